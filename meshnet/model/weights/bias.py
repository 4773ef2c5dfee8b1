"""Biases of linear layers, which a layer may lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn


def bias_of(linear: nn.Linear) -> torch.Tensor | None:
    """[out], or None; torch types it as if there always were one."""
    bias = cast("torch.Tensor | None", linear.bias)
    return None if bias is None else bias.detach()


def stacked_bias(linears: Sequence[tuple[torch.Tensor | None, int]]) -> torch.Tensor | None:
    """Biases side by side, zeros where there is none; or None where there is none at all.

    Args:
        linears: Each layer's bias, and how many outputs it has.
    """
    known = [bias for bias, _ in linears if bias is not None]
    if not known:
        return None
    return torch.cat(
        [known[0].new_zeros(n_out) if bias is None else bias for bias, n_out in linears]
    )
