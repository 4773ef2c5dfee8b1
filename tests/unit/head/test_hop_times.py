from __future__ import annotations

from meshnet.head.hop_client import HopAnswer
from meshnet.head.hop_times import HopTimes, HopTimesBook
from meshnet.wire.messages import TailAnswer


def answer(step_ms: float, queue_ms: float = 0.0, compute_ms: float = 0.0) -> HopAnswer:
    return HopAnswer(TailAnswer(), step_ms, queue_ms, compute_ms)


def test_before_its_first_step_a_hop_has_no_times() -> None:
    """Nothing is known of a hop that took no decode step."""
    assert HopTimesBook().of("a") is None


def test_asking_makes_no_hop() -> None:
    """To ask for a hop does not make it known."""
    book = HopTimesBook()
    book.of("a")

    assert book.of("a") is None


def test_times_are_medians() -> None:
    """One slow step does not change what is usual; each column has its own median."""
    book = HopTimesBook()
    for times in ((1.0, 0.3, 9.0), (2.0, 0.1, 7.0), (900.0, 0.2, 8.0)):
        book.note("a", answer(*times))

    assert book.of("a") == HopTimes(steps=3, step_ms=2.0, queue_ms=0.2, compute_ms=8.0)


def test_hops_are_kept_apart() -> None:
    """One hop's steps do not count as another's."""
    book = HopTimesBook()
    book.note("a", answer(1.0))
    book.note("b", answer(5.0))

    assert [times.step_ms for times in map(book.of, "ab") if times] == [1.0, 5.0]


def test_only_recent_steps_count() -> None:
    """The last 256 steps are remembered, older ones are not."""
    book = HopTimesBook()
    for step_ms in [1000.0] * 300 + [1.0] * 256:
        book.note("a", answer(step_ms))

    assert book.of("a") == HopTimes(steps=256, step_ms=1.0, queue_ms=0.0, compute_ms=0.0)
