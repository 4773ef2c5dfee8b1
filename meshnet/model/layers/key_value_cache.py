"""One attention layer's keys and values of one session, in memory that is taken in blocks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Final

import torch

BLOCK_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where keys and values are.

    Attributes:
        rows: [room, 2 * heads, head_dim]: each token's keys, and behind them its values.
        first: The position of the first token.
    """

    rows: torch.Tensor
    first: int

    @property
    def room(self) -> int:
        """In tokens."""
        return self.rows.shape[0]


class KeysValues:
    """Keys and values of the tokens so far, as far back as the layer looks.

    Args:
        n_heads: Of keys, and of values.
        head_dim: Numbers a head.
        dtype: Theirs.
        window: How far back the layer looks, in tokens, the looking one included; None is all.
    """

    def __init__(
        self, n_heads: int, head_dim: int, dtype: torch.dtype, window: int | None = None
    ) -> None:
        self._n_heads = n_heads
        self._head_dim = head_dim
        self._window = window
        self._memory = _Memory(torch.empty((0, 2 * n_heads, head_dim), dtype=dtype), first=0)
        self._is_shared = False
        """Whether the memory is another one's, who writes to it behind the tokens that are ours."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._memory.rows.nbytes

    def fork(self, n_tokens: int) -> KeysValues | None:
        """The first `n_tokens` tokens; None where those that are looked at next are not all here.

        Another thread may be writing. That is safe: whoever moves to other memory copies first and
        then takes its place by one assignment, which is read here once; and what was written for a
        token is never written again, since a step begins behind all that are held. So in whatever
        memory is found here, the first tokens are whole, and stay as they are.
        """
        memory = self._memory
        if memory.first > self._oldest(n_tokens):
            return None
        fork = copy.copy(self)
        fork._memory = memory
        fork._is_shared = True
        return fork

    def write(self, position: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put in what comes at `position`; what was there and after it is gone.

        Args:
            position: Tokens before.
            rows: [n, 2 * heads, head_dim]: keys, and behind them values.

        Returns:
            Keys and values, [1, heads, m, head_dim] each, of all tokens that the n new ones may
            look at: they end with the last of those, and begin where the first of them looks back
            to. Views, good until the next call.
        """
        n_tokens = len(rows)
        if self._is_shared or position + n_tokens - self._memory.first > self._memory.room:
            self._make_room(position, n_tokens)
        memory = self._memory
        memory.rows.narrow(0, position - memory.first, n_tokens).copy_(rows)
        oldest = self._oldest(position)
        return self._seen(oldest - memory.first, position + n_tokens - oldest)

    def settle(self, end: int) -> None:
        """Give back what a long step took, and no later one looks at."""
        if self._window is not None and self._memory.room > capacity(self._window):
            self._make_room(end, 1)

    def _seen(self, start: int, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some tokens in memory, [1, heads, n, head_dim] each."""
        half, token = self._n_heads * self._head_dim, 2 * self._n_heads * self._head_dim
        size = (1, self._n_heads, n_tokens, self._head_dim)
        strides = (0, self._head_dim, token, 1)
        rows, first = self._memory.rows, start * token
        # Slices and a transposition make the same views in four times as many calls.
        return rows.as_strided(size, strides, first), rows.as_strided(size, strides, first + half)

    def _oldest(self, position: int) -> int:
        """The first position that a token at `position` looks at."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _make_room(self, position: int, n_tokens: int) -> None:
        """Move what is still looked at to larger memory, or to the front of as much as before."""
        oldest, old = self._oldest(position), self._memory
        kept = old.rows[oldest - old.first : position - old.first]
        rows = kept.new_empty((capacity(len(kept) + n_tokens), *kept.shape[1:]))
        rows[: len(kept)] = kept
        self._memory = _Memory(rows, oldest)
        self._is_shared = False


def capacity(n_tokens: int) -> int:
    """How many tokens' memory so many take: room for one more, so that windows seldom move."""
    return n_tokens // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS
