"""The undisturbed request: its text, and how long it takes; and what a disturbed one took more."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from benchmarks.faults.matrix import Cell, Way
from benchmarks.faults.question import Reply, ask
from services.cli.cluster import ClusterError

_LIMIT_S: Final = 60.0
_RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class Baseline:
    """Medians over some undisturbed requests, in seconds.

    Attributes:
        text: Of all of them.
        first_s: Until the first token of a stream.
        gap_s: From one token to the next.
        total_s: A whole request in one piece.
    """

    text: str
    first_s: float
    gap_s: float
    total_s: float

    def recovery_ms(self, cell: Cell, reply: Reply) -> float:
        """What the fault cost, in milliseconds; what undisturbed requests differ by counts, too.

        In one piece: the time beyond an undisturbed request's. In a stream: the longest time
        without a token beyond the undisturbed one; for a fault at the prefill that is the time
        before the first token, if nothing later took longer.
        """
        if cell.way == "plain":
            lost_s = reply.total_s - self.total_s
        else:
            times = [*reply.event_s, reply.total_s]
            gaps = [later - earlier - self.gap_s for earlier, later in pairwise(times)]
            first = [times[0] - self.first_s] if cell.when == "prefill" else []
            lost_s = max([*first, *gaps, 0.0])
        return round(max(lost_s, 0.0) * 1000, 1)


async def measure(head_url: str) -> Baseline:
    """Ask a head that nothing disturbs.

    Raises:
        ClusterError: A reply was not whole, or not the same as another one.
    """
    await _ask_whole(head_url, "stream")  # warms up
    streams = [await _ask_whole(head_url, "stream") for _ in range(_RUNS)]
    plain = [await _ask_whole(head_url, "plain") for _ in range(_RUNS)]
    texts = {reply.text for reply in (*streams, *plain)}
    if len(texts) != 1:
        raise ClusterError(f"undisturbed replies differ: {texts}")
    gaps = [b - a for reply in streams for a, b in pairwise(reply.event_s)]
    return Baseline(
        texts.pop(),
        first_s=median(reply.event_s[0] for reply in streams),
        gap_s=median(gaps),
        total_s=median(reply.total_s for reply in plain),
    )


async def _ask_whole(head_url: str, way: Way) -> Reply:
    reply = await ask(head_url, way, limit_s=_LIMIT_S)
    if not reply.is_whole:
        raise ClusterError(f"an undisturbed reply is not whole: {reply}")
    return reply
