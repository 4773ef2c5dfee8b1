"""A tensor as bytes: dtype, shape, row-major little-endian data. Knows no tensor library."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from meshnet.errors import InvalidRequest

Dtype = Literal["int32", "float32", "bfloat16", "float16"]

ITEMSIZE: Final[dict[Dtype, int]] = {"int32": 4, "float32": 4, "bfloat16": 2, "float16": 2}


def nbytes(dtype: Dtype, shape: Sequence[int]) -> int:
    """How many bytes a tensor of this dtype and shape is."""
    return prod(shape) * ITEMSIZE[dtype]


@dataclass(frozen=True, slots=True)
class Frame:
    """One tensor on the wire.

    Raises:
        InvalidRequest: The data's length is not that of the shape and dtype.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        expected = nbytes(self.dtype, self.shape)
        if len(self.data) != expected:
            raise InvalidRequest(
                f"the body has {len(self.data)} bytes, shape {list(self.shape)} of {self.dtype} "
                f"has {expected}",
                field="body",
                value=len(self.data),
                allowed=expected,
            )

    @property
    def n_tokens(self) -> int:
        """Length of the token axis, axis 1."""
        return self.shape[1]

    @classmethod
    def of_token_ids(cls, ids: Sequence[int]) -> Frame:
        """Token ids as `[1, n]` int32."""
        return cls("int32", (1, len(ids)), array("i", ids).tobytes())

    def token_ids(self) -> list[int]:
        """The ids of a `[1, n]` int32 frame."""
        return array("i", self.data).tolist()
