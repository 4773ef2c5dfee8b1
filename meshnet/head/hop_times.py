"""What the hops' recent steps took: for people to look at, and to know how long a step may take."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass, field

from meshnet.head.hop_client import HopAnswer

_REMEMBERED_STEPS = 128
_REMEMBERED_PREFILLS = 16


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Medians over a hop's recent one-token steps, milliseconds."""

    steps: int
    step_ms: float
    queue_ms: float
    compute_ms: float
    overhead_ms: float
    """Of a step beyond its queue and compute."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How long a step may take before the head asks what is the matter.

    Attributes:
        least_s: Also for the quickest step: a machine may be busy with something else.
        most_s: Also for the longest one, and where nothing was measured yet.
        factor: So many times as long as the measured speed makes it.
    """

    least_s: float = 5.0
    most_s: float = 120.0
    factor: float = 10.0

    def limit_s(self, expected_s: float | None) -> float:
        """The limit of a step that is expected to take so long."""
        if expected_s is None:
            return self.most_s
        return min(self.most_s, max(self.least_s, self.factor * expected_s))


class _Recent:
    """The last values of something. Their median is at hand: it is asked for at every step."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._values) == _REMEMBERED_STEPS:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        middle = len(self._sorted) // 2
        return (self._sorted[middle] + self._sorted[-middle - 1]) / 2

    def __len__(self) -> int:
        return len(self._sorted)


@dataclass(slots=True)
class _SingleSteps:
    """What a hop's last one-token steps took, milliseconds."""

    step: _Recent = field(default_factory=_Recent)
    queue: _Recent = field(default_factory=_Recent)
    compute: _Recent = field(default_factory=_Recent)
    overhead: _Recent = field(default_factory=_Recent)


class HopTimesBook:
    """Remembers the last steps of each hop.

    Args:
        limits: What the remembered is turned into.
    """

    def __init__(self, limits: StepLimits | None = None) -> None:
        self._limits = limits or StepLimits()
        self._single: defaultdict[str, _SingleSteps] = defaultdict(_SingleSteps)
        self._ms_a_token: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_PREFILLS)
        )

    def note(self, endpoint: str, n_tokens: int, answer: HopAnswer) -> None:
        """Remember one step."""
        if n_tokens == 1:
            single = self._single[endpoint]
            single.step.add(answer.step_ms)
            single.queue.add(answer.queue_ms)
            single.compute.add(answer.compute_ms)
            single.overhead.add(answer.step_ms - answer.queue_ms - answer.compute_ms)
        else:
            self._ms_a_token[endpoint].append(answer.step_ms / n_tokens)

    def of(self, endpoint: str) -> HopTimes | None:
        """The hop's medians, or None before its first one-token step."""
        single = self._single.get(endpoint)
        if single is None:
            return None
        return HopTimes(
            len(single.step),
            single.step.median,
            single.queue.median,
            single.compute.median,
            single.overhead.median,
        )

    def limit_s(self, endpoint: str, n_tokens: int) -> float:
        """How long a step of so many tokens may take on a hop, seconds."""
        return self._limits.limit_s(self._expected_s(endpoint, n_tokens))

    def _expected_s(self, endpoint: str, n_tokens: int) -> float | None:
        single = self._single.get(endpoint)
        seen = self._ms_a_token.get(endpoint)
        if n_tokens > 1 and seen:
            return n_tokens * max(seen) / 1000
        # Many tokens at once never take longer than one after the other.
        return None if single is None else n_tokens * single.step.median / 1000
