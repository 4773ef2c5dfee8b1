"""Which layers of a stage are kept in 8 or 4 bits, and putting them there.

Linear layers of the decoder layers, and `lm_head`. Everything else (embeddings, norms, experts that
a family keeps in one tensor) stays in the stage's dtype.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch types its modules loosely.

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from meshnet.model.weights.bias import bias_of, stacked_bias
from meshnet.model.weights.dense import DenseLinear
from meshnet.model.weights.int4 import Int4Linear, fits_int4
from meshnet.model.weights.int8 import Int8Linear

Packing = Literal["int8", "int4"]
"""What weights are rounded to: 8 bits with a scale a row, or 4 with scale and zero a group."""

PackedLinear = Int8Linear | Int4Linear
"""What stands in the place of an `nn.Linear`. Sealed once it is known how it is used."""


def packable(model: PreTrainedModel, packing: Packing | None) -> frozenset[str]:
    """The names of the layers that are to be packed: none where `packing` is None."""
    if packing is None:
        return frozenset()
    layers = cast("nn.Module", model.base_model.layers)
    inside = {id(module) for module in (*layers.modules(), model.get_output_embeddings())}
    return frozenset(
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) in inside and _fits(module, packing)
    )


def _fits(linear: nn.Linear, packing: Packing) -> bool:
    return packing == "int8" or fits_int4(linear.out_features, linear.in_features)


def pack(model: PreTrainedModel, names: Collection[str], packing: Packing) -> None:
    """Put packed layers in the place of the named ones that are loaded, and free those."""
    for name in names:
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear) and not linear.weight.is_meta:
            kind = Int8Linear if packing == "int8" else Int4Linear
            model.set_submodule(name, kind.quantised(linear.weight.detach(), bias_of(linear)))


class SideBySide(nn.Module):
    """The outputs of several layers, of the same inputs, side by side; one after the other."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linears)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., the sum of all out]."""
        return torch.cat([part(inputs) for part in self.parts], dim=-1)


def stacked(layer: nn.Module) -> nn.Module:
    """What gives the same in the quickest way: several layers side by side as one, if of a kind.

    That one has a copy of their weights; a layer by itself keeps its own.
    """
    linears = list(layer.parts) if isinstance(layer, SideBySide) else [layer]
    if len({(type(linear), getattr(linear, "planes", 1)) for linear in linears}) > 1:
        return layer
    if isinstance(linears[0], Int8Linear):
        return Int8Linear.stacked([one for one in linears if isinstance(one, Int8Linear)])
    if isinstance(linears[0], Int4Linear):
        return Int4Linear.stacked([one for one in linears if isinstance(one, Int4Linear)])
    return _stacked_dense([one for one in linears if isinstance(one, nn.Linear)])


def has_packed(module: nn.Module) -> bool:
    """Whether some of its layers are packed."""
    return any(True for _ in _packed_in(module))


def seal(module: nn.Module) -> None:
    """Arrange every packed layer's weights for its kernel, and free the numbers they came from."""
    for part in _packed_in(module):
        part.seal()


def _packed_in(module: nn.Module) -> Iterator[PackedLinear]:
    for part in module.modules():
        if isinstance(part, Int8Linear | Int4Linear):
            yield part


def _stacked_dense(linears: Sequence[nn.Linear]) -> DenseLinear:
    if len(linears) == 1:
        return DenseLinear.of(linears[0])
    bias = stacked_bias([(bias_of(linear), linear.out_features) for linear in linears])
    return DenseLinear(torch.cat([linear.weight.detach() for linear in linears]), bias)
