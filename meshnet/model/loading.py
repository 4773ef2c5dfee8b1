"""Loads one span of a checkpoint into memory, tensor by tensor, and nothing else of it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its loader loosely.

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from meshnet.errors import MeshError, ModelError
from meshnet.model import split
from meshnet.model.checkpoint import Checkpoint, LazyTensor, open_checkpoint, revision
from meshnet.model.gguf_file import GgufCheckpoint
from meshnet.model.identity import LAYER_NUMBER, fingerprint, layer_digests
from meshnet.model.tensors import torch_dtype
from meshnet.model.torch_stage import TorchStage
from meshnet.topology import LayerSpan, ShardFacts
from meshnet.wire.frames import Dtype

Progress = Callable[[int], None]
"""Called with the bytes read so far, one call at a time, from any thread."""


@dataclass(frozen=True)
class StagePlan:
    """A span that is known to be loadable, before a weight of it is read."""

    model: str
    checkpoint: Checkpoint
    piece: split.Piece
    facts: ShardFacts
    names: Mapping[str, str]
    """Tensor name in the stage to tensor name in the checkpoint."""
    twins: frozenset[str]
    """Parameters of the stage that share another one's memory."""
    n_threads: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the span's tensors in the stage's dtype."""
        tensors = _tensors(self.piece.model)
        return sum(t.nbytes for name, t in tensors.items() if name not in self.twins)

    def load(self, progress: Progress = lambda _: None) -> TorchStage:
        """Read the span's tensors; the plan is spent: the stage is made of its skeleton.

        Args:
            progress: Called after every tensor that was read and before every layer that is
                hashed. A MeshError that it raises ends the loading.

        Raises:
            ModelError: A tensor is missing, damaged or of another shape.
            MeshError: `progress` raised it. Threads of the loader may end their tensor after that.
        """
        if self.n_threads is not None:
            torch.set_num_threads(self.n_threads)
        model = self.piece.model
        lazy = self.checkpoint.open(set(self.names.values()))
        meter = _Meter(progress, model.dtype.itemsize)
        state = {name: _Metered(lazy[source], meter) for name, source in self.names.items()}
        mapping = [] if isinstance(self.checkpoint, GgufCheckpoint) else _conversions(model)
        _fill(model, state, mapping, self.twins)
        model.eval().requires_grad_(requires_grad=False)
        return TorchStage(self.piece, self._identified(meter.tell))

    def _identified(self, tick: Callable[[], None]) -> ShardFacts:
        """The facts, with what is known once the tensors are there."""
        facts = self.facts
        digests = layer_digests(self.piece.model, facts.span, facts.n_layers, tick)
        facts = replace(facts, layer_digests=digests)
        return replace(facts, fingerprint=fingerprint(facts))


def plan_stage(
    model: str, span: LayerSpan, dtype: Dtype, *, n_threads: int | None = None
) -> StagePlan:
    """Check that `span` of `model` can be run here; reads headers and directories only.

    Args:
        model: See `open_checkpoint`.
        span: Layers to run.
        dtype: Of weights, activations and caches.
        n_threads: Threads that torch computes with in this process; None leaves its choice.

    Raises:
        ModelError: The model is not there or damaged, cannot be split as asked, or lacks tensors.
    """
    checkpoint = open_checkpoint(model)
    config = checkpoint.config()
    skeleton = split.build_skeleton(config, torch_dtype(dtype))
    names = checkpoint.names(skeleton)
    total = split.n_layers(skeleton)
    tied = _tied(skeleton)
    piece = split.cut(skeleton, span)
    facts = ShardFacts(
        model=model,
        revision=revision(config, names),
        fingerprint="",
        span=span,
        n_layers=total,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=dtype,
        max_positions=config.max_position_embeddings,
        transformers_version=transformers.__version__,
        weights=checkpoint.weights(),
    )
    held = piece.model.state_dict()
    twins = frozenset(twin for twin, original in tied.items() if {twin, original} <= held.keys())
    own_names = _own_names(names, span, piece, tied)
    _check_complete(own_names, piece.model, twins)
    return StagePlan(model, checkpoint, piece, facts, own_names, twins, n_threads)


def _tied(skeleton: PreTrainedModel) -> Mapping[str, str]:
    """Parameters that are another one's twin, e.g. `lm_head.weight` of `embed_tokens.weight`."""
    if not getattr(skeleton.config, "tie_word_embeddings", False):
        return {}
    keys: Any = getattr(skeleton, "_tied_weights_keys", None)  # there is no public name
    return dict(keys) if isinstance(keys, dict) else {}


def _own_names(
    names: Collection[str], span: LayerSpan, piece: split.Piece, tied: Mapping[str, str]
) -> dict[str, str]:
    """The checkpoint's tensors that the span owns, by the name they get in the stage."""
    own: dict[str, str] = {}
    for name in names:
        match = LAYER_NUMBER.search(name)
        if match is None:
            own[name] = name
        elif int(match[0]) in span:
            own[LAYER_NUMBER.sub(str(int(match[0]) - span.start), name, count=1)] = name
    wanted = _Wanted(piece.model)
    for twin, original in tied.items():
        if twin in wanted and original not in wanted and twin not in own and original in own:
            own[twin] = own[original]
    return {local: name for local, name in own.items() if local in wanted}


def _check_complete(own: Collection[str], model: PreTrainedModel, twins: frozenset[str]) -> None:
    """Refuse now what the loader would find missing later, where names alone can tell."""
    wanted = _Wanted(model)
    if wanted.merges:  # several tensors make one: only the loader knows which
        return
    missing = model.state_dict().keys() - {wanted.target(name) for name in own} - twins
    if missing:
        raise _incomplete("missing", missing)


def _incomplete(fault: str, names: Collection[object]) -> ModelError:
    some = ", ".join(sorted(map(str, names))[:4])
    return ModelError(
        f"{len(names)} tensors are {fault}: {some}",
        field="model",
        value=some,
        allowed="a checkpoint with every tensor of the span",
    )


class _Wanted:
    """The checkpoint names that end up in the stage, after the renames that the loader makes."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = _conversions(model)
        self._renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
        self._converters = [step for step in mapping if isinstance(step, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._targets = model.state_dict()

    @property
    def merges(self) -> bool:
        """Whether some parameter is made of several tensors."""
        return bool(self._converters)

    def target(self, name: str) -> str:
        """The parameter that a tensor goes to."""
        renamed, _ = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._targets
        )
        return renamed

    def __contains__(self, name: str) -> bool:
        return self.target(name) in self._targets


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Renames and mergings from the checkpoint's names to the family's own."""
    return get_model_conversion_mapping(model)


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True))


def _fill(
    model: PreTrainedModel,
    state: Mapping[str, LazyTensor],
    mapping: list[Any],
    twins: frozenset[str],
) -> None:
    """Let transformers' own loader fill the skeleton, renames and expert merging included."""
    transformers_logging.disable_progress_bar()
    config = LoadStateDictConfig(dtype=model.dtype, weight_mapping=mapping)
    try:
        report, _ = convert_and_load_state_dict_in_model(model, dict(state), config)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the weights cannot be read: {error}", field="model") from error
    faults = [
        ("missing", report.missing_keys - twins),
        ("of another shape", report.mismatched_keys),
        ("not convertible", report.conversion_errors),
    ]
    for fault, keys in faults:
        if keys:
            raise _incomplete(fault, keys)
    if twins:
        model.tie_weights()
    _make_buffers(model)


def _make_buffers(model: PreTrainedModel) -> None:
    """Compute what no checkpoint holds: rotary frequencies, embedding scales."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()


class _Meter:
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


class _Metered:
    """A lazy tensor that tells when it was read."""

    def __init__(self, tensor: LazyTensor, meter: _Meter) -> None:
        self._tensor = tensor
        self._meter = meter

    def __getitem__(self, index: Any) -> torch.Tensor:  # noqa: ANN401  # as slices of tensors go
        self._meter.check()
        value = self._tensor[index]
        self._meter.add(value.numel())
        return value
