from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from meshnet.cache.policy import CacheLimits
from meshnet.cache.store import SessionCacheStore
from meshnet.errors import Draining, ModelError, ModelLoading
from meshnet.ids import BootId, SessionId
from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import CacheState, StageModel
from meshnet.shard.compute import ComputeThread
from meshnet.shard.host import ShardHost
from meshnet.shard.step_log import DecodeLog
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import CacheUse, ShardLimits, ShardReadiness
from tests.unit.fakes import FakeClock, FakeLog
from tests.unit.shard.making import body_of

FACTS = replace(fake_facts(LayerSpan(0, 2)), weights="commit-1")
LIMITS = ShardLimits(max_step_tokens=16, max_sessions=2, cache_ttl_s=600, cache_bytes=10**6)


@dataclass
class FakeLoader:
    """Loads 100 bytes in two parts, or fails after the first."""

    failure: Exception | None = None
    after_first_part: Callable[[], None] = lambda: None
    nbytes: int = 100

    def load(self, progress: Callable[[int], None]) -> StageModel:
        progress(40)
        self.after_first_part()
        if self.failure is not None:
            raise self.failure
        progress(100)
        return FakeStage(FACTS)


@asynccontextmanager
async def open_host(
    loader: FakeLoader | None = None, *, kv_cache: bool = True, push: bool = True
) -> AsyncGenerator[ShardHost]:
    clock = FakeClock()
    limits = CacheLimits(ttl_s=600, max_sessions=2, max_bytes=10**6)
    store: SessionCacheStore[CacheState] = SessionCacheStore(limits, clock=clock)
    async with ComputeThread(max_queued=2, max_batch=2) as compute:
        yield ShardHost(
            loader=loader or FakeLoader(),
            store=store,
            compute=compute,
            decode_log=DecodeLog(clock),
            limits=LIMITS,
            boot_id=BootId("boot-1"),
            kv_cache=kv_cache,
            push=push,
        )


async def test_before_loading_it_is_not_ready() -> None:
    """A shard that has not loaded is loading, with nothing read yet."""
    async with open_host() as host:
        assert host.readiness() == ShardReadiness(state="loading", total_bytes=100)


async def test_before_loading_there_is_no_worker() -> None:
    """A step meets ModelLoading, which is retryable and tells how far it is."""
    async with open_host() as host:
        with pytest.raises(ModelLoading, match="0 of 100 bytes") as caught:
            _ = host.worker

    assert caught.value.members == {"loaded_bytes": 0, "total_bytes": 100}


async def test_before_loading_there_is_no_description() -> None:
    """What the shard is, is known when it is loaded."""
    async with open_host() as host:
        with pytest.raises(ModelLoading):
            await host.info()


async def test_progress_is_told_while_loading() -> None:
    """Readiness in the midst of loading has the bytes read so far."""
    seen: list[ShardReadiness] = []
    loader = FakeLoader()
    async with open_host(loader) as host:
        loader.after_first_part = lambda: seen.append(host.readiness())
        await host.load()

    assert seen == [ShardReadiness(state="loading", loaded_bytes=40, total_bytes=100)]


async def test_after_loading_it_is_ready() -> None:
    """A loaded shard is ready, with all bytes read."""
    async with open_host() as host:
        await host.load()

        assert host.readiness() == ShardReadiness(state="ready", loaded_bytes=100, total_bytes=100)


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_a_loaded_shard_describes_itself(kv_cache: bool) -> None:
    """The description has the stage's facts, this process's life, the limits and the use."""
    async with open_host(kv_cache=kv_cache) as host:
        await host.load()
        info = await host.info()

    assert info.facts() == replace(
        FACTS,
        kv_cache=kv_cache,
        push=kv_cache,
        max_step_tokens=16,
        max_sessions=2,
        cache_bytes=10**6,
        state_token_bytes=64 + 16,
    )
    assert (info.boot_id, info.limits) == ("boot-1", LIMITS)
    assert info.cache == CacheUse(sessions=0, leases=0, cached_bytes=0)


async def test_the_description_counts_sessions() -> None:
    """After a prefill one session is held, with its state's and its answer's bytes."""
    async with open_host() as host:
        await host.load()
        step = StepHeaders(session="s", cache="prefill", shape=(1, 3), dtype="int32")
        await host.worker.step(step, body_of(step, [5, 6, 7]))
        info = await host.info()

    assert info.cache == CacheUse(sessions=1, leases=0, cached_bytes=3 * (64 + 16))


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_the_worker_has_the_shards_limits(kv_cache: bool) -> None:
    """What the shard says it takes is what its worker takes."""
    async with open_host(kv_cache=kv_cache) as host:
        await host.load()

        assert (host.worker.max_step_tokens, host.worker.kv_cache) == (16, kv_cache)


async def test_a_failed_load_is_told() -> None:
    """A shard whose model cannot be loaded is failed, and says why."""
    async with open_host(FakeLoader(ModelError("w is missing", field="model"))) as host:
        await host.load()

        assert host.readiness() == ShardReadiness(
            state="failed", reason="w is missing", loaded_bytes=40, total_bytes=100
        )


async def test_after_a_failed_load_steps_meet_the_reason() -> None:
    """A step meets a ModelError that is not retryable, with the failure's text and members."""
    async with open_host(FakeLoader(ModelError("w is missing", field="model"))) as host:
        await host.load()
        with pytest.raises(ModelError, match="w is missing") as caught:
            _ = host.worker

    assert caught.value.members == {"field": "model"}


async def test_an_unforeseen_failure_is_told_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever loading fails with, the shard does not say for ever that it is loading."""
    log = FakeLog.instead_of("meshnet.shard.host._log", monkeypatch)
    async with open_host(FakeLoader(OSError("disk gone"))) as host:
        await host.load()
        readiness = host.readiness()

    assert readiness.state == "failed"
    assert "disk gone" in str(readiness.reason)
    assert [line["exc_info"] for line in log.lines] == [True]


# --- draining ---


def step_of(**changed: object) -> StepHeaders:
    right = StepHeaders(session="s", cache="prefill", shape=(1, 3), dtype="int32")
    return right.model_copy(update=changed)


@asynccontextmanager
async def open_draining(
    monkeypatch: pytest.MonkeyPatch, *, n_looks: int
) -> AsyncGenerator[tuple[ShardHost, list[float]]]:
    """A shard that holds one session, which is closed after so many looks at it."""
    slept: list[float] = []
    async with open_host() as host:
        await host.load()
        step = step_of()
        await host.worker.step(step, body_of(step, [5, 6, 7]))

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == n_looks:
                await host.worker.close(SessionId("s"))

        monkeypatch.setattr("meshnet.shard.host.asyncio.sleep", sleep)
        yield host, slept


async def test_draining_waits_for_the_sessions_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when the last session is closed, and says that none was left."""
    async with open_draining(monkeypatch, n_looks=3) as (host, slept):
        assert (await host.drain(10), len(slept)) == (True, 3)


async def test_draining_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its limit it ends, and says that something was left."""
    async with open_draining(monkeypatch, n_looks=10**6) as (host, slept):
        assert (await host.drain(2), round(sum(slept), 6)) == (False, 2.0)


async def test_draining_without_sessions_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that holds nothing need not wait."""
    async with open_draining(monkeypatch, n_looks=0) as (host, slept):
        await host.worker.close(SessionId("s"))

        assert (await host.drain(10), slept) == (True, [])


async def test_a_draining_shard_says_so() -> None:
    """Readiness and description tell it, and why; the worker goes on."""
    async with open_host() as host:
        await host.load()
        before = (await host.info()).draining
        await host.drain(1)
        info, readiness = await host.info(), host.readiness()
        worker = host.worker

    assert (before, info.draining, readiness.state) == (False, True, "draining")
    assert readiness.reason == "finishing its sessions, taking no new one"
    assert worker.boot_id == "boot-1"


@pytest.mark.parametrize(
    "changed",
    [{"past_len": 3}, {"cache": "decode", "past_len": 3}, {"cache": "stateless"}],
    ids=str,
)
async def test_a_draining_shard_finishes_its_sessions(
    changed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What continues a session that is held, or keeps nothing, is taken."""
    async with open_draining(monkeypatch, n_looks=10**6) as (host, _):
        await host.drain(1)
        step = step_of(**changed)
        done = await host.worker.step(step, body_of(step, [5, 6, 7]))

    assert isinstance(done.result, Frame)


async def test_a_draining_shard_begins_no_session() -> None:
    """A first prefill is to go elsewhere; before, it was taken."""
    async with open_host() as host:
        await host.load()
        await host.drain(1)
        step = step_of()
        with pytest.raises(Draining):
            await host.worker.step(step, body_of(step, [5, 6, 7]))


@pytest.mark.parametrize(
    ("kv_cache", "push", "told"), [(True, True, True), (True, False, False), (False, True, False)]
)
async def test_it_tells_whether_it_takes_part_in_direct_return(
    *, kv_cache: bool, push: bool, told: bool
) -> None:
    """Where it may, and keeps the sessions that this is for; its worker holds to it."""
    async with open_host(kv_cache=kv_cache, push=push) as host:
        await host.load()

        assert ((await host.info()).push, host.worker.push) == (told, told)
