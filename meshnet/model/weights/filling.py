"""Fills a stage's skeleton with the checkpoint's tensors, and packs the weights that are to be."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its loader loosely.

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from meshnet.errors import MeshError, ModelError
from meshnet.model.checkpoint import LazyTensor
from meshnet.model.gguf_file import GgufTensor
from meshnet.model.identity import LAYER_NUMBER
from meshnet.model.weights.gguf_blocks import Blocks, read_blocks
from meshnet.model.weights.packing import Packing, pack, packable

Progress = Callable[[int], None]
"""Called with the bytes read so far, one call at a time, from any thread."""


class Meter:
    """Counts what was read, in bytes of the stage's dtype, whatever the file's is.

    Several threads read. Once the listener has raised a MeshError, none of them reads on.
    """

    def __init__(self, progress: Progress, itemsize: int) -> None:
        self._progress = progress
        self._itemsize = itemsize
        self._seen = 0
        self._stopped: MeshError | None = None
        self._lock = threading.Lock()

    def add(self, n_elements: int) -> None:
        """Count a tensor and tell."""
        with self._lock:
            self._seen += n_elements * self._itemsize
            self._tell()

    def tell(self) -> None:
        """Tell again what was read, so that the listener can stop the loading."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        self.check()
        try:
            self._progress(self._seen)
        except MeshError as error:
            self._stopped = error
            raise

    def check(self) -> None:
        """Raise what the listener raised, if it did."""
        if self._stopped is not None:
            raise self._stopped


class Metered:
    """A lazy tensor that tells when it was read."""

    def __init__(self, tensor: LazyTensor, meter: Meter) -> None:
        self._tensor = tensor
        self._meter = meter

    def __getitem__(self, index: Any) -> torch.Tensor:  # noqa: ANN401  # as slices of tensors go
        self._meter.check()
        value = self._tensor[index]
        self._meter.add(value.numel())
        return value

    def blocks(self, packing: Packing) -> Blocks | None:
        """The tensor's own numbers, if it has few enough bits to be kept as it is; not counted."""
        self._meter.check()
        return self._tensor.blocks(packing) if isinstance(self._tensor, GgufTensor) else None

    def count(self, n_elements: int) -> None:
        """Tell that so much of the tensor was read otherwise."""
        self._meter.add(n_elements)


def fill(
    model: PreTrainedModel,
    state: Mapping[str, Metered],
    mapping: list[Any],
    twins: Mapping[str, str],
    packing: Packing | None,
) -> None:
    """Fill `model`, in place.

    What is to be packed is read a decoder layer at a time, so that no more than one is ever held
    unpacked.

    Args:
        model: A skeleton, on the meta device.
        state: Its tensors, by the checkpoint's names.
        mapping: Renames and mergings from those names to the model's.
        twins: Parameters that share another one's memory, and whose.
        packing: How linear layers' weights are packed; None leaves them as they are.

    Raises:
        ModelError: A tensor is missing, damaged or of another shape.
        MeshError: Whoever listens to the reading raised it.
    """
    transformers_logging.disable_progress_bar()
    if packing is None:
        _load(model, state, mapping)
    else:
        names = packable(model, packing)
        kept = _kept_as_blocks(model, names, packing)
        for part in _layer_by_layer(state):
            blocks = _blocks(part, kept, packing)
            _load(model, {name: part[name] for name in part.keys() - blocks.keys()}, mapping)
            for name, block in blocks.items():
                part[name].count(block.n_elements)
                _install(model, name, block)
            pack(model, names, packing)
    missing = {name for name, tensor in model.state_dict().items() if tensor.is_meta} - twins.keys()
    if missing:
        raise incomplete("missing", missing)
    if twins:
        model.tie_weights()
    _make_buffers(model)
    if packing is not None:
        _pack_twins(model, state, twins, packing)


def _load(model: PreTrainedModel, state: Mapping[str, LazyTensor], mapping: list[Any]) -> None:
    """Let transformers' own loader do it, renames and expert merging included."""
    config = LoadStateDictConfig(dtype=model.dtype, weight_mapping=mapping)
    try:
        report, _ = convert_and_load_state_dict_in_model(model, dict(state), config)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the weights cannot be read: {error}", field="model") from error
    faults = [
        ("of another shape", report.mismatched_keys),
        ("not convertible", report.conversion_errors),
    ]
    for fault, keys in faults:
        if keys:
            raise incomplete(fault, keys)


def _layer_by_layer(state: Mapping[str, Metered]) -> Iterable[dict[str, Metered]]:
    """The tensors of each decoder layer, and those outside of layers."""
    parts: defaultdict[int | None, dict[str, Metered]] = defaultdict(dict)
    for name, tensor in state.items():
        number = LAYER_NUMBER.search(name)
        parts[None if number is None else int(number[0])][name] = tensor
    return parts.values()


def _kept_as_blocks(
    model: PreTrainedModel, names: frozenset[str], packing: Packing
) -> frozenset[str]:
    """The layers that keep a file's blocks: all that are packed, but in 8 bits `lm_head`.

    That one is the widest of all, and the kernel of blocks takes three times as long for the rows
    of a batch. It is rounded to 8 bits from what the blocks say, in whatever span it is.
    """
    if packing == "int4":
        return names
    head = model.get_output_embeddings()
    return frozenset(name for name in names if model.get_submodule(name) is not head)


def _blocks(
    part: Mapping[str, Metered], kept: Collection[str], packing: Packing
) -> dict[str, Blocks]:
    """What can be kept as it is, by tensor name."""
    own = {name: part[name].blocks(packing) for name in part if _layer_of(name) in kept}
    return {name: block for name, block in own.items() if block is not None}


def _pack_twins(
    model: PreTrainedModel, state: Mapping[str, Metered], twins: Mapping[str, str], packing: Packing
) -> None:
    """What is a twin of the embedding gets packed weights of its own: that one stays as it is."""
    names = packable(model, packing)
    kept = _kept_as_blocks(model, names, packing)
    for twin, original in twins.items():
        block = state[original].blocks(packing) if original in state else None
        if block is not None and _layer_of(twin) in kept:
            _install(model, twin, block)
    pack(model, names, packing)


def _install(model: PreTrainedModel, name: str, block: Blocks) -> None:
    layer = model.get_submodule(_layer_of(name))
    bias = layer.bias if isinstance(layer, nn.Linear) else None
    model.set_submodule(
        _layer_of(name), read_blocks(block, None if bias is None else bias.detach())
    )


def _layer_of(name: str) -> str:
    """The module that a tensor is the weight of."""
    return name.removesuffix(".weight")


def _make_buffers(model: PreTrainedModel) -> None:
    """Compute what no checkpoint holds: rotary frequencies, embedding scales."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()


def incomplete(fault: str, names: Collection[object]) -> ModelError:
    """The error of a checkpoint whose tensors are not what the span needs."""
    some = ", ".join(sorted(map(str, names))[:4])
    return ModelError(
        f"{len(names)} tensors are {fault}: {some}",
        field="model",
        value=some,
        allowed="a checkpoint with every tensor of the span",
    )
