"""Linear layers with weights of 4 bits in groups of 32, each group with its scale and zero.

A weight is `(number - 8) * scale + zero`, its number in [0, 15]. So GGUF's Q4_0 and Q4_1 blocks fit
as they are, and Q8_0 blocks too, as two numbers of 4 bits a weight: see gguf_blocks.py.

Products are computed on inputs in bfloat16, the one dtype that torch's kernel is quick in.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch types its operators loosely.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from meshnet.model.weights.bias import stacked_bias

GROUP: Final = 32
ROW_BLOCK: Final = 16
"""The kernel takes outputs by so many."""
_MAX: Final = 15
_MIDDLE: Final = 8
ROWS_AT_ONCE: Final = 4096
"""Rounding and arranging make copies; a multiple of the blocks that any CPU arranges by."""


def fits_int4(out_features: int, in_features: int) -> bool:
    """Whether the kernel takes a matrix of that shape."""
    return out_features % ROW_BLOCK == 0 and in_features % GROUP == 0


class Int4Linear(nn.Module):
    """`nn.Linear` with weights of 4 bits.

    Args:
        nibbles: [out, columns / 2] uint8; the low half of a byte is the number before the high's.
        scale: [out, columns / 32] bfloat16.
        zero: [out, columns / 32] bfloat16.
        bias: [out], any float dtype, or None.
        in_features: Columns, or half of them: each input then meets two numbers, whose weights add
            up, those of the first half of the columns and of the second.
    """

    def __init__(
        self,
        nibbles: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        in_features: int,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = len(nibbles), in_features
        self.planes = nibbles.shape[1] * 2 // in_features
        self.nibbles: torch.Tensor
        self.scale: torch.Tensor
        self.zero: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("nibbles", nibbles)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)
        self.register_buffer("bias", bias)
        self._packed: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def quantised(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int4Linear:
        """Round a weight [out, in] of any float dtype to 16 numbers a group, least to greatest."""
        nibbles, scales, zeros = zip(*map(_round, weight.split(ROWS_AT_ONCE)), strict=True)
        return cls(
            torch.cat(nibbles),
            torch.cat(scales),
            torch.cat(zeros),
            bias,
            in_features=weight.shape[1],
        )

    @classmethod
    def stacked(cls, linears: Sequence[Int4Linear]) -> Int4Linear:
        """One layer with the outputs of several, side by side. None of them is sealed."""
        if len(linears) == 1:
            return linears[0]
        return cls(
            torch.cat([linear.nibbles for linear in linears]),
            torch.cat([linear.scale for linear in linears]),
            torch.cat([linear.zero for linear in linears]),
            stacked_bias([(linear.bias, linear.out_features) for linear in linears]),
            in_features=linears[0].in_features,
        )

    def dequantised(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Weights that the numbers of some rows stand for, [rows, in] float32. Not once sealed."""
        numbers = split_nibbles(self.nibbles[start:end]).unflatten(1, (-1, GROUP)).float()
        weights = (numbers - _MIDDLE) * self.scale[start:end].float().unsqueeze(2)
        weights += self.zero[start:end].float().unsqueeze(2)
        return weights.flatten(1).unflatten(1, (self.planes, self.in_features)).sum(dim=1)

    def seal(self) -> None:
        """Arrange the weights for the kernel, once, and let go of the numbers."""
        packed = [_pack(rows) for rows in self.nibbles.split(ROWS_AT_ONCE)]
        scale_and_zero = torch.stack([self.scale, self.zero], dim=-1).transpose(0, 1).contiguous()
        self._packed = torch.cat(packed), scale_and_zero
        self.nibbles = torch.empty(0, dtype=torch.uint8)
        self.scale = self.zero = torch.empty(0, dtype=torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out], in the inputs' dtype."""
        rows = inputs.reshape(-1, self.in_features).bfloat16()
        if self._packed is None:
            outputs = self._reference(rows.float())
        else:
            weight, scale_and_zero = self._packed
            rows = rows.repeat(1, self.planes) if self.planes > 1 else rows
            outputs = torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows, weight, GROUP, scale_and_zero
            )
        outputs = outputs.to(inputs.dtype)
        if self.bias is not None:
            outputs += self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)

    def _reference(self, rows: torch.Tensor) -> torch.Tensor:
        """The product from the numbers as they are: slow."""
        starts = range(0, self.out_features, ROWS_AT_ONCE)
        blocks = (self.dequantised(start, start + ROWS_AT_ONCE) for start in starts)
        return torch.cat([nn.functional.linear(rows, block) for block in blocks], dim=1)


def _round(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nibbles [out, in / 2], scales and zeros [out, in / 32] of some rows."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    least, greatest = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((greatest - least) / _MAX).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    zero = (least + _MIDDLE * scale.float()).bfloat16()
    # By the scale and zero that the kernel will use, so that their own rounding is made up for.
    offset, step = zero.float().unsqueeze(2), scale.float().unsqueeze(2)
    numbers = ((groups - offset) / step + _MIDDLE).round_().clamp_(0, _MAX).to(torch.uint8)
    return join_nibbles(numbers.flatten(1)), scale, zero


def join_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """[out, columns] uint8 below 16 to [out, columns / 2], the first of two in the low half."""
    return numbers[:, 0::2] | (numbers[:, 1::2] << 4)


def split_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """What `join_nibbles` joined."""
    return torch.stack([nibbles & 15, nibbles >> 4], dim=-1).flatten(1)


def _pack(nibbles: torch.Tensor) -> torch.Tensor:
    numbers = split_nibbles(nibbles).to(torch.int32)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
