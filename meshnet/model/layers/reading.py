"""Reads lean layers out of a family's modules, after a proof that they compute the same."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its modules loosely.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from meshnet.model.layers.family import FamilyLayers, StageCache
from meshnet.model.layers.interface import Chunk
from meshnet.model.layers.lean import Ends, LeanLayer, LeanLayers, Norm
from meshnet.model.split import Piece
from meshnet.model.tensors import torch_dtype
from meshnet.model.weights.packing import SideBySide, has_packed, stacked
from meshnet.topology import ShardFacts
from meshnet.wire.frames import Dtype

_BASE_PARTS: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER_PARTS: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_AFTER_NORMS: Final = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""Where there are these, attention and MLP have a norm each before and after them."""
_ATTENTION_PARTS: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_QUERY_KEY_NORMS: Final = {"q_norm", "k_norm"}
_MLP_PARTS: Final = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_FIXED_ROTATIONS: Final = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding that depend on the position alone, not on the text's length."""

_CHUNK_LENGTHS: Final = (6, 1)
_TOLERANCE: Final = 1e-3
_COARSE_TOLERANCE: Final = 5e-2
"""Where numbers of 8 bits are on the way: bfloat16, half precision, packed weights."""
_LOGITS_TOLERANCE: Final = 1e-4
"""The same products of the same numbers; a family that caps logits is further off."""


Passage = tuple[torch.Tensor, torch.Tensor]
"""What went into a decoder layer, [n, hidden], and what came out."""


class NotLean(Exception):
    """The layers are of another arrangement; the message says where."""


def read_lean_layers(piece: Piece, facts: ShardFacts, family: FamilyLayers) -> LeanLayers:
    """Lean layers in the place of a family's. Those are freed: `family` and `piece` are spent.

    Raises:
        NotLean: The span must stay with the family's own forward. Nothing was changed.
    """
    base, dtype = cast("Any", piece.base), torch_dtype(cast("Dtype", facts.dtype))
    _check_parts(base, _BASE_PARTS)
    _check_numbers(piece.config)
    ends = _read_ends(piece, facts)
    layers = [
        _read_layer(layer, window, rotation)
        for layer, window, rotation in zip(
            base.layers, _windows(piece.config), _rotations(piece.config), strict=True
        )
    ]
    try:
        with torch.inference_mode():
            _prove(piece, facts, family, layers, ends, dtype)
    except (RuntimeError, ValueError) as error:  # whatever comes of parts that do not fit
        raise NotLean(f"they do not fit together: {error}") from error
    for index, layer in enumerate(layers):
        layers[index] = layer.stacked()
        base.layers[index] = nn.Identity()  # what was copied is freed before the next one is
    if ends.lm_head is not None:
        ends = replace(ends, lm_head=stacked(ends.lm_head))
    return LeanLayers(layers, ends, facts.span.start, dtype)


def _check_parts(module: nn.Module, *arrangements: set[str]) -> None:
    """Whether the module has these parts, in one of the arrangements, and no other."""
    parts = {name for name, _ in module.named_children()}
    parts |= {name for name, _ in module.named_parameters(recurse=False)}
    if parts not in arrangements:
        raise NotLean(f"{type(module).__name__} has the parts {sorted(parts)}")


def _check_numbers(config: PreTrainedConfig) -> None:
    """Refuse by name what a short text might not show."""
    caps = [name for name, value in vars(config).items() if "softcap" in name and value]
    if caps:
        raise NotLean(f"it has {caps[0]}")
    for given in _rotary_parameters(config).values():
        kind = given.get("rope_type", "default")
        if kind not in _FIXED_ROTATIONS:
            raise NotLean(f"its rotary embedding is of type {kind!r}")


def _rotary_parameters(config: PreTrainedConfig) -> dict[str | None, dict[str, Any]]:
    """By kind of layer where kinds differ in them, else of None."""
    given: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_kind = {kind: value for kind, value in given.items() if isinstance(value, dict)}
    return {**by_kind} or {None: given}


def _rotations(config: PreTrainedConfig) -> list[str | None]:
    """Which rotation each layer has, where there are several."""
    if None in _rotary_parameters(config):
        return [None] * config.num_hidden_layers
    return list(config.layer_types)


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """How far back each layer looks, as transformers' own cache has it."""
    caches = StageCache(config).layers
    if any(type(cache) not in (DynamicLayer, DynamicSlidingWindowLayer) for cache in caches):
        raise NotLean("it has layers without attention")
    return [getattr(cache, "sliding_window", None) for cache in caches]


def _read_layer(layer: nn.Module, window: int | None, rotation: str | None) -> LeanLayer:
    """The family's own modules, arranged as a lean layer: nothing is copied."""
    _check_parts(layer, _LAYER_PARTS, _LAYER_PARTS | _AFTER_NORMS)
    parts = cast("Any", layer)
    attention, mlp, second_norm = parts.self_attn, parts.mlp, parts.post_attention_layernorm
    has_after_norms = hasattr(parts, "pre_feedforward_layernorm")
    _check_parts(attention, _ATTENTION_PARTS, _ATTENTION_PARTS | _QUERY_KEY_NORMS)
    _check_parts(mlp, _MLP_PARTS)
    has_norms = hasattr(attention, "q_norm")
    head_dim: int = attention.head_dim
    return LeanLayer(
        attention_norm=_read_norm(parts.input_layernorm),
        attention_after_norm=_read_norm(second_norm) if has_after_norms else None,
        query_key_value=SideBySide([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=_read_norm(attention.q_norm) if has_norms else None,
        key_norm=_read_norm(attention.k_norm) if has_norms else None,
        output=attention.o_proj,
        mlp_norm=_read_norm(parts.pre_feedforward_layernorm if has_after_norms else second_norm),
        mlp_after_norm=_read_norm(parts.post_feedforward_layernorm) if has_after_norms else None,
        gate_up=SideBySide([mlp.gate_proj, mlp.up_proj]),
        activation=mlp.act_fn,
        down=mlp.down_proj,
        n_heads=attention.q_proj.out_features // head_dim,
        n_key_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        scale=attention.scaling,
        window=window,
        rotation=rotation,
    )


def _read_norm(norm: nn.Module) -> Norm:
    _check_parts(norm, {"weight"})
    weight = cast("torch.Tensor", norm.weight).detach()
    epsilon: Any = getattr(norm, "variance_epsilon", None)
    if epsilon is not None:
        return Norm(weight, epsilon)
    epsilon = getattr(norm, "eps", None)
    if epsilon is None:
        raise NotLean(f"{type(norm).__name__} has no epsilon")
    return Norm(1.0 + weight.float(), epsilon)  # as Gemma keeps them; others are found out


def _read_ends(piece: Piece, facts: ShardFacts) -> Ends:
    base = cast("Any", piece.base)
    return Ends(
        embedding=base.embed_tokens if facts.span.start == 0 else None,
        rotary=base.rotary_emb,
        norm=_read_norm(base.norm) if piece.tail else None,
        lm_head=piece.model.get_output_embeddings() if piece.tail else None,
    )


def _prove(
    piece: Piece,
    facts: ShardFacts,
    family: FamilyLayers,
    layers: Sequence[LeanLayer],
    ends: Ends,
    dtype: torch.dtype,
) -> None:
    """Run a short text the family's way, and then every layer on what it was given there."""
    chunks = _chunks(facts, family)
    passages, outputs = _watch(family, facts.span.start, cast("Any", piece.base).layers, chunks)
    if ends.embedding is not None:
        for chunk, (given, _) in zip(chunks, passages[0], strict=True):
            _compare("the embedding", ends.embedding(chunk.inputs), given, 0)
    exact = dtype == torch.float32 and not has_packed(piece.model)
    for index, (layer, passed) in enumerate(zip(layers, passages, strict=True)):
        ours = _run_alone(layer, ends.rotary, passed, dtype)
        for rows, (given, expected) in zip(ours, passed, strict=True):
            change = _TOLERANCE if exact else _COARSE_TOLERANCE
            # What a layer adds can be so little that it is lost in the last digits of the sum.
            lost = torch.finfo(dtype).eps * expected.float().norm(dim=-1)
            _compare(f"layer {index}", rows - given, expected - given, change, lost)
    if ends.norm is not None and ends.lm_head is not None:
        for (_, last), expected in zip(passages[-1], outputs, strict=True):
            _compare("the final norm", ends.norm(last), expected, _COARSE_TOLERANCE)
            logits = family.logits(expected)
            _compare("lm_head", ends.lm_head(expected), logits, _LOGITS_TOLERANCE)


def _chunks(facts: ShardFacts, family: FamilyLayers) -> list[Chunk]:
    state, start = family.new_state(facts.span.start), 0
    inputs = family.probe_inputs(sum(_CHUNK_LENGTHS)).split(_CHUNK_LENGTHS)
    chunks: list[Chunk] = []
    for some in inputs:
        chunks.append(Chunk(some, start, state))
        start += len(some)
    return chunks


def _watch(
    family: FamilyLayers, start: int, layers: Sequence[nn.Module], chunks: Sequence[Chunk]
) -> tuple[list[list[Passage]], list[torch.Tensor]]:
    """What passed through each layer, chunk by chunk, and what the stage made of each chunk."""
    passages: list[list[Passage]] = [[] for _ in layers]
    with ExitStack() as stack:
        for layer, passed in zip(layers, passages, strict=True):
            watch = layer.register_forward_hook(partial(_note, passed), with_kwargs=True)
            stack.callback(watch.remove)
        return passages, [family.run(start, [chunk])[0] for chunk in chunks]


def _note(
    passed: list[Passage],
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: torch.Tensor | tuple[torch.Tensor, ...],
) -> None:
    del layer
    given = args[0] if args else kwargs["hidden_states"]
    passed.append((given[0], (output[0] if isinstance(output, tuple) else output)[0]))


def _run_alone(
    layer: LeanLayer, rotary: nn.Module, passed: Sequence[Passage], dtype: torch.dtype
) -> list[torch.Tensor]:
    """What a lean layer makes of what the family's was given."""
    alone = LeanLayers([layer], Ends(None, rotary, None, None), 1, dtype)
    state, position = alone.new_state(1), 0
    outputs: list[torch.Tensor] = []
    for given, _ in passed:
        outputs += alone.run(1, [Chunk(given, position, state)])
        position += len(given)
    return outputs


def _compare(
    what: str,
    ours: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    lost: torch.Tensor | float = 0.0,
) -> None:
    """Whether each row is as long as it should be, and points the same way.

    Args:
        what: It is.
        ours: [n, hidden].
        expected: Likewise.
        tolerance: The largest error, in parts of a row's length.
        lost: [n], or one number: errors that much longer are none, for numbers have only so many
            digits.
    """
    if ours.shape != expected.shape:
        raise NotLean(f"{what} gives {list(ours.shape)}, not {list(expected.shape)}")
    ours, expected = ours.float(), expected.float()
    wrong = ((ours - expected).norm(dim=-1) - lost).clamp_min(0.0)
    error = (wrong / expected.norm(dim=-1).clamp_min(1e-12)).max()
    if not bool(error <= tolerance):
        raise NotLean(f"{what} differs by {float(error):.1g}")
