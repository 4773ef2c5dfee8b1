from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.head.hop_client import HopAnswer
from meshnet.head.hop_times import HopTimes, HopTimesBook, StepLimits
from meshnet.wire.messages import TailAnswer

LIMITS = StepLimits(least_s=1.0, most_s=60.0, factor=10.0)


def answer(step_ms: float, queue_ms: float = 0.0, compute_ms: float = 0.0) -> HopAnswer:
    return HopAnswer(TailAnswer(), step_ms, queue_ms, compute_ms, 0.0)


def test_before_its_first_step_a_hop_has_no_times() -> None:
    """Nothing is known of a hop that took no decode step."""
    assert HopTimesBook().of("a") is None


def test_asking_makes_no_hop() -> None:
    """To ask for a hop does not make it known."""
    book = HopTimesBook()
    book.of("a")
    book.limit_s("a", 4)

    assert book.of("a") is None


def test_times_are_medians() -> None:
    """One slow step does not change what is usual; each column has its own median."""
    book = HopTimesBook()
    for times in ((9.0, 0.5, 6.0), (12.0, 0.25, 10.0), (900.0, 0.125, 7.0)):
        book.note("a", 1, answer(*times))

    assert book.of("a") == HopTimes(
        steps=3, step_ms=12.0, queue_ms=0.25, compute_ms=7.0, overhead_ms=2.5
    )


def test_longer_steps_are_not_among_the_times() -> None:
    """Steps of many tokens are of any length, and say nothing of a decode."""
    book = HopTimesBook()
    book.note("a", 2, answer(1.0))

    assert book.of("a") is None


def test_hops_are_kept_apart() -> None:
    """One hop's steps do not count as another's."""
    book = HopTimesBook()
    book.note("a", 1, answer(1.0))
    book.note("b", 1, answer(5.0))

    assert [times.step_ms for times in map(book.of, "ab") if times] == [1.0, 5.0]


def test_only_recent_steps_count() -> None:
    """The last 128 steps are remembered, older ones are not."""
    book = HopTimesBook()
    for step_ms in [1000.0] * 300 + [1.0] * 128:
        book.note("a", 1, answer(step_ms))

    assert book.of("a") == HopTimes(
        steps=128, step_ms=1.0, queue_ms=0.0, compute_ms=0.0, overhead_ms=1.0
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_a_median_is_that_of_the_last_steps(times: list[float]) -> None:
    """However many steps there were, and in whatever order."""
    book = HopTimesBook()
    for step_ms in times:
        book.note("a", 1, answer(step_ms))
    told = book.of("a")

    assert told is not None
    assert (told.steps, told.step_ms) == (len(times[-128:]), median(times[-128:]))


# --- how long a step may take ---


@pytest.mark.parametrize("n_tokens", [1, 512])
def test_before_anything_was_measured_a_step_has_all_the_time(n_tokens: int) -> None:
    """Who knows nothing of a hop waits for it as long as may be."""
    assert HopTimesBook(LIMITS).limit_s("a", n_tokens) == 60.0


@pytest.mark.parametrize(
    ("step_ms", "limit_s"), [(500.0, 5.0), (1.0, 1.0), (90_000.0, 60.0)], ids=str
)
def test_a_decode_may_take_ten_times_the_median(step_ms: float, limit_s: float) -> None:
    """But no less than the least limit, and no more than the most."""
    book = HopTimesBook(LIMITS)
    book.note("a", 1, answer(step_ms))

    assert book.limit_s("a", 1) == limit_s


def test_a_prefill_is_measured_by_the_token() -> None:
    """A prefill of 100 tokens may take ten times what the slowest of late makes of so many."""
    book = HopTimesBook(LIMITS)
    book.note("a", 10, answer(100.0))
    book.note("a", 10, answer(200.0))
    book.note("a", 10, answer(50.0))

    assert book.limit_s("a", 100) == 20.0


def test_only_recent_prefills_count() -> None:
    """The last 16 are remembered, a slow one before them is not."""
    book = HopTimesBook(LIMITS)
    for step_ms in [10_000.0] + [100.0] * 16:
        book.note("a", 10, answer(step_ms))

    assert book.limit_s("a", 100) == 10.0


def test_a_first_prefill_is_reckoned_from_decodes() -> None:
    """Many tokens at once take no longer than one after the other."""
    book = HopTimesBook(LIMITS)
    book.note("a", 1, answer(100.0))

    assert book.limit_s("a", 20) == 20.0


def test_a_first_decode_has_all_the_time() -> None:
    """What a prefill takes a token says nothing of a single one."""
    book = HopTimesBook(LIMITS)
    book.note("a", 10, answer(100.0))

    assert book.limit_s("a", 1) == 60.0
