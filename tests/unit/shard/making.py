"""A shard's parts over a fake stage."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from meshnet.cache.policy import CacheLimits
from meshnet.cache.store import SessionCacheStore
from meshnet.generation import NO_CONTEXT, Sampling, SamplingContext
from meshnet.ids import BootId
from meshnet.model.fake_stage import HIDDEN_SIZE, FakeStage, fake_facts
from meshnet.model.interface import CacheState
from meshnet.shard.compute import ComputeThread, Timed
from meshnet.shard.step_log import DecodeLog
from meshnet.shard.worker import ShardWorker
from meshnet.topology import LayerSpan
from meshnet.wire.context import render_context
from meshnet.wire.frames import Frame
from meshnet.wire.headers import CacheMode, StepHeaders
from tests.unit.fakes import FakeClock

MAX_STEP_TOKENS = 16
BOOT_ID = BootId("boot-1")


@dataclass
class Bench:
    """A worker, and what it works with."""

    stage: FakeStage
    store: SessionCacheStore[CacheState]
    compute: ComputeThread
    clock: FakeClock
    worker: ShardWorker

    async def step(self, step: StepHeaders, ids: Sequence[int], context: bytes = b"") -> Timed:
        """Check and run one step, as the routes do."""
        step = step.model_copy(update={"context_bytes": len(context)})
        self.worker.check(step)
        return await self.worker.step(step, body_of(step, ids) + context)

    async def cached(
        self,
        mode: CacheMode,
        past_len: int,
        ids: Sequence[int],
        context: SamplingContext = NO_CONTEXT,
        **changed: object,
    ) -> Timed:
        """A step of session "s"."""
        step = self.headers(mode, past_len, len(ids), **changed)
        return await self.step(step, ids, render_context(context))

    def headers(
        self, mode: CacheMode, past_len: int, n_tokens: int, /, **changed: object
    ) -> StepHeaders:
        """The headers of a right step, but for what is changed."""
        first = self.stage.facts.span.start == 0
        right = StepHeaders(
            session="s",
            cache=mode,
            past_len=past_len,
            shape=(1, n_tokens) if first else (1, n_tokens, HIDDEN_SIZE),
            dtype="int32" if first else "float32",
            sampling=Sampling(),
        )
        return right.model_copy(update=changed)

    async def held(self) -> tuple[int, int]:
        """Sessions and leases."""
        self.store.check_integrity()
        usage = await self.store.usage()
        return usage.sessions, usage.leases


def body_of(step: StepHeaders, ids: Sequence[int]) -> bytes:
    """Ids as the step's headers announce them."""
    return Frame.of_token_ids(ids).data if step.dtype == "int32" else hidden_of(ids)


def hidden_of(ids: Sequence[int]) -> bytes:
    """The fake model's hidden states of ids."""
    return array("f", [float(value) for i in ids for value in (i, 0, 0, 0)]).tobytes()


@asynccontextmanager
async def open_bench(
    span: str = "0-4",
    *,
    stage: FakeStage | None = None,
    max_bytes: int = 10**6,
    max_sessions: int = 2,
    max_queued: int = 4,
    kv_cache: bool = True,
    max_positions: int = 32,
    check_begin: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Bench]:
    """A worker for a span of four layers."""
    facts = replace(fake_facts(LayerSpan.parse(span)), max_positions=max_positions)
    stage = stage or FakeStage(facts)
    clock = FakeClock()
    limits = CacheLimits(ttl_s=600, max_sessions=max_sessions, max_bytes=max_bytes)
    store: SessionCacheStore[CacheState] = SessionCacheStore(limits, clock=clock)
    async with ComputeThread(max_queued, max_batch=4) as compute:
        worker = ShardWorker(
            stage=stage,
            store=store,
            compute=compute,
            decode_log=DecodeLog(clock),
            boot_id=BOOT_ID,
            check_begin=check_begin,
            max_step_tokens=MAX_STEP_TOKENS,
            kv_cache=kv_cache,
        )
        yield Bench(stage, store, compute, clock, worker)
