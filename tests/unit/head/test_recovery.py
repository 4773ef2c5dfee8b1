from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from meshnet.errors import (
    CacheFull,
    CacheMiss,
    Draining,
    HopProtocolError,
    HopTimeout,
    HopUnreachable,
    InputsDropped,
    InvalidRequest,
    MeshError,
    ModelError,
    ModelLoading,
    ModelMismatch,
    QueueFull,
    RecoveryExhausted,
    RouteError,
    SessionBusy,
    StageError,
    StaleEpoch,
)
from meshnet.head.recovery import Recovery, RecoveryLimits, Tries, is_passing
from tests.unit.fakes import FakeClock, FakeLog

A = "http://a"
LIMITS = RecoveryLimits(max_rebuilds=3, timeout_s=10, backoff_s=1, max_backoff_s=4)

MISS = CacheMiss("gone", reason="evicted", held=0, endpoint=A)
GONE = HopUnreachable("refused", endpoint=A)
SLOW = HopTimeout("slow", endpoint=A)

PASSING = [
    MISS,
    GONE,
    SLOW,
    ModelLoading("x"),
    ModelMismatch("x"),
    InputsDropped("x"),
    RouteError("x"),
    HopProtocolError("x"),
    Draining("x"),
]
WAITING = [SessionBusy("x"), CacheFull("x"), QueueFull("x")]
LASTING = [
    StageError("x"),
    InvalidRequest("x"),
    ModelError("x"),
    StaleEpoch("x"),
    RecoveryExhausted("x"),
]


@dataclass
class Bench:
    """The tries of one step, over pretended time."""

    limits: RecoveryLimits = LIMITS
    jitter: float = 1.0
    clock: FakeClock = field(default_factory=FakeClock)
    noted: list[MeshError] = field(default_factory=list[MeshError])
    replayed: list[int] = field(default_factory=list[int])

    def begin(self) -> Tries:
        return Recovery(
            self.limits,
            note=self.noted.append,
            note_replay=self.replayed.append,
            clock=self.clock,
            jitter=lambda: self.jitter,
            sleep=self.clock.sleep,
        ).begin()

    def exhausted(self, *failures: MeshError) -> RecoveryExhausted:
        """What the failures end with."""
        tries = self.begin()
        *passing, last = failures
        for failure in passing:
            tries.count(failure)
        with pytest.raises(RecoveryExhausted) as caught:
            tries.count(last)
        return caught.value


def named(error: MeshError) -> str:
    return error.code


@pytest.mark.parametrize("failure", [*PASSING, *WAITING], ids=named)
def test_what_passes_is_noted(failure: MeshError) -> None:
    """A lost state, a lost hop, and what is retryable, may be tried again; the metrics hear it."""
    bench = Bench()
    bench.begin().count(failure)

    assert (bench.noted, is_passing(failure)) == ([failure], True)


@pytest.mark.parametrize("failure", LASTING, ids=named)
def test_what_does_not_pass_is_raised(failure: MeshError) -> None:
    """What another try cannot mend is raised as it is, and not noted."""
    bench = Bench()
    with pytest.raises(MeshError) as caught:
        bench.begin().count(failure)

    assert (caught.value, bench.noted, is_passing(failure)) == (failure, [], False)


@pytest.mark.parametrize(
    ("failures", "rebuilds"), [(PASSING[:3], 3), (WAITING, 0)], ids=["lost", "busy"]
)
def test_who_only_waits_its_turn_spends_no_try(failures: list[MeshError], rebuilds: int) -> None:
    """A failure costs a try, but not being told to wait."""
    tries = Bench().begin()
    for failure in failures:
        tries.count(failure)

    assert tries.rebuilds == rebuilds


def test_tries_are_bounded() -> None:
    """max_rebuilds failures may be mended; one more ends it, and names hop and cause."""
    error = Bench().exhausted(SLOW, SLOW, SLOW, MISS)

    assert (error.message, error.__cause__) == ("gone; 4 attempts failed", MISS)
    assert error.members == {"endpoint": A, "cause": "cache_miss"}


def test_no_try_is_left_unused() -> None:
    """As many failures as allowed end nothing."""
    tries = Bench().begin()
    for failure in (MISS, SLOW, MISS):
        tries.count(failure)

    assert tries.rebuilds == 3


def test_the_last_failure_is_noted_too() -> None:
    """The metrics hear of each failure that passes, also of the one that is too much."""
    bench = Bench()
    bench.exhausted(MISS, SLOW, MISS, SLOW)

    assert bench.noted == [MISS, SLOW, MISS, SLOW]


async def test_pauses_double_up_to_a_limit() -> None:
    """Pauses are 1, 2, 4 and then 4 seconds, where the longest may be 4."""
    bench = Bench(RecoveryLimits(timeout_s=100, backoff_s=1, max_backoff_s=4))
    tries = bench.begin()
    for _ in range(5):
        await tries.pause(MISS)

    assert bench.clock.slept == [1.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize(("jitter", "pause"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
async def test_pauses_are_jittered(jitter: float, pause: float) -> None:
    """A pause is between the half and the whole, so that heads do not come back together."""
    bench = Bench(jitter=jitter)
    await bench.begin().pause(MISS)

    assert bench.clock.slept == [pause]


async def test_a_pause_never_overflows() -> None:
    """However many pauses there are, each is a number of seconds."""
    bench = Bench(RecoveryLimits(timeout_s=1e9, backoff_s=1, max_backoff_s=4))
    tries = bench.begin()
    for _ in range(2000):
        await tries.pause(MISS)

    assert bench.clock.slept[-1] == 4.0


async def test_the_time_counts_from_the_first_failure() -> None:
    """A second failure does not begin a new time."""
    bench = Bench()
    tries = bench.begin()
    tries.count(MISS)
    bench.clock.now = 10.0
    tries.count(GONE)
    bench.clock.now = 10.1
    with pytest.raises(RecoveryExhausted, match="refused; it was not mended within 10 s") as caught:
        tries.count(GONE)

    assert caught.value.__cause__ is GONE


async def test_what_went_well_costs_no_time() -> None:
    """However long a step took before its first failure, all the time is left then."""
    bench = Bench()
    tries = bench.begin()
    bench.clock.now = 1e6
    tries.count(MISS)
    await tries.pause(MISS)

    assert bench.clock.slept == [1.0]


def test_feeding_a_hop_again_takes_as_long_as_it_takes() -> None:
    """A failure after a long replay finds all the time left; tries are counted on."""
    bench = Bench()
    tries = bench.begin()
    tries.count(MISS)
    bench.clock.now = 400.0
    tries.note_replay(10)
    bench.clock.now = 401.0
    tries.count(GONE)

    assert tries.rebuilds == 2


async def test_pauses_end_with_the_time() -> None:
    """When the time is over there is no further pause, but the end."""
    bench = Bench()
    tries = bench.begin()
    for _ in range(4):
        await tries.pause(SLOW)
    with pytest.raises(RecoveryExhausted, match="slow; it was not mended within 10 s"):
        await tries.pause(SLOW)

    assert bench.clock.slept == [1.0, 2.0, 4.0, 4.0]


def test_being_busy_for_ever_ends_too() -> None:
    """Waiting for a turn costs no try, but time."""
    bench = Bench()
    tries = bench.begin()
    tries.count(QueueFull("full"))
    bench.clock.now = 11.0
    with pytest.raises(RecoveryExhausted) as caught:
        tries.count(QueueFull("full"))

    assert caught.value.members == {"endpoint": None, "cause": "queue_full"}


def test_what_is_computed_again_is_told() -> None:
    """The metrics hear of each replay."""
    bench = Bench()
    bench.begin().note_replay(12)

    assert bench.replayed == [12]


def test_steps_have_their_own_tries() -> None:
    """What one step spent the next one has."""
    bench = Bench()
    first = bench.begin()
    first.count(MISS)

    assert (first.rebuilds, bench.begin().rebuilds) == (1, 0)


def test_a_recovery_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line tells what failed, where and why, and which try follows."""
    log = FakeLog.instead_of("meshnet.head.recovery._log", monkeypatch)
    Bench().begin().count(MISS)

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
