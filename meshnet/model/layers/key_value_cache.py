"""One attention layer's keys and values of one session, in memory that is taken in blocks."""

from __future__ import annotations

from typing import Final

import torch

BLOCK_TOKENS: Final = 64


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
        self._window = window
        self._first = 0
        """The position of the first token in memory."""
        self._keys = torch.empty((n_heads, 0, head_dim), dtype=dtype)
        self._values = torch.empty((n_heads, 0, head_dim), dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._keys.nbytes + self._values.nbytes

    def write(
        self, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put in what comes at `position`; what was there and after it is gone.

        Args:
            position: Tokens before.
            keys: [n, heads, head_dim].
            values: Likewise.

        Returns:
            Keys and values, [heads, m, head_dim] each, of all tokens that the n new ones may look
            at: they end with the last of those, and begin where the first of them looks back to.
            Views, good until the next call.
        """
        end = position + len(keys)
        if end - self._first > self._keys.shape[1]:
            self._make_room(position, len(keys))
        at = slice(position - self._first, end - self._first)
        self._keys[:, at] = keys.transpose(0, 1)
        self._values[:, at] = values.transpose(0, 1)
        seen = slice(self._oldest(position) - self._first, at.stop)
        return self._keys[:, seen], self._values[:, seen]

    def settle(self, end: int) -> None:
        """Give back what a long step took, and no later one looks at."""
        if self._window is not None and self._keys.shape[1] > capacity(self._window):
            self._make_room(end, 1)

    def _oldest(self, position: int) -> int:
        """The first position that a token at `position` looks at."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _make_room(self, position: int, n_tokens: int) -> None:
        """Move what is still looked at to larger memory, or to the front of as much as before."""
        oldest = self._oldest(position)
        kept = slice(oldest - self._first, position - self._first)
        n_heads, _, head_dim = self._keys.shape
        shape = (n_heads, capacity(position - oldest + n_tokens), head_dim)
        for name in ("_keys", "_values"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_empty(shape)
            new[:, : position - oldest] = old[:, kept]
            setattr(self, name, new)
        self._first = oldest


def capacity(n_tokens: int) -> int:
    """How many tokens' memory so many take: room for one more, so that windows seldom move."""
    return n_tokens // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS
