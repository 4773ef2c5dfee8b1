"""One log line a session and interval, instead of one a token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from meshnet.ids import SessionId

_MAX_SESSIONS = 1024


@dataclass
class _Progress:
    steps: int = 0
    logged_at: float | None = None


class DecodeLog:
    """Decides which decode steps are worth a line: the first at once, then one in `interval_s`.

    Args:
        clock: Monotonic seconds.
        interval_s: The least time between two lines of one session.
    """

    def __init__(self, clock: Callable[[], float], interval_s: float = 5.0) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._sessions: OrderedDict[SessionId, _Progress] = OrderedDict()

    def note(self, session: SessionId) -> int | None:
        """Count one decode step; the session's steps so far if a line is due, else None."""
        progress = self._sessions.setdefault(session, _Progress())
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        progress.steps += 1
        now = self._clock()
        if progress.logged_at is not None and now - progress.logged_at < self._interval_s:
            return None
        progress.logged_at = now
        return progress.steps

    def forget(self, session: SessionId) -> None:
        """Drop what is known of a session that ended."""
        self._sessions.pop(session, None)
