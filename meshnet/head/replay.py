"""What a hop was fed in one session, kept so that a hop which lost it can be fed again alone.

Kept call by call: the same tokens in calls of other lengths give other last digits (measured: a
prefill in bulk instead of the original calls changed 9 of 396 greedy tokens in bfloat16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshnet.errors import InputsDropped
from meshnet.wire.frames import Frame

ReplayMode = Literal["exact", "fast"]
"""In calls of the original lengths, bit for bit; or in as few as a shard takes."""


class ReplayBudget:
    """The bytes that the kept inputs of all sessions may take together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, nbytes: int) -> bool:
        """Reserve room; False where there is not enough, and nothing was reserved."""
        if self.used_bytes + nbytes > self.max_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Free what was reserved."""
        self.used_bytes -= nbytes


@dataclass(frozen=True, slots=True)
class FedFrame:
    """One call's input, and the tokens before it."""

    past_len: int
    frame: Frame

    @property
    def end(self) -> int:
        """Tokens held after the call."""
        return self.past_len + self.frame.n_tokens


class InputLog:
    """The inputs of one hop in one session, oldest first, without a gap.

    Once an input finds no room in the budget, none is kept any more: a part is of no use.

    Args:
        budget: Shared with other logs.
        mode: How they are fed again.
    """

    def __init__(self, budget: ReplayBudget, mode: ReplayMode) -> None:
        self._budget = budget
        self._mode: ReplayMode = mode
        self._fed: list[FedFrame] = []
        self._nbytes = 0
        self._complete = True

    def add(self, past_len: int, frame: Frame) -> None:
        """Keep one call's input, if there is room."""
        if not self._complete:
            return
        if not self._budget.take(len(frame.data)):
            self.clear()
            self._complete = False
            return
        self._nbytes += len(frame.data)
        self._fed.append(FedFrame(past_len, frame))

    def clear(self) -> None:
        """Forget everything, and give the room back; what is added next is the first."""
        self._budget.give_back(self._nbytes)
        self._fed.clear()
        self._nbytes = 0
        self._complete = True

    def usable(self, held: int) -> int:
        """Up to where a hop that holds `held` tokens can go on; 0 where it must begin anew."""
        if self._mode == "fast":
            ends = self._fed[-1].end if self._fed else 0
            return held if held <= ends else 0
        return held if any(fed.end == held for fed in self._fed) else 0

    def replay(
        self, start: int, end: int, max_tokens: int, *, in_bulk: bool = False
    ) -> Iterator[FedFrame]:
        """The inputs that cover tokens `[start, end)`.

        Args:
            start: Tokens that the hop holds; see `usable`.
            end: Tokens that it is to hold.
            max_tokens: The longest call in bulk.
            in_bulk: In as few calls as that makes, whatever the log's mode.

        Raises:
            InputsDropped: They were not kept.
        """
        fed = [one for one in self._fed if one.end > start]
        covered = fed and fed[0].past_len <= start and fed[-1].end == end
        if not self._complete or not covered:
            raise InputsDropped(f"the inputs of tokens {start} to {end} were not kept")
        if self._mode == "exact" and not in_bulk:
            return iter(fed)
        return _in_bulk(fed, start, max_tokens)


def _in_bulk(fed: list[FedFrame], start: int, max_tokens: int) -> Iterator[FedFrame]:
    """The same tokens from `start` on, in calls as long as may be."""
    _, *axes = fed[0].frame.shape
    token_bytes = len(fed[0].frame.data) // axes[0]
    data = b"".join(one.frame.data for one in fed)[(start - fed[0].past_len) * token_bytes :]
    for first in range(0, len(data) // token_bytes, max_tokens):
        part = data[first * token_bytes : (first + max_tokens) * token_bytes]
        shape = (1, len(part) // token_bytes, *axes[1:])
        yield FedFrame(start + first, Frame(fed[0].frame.dtype, shape, part))
