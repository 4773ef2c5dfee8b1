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
"""The longest pause before a batch, in parts of what the last batch took (ADR 0019)."""
_FORGET_S: Final = 10.0
"""A session that stays away for longer has no rhythm."""


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
        """Whether it can share a forward with others': it has one token, and a state."""
        return self.state is not None and self.step.frame.n_tokens == 1


JobT = TypeVar("JobT", bound=Job)


@dataclass(slots=True)
class _Rhythm:
    """How a session comes and goes.

    Attributes:
        start_layer: Where it enters the stage.
        left_at: When its last decode ended here; infinite while one is here.
        away_s: How long it was away before that decode; infinite while this is not known.
    """

    start_layer: int
    left_at: float = -inf
    away_s: float = inf


class StepScheduler(Generic[JobT]):
    """Decodes run in batches of all that wait, everything else (prefill chunks) runs alone.

    Where both wait they take turns: between two steps that run alone, every decode runs that
    waited when the first of them ended. So a decode waits for one chunk of a prompt at most, and a
    chunk never for decodes that came after it.

    Sessions that were answered together come again one shortly after the other. A batch that began
    with the first of them would leave the rest to the next batch, as often as they come, and a
    batch costs far more than one step more in it. So before a batch there is a pause for sessions
    that are about to come, as far as can be told from how long each was away the last time. There
    is none for a session that is alone, or whose neighbours are far away on other shards.

    Args:
        max_batch: The most steps in a batch.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._decodes: deque[JobT] = deque()
        self._singles: deque[JobT] = deque()
        self._rhythms: dict[SessionId | None, _Rhythm] = {}
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
        rhythm = self._rhythm_of(job)
        rhythm.away_s = job.queued_at - rhythm.left_at
        rhythm.left_at = inf

    def remove(self, job: JobT) -> bool:
        """Forget a step that waits. Returns False for one that was taken already."""
        queue = self._decodes if job.is_decode else self._singles
        if job not in queue:
            return False
        queue.remove(job)
        if job.is_decode:
            self._rhythms[job.session] = _Rhythm(job.step.start_layer, left_at=job.queued_at)
        return True

    def pause_s(self, now: float) -> float:
        """How long to wait for more decodes, unless one comes before; 0 where `take` is due."""
        if self._singles or not 0 < len(self._decodes) < self._max_batch:
            return 0.0
        first = self._decodes[0]
        until = max(first.queued_at, self._ended_at) + self._patience_s
        about_to_come = any(
            now - self._patience_s < rhythm.left_at + rhythm.away_s <= until
            and rhythm.start_layer == first.step.start_layer
            for rhythm in self._rhythms.values()
        )
        return max(until - now, 0.0) if about_to_come else 0.0

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
        for job in jobs:
            self._rhythm_of(job).left_at = now
        self._rhythms = {
            session: rhythm
            for session, rhythm in self._rhythms.items()
            if now - rhythm.left_at < _FORGET_S
        }

    def _rhythm_of(self, job: JobT) -> _Rhythm:
        return self._rhythms.setdefault(job.session, _Rhythm(job.step.start_layer))

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
