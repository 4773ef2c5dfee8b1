from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from meshnet.errors import (
    CacheFull,
    CacheMiss,
    HopProtocolError,
    HopTimeout,
    HopUnreachable,
    InvalidRequest,
    MeshError,
    ModelLoading,
    ModelMismatch,
    QueueFull,
    RecoveryExhausted,
    SessionBusy,
    StageError,
)
from meshnet.head.recovery import Recovery, RecoveryLimits
from tests.unit.fakes import FakeClock, FakeLog

A = "http://a"
LIMITS = RecoveryLimits(max_rebuilds=3, timeout_s=10, backoff_s=1, max_backoff_s=4)

MISS = CacheMiss("gone", reason="evicted", held=0, endpoint=A)
GONE = HopUnreachable("refused", endpoint=A)
LOADING = ModelLoading("reading", endpoint=A)
SLOW = HopTimeout("slow", endpoint=A)


@dataclass
class Bench:
    """A recovery of an attempt that fails as told, on a hop that is away as long as told.

    Attributes:
        failures: What the first attempts fail with; the next one succeeds.
        away_s: How long the hop is not ready, from the beginning.
        attempt_s: How long an attempt takes.
    """

    failures: Sequence[Exception]
    away_s: float = 0.0
    attempt_s: float = 0.0
    limits: RecoveryLimits = LIMITS
    jitter: float = 1.0
    clock: FakeClock = field(default_factory=FakeClock)
    attempts: int = 0
    looks: list[str] = field(default_factory=list[str])
    noted: list[MeshError] = field(default_factory=list[MeshError])

    async def run(self) -> str:
        recovery = Recovery(
            self.limits,
            is_ready=self._is_ready,
            note=self.noted.append,
            clock=self.clock,
            jitter=lambda: self.jitter,
            sleep=self.clock.sleep,
        )
        return await recovery.run(self._attempt)

    async def exhausted(self) -> RecoveryExhausted:
        with pytest.raises(RecoveryExhausted) as caught:
            await self.run()
        return caught.value

    async def _attempt(self) -> str:
        self.clock.now += self.attempt_s
        self.attempts += 1
        if self.attempts <= len(self.failures):
            raise self.failures[self.attempts - 1]
        return "done"

    async def _is_ready(self, endpoint: str) -> bool:
        self.looks.append(endpoint)
        return self.clock.now >= self.away_s


async def test_what_succeeds_is_not_recovered() -> None:
    """Without a failure there is one attempt, no pause, no look at a hop, no note."""
    bench = Bench([])

    assert (await bench.run(), bench.attempts) == ("done", 1)
    assert (bench.clock.slept, bench.looks, bench.noted) == ([], [], [])


@pytest.mark.parametrize(
    "failure",
    [MISS, GONE, LOADING, SLOW, SessionBusy("x"), CacheFull("x"), QueueFull("x")],
    ids=lambda error: error.code,
)
async def test_what_passes_is_tried_again(failure: MeshError) -> None:
    """A lost state, a lost hop, and what is retryable, are tried again and noted."""
    bench = Bench([failure])

    assert (await bench.run(), bench.attempts, bench.noted) == ("done", 2, [failure])


@pytest.mark.parametrize(
    "failure",
    [
        StageError("x"),
        InvalidRequest("x"),
        ModelMismatch("x"),
        HopProtocolError("x"),
        RecoveryExhausted("x"),
        ValueError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_does_not_pass_is_raised(failure: Exception) -> None:
    """What another attempt cannot mend is raised as it is, after one attempt."""
    bench = Bench([failure])
    with pytest.raises(type(failure)) as caught:
        await bench.run()

    assert (caught.value, bench.attempts, bench.clock.slept) == (failure, 1, [])


async def test_attempts_are_bounded() -> None:
    """A hop that always misses gets one attempt and max_rebuilds more."""
    bench = Bench([MISS] * 100)
    error = await bench.exhausted()

    assert bench.attempts == 4
    assert error.members == {"endpoint": A, "cause": "cache_miss"}


async def test_the_last_failure_is_the_cause() -> None:
    """Exhaustion tells the last failure's text, and has it as its cause."""
    error = await Bench([SLOW, SLOW, SLOW, MISS]).exhausted()

    assert error.__cause__ is MISS
    assert error.message == "gone; 4 attempts failed"


async def test_each_failure_is_noted() -> None:
    """The metrics hear of each failure that is passing, the last one too."""
    bench = Bench([MISS, SLOW, MISS, SLOW])
    await bench.exhausted()

    assert bench.noted == [MISS, SLOW, MISS, SLOW]


async def test_no_rebuild_is_left_unused() -> None:
    """Success at the last attempt allowed is success."""
    assert await Bench([MISS, SLOW, MISS]).run() == "done"


async def test_a_first_miss_is_rebuilt_at_once() -> None:
    """A state lost once costs no pause; lost again, it does."""
    bench = Bench([MISS, MISS, MISS])
    await bench.run()

    assert bench.clock.slept == [2.0, 4.0]


async def test_pauses_double_up_to_a_limit() -> None:
    """Pauses are 1, 2, 4 and then 4 seconds, where the longest may be 4."""
    limits = RecoveryLimits(max_rebuilds=5, timeout_s=100, backoff_s=1, max_backoff_s=4)
    bench = Bench([QueueFull("x")] * 5, limits=limits)
    await bench.run()

    assert bench.clock.slept == [1.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize(("jitter", "pause"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
async def test_pauses_are_jittered(jitter: float, pause: float) -> None:
    """A pause is between the half and the whole, so that heads do not come back together."""
    bench = Bench([QueueFull("x")], jitter=jitter)
    await bench.run()

    assert bench.clock.slept == [pause]


async def test_a_pause_never_overflows() -> None:
    """However many rebuilds are allowed, a pause is a number of seconds."""
    limits = RecoveryLimits(max_rebuilds=2000, timeout_s=1e9, backoff_s=1, max_backoff_s=4)
    bench = Bench([QueueFull("x")] * 2000, limits=limits)

    assert await bench.run() == "done"


@pytest.mark.parametrize("failure", [GONE, LOADING], ids=lambda error: error.code)
async def test_an_absent_hop_costs_no_rebuilds(failure: MeshError) -> None:
    """While a hop is away it is looked for; the one attempt comes when it is back."""
    bench = Bench([failure], away_s=9.0)

    assert (await bench.run(), bench.attempts) == ("done", 2)
    assert set(bench.looks) == {A}
    assert len(bench.looks) > LIMITS.max_rebuilds


async def test_looks_at_a_hop_are_paused() -> None:
    """Looks get the same growing pauses as attempts do."""
    bench = Bench([GONE], away_s=7.0)
    await bench.run()

    assert bench.clock.slept == [1.0, 1.0, 2.0, 4.0]


async def test_a_hop_that_does_not_come_back_is_given_up() -> None:
    """Not ready by the deadline, the hop ends the recovery, and no attempt was spent on it."""
    bench = Bench([GONE], away_s=1e9)
    error = await bench.exhausted()

    assert bench.attempts == 1
    assert error.message == "refused; it was not back after 10 s"
    assert 10.0 <= bench.clock.now <= 10.0 + LIMITS.max_backoff_s


async def test_the_deadline_counts_from_the_first_failure() -> None:
    """A second loss does not begin a new deadline."""
    bench = Bench([MISS, GONE], away_s=1e9, attempt_s=8.0)
    await bench.exhausted()

    assert bench.clock.now <= 8.0 + 10.0 + LIMITS.max_backoff_s


async def test_slow_attempts_end_with_the_deadline() -> None:
    """Attempts that each fail late are not begun past the deadline, though some are left."""
    bench = Bench([SLOW] * 100, attempt_s=7.0)
    error = await bench.exhausted()

    assert bench.attempts == 3
    assert error.message == "slow; more than 10 s"


@pytest.mark.parametrize(
    "failure", [HopUnreachable("x"), ModelLoading("x", endpoint=3), QueueFull("x", endpoint=A)]
)
async def test_only_a_lost_hop_of_known_name_is_waited_for(failure: MeshError) -> None:
    """A failure that names no hop, or whose hop is there, is tried again after its pause."""
    bench = Bench([failure], away_s=1e9)

    assert (await bench.run(), bench.looks) == ("done", [])


async def test_a_recovery_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line tells what failed, where and why, and which rebuild follows."""
    log = FakeLog.instead_of("meshnet.head.recovery._log", monkeypatch)
    await Bench([MISS]).run()

    assert log.lines == [
        {
            "event": "recovering",
            "code": "cache_miss",
            "rebuild": 1,
            "endpoint": A,
            "reason": "evicted",
            "held": 0,
        }
    ]
