"""Cuts a span out of any decoder-only transformers model, without per-model code.

A stage is a smaller model of the same architecture, run by the family's own `forward`: the layers
of the span renumbered from 0, a config that speaks of those layers only (so that caches and masks
are of the right kind), and an identity in place of what the span does not own. See
docs/adr/0005-cut-any-model.md.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its modules loosely.

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from meshnet.errors import ModelError
from meshnet.topology import LayerSpan


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers `[offset, len)` of a span as a runnable model.

    Attributes:
        model: The causal LM; its lm_head is an identity unless this is the tail.
        config: The piece's own config, its layers counted from 0.
        tail: Whether the last layer is in it.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    tail: bool

    @property
    def base(self) -> PreTrainedModel:
        """The model without lm_head."""
        return base_of(self.model)

    @property
    def first_layer(self) -> nn.Module:
        """The layer that runs first."""
        return _layers(self.model)[0]

    def number_layers(self) -> None:
        """Count the piece's layers from 0, as its caches do. Pieces of one span share layers."""
        for index, layer in enumerate(_layers(self.model)):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    # Families set this number themselves; torch types it as a submodule.
                    cast("Any", module).layer_idx = index


def build_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole causal LM of `config`, without memory for its weights.

    Raises:
        ModelError: transformers knows no causal LM of this kind, or it cannot be cut by layers.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ModelError(
            f"transformers has no causal language model of type {config.model_type!r}: {error}",
            field="model",
            value=config.model_type,
            allowed="a decoder-only causal language model",
        ) from error
    _check_can_be_cut(model)
    return model


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without lm_head; typed, which transformers' own property is not."""
    return cast("PreTrainedModel", model.base_model)


def n_layers(model: PreTrainedModel) -> int:
    """How many decoder layers the model has."""
    return len(_layers(model))


def cut(model: PreTrainedModel, span: LayerSpan) -> Piece:
    """Reduce a skeleton to `span`, in place.

    Raises:
        ModelError: The span lies outside the model, or the family shares state across layers, so
            that this cut would change what the model computes.
    """
    total = n_layers(model)
    if span.end > total:
        raise ModelError(
            f"layers {span} are not all in the model, which has {total}",
            field="layers",
            value=str(span),
            allowed=f"0 <= START < END <= {total}",
        )
    _check_no_sharing_across(model.config, span, total)
    base = base_of(model)
    if span.end < total:
        setattr(base, _norm_name(base), nn.Identity())
        model.set_output_embeddings(nn.Identity())
    if span.start > 0:
        model.set_input_embeddings(nn.Identity())
    base.layers = nn.ModuleList(list(_layers(model))[span.start : span.end])
    config = _config_of(model.config, span.start, span.end)
    base.config = config
    model.config = config
    piece = Piece(model, config, tail=span.end == total)
    piece.number_layers()
    return piece


def enter_at(piece: Piece, offset: int) -> Piece:
    """The same piece without its first `offset` layers; the layers are shared, not copied."""
    if offset == 0:
        return piece
    layers = list(_layers(piece.model))
    model, base = _shallow(piece.model), _shallow(piece.base)
    setattr(model, model.base_model_prefix, base)
    base.layers = nn.ModuleList(layers[offset:])
    config = _config_of(piece.config, offset, len(layers))
    base.config = config
    model.config = config
    return Piece(model, config, piece.tail)


def _shallow(module: PreTrainedModel) -> PreTrainedModel:
    """A copy whose submodules can be set apart from the original's; weights are shared."""
    twin = copy.copy(module)
    vars(twin)["_modules"] = dict(module.named_children())
    return twin


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    return cast("nn.ModuleList", model.base_model.layers)


def _config_of(config: PreTrainedConfig, start: int, end: int) -> PreTrainedConfig:
    """The config of layers `[start, end)`: their number, and every list with an entry a layer."""
    piece = copy.deepcopy(config)
    total = config.num_hidden_layers
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(piece, name, value[start:end])
    piece.num_hidden_layers = end - start
    return piece


def _norm_name(base: nn.Module) -> str:
    names = [
        name for name, child in base.named_children() if "norm" in type(child).__name__.lower()
    ]
    if len(names) != 1:
        raise ModelError(
            f"{type(base).__name__} has {len(names)} norms beside its layers, so its last one is "
            "not known",
            field="model",
            value=type(base).__name__,
            allowed="exactly one final norm",
        )
    return names[0]


def _check_can_be_cut(model: PreTrainedModel) -> None:
    base = model.base_model
    layers = getattr(base, "layers", None)
    parameters = inspect.signature(base.forward).parameters
    needed = ("inputs_embeds", "position_ids", "cache")
    faults = [
        (model.config.is_encoder_decoder, "it is an encoder-decoder"),
        (not isinstance(layers, nn.ModuleList), "its decoder layers are not a list named `layers`"),
        (
            isinstance(layers, nn.ModuleList) and len(layers) != model.config.num_hidden_layers,
            "its config counts other layers than it has",
        ),
        (any(name not in parameters for name in needed), f"its forward lacks one of {needed}"),
        (model.get_output_embeddings() is None, "it has no lm_head"),
    ]
    for is_fault, fault in faults:
        if is_fault:
            raise ModelError(
                f"{type(model).__name__} cannot be split: {fault}",
                field="model",
                value=model.config.model_type,
                allowed="decoder-only models whose layers stand in one list",
            )
    _norm_name(base)


def _check_no_sharing_across(config: PreTrainedConfig, span: LayerSpan, total: int) -> None:
    """Refuse cuts that part layers which lend each other keys, values or side inputs."""
    shared: Any = getattr(config, "num_kv_shared_layers", 0) or getattr(
        config, "hidden_size_per_layer_input", 0
    )
    if shared and len(span) < total:
        raise ModelError(
            f"{config.model_type} shares state between layers, so layers {span} cannot run apart",
            field="layers",
            value=str(span),
            allowed=f"0-{total}",
        )
