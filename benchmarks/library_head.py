"""A head without its HTTP side, in this process: the library over shard processes."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic

from meshnet.errors import MeshError
from meshnet.generation import GenerationRequest, Sampling
from meshnet.head.background import Background
from meshnet.head.call import Trace
from meshnet.head.generator import Detokenizer, Generator, TextModel
from meshnet.head.hop_client import HopAnswer, HopClient, HopTimeouts, open_hop
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.prefixes import PrefixIndex
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.replay import ReplayBudget, ReplayMode
from meshnet.head.route_book import RouteBook
from meshnet.ids import SessionId
from meshnet.topology import HopSpec, Route
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import ShardInfo
from services.cli.cluster import LocalCluster


@dataclass
class LibraryHead:
    """Generates token ids over the shards of a cluster; no token ends a sequence.

    Attributes:
        book: The shards.
        kit: What pipelines share.
        failures: What was mended.
        replayed_layer_tokens: What was computed again: tokens times layers.
    """

    book: RouteBook
    background: Background
    replay: ReplayMode = "exact"
    replay_max_bytes: int = 256 * 1024**2
    prefill_chunk_tokens: int = 512
    failures: list[MeshError] = field(default_factory=list[MeshError])
    replayed_layer_tokens: int = 0
    times: HopTimesBook = field(default_factory=HopTimesBook)

    async def route(self) -> Route:
        """The route over all shards that are there."""
        await self.book.refresh()
        self.book.mark_proven(self.book.unproven())
        return self.book.route()

    def pipeline(self, route: Route) -> Pipeline:
        """A new session, which computes all of its prompt."""
        budget = ReplayBudget(self.replay_max_bytes)
        kit = PipelineKit(
            times=self.times,
            recovery=Recovery(
                RecoveryLimits(timeout_s=120.0),
                note=self.failures.append,
                note_replay=self._note_replay,
                clock=monotonic,
                jitter=random.Random(0).random,  # noqa: S311  # jitter
            ),
            budget=budget,
            replay=self.replay,
            prefixes=PrefixIndex(budget, exact=True, reuse=False),
            background=self.background,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
        )
        return Pipeline(route, self.book, kit, Trace())

    async def generate(
        self,
        prompt: Sequence[int],
        n_tokens: int,
        sampling: Sampling | None = None,
        *,
        stateless: bool = False,
        on_token: Callable[[int], None] = lambda _: None,
    ) -> list[int]:
        """The tokens after the prompt.

        Args:
            prompt: Token ids.
            n_tokens: How many to generate.
            sampling: None is greedy.
            stateless: As if a hop kept no cache.
            on_token: Called after every token with their number so far.
        """
        route = await self.route()
        pipeline = self.pipeline(_without_caches(route) if stateless else route)
        generator = Generator(TextModel(frozenset(), _NoText, lambda _: []))
        request = GenerationRequest(tuple(prompt), n_tokens, sampling or Sampling())
        tokens: list[int] = []
        async for event in generator.generate(request, lambda: pipeline):
            if event.token_id is not None:
                tokens.append(event.token_id)
                on_token(len(tokens))
        return tokens

    def _note_replay(self, layer_tokens: int) -> None:
        self.replayed_layer_tokens += layer_tokens


class WatchedHop(HopClient):
    """A hop behind another one's client; subclasses look at what passes, or disturb it."""

    def __init__(self, inner: HopClient) -> None:
        self.endpoint = inner.endpoint
        self._inner = inner

    async def step(
        self, step: StepHeaders, body: bytes, *, limit_s: float, max_answer_bytes: int
    ) -> HopAnswer:
        return await self._inner.step(
            step, body, limit_s=limit_s, max_answer_bytes=max_answer_bytes
        )

    async def close_session(self, session: SessionId, epoch: int, *, keep: bool = False) -> None:
        await self._inner.close_session(session, epoch, keep=keep)

    async def describe(self) -> ShardInfo:
        return await self._inner.describe()


class _NoText(Detokenizer):
    """Ids are all that is asked for."""

    def __init__(self, *, skip_special_tokens: bool) -> None:
        del skip_special_tokens

    def push(self, token_id: int) -> str:
        del token_id
        return ""

    def finish(self) -> str:
        return ""


@asynccontextmanager
async def open_library_head(
    cluster: LocalCluster, hops: Sequence[HopClient] | None = None
) -> AsyncGenerator[LibraryHead]:
    """A head over the shards of a cluster.

    Args:
        cluster: Whose shards run.
        hops: The clients to use; None opens plain ones.
    """
    async with AsyncExitStack() as stack:
        clients = hops or await stack.enter_async_context(open_hops(cluster))
        book = RouteBook(
            [HopSpec(hop.endpoint) for hop in clients],
            {hop.endpoint: hop for hop in clients},
            clock=monotonic,
            jitter=random.Random(0).random,  # noqa: S311  # jitter
        )
        background = await stack.enter_async_context(Background())
        yield LibraryHead(book, background)


@asynccontextmanager
async def open_hops(cluster: LocalCluster) -> AsyncGenerator[list[HopClient]]:
    """A client for every shard of a cluster."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_hop(shard.url, HopTimeouts(), cluster.cluster_key))
            for shard in cluster.shards
        ]


def _without_caches(route: Route) -> Route:
    """The same hops, taken for such that keep no cache."""
    hops = [replace(hop, facts=replace(hop.facts, kv_cache=False)) for hop in route.hops]
    return Route(tuple(hops))
