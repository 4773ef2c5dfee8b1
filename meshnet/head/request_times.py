"""Where the time of one request goes: what each hop took of it, and what the head did itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from meshnet.head.hop_client import HopAnswer


@dataclass(slots=True)
class HopSums:
    """What one hop took of a phase, in sum over its steps, milliseconds.

    Attributes:
        steps: How many.
        step_ms: Their round trips as the head sees them, which the next three are parts of.
        queue_ms: As the shard says.
        compute_ms: As the shard says; of a step that ran in a batch it is all of the batch's.
        serialise_ms: Making and reading what is sent, by head and shard.
        recoveries: Steps that did not go well at once, and calls that fed everything again.
        recovery_ms: What these took besides: failed tries, pauses, and feeding the hop again.
    """

    steps: int = 0
    step_ms: float = 0.0
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    serialise_ms: float = 0.0
    recoveries: int = 0
    recovery_ms: float = 0.0

    @property
    def wire_ms(self) -> float:
        """The rest of the round trips: the network, and what both sides do to use it."""
        return self.step_ms - self.queue_ms - self.compute_ms - self.serialise_ms

    @property
    def total_ms(self) -> float:
        """All that the hop took."""
        return self.step_ms + self.recovery_ms

    def add(self, other: HopSums) -> None:
        """Add another one's sums to these."""
        self.steps += other.steps
        self.step_ms += other.step_ms
        self.queue_ms += other.queue_ms
        self.compute_ms += other.compute_ms
        self.serialise_ms += other.serialise_ms
        self.recoveries += other.recoveries
        self.recovery_ms += other.recovery_ms


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Prefill or decode of a request, in sum over its generations.

    Attributes:
        n_tokens: The tokens that came of it.
        total_ms: How long it took.
        hops: What each hop took of it, by endpoint, first used first.
    """

    n_tokens: int
    total_ms: float
    hops: Mapping[str, HopSums]

    @property
    def head_ms(self) -> float:
        """What no hop took; 0 where hops worked at the same time, as on a prompt's chunks."""
        return max(0.0, self.total_ms - sum(hop.total_ms for hop in self.hops.values()))


class GenerationTimes:
    """Of one generation: prefill lasts until its first token, decode from there to its last.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.began_at = clock()
        self.first_token_at: float | None = None
        self.last_at = self.began_at
        self.prefill: defaultdict[str, HopSums] = defaultdict(HopSums)
        self.decode: defaultdict[str, HopSums] = defaultdict(HopSums)
        self.n_tokens = 0
        self._present = self.prefill
        self._is_fed_anew = False

    def note_step(self, endpoint: str, answer: HopAnswer) -> None:
        """Note a step that went well."""
        if self._is_fed_anew:
            self.note_recovery(endpoint, answer.step_ms)
            return
        sums = self._present[endpoint]
        sums.steps += 1
        sums.step_ms += answer.step_ms
        sums.queue_ms += answer.queue_ms
        sums.compute_ms += answer.compute_ms
        sums.serialise_ms += answer.serialise_ms

    def note_recovery(self, endpoint: str, recovery_ms: float) -> None:
        """Note what a step cost besides its last try."""
        sums = self._present[endpoint]
        sums.recoveries += 1
        sums.recovery_ms += recovery_ms
        self.last_at = self._clock()

    def note_token(self) -> None:
        """Note that the tail has answered; what comes next is decode."""
        self.last_at = self._clock()
        self.n_tokens += 1
        if self.first_token_at is None:
            self.first_token_at = self.last_at
            self._present = self.decode

    @contextmanager
    def feeding_anew(self) -> Generator[None]:
        """Take the steps meanwhile for recovery: all hops are fed what they held."""
        self._is_fed_anew = True
        try:
            yield
        finally:
            self._is_fed_anew = False

    @property
    def prefill_ms(self) -> float:
        """To the first token, or as far as it came."""
        ends_at = self.last_at if self.first_token_at is None else self.first_token_at
        return (ends_at - self.began_at) * 1000

    @property
    def decode_ms(self) -> float:
        """From the first token to the last."""
        return 0.0 if self.first_token_at is None else (self.last_at - self.first_token_at) * 1000


class RequestTimes:
    """Of a request, whose generations may run at the same time.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._generations: list[GenerationTimes] = []
        self._started_at = clock()

    def begin(self) -> GenerationTimes:
        """Note the beginning of a generation."""
        generation = GenerationTimes(self._clock)
        self._generations.append(generation)
        return generation

    @property
    def total_ms(self) -> float:
        """Since the request came."""
        return (self._clock() - self._started_at) * 1000

    @property
    def waiting_ms(self) -> float:
        """From when the request came to each generation's beginning, in sum over these."""
        return sum(one.began_at - self._started_at for one in self._generations) * 1000

    @property
    def prefill(self) -> PhaseTimes:
        """Up to the first tokens."""
        times = self._generations
        return PhaseTimes(
            sum(t.n_tokens > 0 for t in times),
            sum(t.prefill_ms for t in times),
            _together(t.prefill for t in times),
        )

    @property
    def decode(self) -> PhaseTimes:
        """From the first tokens on."""
        times = self._generations
        return PhaseTimes(
            sum(max(0, t.n_tokens - 1) for t in times),
            sum(t.decode_ms for t in times),
            _together(t.decode for t in times),
        )


def _together(all_hops: Iterable[Mapping[str, HopSums]]) -> Mapping[str, HopSums]:
    together: defaultdict[str, HopSums] = defaultdict(HopSums)
    for hops in all_hops:
        for endpoint, sums in hops.items():
            together[endpoint].add(sums)
    return together
