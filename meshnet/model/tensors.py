"""Frames to torch tensors and back."""

from __future__ import annotations

from math import isfinite
from typing import Final

import torch

from meshnet.wire.frames import Dtype, Frame

_TORCH_DTYPE: Final[dict[Dtype, torch.dtype]] = {
    "int32": torch.int32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype of that name."""
    return _TORCH_DTYPE[dtype]


def from_frame(frame: Frame) -> torch.Tensor:
    """The frame's tensor; it owns its memory."""
    flat = torch.frombuffer(bytearray(frame.data), dtype=_TORCH_DTYPE[frame.dtype])
    return flat.reshape(frame.shape)


def to_frame(tensor: torch.Tensor, dtype: Dtype) -> Frame:
    """The frame of a tensor of that dtype."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return Frame(dtype, tuple(tensor.shape), data)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite; where they are, their sum says so in little time.

    A sum can overflow where no number has, which is looked at one by one then.
    """
    return isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
