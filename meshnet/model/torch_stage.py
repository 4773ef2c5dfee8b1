"""Runs a span of layers with torch, and knows what a session's cache state is made of."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its models loosely.

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, cast

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.utils.generic import ModelOutput

from meshnet.errors import MeshError, ModelError, StageError
from meshnet.generation import Sampling, TokenScore
from meshnet.model import split
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.model.sampler import sample
from meshnet.model.scores import score
from meshnet.model.tensors import from_frame, to_frame, torch_dtype
from meshnet.topology import ShardFacts
from meshnet.wire.frames import Dtype
from meshnet.wire.messages import TailAnswer

_PROBE_TOKENS = (4, 8)
_LOGITS_BYTES: Final = 2**24
"""About how much memory the logits of a prompt's tokens take at once; a row a token at least."""


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


def _logits(model: PreTrainedModel, output: ModelOutput, start: int, end: int) -> torch.Tensor:
    """[end - start, vocab_size] for the tokens `[start, end)` of what the model's base put out.

    The family's own forward makes them, for it may scale or cap what lm_head gives: that of a copy
    with the same weights, whose base says `output` again instead of running its layers.
    """
    whole = cast("Any", output)
    part: ModelOutput = replace(whole, last_hidden_state=whole.last_hidden_state[:, start:end])
    base, model = copy.copy(split.base_of(model)), copy.copy(model)
    base.forward = lambda *_args, **_kwargs: part
    vars(model)["_modules"] = {**vars(model)["_modules"], model.base_model_prefix: base}
    return model().logits[0]


def _pick(logits: torch.Tensor, step: StageStep, sampling: Sampling) -> TailAnswer:
    """The answer with the token after the step, of logits [vocab_size] of the step's last one."""
    position, n_top = step.position + step.frame.n_tokens, sampling.top_logprobs
    token_id = sample(logits, sampling, step.context, position)
    own = None if n_top is None else score(logits, token_id, n_top, position)
    return TailAnswer(token_id=token_id, score=own)


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
        inputs, sampling = self._inputs(step, cache), step.sampling
        if piece.tail and sampling is not None and not step.context.next_ids:
            logits = piece.model(**inputs, logits_to_keep=1).logits[0, -1]
            return _pick(logits, step, sampling)
        output = piece.base(**inputs)
        self._check_finite(output.last_hidden_state, step)
        if not piece.tail:
            return to_frame(output.last_hidden_state, cast("Dtype", self._facts.dtype))
        if sampling is None:
            return TailAnswer()
        scores = self._score_prompt(piece.model, output, step, sampling.top_logprobs or 0)
        if not step.samples:
            return TailAnswer(prompt_scores=scores)
        logits = _logits(piece.model, output, step.frame.n_tokens - 1, step.frame.n_tokens)[0]
        return _pick(logits, step, sampling).model_copy(update={"prompt_scores": scores})

    def _score_prompt(
        self, model: PreTrainedModel, output: ModelOutput, step: StageStep, n_top: int
    ) -> tuple[TokenScore, ...]:
        """Scores of the step's next tokens, block by block: all their logits would be too many."""
        n_rows = max(1, _LOGITS_BYTES // (4 * self._facts.vocab_size))
        next_ids = step.context.next_ids
        scores: list[TokenScore] = []
        for start in range(0, len(next_ids), n_rows):
            ids = next_ids[start : start + n_rows]
            logits = _logits(model, output, start, start + len(ids))
            first = step.position + start + 1
            scores += [score(logits[i], token, n_top, first + i) for i, token in enumerate(ids)]
        return tuple(scores)

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
