"""Runs a span of layers with torch, and knows what a session's cache state is made of."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its models loosely.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from meshnet.errors import MeshError, ModelError, StageError
from meshnet.model import split
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.model.sampler import sample
from meshnet.model.tensors import from_frame, to_frame, torch_dtype
from meshnet.topology import ShardFacts
from meshnet.wire.frames import Dtype
from meshnet.wire.messages import TailAnswer

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


class TorchState:
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


class TorchStage:
    """A StageModel on torch and transformers."""

    def __init__(self, piece: split.Piece, facts: ShardFacts) -> None:
        self._facts = facts
        self._pieces = {facts.span.start: piece}
        self._numbered = facts.span.start
        self._state_bytes, self._token_bytes = self._probe()

    @property
    def facts(self) -> ShardFacts:
        """What the stage is a piece of."""
        return self._facts

    def new_state(self, start_layer: int) -> TorchState:
        """An empty state for sessions that enter at `start_layer`."""
        return TorchState(StageCache(self._piece(start_layer).config))

    def state_nbytes(self, n_tokens: int) -> int:
        """About how many bytes a state of `n_tokens` tokens takes, as measured on short ones."""
        return self._state_bytes + self._token_bytes * n_tokens

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """Run the layers on one step; see StageModel.run."""
        piece = self._piece(step.start_layer)
        if self._numbered != step.start_layer:
            piece.number_layers()
            self._numbered = step.start_layer
        cache = cast("TorchState", state).cache if state is not None else None
        try:
            with torch.inference_mode():
                return self._forward(piece, step, cache)
        except Exception as error:  # whatever a family's own forward may raise
            if isinstance(error, MeshError):
                raise
            raise StageError(
                f"layers {step.start_layer}-{self._facts.span.end} failed at position "
                f"{step.position}: {error}",
                position=step.position,
            ) from error

    def _forward(
        self, piece: split.Piece, step: StageStep, cache: StageCache | None
    ) -> StageOutput:
        inputs = self._inputs(step, cache)
        if not piece.tail or step.sampling is None:
            hidden = piece.base(**inputs).last_hidden_state
            self._check_finite(hidden, step)
            if piece.tail:
                return TailAnswer()
            return to_frame(hidden, cast("Dtype", self._facts.dtype))
        logits = piece.model(**inputs, logits_to_keep=1).logits[0, -1]
        token_id = sample(logits, step.sampling, step.position + step.frame.n_tokens)
        return TailAnswer(token_id=token_id)

    def _inputs(self, step: StageStep, cache: StageCache | None) -> dict[str, Any]:
        if cache is not None:
            cache.position = step.position
        tensor = from_frame(step.frame)
        end = step.position + step.frame.n_tokens
        name = "input_ids" if step.start_layer == 0 else "inputs_embeds"
        return {
            name: tensor.long() if step.start_layer == 0 else tensor,
            # Law 13: from the request, never from the cache.
            "position_ids": torch.arange(step.position, end).unsqueeze(0),
            "cache": cache,
            "use_cache": cache is not None,
        }

    def _check_finite(self, hidden: torch.Tensor, step: StageStep) -> None:
        if not bool(torch.isfinite(hidden).all()):
            raise StageError(
                f"the hidden states after layer {self._facts.span.end - 1} are not finite",
                position=step.position,
            )

    def _piece(self, start_layer: int) -> split.Piece:
        if start_layer not in self._pieces:
            whole = self._pieces[self._facts.span.start]
            self._pieces[start_layer] = split.enter_at(whole, start_layer - self._facts.span.start)
        return self._pieces[start_layer]

    def _probe(self) -> tuple[int, int]:
        """Run two short texts: shows that the stage works, and what its state takes.

        Returns:
            Bytes of a state whatever its length (recurrent layers), and of each token (attention).
        """
        few, more = (self._probed_nbytes(n_tokens) for n_tokens in _PROBE_TOKENS)
        token_bytes = (more - few) // (_PROBE_TOKENS[1] - _PROBE_TOKENS[0])
        return few - token_bytes * _PROBE_TOKENS[0], token_bytes

    def _probed_nbytes(self, n_tokens: int) -> int:
        facts = self._facts
        piece, state = self._piece(facts.span.start), self.new_state(facts.span.start)
        positions = torch.arange(n_tokens).unsqueeze(0)
        if facts.span.start == 0:
            inputs = {"input_ids": torch.zeros_like(positions)}
        else:
            dtype = torch_dtype(cast("Dtype", facts.dtype))
            inputs = {"inputs_embeds": torch.ones((1, n_tokens, facts.hidden_size), dtype=dtype)}
        seen: list[torch.Tensor] = []
        watch = piece.first_layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        try:
            with torch.inference_mode():
                piece.base(**inputs, position_ids=positions, cache=state.cache, use_cache=True)
        finally:
            watch.remove()
        if facts.span.start > 0:
            self._check_untouched(inputs["inputs_embeds"], seen)
        return state.nbytes

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
