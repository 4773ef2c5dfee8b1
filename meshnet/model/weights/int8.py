"""Linear layers with weights of 8 bits, one scale a row, and inputs of nearly 16.

Weights are rounded to 8 bits once, when they are loaded. Inputs are rounded at each step, row by
row, to twice 8 bits: a coarse part, and what it leaves. One product of 8-bit integers takes both.
With 8 bits alone the perplexity of SmolLM2 rises by 4 percent, since some channels dwarf the rest;
with both parts by 0.1 (docs/adr/0020-weights-in-8-and-4-bits.md).

Sums of integers are exact, so a row's result is the same, bit for bit, whatever rows go with it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch types its operators loosely.

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from meshnet.model.weights.bias import stacked_bias

_MAX: Final = 127
_FINER: Final = 2 * _MAX
"""Steps of the second part to one of the first: what is left after rounding is half a step."""
_TINY: Final = torch.finfo(torch.float32).tiny
_ZERO_POINT: Final = 128
"""Kernels take unsigned inputs."""

_ROWS_AT_ONCE: Final = 4096
"""Rounding makes several copies of what it is given."""

Integers = Callable[[torch.Tensor], torch.Tensor]
"""[n, in] float32 in [-127, 127] to [n, out] float32: products of the nearest integers."""


class Int8Linear(nn.Module):
    """`nn.Linear` with weights of 8 bits.

    Args:
        weight: [out, in] int8.
        scale: [out] float32; a weight is its number times its row's scale.
        bias: [out], any float dtype, or None.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self._product: Integers | None = None

    @classmethod
    def quantised(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
        """Round a weight [out, in] of any float dtype to the nearest of 255 numbers a row."""
        numbers, scales = zip(*map(_round, weight.split(_ROWS_AT_ONCE)), strict=True)
        return cls(torch.cat(numbers), torch.cat(scales), bias)

    @classmethod
    def stacked(cls, linears: Sequence[Int8Linear]) -> Int8Linear:
        """One layer with the outputs of several, side by side. None of them is sealed."""
        if len(linears) == 1:
            return linears[0]
        return cls(
            torch.cat([linear.weight for linear in linears]),
            torch.cat([linear.scale for linear in linears]),
            stacked_bias([(linear.bias, linear.out_features) for linear in linears]),
        )

    def dequantised(self) -> torch.Tensor:
        """The weights that the numbers stand for, [out, in] float32. Not of a sealed layer."""
        return self.weight.float() * self.scale.unsqueeze(1)

    def seal(self) -> None:
        """Arrange the weights for the kernel, once, and let go of the numbers."""
        self._product = _kernel()(self.weight, self.scale)
        self.weight = torch.empty(0, dtype=torch.int8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out], in the inputs' dtype."""
        rows = inputs.reshape(-1, self.in_features).float()
        step = rows.abs().amax(dim=-1, keepdim=True)
        step = step.clamp_(min=_TINY).mul_(1 / _MAX)
        coarse = rows / step
        fine = (coarse - coarse.round()).mul_(_FINER)
        product = self._product or _reference(self.weight, self.scale)
        outputs, rest = product(torch.cat([coarse, fine])).chunk(2)
        outputs = outputs.add_(rest, alpha=1 / _FINER).mul_(step)
        if self.bias is not None:
            outputs += self.bias
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)


def _round(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [out, in] and scales [out] of some rows."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1).clamp_min(_TINY) / _MAX
    return (weight / scale.unsqueeze(1)).round_().to(torch.int8), scale


def _reference(weight: torch.Tensor, scale: torch.Tensor) -> Integers:
    """In float32, from the numbers as they are: any machine can, and none quickly."""

    def product(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.round()
        parts = [nn.functional.linear(rows, part.float()) for part in weight.split(_ROWS_AT_ONCE)]
        return torch.cat(parts, dim=1).mul_(scale)

    return product


def _fbgemm(weight: torch.Tensor, scale: torch.Tensor) -> Integers:
    """The kernel of torch's older quantised modules: the one with the least around its product."""
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    # By its Python name: torch means to drop it some day, and warns of that where it can be caught.
    quantise: Any = getattr(torch, "_make_per_channel_quantized_tensor")  # noqa: B009
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = quantise(weight, scale.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return lambda rows: multiply(rows, 1.0, _ZERO_POINT, packed)


def _onednn(weight: torch.Tensor, scale: torch.Tensor) -> Integers:
    """The kernel behind torch's quantised x86 exports."""
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zeros = torch.zeros(len(scale), dtype=torch.int32)

    def product(rows: torch.Tensor) -> torch.Tensor:
        unsigned = rows.round().add_(_ZERO_POINT).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            unsigned,
            1.0,
            _ZERO_POINT,
            packed,
            scale,
            zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )

    return product


def _int_mm(weight: torch.Tensor, scale: torch.Tensor) -> Integers:
    """Torch's plain product of integers, which every CPU has."""
    weight = weight.t()
    return lambda rows: torch.ops.aten._int_mm(rows.round().to(torch.int8), weight) * scale


@cache
def _kernel() -> Callable[[torch.Tensor, torch.Tensor], Integers]:
    """The quickest kernel that is right on this machine.

    Without instructions for it some kernels saturate where sums are large, as they are here.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-_MAX, _MAX + 1, (64, 256), generator=generator, dtype=torch.int8)
    weight[:32] = _MAX
    rows = torch.randint(-_MAX, _MAX + 1, (5, 256), generator=generator).float()
    rows[0], rows[1] = _MAX, -_MAX
    rows[2:] *= 0.75  # which leaves halves too
    ones = torch.ones(64)
    right = _reference(weight, ones)(rows)
    for kernel in (_fbgemm, _onednn, _int_mm):
        try:
            if torch.equal(kernel(weight, ones)(rows), right):
                return kernel
        except (RuntimeError, AttributeError):  # not built for this CPU
            continue
    return _reference
