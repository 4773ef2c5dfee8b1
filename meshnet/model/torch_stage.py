"""A span of layers on torch: frames in, frames or the tail's answer out."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch types its tensors loosely.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import structlog
import torch

from meshnet.errors import MeshError, StageError
from meshnet.generation import Sampling, TokenScore
from meshnet.model import split
from meshnet.model.interface import CacheState, StageOutput, StageStep, StateCost
from meshnet.model.layers.family import FamilyLayers
from meshnet.model.layers.interface import Chunk, Layers
from meshnet.model.layers.reading import NotLean, read_lean_layers
from meshnet.model.sampler import sample
from meshnet.model.scores import score
from meshnet.model.tensors import from_frame, is_finite, to_frame
from meshnet.model.weights.packing import seal
from meshnet.topology import ShardFacts
from meshnet.wire.frames import Dtype
from meshnet.wire.messages import TailAnswer

_log = structlog.get_logger(__name__)

_LOGITS_BYTES: Final = 2**24
"""About how much memory the logits of a prompt's tokens take at once; a row a token at least."""


def make_layers(piece: split.Piece, facts: ShardFacts) -> Layers:
    """The quickest way to run a span that gives what its family's own forward does.

    The piece is spent.

    Raises:
        ModelError: The span cannot run apart.
    """
    family = FamilyLayers(piece, facts)
    try:
        layers = read_lean_layers(piece, facts, family)
    except NotLean as reason:
        _log.info("layers run by transformers", span=str(facts.span), reason=str(reason))
        layers = family
    seal(piece.model)
    return layers


class TorchStage:
    """A StageModel on torch.

    Args:
        layers: The span's.
        facts: What it is a piece of.
    """

    def __init__(self, layers: Layers, facts: ShardFacts) -> None:
        self._layers = layers
        self._facts = facts

    @property
    def facts(self) -> ShardFacts:
        """What the stage is a piece of."""
        return self._facts

    @property
    def state_cost(self) -> StateCost:
        """A bound on what a state takes."""
        return self._layers.state_cost

    def new_state(self, start_layer: int) -> CacheState:
        """An empty state for sessions that enter at `start_layer`."""
        return self._layers.new_state(start_layer)

    def state_nbytes(self, n_tokens: int) -> int:
        """About how many bytes a state of `n_tokens` tokens takes."""
        return self._layers.state_nbytes(n_tokens)

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """Run the layers on one step; see StageModel.run."""
        (outcome,) = self._run_all([step], [state])
        if isinstance(outcome, StageError):
            raise outcome
        return outcome

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        """Run the next token of several sessions in one forward; see StageModel.run_batch."""
        steps, states = zip(*works, strict=True)
        return self._run_all(steps, states)

    def _run_all(
        self, steps: Sequence[StageStep], states: Sequence[CacheState | None]
    ) -> list[StageOutput | StageError]:
        chunks = [
            Chunk(_inputs(step), step.position, state)
            for step, state in zip(steps, states, strict=True)
        ]
        try:
            with torch.inference_mode():
                hidden = self._layers.run(steps[0].start_layer, chunks)
                logits = self._next_logits(steps, hidden)
                return [self._outcome(*one) for one in zip(steps, hidden, logits, strict=True)]
        except Exception as error:  # whatever a family's own forward may raise
            if isinstance(error, MeshError):
                raise
            raise StageError(
                f"layers {steps[0].start_layer}-{self._facts.span.end} failed at position "
                f"{steps[0].position}: {error}",
                position=steps[0].position,
            ) from error

    def _next_logits(
        self, steps: Sequence[StageStep], hidden: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """[vocab_size] of what follows each step, where this is the tail and it is asked for."""
        asked = [step.samples and self._is_tail for step in steps]
        if not any(asked):
            return [None] * len(steps)
        last = [rows[-1:] for rows, is_asked in zip(hidden, asked, strict=True) if is_asked]
        logits = iter(self._layers.logits(torch.cat(last)))
        return [next(logits) if is_asked else None for is_asked in asked]

    @property
    def _is_tail(self) -> bool:
        return self._facts.span.end == self._facts.n_layers

    def _outcome(
        self, step: StageStep, hidden: torch.Tensor, logits: torch.Tensor | None
    ) -> StageOutput | StageError:
        """What a step gives, or why it gives nothing."""
        try:
            return self._answer(step, hidden, logits)
        except StageError as error:
            return error

    def _answer(
        self, step: StageStep, hidden: torch.Tensor, logits: torch.Tensor | None
    ) -> StageOutput:
        if not is_finite(hidden):
            raise StageError(
                f"the hidden states after layer {self._facts.span.end - 1} are not finite",
                position=step.position,
            )
        if not self._is_tail:
            return to_frame(hidden.unsqueeze(0), cast("Dtype", self._facts.dtype))
        if step.sampling is None:
            return TailAnswer()
        scores = self._score_prompt(hidden, step, step.sampling.top_logprobs or 0)
        if logits is None:
            return TailAnswer(prompt_scores=scores)
        answer = _pick(logits, step, step.sampling)
        return answer.model_copy(update={"prompt_scores": scores}) if scores else answer

    def _score_prompt(
        self, hidden: torch.Tensor, step: StageStep, n_top: int
    ) -> tuple[TokenScore, ...]:
        """Scores of the step's next tokens, block by block: all their logits would be too many."""
        n_rows = max(1, _LOGITS_BYTES // (4 * self._facts.vocab_size))
        next_ids = step.context.next_ids
        scores: list[TokenScore] = []
        for start in range(0, len(next_ids), n_rows):
            ids = next_ids[start : start + n_rows]
            logits = self._layers.logits(hidden[start : start + len(ids)])
            first = step.position + start + 1
            scores += [score(logits[i], token, n_top, first + i) for i, token in enumerate(ids)]
        return tuple(scores)


def _inputs(step: StageStep) -> torch.Tensor:
    """[n] token ids or [n, hidden] hidden states."""
    tensor = from_frame(step.frame)[0]
    return tensor.long() if step.start_layer == 0 else tensor


def _pick(logits: torch.Tensor, step: StageStep, sampling: Sampling) -> TailAnswer:
    """The answer with the token after the step, of logits [vocab_size] of the step's last one."""
    position, n_top = step.position + step.frame.n_tokens, sampling.top_logprobs
    token_id = sample(logits, sampling, step.context, position)
    own = None if n_top is None else score(logits, token_id, n_top, position)
    return TailAnswer(token_id=token_id, score=own)
