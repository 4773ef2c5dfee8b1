from __future__ import annotations

import pytest
import torch

from meshnet.model.tensors import is_finite


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_one_number_that_is_not_finite_is_found(number: float) -> None:
    """Also among others, and where two of them would cancel out."""
    assert not is_finite(torch.tensor([1.0, number, 2.0]))
    assert not is_finite(torch.tensor([number, 1.0, -number]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    """A sum says nothing then, and each is looked at."""
    assert is_finite(torch.full((4, 3), torch.finfo(dtype).max, dtype=dtype))
