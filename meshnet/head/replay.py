"""What a hop was fed in one session, kept so that a hop which lost it can be fed again alone.

Kept call by call: the same tokens in calls of other lengths give other last digits (measured: a
prefill in bulk instead of the original calls changed 9 of 396 greedy tokens in bfloat16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from meshnet.errors import InputsDropped
from meshnet.wire.frames import Frame

ReplayMode = Literal["exact", "fast"]
"""In calls of the original lengths, bit for bit; or in as few as a shard takes."""


class ReplayBudget:
    """The bytes that the kept inputs of all sessions may take together.

    An input that several logs have is there once, and counts once: it is told from others by its
    identity, so whoever takes room for one has it until the room is given back.

    Attributes:
        make_room: Asked when there is not enough room: has something given back that can be
            spared, and tells whether there was any.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.make_room: Callable[[], bool] = lambda: False
        self._holders: Counter[int] = Counter()

    def take(self, frame: Frame) -> bool:
        """Reserve room for an input; False where there is not enough, and nothing was reserved."""
        if not self._holders[id(frame)]:
            while self.used_bytes + len(frame.data) > self.max_bytes:
                if not self.make_room():
                    return False
            self.used_bytes += len(frame.data)
        self._holders[id(frame)] += 1
        return True

    def give_back(self, frame: Frame) -> None:
        """Free what was reserved, if nobody else holds the input."""
        self._holders[id(frame)] -= 1
        if not self._holders[id(frame)]:
            del self._holders[id(frame)]
            self.used_bytes -= len(frame.data)


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
        self._complete = True

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs, those that other logs have too included."""
        return sum(len(fed.frame.data) for fed in self._fed)

    def add(self, past_len: int, frame: Frame) -> None:
        """Keep one call's input, if there is room."""
        if not self._complete:
            return
        if not self._budget.take(frame):
            self.clear()
            self._complete = False
            return
        self._fed.append(FedFrame(past_len, frame))

    def clear(self) -> None:
        """Forget everything, and give the room back; what is added next is the first."""
        for fed in self._fed:
            self._budget.give_back(fed.frame)
        self._fed.clear()
        self._complete = True

    def begin_as(self, other: InputLog, n_tokens: int) -> None:
        """Begin an empty log with the inputs of the first `n_tokens` tokens of another one.

        A call that goes beyond them is cut: its part becomes a call of its own.
        """
        fed = [one for one in other._fed if one.past_len < n_tokens]
        if not fed or fed[-1].end < n_tokens:
            self._complete = False
            return
        *whole, last = fed
        for one in (*whole, _cut(last, n_tokens)):
            self.add(one.past_len, one.frame)

    def last_end(self, n_tokens: int) -> int:
        """The end of the last call that does not go beyond `n_tokens` tokens; 0 is none."""
        return max((one.end for one in self._fed if one.end <= n_tokens), default=0)

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


def _cut(one: FedFrame, end: int) -> FedFrame:
    """A call as far as `end`, the very same if it goes no further."""
    n_tokens = end - one.past_len
    if n_tokens >= one.frame.n_tokens:
        return one
    frame = one.frame
    n_bytes = len(frame.data) // frame.n_tokens * n_tokens
    shape = (1, n_tokens, *frame.shape[2:])
    return FedFrame(one.past_len, Frame(frame.dtype, shape, frame.data[:n_bytes]))
