from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet.head.hop_client import HopAnswer
from meshnet.head.request_times import HopSums, RequestTimes
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeClock

STEP = HopAnswer(TailAnswer(), step_ms=10.0, queue_ms=1.0, compute_ms=6.0, serialise_ms=0.5)
OTHER = replace(STEP, step_ms=20.0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def times(clock: FakeClock) -> RequestTimes:
    return RequestTimes(clock)


def test_a_step_has_parts() -> None:
    """What is neither queue nor compute nor serialising is the wire; together they are the step."""
    sums = HopSums(2, step_ms=10.0, queue_ms=1.0, compute_ms=6.0, serialise_ms=0.5)

    assert sums.wire_ms == 2.5
    assert sums.total_ms == 10.0


def test_phases_end_with_their_tokens(times: RequestTimes, clock: FakeClock) -> None:
    """Up to the first token it is prefill, with its steps; from there to the last it is decode."""
    clock.now += 1.0
    generation = times.begin()
    for answer in (STEP, OTHER):
        clock.now += 2.0
        generation.note_step("a", answer)
    generation.note_token()
    for _ in range(3):
        clock.now += 1.0
        generation.note_step("a", STEP)
        generation.note_token()
    clock.now += 8.0

    assert (times.waiting_ms, times.total_ms) == (1000.0, 16000.0)
    prefill, decode = times.prefill, times.decode
    assert (prefill.n_tokens, prefill.total_ms, decode.n_tokens, decode.total_ms) == (
        *(1, 4000.0),
        *(3, 3000.0),
    )
    assert prefill.hops == {"a": HopSums(2, 30.0, 2.0, 12.0, 1.0)}
    assert decode.hops == {"a": HopSums(3, 30.0, 3.0, 18.0, 1.5)}


def test_the_rest_is_the_heads(times: RequestTimes, clock: FakeClock) -> None:
    """Hops and head together are the phase."""
    generation = times.begin()
    generation.note_step("a", STEP)
    generation.note_step("b", OTHER)
    clock.now += 0.0625
    generation.note_token()

    assert times.prefill.head_ms == 62.5 - 30.0


def test_hops_that_work_at_once_leave_nothing(times: RequestTimes, clock: FakeClock) -> None:
    """Together they may take longer than the phase: then nobody knows what the head took."""
    generation = times.begin()
    for endpoint in "ab":
        generation.note_step(endpoint, OTHER)
    clock.now += 0.03
    generation.note_token()

    assert times.prefill.head_ms == 0.0


def test_recovery_is_told_apart(times: RequestTimes, clock: FakeClock) -> None:
    """What a step cost besides its last try is no part of the step, but of what the hop took."""
    generation = times.begin()
    generation.note_token()
    clock.now += 5.0
    generation.note_step("a", STEP)
    generation.note_recovery("a", 4000.0)

    (sums,) = times.decode.hops.values()
    assert (sums.steps, sums.step_ms, sums.recoveries, sums.recovery_ms) == (1, 10.0, 1, 4000.0)
    assert sums.total_ms == 4010.0
    assert times.decode.total_ms == 5000.0  # time goes on, though no token came


def test_what_all_hops_are_fed_again_is_recovery(times: RequestTimes) -> None:
    """The prompt is in the sums once, however often it was computed."""
    generation = times.begin()
    generation.note_step("a", STEP)
    with generation.feeding_anew():
        generation.note_step("a", OTHER)
    generation.note_step("a", STEP)

    (sums,) = times.prefill.hops.values()
    assert (sums.steps, sums.step_ms, sums.recoveries, sums.recovery_ms) == (2, 20.0, 1, 20.0)


def test_generations_are_added_up(times: RequestTimes, clock: FakeClock) -> None:
    """Each has phases of its own, though they run at the same time; one may wait for longer."""
    first = times.begin()
    clock.now += 1.0
    second = times.begin()
    for generation in (first, second):
        generation.note_step("a", STEP)
        generation.note_token()
    clock.now += 1.0
    first.note_token()

    assert times.waiting_ms == 1000.0
    assert (times.prefill.n_tokens, times.prefill.total_ms) == (2, 1000.0)
    assert (times.decode.n_tokens, times.decode.total_ms) == (1, 1000.0)
    assert times.prefill.hops["a"].steps == 2


def test_nothing_is_known_before_it_begins(times: RequestTimes) -> None:
    """A request that waits for its turn has phases of no time."""
    times.begin()

    for phase in (times.prefill, times.decode):
        assert (phase.n_tokens, phase.total_ms, phase.head_ms, dict(phase.hops)) == (
            0,
            0.0,
            0.0,
            {},
        )
