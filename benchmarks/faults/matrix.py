"""The cells of the matrix: which fault, at which step, on which hop, in which kind of use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, get_args

Fault = Literal[
    "kill",
    "restart",
    "stop",
    "evict",
    "expire",
    "drop_answer",
    "duplicate",
    "reorder",
    "wrong_fingerprint",
    "half_open",
    "slow_link",
]
Moment = Literal["prefill", "first", "middle", "last"]
HopName = Literal["first", "middle", "tail"]
Way = Literal["stream", "plain"]
FleetName = Literal["cached", "standby"]
Expectation = Literal["identical", "error", "identical or error"]

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
MOMENTS: Final[tuple[Moment, ...]] = get_args(Moment)
HOPS: Final[tuple[HopName, ...]] = get_args(HopName)
WAYS: Final[tuple[Way, ...]] = get_args(Way)
FLEETS: Final[tuple[FleetName, ...]] = get_args(FleetName)

N_TOKENS: Final = 16
DECODE_STEP: Final[dict[Moment, int]] = {
    "prefill": 0,
    "first": 1,
    "middle": N_TOKENS // 2,
    "last": N_TOKENS - 1,
}
"""Which decode step of the session a moment is; 0 is the prefill, which gives the first token."""

EXPECTED: Final[dict[tuple[Fault, FleetName], Expectation]] = {
    ("kill", "cached"): "error",  # nobody else holds these layers, and the shard stays away
}
"""What is not here must give the identical text."""

DOCUMENTED: Final[dict[Fault, frozenset[tuple[int, str | None]]]] = {
    "kill": frozenset({(503, "shard_unavailable")}),
}
"""Status and code of the errors that a client may see, where an error is expected."""

RECOVERY_S: Final = 60.0
"""How long the head tries. A shard takes 5 to 8 s to start again, but 30 s on a busy machine."""
KILL_RECOVERY_S: Final = 12.0
"""The same where a shard stays away for good, and so all of it is waited for."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a cell needs of the cluster; cells with the same one share it.

    Attributes:
        fleet: With standby shards or without.
        recovery_s: The head's recovery time-out.
        expiring: The hop whose shards have a short time to live, if any.
    """

    fleet: FleetName
    recovery_s: float = RECOVERY_S
    expiring: HopName | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault at one step of one request."""

    fault: Fault
    when: Moment
    hop: HopName
    way: Way
    fleet: FleetName

    @property
    def mode(self) -> str:
        """As the results name it."""
        return f"{self.way}, {self.fleet}"

    @property
    def expected(self) -> Expectation:
        """What must come of it."""
        return EXPECTED.get((self.fault, self.fleet), "identical")

    @property
    def setup(self) -> Setup:
        """What it needs of the cluster."""
        dies_for_good = self.fault == "kill" and self.fleet == "cached"
        return Setup(
            self.fleet,
            KILL_RECOVERY_S if dies_for_good else RECOVERY_S,
            self.hop if self.fault == "expire" else None,
        )

    def __str__(self) -> str:
        return f"{self.fault:17} {self.when:7} {self.hop:6} {self.mode:15}"


def all_cells() -> list[Cell]:
    """All 528; those that need the same of the cluster stand together."""
    order = product(FLEETS, FAULTS, HOPS, MOMENTS, WAYS)
    return [Cell(fault, when, hop, way, fleet) for fleet, fault, hop, when, way in order]


def sampled_cells() -> list[Cell]:
    """Every fault on every hop once; all moments, ways and fleets take turns."""
    cells = [
        Cell(
            fault,
            MOMENTS[(i + j) % len(MOMENTS)],
            hop,
            WAYS[(i // 2 + j) % len(WAYS)],
            FLEETS[(i + j + i // 4) % len(FLEETS)],
        )
        for (i, fault), (j, hop) in product(enumerate(FAULTS), enumerate(HOPS))
    ]
    return in_order(cells)


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """The same cells, in the order of `all_cells`."""
    return sorted(cells, key={cell: at for at, cell in enumerate(all_cells())}.__getitem__)
