"""The head's parts, wired together once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePath
from time import (
    monotonic,
    time,  # noqa: TID251  # a model card's `created` is a wall-clock second
)
from typing import Final

from meshnet.errors import HopProtocolError, MeshError
from meshnet.generation import Sampling
from meshnet.head.background import Background
from meshnet.head.call import Trace
from meshnet.head.generator import Generator, TextModel
from meshnet.head.hop_client import HopTimeouts, open_hop
from meshnet.head.hop_times import HopTimesBook, StepLimits
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.readiness import Readiness
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.replay import ReplayBudget
from meshnet.head.route_book import PinnedShards, RouteBook
from meshnet.ids import SessionId, new_id
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.topology import HopSpec, Route
from services.head.metrics import HeadMetrics
from services.head.settings import HeadSettings

PROBE_PREFIX: Final = "probe-"
"""How the ids of the sessions begin that prove a route."""
_PROBE_RECOVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Head:
    """What the routes work with."""

    settings: HeadSettings
    model_name: str
    started_at: int
    tokenizer: ChatTokenizer
    book: RouteBook
    readiness: Readiness
    kit: PipelineKit
    generator: Generator
    metrics: HeadMetrics

    def pipeline(self, trace: Trace, pinned: Route | None) -> Pipeline:
        """A new session, on a pinned route, or on the one that is the least busy now.

        Raises:
            Draining: The head begins none.
            RouteError: There is none.
        """
        self.readiness.check_admission()
        if pinned is not None:
            return Pipeline(pinned, PinnedShards(self.book), self.kit, trace)
        return Pipeline(self.book.route(), self.book, self.kit, trace)

    async def drain(self) -> None:
        """Take no new request, and wait until the running ones have ended, or for the limit."""
        self.readiness.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.generator.idle.wait(), self.settings.drain_timeout_s)


@asynccontextmanager
async def open_head(settings: HeadSettings, tokenizer: ChatTokenizer) -> AsyncGenerator[Head]:
    """Connect to the hops; at the end wait for sessions to be closed, then for connections."""
    async with AsyncExitStack() as stack:
        key = settings.cluster_key.get_secret_value() if settings.cluster_key else None
        timeouts = HopTimeouts(settings.connect_timeout_s, settings.probe_timeout_s)
        specs = [HopSpec(hop.endpoint, hop.start_layer) for hop in settings.route]
        clients = {
            endpoint: await stack.enter_async_context(open_hop(endpoint, timeouts, key))
            for endpoint in {spec.endpoint for spec in specs}
        }
        book = RouteBook(specs, clients, clock=monotonic, jitter=random.random)
        metrics = HeadMetrics()
        background = await stack.enter_async_context(Background())
        kit = _kit(settings, metrics, background)
        yield Head(
            settings=settings,
            model_name=settings.served_model_name or PurePath(settings.model).name,
            started_at=int(time()),
            tokenizer=tokenizer,
            book=book,
            readiness=Readiness(book, _probe(book, kit), background),
            kit=kit,
            generator=Generator(
                text=TextModel(
                    tokenizer.end_token_ids, tokenizer.new_detokenizer, tokenizer.encode
                ),
                max_concurrent=settings.max_concurrent_requests,
            ),
            metrics=metrics,
        )


def _kit(settings: HeadSettings, metrics: HeadMetrics, background: Background) -> PipelineKit:
    limits = RecoveryLimits(settings.max_rebuilds_per_token, settings.recovery_timeout_s)
    return PipelineKit(
        times=HopTimesBook(
            StepLimits(
                min(settings.min_step_timeout_s, settings.step_timeout_s), settings.step_timeout_s
            )
        ),
        recovery=Recovery(
            limits,
            note=metrics.count_rebuild,
            note_replay=metrics.count_replay,
            clock=monotonic,
            jitter=random.random,
        ),
        budget=ReplayBudget(settings.replay_max_bytes),
        replay=settings.replay,
        background=background,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
    )


def _probe(book: RouteBook, kit: PipelineKit) -> Callable[[Route], Awaitable[None]]:
    """Runs one token over a route, once: what fails is tried again by the next poll."""
    limits = RecoveryLimits(max_rebuilds=1, timeout_s=_PROBE_RECOVERY_S)
    kit = replace(kit, recovery=replace(kit.recovery, limits=limits, note=_ignore))

    async def probe(route: Route) -> None:
        session = SessionId(f"{PROBE_PREFIX}{new_id()}")
        pipeline = Pipeline(route, PinnedShards(book), kit, Trace(), session)
        try:
            step = pipeline.stateless_step if route.stateless else pipeline.prefill
            answer = await step([0], Sampling())
            if answer.token_id is None and answer.text is None:
                raise HopProtocolError("the tail answered neither a token nor text")
        finally:
            await kit.background.finish(pipeline.close())

    return probe


def _ignore(failure: MeshError) -> None:
    del failure
