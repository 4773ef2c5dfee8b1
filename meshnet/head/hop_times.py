"""Where the time of recent decode steps went, hop by hop."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

from meshnet.head.hop_client import HopAnswer

_REMEMBERED_STEPS = 256


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Medians over a hop's recent decode steps, in milliseconds."""

    steps: int
    step_ms: float
    queue_ms: float
    compute_ms: float


class HopTimesBook:
    """Remembers the last decode steps of each hop."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, deque[tuple[float, float, float]]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_STEPS)
        )

    def note(self, endpoint: str, answer: HopAnswer) -> None:
        """Remember one decode step."""
        self._answers[endpoint].append((answer.step_ms, answer.queue_ms, answer.compute_ms))

    def of(self, endpoint: str) -> HopTimes | None:
        """The hop's medians, or None before its first decode step."""
        answers = self._answers.get(endpoint)
        if not answers:
            return None
        step_ms, queue_ms, compute_ms = (median(column) for column in zip(*answers, strict=True))
        return HopTimes(len(answers), step_ms, queue_ms, compute_ms)
