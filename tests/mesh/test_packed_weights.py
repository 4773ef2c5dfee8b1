"""Weights of 8 and 4 bits: rounded as said, read from GGUF as they are, right on every kernel."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# The kernels are the module's own business, except here; transformers types its models loosely.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from meshnet.model.loading import plan_stage
from meshnet.model.weights import int8
from meshnet.model.weights.gguf_blocks import Blocks, read_blocks
from meshnet.model.weights.int4 import Int4Linear
from meshnet.model.weights.int8 import Int8Linear, Integers
from meshnet.model.weights.packing import Packing, SideBySide, stacked
from meshnet.topology import LayerSpan

pytestmark = pytest.mark.mesh

KERNELS: list[Callable[[torch.Tensor, torch.Tensor], Integers]] = [
    int8._fbgemm,
    int8._onednn,
    int8._int_mm,
]
BLOCK_BYTES = {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(ours: torch.Tensor, right: torch.Tensor) -> float:
    """The difference's length, in parts of what is right."""
    return float((ours.float() - right).norm() / right.norm())


def blocks_of(weight: torch.Tensor, kind: Kind) -> tuple[Blocks, torch.Tensor]:
    """A weight as GGUF keeps it, and what gguf's own reader makes of that."""
    raw = gguf.quantize(weight.numpy(), kind)
    blocks = Blocks(kind, torch.from_numpy(raw).unflatten(1, (-1, BLOCK_BYTES[kind])))
    return blocks, torch.from_numpy(gguf.dequantize(raw, kind))


@settings(deadline=None, max_examples=40)
@given(n_rows=st.integers(1, 20), scale=st.sampled_from([1e-6, 1.0, 1e6]), seed=st.integers(0, 99))
def test_8_bits_are_the_nearest_and_nothing_else_is_lost(
    n_rows: int, scale: float, seed: int
) -> None:
    """Weights within half a step; products as of those weights to 5e-4, sealed or not."""
    weight, rows = noise(48, 96, seed=seed) * scale, noise(n_rows, 96, seed=seed + 1)
    rows[0, 0] = 300.0  # one channel that dwarfs the rest
    layer = Int8Linear.quantised(weight)
    steps = weight.abs().amax(dim=1, keepdim=True) / 127

    assert bool(((layer.dequantised() - weight).abs() <= steps * 0.5001).all())
    right = rows @ layer.dequantised().t()
    assert error(layer(rows), right) < 5e-4
    layer.seal()
    assert error(layer(rows), right) < 5e-4


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_8_bit_kernel_here_is_exact(
    kernel: Callable[[torch.Tensor, torch.Tensor], Integers],
) -> None:
    """Products of integers are those of the reference, also where sums are at their largest."""
    weight = torch.full((32, 512), 127, dtype=torch.int8)
    weight[::2] = -127
    rows = torch.full((3, 512), 127.0)
    rows[1] = -127.0
    ones = torch.ones(32)

    assert torch.equal(kernel(weight, ones)(rows), int8._reference(weight, ones)(rows))


def test_a_wrong_8_bit_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that saturates, and one that is missing, are passed over."""

    def saturating(weight: torch.Tensor, scale: torch.Tensor) -> Integers:
        right = int8._reference(weight, scale)
        return lambda rows: right(rows).clamp(-32768, 32767)

    def missing(weight: torch.Tensor, scale: torch.Tensor) -> Integers:
        raise RuntimeError("not built for this CPU")

    monkeypatch.setattr(int8, "_fbgemm", missing)
    monkeypatch.setattr(int8, "_onednn", saturating)
    monkeypatch.setattr(int8, "_int_mm", missing)

    assert int8._kernel.__wrapped__() is int8._reference


def test_4_bits_are_the_nearest() -> None:
    """Weights within about half a step of their group; products as of those to 1 percent."""
    weight, rows = noise(64, 128), noise(5, 128, seed=1)
    layer = Int4Linear.quantised(weight)
    groups = weight.reshape(64, 4, 32)
    steps = ((groups.amax(dim=2) - groups.amin(dim=2)) / 15).repeat_interleave(32, dim=1)

    assert bool(((layer.dequantised() - weight).abs() <= steps * 0.56).all())
    right = rows @ layer.dequantised().t()
    layer.seal()
    assert error(layer(rows), right) < 0.01


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_gguf_blocks_keep_their_numbers(kind: Kind) -> None:
    """What gguf's own reader makes of them, but for scales in bfloat16; sealed or not."""
    blocks, right = blocks_of(noise(64, 128), kind)
    layer = read_blocks(blocks, None)
    rows = noise(5, 128, seed=1)

    assert error(layer.dequantised(), right) < 2**-8
    layer.seal()
    assert error(layer(rows), rows @ right.t()) < 0.01


def test_gguf_blocks_with_short_scales_are_read_exactly() -> None:
    """Scales that bfloat16 holds lose nothing: each of the 256 numbers of 8 bits is met."""
    numbers = torch.arange(-128, 128).reshape(8, 1, 32).to(torch.int8)
    halves = torch.tensor([0.5, 2.0], dtype=torch.float16).repeat(4).reshape(8, 1, 1)
    raw = torch.cat([halves.view(torch.uint8), numbers.view(torch.uint8)], dim=2).repeat(2, 1, 1)
    weight = (halves * numbers).float().repeat(2, 1, 1).flatten(1)

    assert torch.equal(read_blocks(Blocks(Kind.Q8_0, raw), None).dequantised(), weight)


@pytest.mark.parametrize("make", [Int8Linear.quantised, Int4Linear.quantised])
def test_layers_stacked_give_what_they_give_one_by_one(
    make: Callable[[torch.Tensor, torch.Tensor | None], Int8Linear | Int4Linear],
) -> None:
    """Side by side, with and without a bias, before and after sealing."""
    layers = [make(noise(32, 64), noise(32)), make(noise(16, 64, seed=2), None)]
    rows = noise(3, 64, seed=3)
    right = torch.cat([layer(rows) for layer in layers], dim=1)
    stack = stacked(SideBySide(layers))

    assert torch.equal(stack(rows), right)


def test_layers_of_different_kinds_stay_apart() -> None:
    """A mixture is run one by one, and gives the same."""
    layers = SideBySide([Int8Linear.quantised(noise(32, 64)), Int4Linear.quantised(noise(32, 64))])

    assert stacked(layers) is layers


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_all_linear_layers_of_a_span_are_packed(
    tmp_path: Path, packing: Packing, *, tied: bool
) -> None:
    """Those of the layers, and lm_head, whether the embedding is its twin or not."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    plan = plan_stage(str(tmp_path), LayerSpan(0, 3), "float32", packing=packing, n_threads=1)
    seen: list[int] = []
    piece, nbytes = plan.piece, plan.nbytes
    plan.read(seen.append)

    kind = Int8Linear if packing == "int8" else Int4Linear
    assert isinstance(piece.model.get_output_embeddings(), kind)
    assert seen[-1] == nbytes
