"""Loads one span of a checkpoint into memory, tensor by tensor, and nothing else of it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its loader loosely.

from __future__ import annotations

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
    rename_source_key,
)

from meshnet.model import split
from meshnet.model.allocator import returning_memory
from meshnet.model.checkpoint import Checkpoint, open_checkpoint, revision
from meshnet.model.gguf_file import GgufCheckpoint
from meshnet.model.identity import LAYER_NUMBER, fingerprint, layer_digests
from meshnet.model.tensors import torch_dtype
from meshnet.model.torch_stage import TorchStage, make_layers
from meshnet.model.weights.filling import Meter, Metered, Progress, fill, incomplete
from meshnet.model.weights.packing import Packing
from meshnet.topology import LayerSpan, ShardFacts
from meshnet.wire.frames import Dtype


@dataclass(frozen=True)
class StagePlan:
    """A span that is known to be loadable, before a weight of it is read."""

    model: str
    checkpoint: Checkpoint
    piece: split.Piece
    facts: ShardFacts
    names: Mapping[str, str]
    """Tensor name in the stage to tensor name in the checkpoint."""
    twins: Mapping[str, str]
    """Parameters of the stage that share another one's memory, and whose."""
    nbytes: int
    """Bytes of the span's tensors in the stage's dtype, before any of them is packed."""
    packing: Packing | None
    n_threads: int | None

    def load(self, progress: Progress = lambda _: None) -> TorchStage:
        """Make the stage; the plan is spent. See `read`.

        Raises:
            ModelError: A tensor is missing, damaged or of another shape, or the span cannot run.
            MeshError: `progress` raised it. Threads of the loader may end their tensor after that.
        """
        with returning_memory():
            facts = self.read(progress)
            return TorchStage(make_layers(self.piece, facts), facts)

    def read(self, progress: Progress = lambda _: None) -> ShardFacts:
        """Read the span's tensors into its piece, and say what it is now.

        Args:
            progress: Called after every tensor that was read and before every layer that is
                hashed. A MeshError that it raises ends the loading.
        """
        if self.n_threads is not None:
            torch.set_num_threads(self.n_threads)
        model = self.piece.model
        lazy = self.checkpoint.open(set(self.names.values()))
        meter = Meter(progress, model.dtype.itemsize)
        state = {name: Metered(lazy[source], meter) for name, source in self.names.items()}
        mapping = [] if isinstance(self.checkpoint, GgufCheckpoint) else _conversions(model)
        fill(model, state, mapping, self.twins, self.packing)
        model.eval().requires_grad_(requires_grad=False)
        return self._identified(meter.tell)

    def _identified(self, tick: Callable[[], None]) -> ShardFacts:
        """The facts, with what is known once the tensors are there."""
        facts = self.facts
        digests = layer_digests(self.piece.model, facts.span, facts.n_layers, tick)
        facts = replace(facts, layer_digests=digests)
        return replace(facts, fingerprint=fingerprint(facts))


def plan_stage(
    model: str,
    span: LayerSpan,
    dtype: Dtype,
    *,
    packing: Packing | None = None,
    n_threads: int | None = None,
) -> StagePlan:
    """Check that `span` of `model` can be run here; reads headers and directories only.

    Args:
        model: See `open_checkpoint`.
        span: Layers to run.
        dtype: Of activations and caches, and of the weights that are not packed.
        packing: How linear layers' weights are packed; None leaves them as they are.
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
    twins = {twin: one for twin, one in tied.items() if {twin, one} <= held.keys()}
    own_names = _own_names(names, span, piece, tied)
    _check_complete(own_names, piece.model, twins)
    return StagePlan(
        model,
        checkpoint,
        piece,
        facts,
        own_names,
        twins,
        nbytes=sum(tensor.nbytes for name, tensor in held.items() if name not in twins),
        packing=packing,
        n_threads=n_threads,
    )


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


def _check_complete(own: Collection[str], model: PreTrainedModel, twins: Collection[str]) -> None:
    """Refuse now what the loader would find missing later, where names alone can tell."""
    wanted = _Wanted(model)
    if wanted.merges:  # several tensors make one: only the loader knows which
        return
    missing = model.state_dict().keys() - {wanted.target(name) for name in own} - set(twins)
    if missing:
        raise incomplete("missing", missing)


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
