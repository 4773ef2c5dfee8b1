"""What the hops' recent steps took: for people to look at, and to know how long a step may take."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

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


class HopTimesBook:
    """Remembers the last steps of each hop.

    Args:
        limits: What the remembered is turned into.
    """

    def __init__(self, limits: StepLimits | None = None) -> None:
        self._limits = limits or StepLimits()
        self._single: defaultdict[str, deque[HopAnswer]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_STEPS)
        )
        self._ms_a_token: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_PREFILLS)
        )

    def note(self, endpoint: str, n_tokens: int, answer: HopAnswer) -> None:
        """Remember one step."""
        if n_tokens == 1:
            self._single[endpoint].append(answer)
        else:
            self._ms_a_token[endpoint].append(answer.step_ms / n_tokens)

    def of(self, endpoint: str) -> HopTimes | None:
        """The hop's medians, or None before its first one-token step."""
        answers = self._single.get(endpoint)
        if not answers:
            return None
        return HopTimes(
            len(answers),
            median(answer.step_ms for answer in answers),
            median(answer.queue_ms for answer in answers),
            median(answer.compute_ms for answer in answers),
        )

    def limit_s(self, endpoint: str, n_tokens: int) -> float:
        """How long a step of so many tokens may take on a hop, seconds."""
        return self._limits.limit_s(self._expected_s(endpoint, n_tokens))

    def _expected_s(self, endpoint: str, n_tokens: int) -> float | None:
        single = self.of(endpoint)
        seen = self._ms_a_token.get(endpoint)
        if n_tokens > 1 and seen:
            return n_tokens * max(seen) / 1000
        # Many tokens at once never take longer than one after the other.
        return None if single is None else n_tokens * single.step_ms / 1000
