"""A stage without torch for tests of everything around the model.

Its hidden states carry the token ids, so that each stage sees the whole history, and the tail's
next token is a digest of it: a lost, mixed up or doubled cache changes the text. So does a lost
context: penalties, bias, bans and masks count. Temperature and what goes with it does not.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import cast

from meshnet.errors import StageError
from meshnet.generation import Sampling, SamplingContext, TokenScore, is_allowed
from meshnet.model.interface import CacheState, StageOutput, StageStep, StateCost
from meshnet.topology import LayerSpan, ShardFacts
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer

HIDDEN_SIZE = 4
_BYTES_PER_TOKEN = 64


def fake_facts(span: LayerSpan, n_layers: int = 4, vocab_size: int = 64) -> ShardFacts:
    """Facts of a made-up model."""
    return ShardFacts(
        model="fake",
        revision="fake-1",
        fingerprint=f"fake-1-{span}",
        span=span,
        n_layers=n_layers,
        hidden_size=HIDDEN_SIZE,
        vocab_size=vocab_size,
        dtype="float32",
        max_positions=512,
        transformers_version="fake",
        layer_digests=tuple(f"fake-{layer}" for layer in range(span.start, span.end)),
    )


@dataclass
class FakeState:
    """The token ids a session ran through this stage."""

    ids: list[int] = field(default_factory=list[int])

    @property
    def nbytes(self) -> int:
        """A made-up cost a token."""
        return _BYTES_PER_TOKEN * len(self.ids)

    def fork(self, n_tokens: int) -> FakeState:
        """A history that begins alike."""
        return FakeState(self.ids[:n_tokens])


def next_token(ids: list[int], vocab_size: int) -> int:
    """What the fake model says after `ids`."""
    digest = hashlib.sha256(array("i", ids).tobytes()).digest()
    return int.from_bytes(digest[:4], "big") % vocab_size


def next_logits(ids: list[int], vocab_size: int) -> list[float]:
    """What the fake model thinks of each token after `ids`.

    1 for `next_token`, and ever less for the ids above it, round to the one below it: so close
    together that every penalty makes a difference.
    """
    best = next_token(ids, vocab_size)
    return [1 - (token - best) % vocab_size / vocab_size for token in range(vocab_size)]


def pick_token(
    ids: list[int], vocab_size: int, sampling: Sampling, context: SamplingContext
) -> int:
    """The token of the best logit, penalised and biased, that may be picked.

    Raises:
        StageError: No token may be picked.
    """
    if context.is_empty:
        return next_token(ids, vocab_size)
    logits = next_logits(ids, vocab_size)
    for token in {*context.prompt_ids, *context.generated_ids}:
        logits[token] /= sampling.repetition_penalty
    for token, count in Counter(context.generated_ids).items():
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, bias in context.logit_bias.items():
        logits[token] += bias
    may_be_picked = [
        token
        for token in range(vocab_size)
        if token not in context.banned_ids
        and (context.allowed is None or is_allowed(context.allowed, token))
    ]
    if not may_be_picked:
        raise StageError("no token may be picked: none is allowed, or all are banned")
    return max(may_be_picked, key=logits.__getitem__)


def score_token(ids: list[int], token_id: int, vocab_size: int, n_top: int) -> TokenScore:
    """The score of `token_id` after `ids`, out of the softmax of the logits."""
    logits = next_logits(ids, vocab_size)
    log_sum = log(sum(map(exp, logits)))
    ranked = sorted(range(vocab_size), key=logits.__getitem__, reverse=True)
    return TokenScore(
        token_id=token_id,
        logprob=logits[token_id] - log_sum,
        top=tuple((token, logits[token] - log_sum) for token in ranked[:n_top]),
    )


class FakeStage:
    """A StageModel whose layers do nothing.

    Attributes:
        batch_sizes: How many steps each batch had, in order.
    """

    def __init__(self, facts: ShardFacts) -> None:
        self.batch_sizes: list[int] = []
        self._facts = facts

    @property
    def facts(self) -> ShardFacts:
        """What the stage is a piece of."""
        return self._facts

    @property
    def state_cost(self) -> StateCost:
        """A made-up cost a token."""
        return StateCost(base_bytes=0, token_bytes=_BYTES_PER_TOKEN)

    def new_state(self, start_layer: int) -> FakeState:
        """An empty history."""
        del start_layer
        return FakeState()

    def state_nbytes(self, n_tokens: int) -> int:
        """A made-up cost a token."""
        return _BYTES_PER_TOKEN * n_tokens

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """Extend the history and pass it on; see StageModel.run."""
        ids = self._ids(step)
        history = FakeState() if state is None else cast("FakeState", state)
        if len(history.ids) != step.position:
            raise StageError(f"step at {step.position}, history of {len(history.ids)}")
        history.ids.extend(ids)
        if self._facts.span.end < self._facts.n_layers:
            flat = [float(value) for i in ids for value in (i, 0, 0, 0)]
            return Frame("float32", (1, len(ids), HIDDEN_SIZE), array("f", flat).tobytes())
        if step.sampling is None:
            return TailAnswer()
        return self._answer(step, step.sampling, history.ids)

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        """Run them one by one; see StageModel.run_batch."""
        self.batch_sizes.append(len(works))
        return [self._outcome(step, state) for step, state in works]

    def _outcome(self, step: StageStep, state: CacheState) -> StageOutput | StageError:
        try:
            return self.run(step, state)
        except StageError as error:
            return error

    def _answer(self, step: StageStep, sampling: Sampling, ids: list[int]) -> TailAnswer:
        vocab_size, n_top = self._facts.vocab_size, sampling.top_logprobs
        scores = tuple(
            score_token(ids[:end], token_id, vocab_size, n_top or 0)
            for end, token_id in enumerate(step.context.next_ids, step.position + 1)
        )
        if not step.samples:
            return TailAnswer(prompt_scores=scores)
        picked = pick_token(ids, vocab_size, sampling, step.context)
        own = None if n_top is None else score_token(ids, picked, vocab_size, n_top)
        return TailAnswer(token_id=picked, score=own, prompt_scores=scores)

    def _ids(self, step: StageStep) -> list[int]:
        if step.start_layer == 0:
            return step.frame.token_ids()
        return [int(value) for value in array("f", step.frame.data)[::HIDDEN_SIZE]]
