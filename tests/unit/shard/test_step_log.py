from __future__ import annotations

from meshnet.ids import SessionId
from meshnet.shard.step_log import DecodeLog
from tests.unit.fakes import FakeClock

A, B = SessionId("a"), SessionId("b")


def notes_at(
    log: DecodeLog, clock: FakeClock, session: SessionId, *times: float
) -> list[int | None]:
    notes: list[int | None] = []
    for clock.now in times:
        notes.append(log.note(session))
    return notes


def test_one_line_an_interval() -> None:
    """Steps at 0, 1, 4.9, 5.5 and 6 s give lines with 1, none, none, 4, none steps."""
    clock = FakeClock()

    assert notes_at(DecodeLog(clock), clock, A, 0, 1, 4.9, 5.5, 6) == [1, None, None, 4, None]


def test_the_interval_is_over_when_it_is_over() -> None:
    """A step exactly one interval after a line gets a line."""
    clock = FakeClock()

    assert notes_at(DecodeLog(clock, interval_s=2), clock, A, 0, 1.9, 2) == [1, None, 3]


def test_sessions_are_throttled_apart() -> None:
    """One session's line costs another none."""
    clock = FakeClock()
    log = DecodeLog(clock)

    assert [log.note(A), log.note(B), log.note(A), log.note(B)] == [1, 1, None, None]


def test_a_forgotten_session_begins_anew() -> None:
    """After its end, a session of the same id gets its line at once."""
    log = DecodeLog(FakeClock())
    log.note(A)
    log.forget(A)

    assert log.note(A) == 1


def test_forgetting_the_unknown_is_no_error() -> None:
    """A session without decode steps can be forgotten."""
    log = DecodeLog(FakeClock())
    log.forget(A)

    assert log.note(A) == 1


def test_memory_is_bounded() -> None:
    """Of more than 1024 sessions the one that was silent longest is forgotten, and no other."""
    log = DecodeLog(FakeClock())
    log.note(A)
    log.note(B)
    log.note(A)
    for i in range(1023):
        log.note(SessionId(f"s{i}"))

    assert (log.note(A), log.note(B)) == (None, 1)
