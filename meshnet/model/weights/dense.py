"""Linear layers in the stage's dtype, quick for a few rows too."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn import functional

from meshnet.model.weights.bias import bias_of

_FEW_ROWS: Final = 4


class DenseLinear(nn.Module):
    """`nn.Linear` with weights as they are.

    BLAS is at half its speed where there are one to four rows of float32, unless they stand as
    columns, and as an even number of them: a layer of 576 x 3072 takes 0.41, 0.72, 0.82 and 0.54 ms
    for them otherwise, and 0.29, 0.29, 0.31 and 0.31 ms so.

    Args:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, linear: nn.Linear) -> DenseLinear:
        """The same layer; the weights are shared."""
        return cls(linear.weight.detach(), bias_of(linear))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] to [n, out]."""
        n_rows = len(rows)
        if n_rows > _FEW_ROWS or rows.dtype != torch.float32:
            return functional.linear(rows, self.weight, self.bias)
        even = torch.cat([rows, rows[-1:]]) if n_rows % 2 else rows
        outputs = (self.weight @ even.t())[:, :n_rows].t().contiguous()
        return outputs if self.bias is None else outputs.add_(self.bias)
