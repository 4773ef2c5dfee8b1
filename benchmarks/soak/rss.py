"""The memory of every process over its life, and whether it stayed where it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from benchmarks.resident import resident_bytes
from services.cli.cluster import Member

SAMPLE_S: Final = 5.0
LONG_LIFE_S: Final = 300.0
FACTOR: Final = 1.05
EXTRA_BYTES: Final = 15 * 1024**2
"""States of four sessions of 800 tokens are 45 MiB on a shard of ten layers: between two quarters
the medians may differ by a part of that, and by what the allocator keeps. A leak of 100 KB a
request is more, after the hundred requests of ten minutes."""


@dataclass
class Life:
    """One process, from its start to its end."""

    name: str
    pid: int
    samples: list[int] = field(default_factory=list[int])

    @property
    def is_long(self) -> bool:
        """Whether it lived long enough to be judged."""
        return len(self.samples) * SAMPLE_S > LONG_LIFE_S

    @property
    def second_quarter(self) -> float:
        """Its median memory there, bytes."""
        n = len(self.samples)
        return median(self.samples[n // 4 : n // 2])

    @property
    def last_quarter(self) -> float:
        """Its median memory there, bytes."""
        return median(self.samples[3 * len(self.samples) // 4 :])

    @property
    def is_flat(self) -> bool:
        """Whether it took no more in the end than before."""
        return self.last_quarter <= FACTOR * self.second_quarter + EXTRA_BYTES

    def summary(self) -> dict[str, object]:
        """For the results."""
        return {
            "process": self.name,
            "minutes": round(len(self.samples) * SAMPLE_S / 60, 1),
            "second_quarter_mib": round(self.second_quarter / 2**20, 1),
            "last_quarter_mib": round(self.last_quarter / 2**20, 1),
            "flat": self.is_flat,
        }


class RssBook:
    """The lives of all processes."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], Life] = {}

    def sample(self, members: Iterable[Member]) -> None:
        """Look at every process that runs."""
        for member in members:
            if member.returncode is None and (rss := resident_bytes(member.pid, "VmRSS")):
                life = self._lives.setdefault(
                    (member.name, member.pid), Life(member.name, member.pid)
                )
                life.samples.append(rss)

    def latest(self, members: Iterable[Member]) -> str:
        """What each takes now, MiB."""
        sizes = (f"{m.name} {resident_bytes(m.pid, 'VmRSS') / 2**20:.0f}" for m in members)
        return ", ".join(sizes)

    @property
    def long_lives(self) -> list[Life]:
        """Those that can be judged."""
        return [life for life in self._lives.values() if life.is_long]

    @property
    def n_lives(self) -> int:
        """How many processes there have been."""
        return len(self._lives)
