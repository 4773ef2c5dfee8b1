"""Kills, stops and ends shards at random, and lets each alone for a third of the time."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Final

from services.cli.cluster import Member

_PAUSE_S: Final = (20.0, 60.0)
_STOPPED_S: Final = (3.0, 8.0)


@dataclass
class Killer:
    """What is done to the shards.

    Attributes:
        shards: The shards.
        rng: When, what, and to whom.
        done: Signals sent.
    """

    shards: Sequence[Member]
    rng: Random
    done: Counter[str] = field(default_factory=Counter[str])

    async def run(self, seconds: float) -> None:
        """Go on for so long.

        In each third of the time one layer's shards live on, stopped at most: of a memory that
        grows slowly nothing would be seen otherwise.
        """
        started_at = monotonic()
        while (elapsed := monotonic() - started_at) < seconds:
            pause_s = self.rng.uniform(*_PAUSE_S)
            await asyncio.sleep(min(pause_s, seconds - elapsed))
            spared = int(3 * elapsed / seconds)
            await self._strike(self.rng.randrange(len(self.shards)), spared)

    async def _strike(self, index: int, spared: int) -> None:
        shard = self.shards[index]
        (what,) = self.rng.choices(("kill", "stop", "term"), (5, 3, 2))
        if index == spared:
            what = "stop"
        if shard.returncode is not None:  # it is being started again
            return
        self.done[what] += 1
        match what:
            case "kill":
                shard.kill()
            case "term":
                shard.terminate()
            case _:
                shard.send(signal.SIGSTOP)
                try:
                    await asyncio.sleep(self.rng.uniform(*_STOPPED_S))
                finally:
                    shard.send(signal.SIGCONT)
