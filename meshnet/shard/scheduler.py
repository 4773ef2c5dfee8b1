"""Decides which of the waiting steps run next, and which of them together.

Pure: no thread, no event loop, and no clock but the times that it is told, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Final, Generic, TypeVar

from meshnet.ids import SessionId
from meshnet.model.interface import CacheState, StageStep

_PATIENCE: Final = 0.25
"""The longest wait for one more, in parts of what the last batch took (ADR 0019)."""
_REMEMBERED: Final = 1024
"""Of so many sessions it is known with whom they left."""


@dataclass(eq=False, slots=True)
class Job:
    """A step that waits or runs.

    Attributes:
        step: The step.
        state: Its session's state; None where it is stateless.
        session: Whose it is; None where it is nobody's.
        queued_at: Since when it waits.
    """

    step: StageStep
    state: CacheState | None
    session: SessionId | None
    queued_at: float

    @property
    def is_decode(self) -> bool:
        """Whether it can share a forward with others': one more token of a session.

        A session's first token is a short prompt's. A head probes a shard that came back with such
        a one, which is not to change the last digits of who is fed again there.
        """
        has_tokens = self.state is not None and self.step.position > 0
        return has_tokens and self.step.frame.n_tokens == 1


JobT = TypeVar("JobT", bound=Job)


@dataclass(slots=True)
class _Party:
    """Sessions whose decodes ran together.

    Attributes:
        start_layer: Where they entered the stage.
        left_at: When their batch ended.
        away: Those that have not come again.
    """

    start_layer: int
    left_at: float
    away: set[SessionId | None]


class StepScheduler(Generic[JobT]):
    """Decodes run in batches of all that wait, everything else (prefill chunks) runs alone.

    Where both wait they take turns: between two steps that run alone, every decode runs that
    waited when the first of them ended. So a decode waits for one chunk of a prompt at most, and a
    chunk never for decodes that came after it.

    Sessions that were answered together come again one shortly after the other. A batch that began
    with the first of them would leave the rest to the next batch, as often as they come, and a
    batch costs far more than one step more in it. So before a batch there is a short pause while
    some are missing of those that left together. There is one as well for those who left last, if
    they come back at once: else two groups would take turns on one shard for ever. A session that
    is alone is never paused for.

    Args:
        max_batch: The most steps in a batch.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._decodes: deque[JobT] = deque()
        self._singles: deque[JobT] = deque()
        self._parties: dict[SessionId | None, _Party] = {}
        self._newest: _Party | None = None
        self._absence_s = inf
        """How long who came back last had been away."""
        self._taken_at = -inf
        self._ended_at = -inf
        self._single_ended_at = -inf
        self._patience_s = 0.0

    def __len__(self) -> int:
        """How many steps wait."""
        return len(self._decodes) + len(self._singles)

    def add(self, job: JobT) -> None:
        """Let a step wait."""
        if not job.is_decode:
            self._singles.append(job)
            return
        self._decodes.append(job)
        party = self._parties.get(job.session)
        if party is not None and job.session in party.away:
            party.away.remove(job.session)
            self._absence_s = job.queued_at - party.left_at

    def remove(self, job: JobT) -> bool:
        """Forget a step that waits. Returns False for one that was taken already."""
        queue = self._decodes if job.is_decode else self._singles
        if job not in queue:
            return False
        queue.remove(job)
        return True

    def pause_s(self, now: float) -> float:
        """How long to wait for more decodes, unless one comes before; 0 where `take` is due."""
        if self._singles or not 0 < len(self._decodes) < self._max_batch:
            return 0.0
        if not self._is_somebody_missing():
            return 0.0
        until = max(self._decodes[0].queued_at, self._ended_at) + self._patience_s
        return max(until - now, 0.0)

    def _is_somebody_missing(self) -> bool:
        """Whether who waits left with others who are away, or they left who come back at once."""
        parties = [self._parties.get(job.session) for job in self._decodes]
        if self._absence_s <= self._patience_s:
            parties.append(self._newest)
        start_layer = self._decodes[0].step.start_layer
        return any(p is not None and p.away and p.start_layer == start_layer for p in parties)

    def take(self, now: float) -> list[JobT]:
        """Take what runs next, once what was taken before has `ended`.

        Returns:
            One step that runs alone, or decodes of one start layer, each of another session.
            Empty where nothing waits.
        """
        self._taken_at = now
        decode_is_due = self._decodes and self._decodes[0].queued_at <= self._single_ended_at
        if self._singles and not decode_is_due:
            return [self._singles.popleft()]
        return self._take_batch()

    def ended(self, jobs: list[JobT], now: float) -> None:
        """Note that what was taken has run."""
        self._ended_at = now
        if not jobs[0].is_decode:
            self._single_ended_at = now
            return
        self._patience_s = _PATIENCE * (now - self._taken_at)
        sessions = {job.session for job in jobs}
        self._newest = _Party(jobs[0].step.start_layer, now, sessions)
        for session in sessions:
            self._parties.pop(session, None)  # what is new is to be last
            self._parties[session] = self._newest
        while len(self._parties) > _REMEMBERED:
            del self._parties[next(iter(self._parties))]

    def _take_batch(self) -> list[JobT]:
        batch: dict[SessionId | None, JobT] = {}
        rest: deque[JobT] = deque()
        for job in self._decodes:
            fits = job.step.start_layer == self._decodes[0].step.start_layer
            if fits and job.session not in batch and len(batch) < self._max_batch:
                batch[job.session] = job
            else:
                rest.append(job)
        self._decodes = rest
        return list(batch.values())
