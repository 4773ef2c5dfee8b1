"""Runs a span by the forward of the model's own family: slowly, and whatever the model is."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its models loosely.

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.utils.generic import ModelOutput

from meshnet.errors import ModelError
from meshnet.model import split
from meshnet.model.interface import StateCost
from meshnet.model.layers.interface import Chunk
from meshnet.model.tensors import torch_dtype
from meshnet.topology import ShardFacts
from meshnet.wire.frames import Dtype

_PROBE_TOKENS = (4, 8)


class StageCache(DynamicCache):
    """A cache that can tell its length even where no layer of the span is an attention layer.

    transformers asks attention layers only, and a span of a hybrid model may have none; there the
    request's position answers (law 13).
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.position = 0
        self._has_attention = any(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this step."""
        return super().get_seq_length(layer_idx) if self._has_attention else self.position

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        if self._has_attention:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.position + query_length, 0


class FamilyState:
    """One session's keys and values (or recurrent state) of one stage's layers."""

    def __init__(self, cache: StageCache) -> None:
        self.cache = cache

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, counted by storage: a window is a view of what it was cut from."""
        storages = [
            t.untyped_storage() for layer in self.cache.layers for t in _tensors_in(vars(layer))
        ]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def fork(self, n_tokens: int) -> FamilyState | None:
        """See CacheState.fork. None where a layer keeps more than all keys and values.

        What slides or recurs has no state of fewer tokens any more. The others make new tensors
        for every step and never write to one, so that whichever are found while a step is running
        have the first tokens, and stay as they are.
        """
        plain = [layer for layer in self.cache.layers if type(layer) is DynamicLayer]
        if len(plain) < len(self.cache.layers):
            return None
        cache = copy.copy(self.cache)
        with torch.inference_mode():
            cache.layers = [_first_tokens(layer, n_tokens) for layer in plain]
        return FamilyState(cache)


def _first_tokens(layer: DynamicLayer, n_tokens: int) -> Any:  # noqa: ANN401  # one of a list of unions
    """A layer's keys and values of the first tokens, as views."""
    keys, values = layer.keys, layer.values
    first = copy.copy(layer)
    if keys is not None and values is not None:  # else another layer's are used in its place
        first.keys, first.values = keys[..., :n_tokens, :], values[..., :n_tokens, :]
    return first


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts and lists: recurrent layers keep theirs in such."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tensors_in(item)


class FamilyLayers:
    """Layers on transformers.

    Args:
        piece: The span as a model.
        facts: What it is a piece of.

    Raises:
        ModelError: The family changes hidden states before its first layer.
    """

    def __init__(self, piece: split.Piece, facts: ShardFacts) -> None:
        self._facts = facts
        self._pieces = {facts.span.start: piece}
        self._numbered = facts.span.start
        self._output_kind: type[ModelOutput] = ModelOutput
        self._cost = self._probe()

    @property
    def state_cost(self) -> StateCost:
        """As measured on short texts; sliding windows make long ones cheaper."""
        return self._cost

    def new_state(self, start_layer: int) -> FamilyState:
        """An empty state for sessions that enter at `start_layer`."""
        return FamilyState(StageCache(self._piece(start_layer).config))

    def state_nbytes(self, n_tokens: int) -> int:
        """About how many bytes a state of `n_tokens` tokens takes, as measured on short ones."""
        return self._cost.base_bytes + self._cost.token_bytes * n_tokens

    def run(self, start_layer: int, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Run one after the other; see Layers.run."""
        piece = self._piece(start_layer)
        if self._numbered != start_layer:
            piece.number_layers()
            self._numbered = start_layer
        return [self._run_one(piece, start_layer, chunk) for chunk in chunks]

    def _run_one(self, piece: split.Piece, start_layer: int, chunk: Chunk) -> torch.Tensor:
        cache = None if chunk.state is None else cast("FamilyState", chunk.state).cache
        if cache is not None:
            cache.position = chunk.position
        end = chunk.position + len(chunk.inputs)
        inputs: dict[str, Any] = {
            "input_ids" if start_layer == 0 else "inputs_embeds": chunk.inputs.unsqueeze(0),
            # Law 13: from the request, never from the cache.
            "position_ids": torch.arange(chunk.position, end).unsqueeze(0),
            "cache": cache,
            "use_cache": cache is not None,
        }
        output = piece.base(**inputs)
        self._output_kind = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] of [n, hidden].

        The family's own forward makes them, for it may scale or cap what lm_head gives: that of a
        copy with the same weights, whose base says `hidden` instead of running its layers.
        """
        model = self._pieces[self._facts.span.start].model
        output = cast("Any", self._output_kind)(last_hidden_state=hidden.unsqueeze(0))
        base, model = copy.copy(split.base_of(model)), copy.copy(model)
        base.forward = lambda *_args, **_kwargs: output
        vars(model)["_modules"] = {**vars(model)["_modules"], model.base_model_prefix: base}
        return model().logits[0]

    def _piece(self, start_layer: int) -> split.Piece:
        if start_layer not in self._pieces:
            whole = self._pieces[self._facts.span.start]
            self._pieces[start_layer] = split.enter_at(whole, start_layer - self._facts.span.start)
        return self._pieces[start_layer]

    def _probe(self) -> StateCost:
        """Run two short texts: shows that the layers work, and what their state takes.

        Whatever its length (recurrent layers), and a token (attention).
        """
        few, more = (self._probed_nbytes(n_tokens) for n_tokens in _PROBE_TOKENS)
        token_bytes = (more - few) // (_PROBE_TOKENS[1] - _PROBE_TOKENS[0])
        return StateCost(few - token_bytes * _PROBE_TOKENS[0], token_bytes)

    def _probed_nbytes(self, n_tokens: int) -> int:
        start, state = self._facts.span.start, self.new_state(self._facts.span.start)
        inputs, seen = self.probe_inputs(n_tokens), list[torch.Tensor]()
        watch = self._piece(start).first_layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        try:
            with torch.inference_mode():
                self.run(start, [Chunk(inputs, 0, state)])
        finally:
            watch.remove()
        if start > 0:
            self._check_untouched(inputs.unsqueeze(0), seen)
        return state.nbytes

    def probe_inputs(self, n_tokens: int) -> torch.Tensor:
        """Something for the first layer to run on; see `Chunk.inputs`."""
        if self._facts.span.start == 0:
            return torch.arange(n_tokens) % self._facts.vocab_size
        noise = torch.randn(
            (n_tokens, self._facts.hidden_size), generator=torch.Generator().manual_seed(0)
        )
        return noise.to(torch_dtype(cast("Dtype", self._facts.dtype)))

    def _check_untouched(self, given: torch.Tensor, seen: list[torch.Tensor]) -> None:
        """Some families scale embeddings, or add positions, in front of every stage's layers."""
        if [tensor for tensor in seen if not torch.equal(tensor, given)] or not seen:
            raise ModelError(
                f"{self._facts.model} changes hidden states before its first layer, so layers "
                f"{self._facts.span} cannot run apart",
                field="layers",
                value=str(self._facts.span),
                allowed=f"0-{self._facts.n_layers}",
            )
