"""GGUF's blocks of 4 and 8 bits as layers of 4 bits, number by number, without a detour by floats.

A block holds 32 weights of a row; llama.cpp's ggml-quants.c is the definition:

- Q4_0: a half `d`, 32 numbers `q`; a weight is `d * (q - 8)`.
- Q4_1: halves `d` and `m`, 32 numbers `q`; a weight is `d * q + m`.
- Q8_0: a half `d`, 32 signed bytes `q`; a weight is `d * q`.

The 4-bit ones keep the numbers of a block's first half in the low halves of 16 bytes, those of the
second half in the high ones. All numbers are kept as they are; scales become bfloat16, which is
three bits shorter (docs/adr/0020-weights-in-8-and-4-bits.md has what that costs).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch types its way of splitting loosely.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from gguf import GGMLQuantizationType

from meshnet.model.weights.int4 import GROUP, ROWS_AT_ONCE, Int4Linear, join_nibbles
from meshnet.model.weights.packing import Packing

_HALF_BYTES: Final = 2
_MIDDLE: Final = 8
_BASE: Final = 16


def _from_q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = _half(blocks, 0)
    return _numbers(blocks[..., _HALF_BYTES:]), scale, torch.zeros_like(scale)


def _from_q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale, least = _half(blocks, 0), _half(blocks, _HALF_BYTES)
    return _numbers(blocks[..., 2 * _HALF_BYTES :]), scale, least + _MIDDLE * scale


def _from_q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two numbers a weight, q = 16 (high - 8) + low, the high ones before the low ones."""
    # In bfloat16 before it is multiplied: by powers of two, so that q is met exactly.
    scale = _half(blocks, 0).bfloat16().float()
    numbers = blocks[..., _HALF_BYTES:].view(torch.int8).to(torch.int16)
    low = numbers & (_BASE - 1)
    high = (numbers - low) // _BASE + _MIDDLE
    both = torch.cat([high.flatten(1), low.flatten(1)], dim=1).to(torch.uint8)
    zero = torch.cat([torch.zeros_like(scale), _MIDDLE * scale], dim=1)
    return both, torch.cat([_BASE * scale, scale], dim=1), zero


_READERS: Final[
    Mapping[
        GGMLQuantizationType,
        Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ]
] = {
    GGMLQuantizationType.Q4_0: _from_q4_0,
    GGMLQuantizationType.Q4_1: _from_q4_1,
    GGMLQuantizationType.Q8_0: _from_q8_0,
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix as it is in the file.

    Attributes:
        kind: One that `is_kept`.
        raw: [out, blocks of a row, bytes of a block] uint8.
    """

    kind: GGMLQuantizationType
    raw: torch.Tensor

    @property
    def n_elements(self) -> int:
        """How many weights that is."""
        return self.raw.shape[0] * self.raw.shape[1] * GROUP


def is_kept(kind: GGMLQuantizationType, packing: Packing) -> bool:
    """Whether blocks of that kind stay as they are, where so many bits are asked for.

    Blocks of 4 bits do not where 8 are: their kernel is slower for many rows at once.
    """
    return kind in _READERS and (packing == "int4" or kind == GGMLQuantizationType.Q8_0)


def read_blocks(blocks: Blocks, bias: torch.Tensor | None) -> Int4Linear:
    """A layer with the weights of a quantised matrix, and a bias [out] or None."""
    parts = [_read_rows(blocks.kind, rows) for rows in blocks.raw.split(ROWS_AT_ONCE)]
    nibbles, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    return Int4Linear(nibbles, scale, zero, bias, in_features=blocks.raw.shape[1] * GROUP)


def _read_rows(
    kind: GGMLQuantizationType, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers, scale, zero = _READERS[kind](rows)
    return join_nibbles(numbers), scale.bfloat16(), zero.bfloat16()


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """[out, blocks] float32: the half at byte `start` of every block."""
    return blocks[..., start : start + _HALF_BYTES].contiguous().view(torch.float16)[..., 0].float()


def _numbers(halves: torch.Tensor) -> torch.Tensor:
    """[out, weights] uint8 of [out, blocks, 16] bytes with two numbers each."""
    return torch.cat([halves & (_BASE - 1), halves >> 4], dim=-1).flatten(1)
