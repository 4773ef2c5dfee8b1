"""A stage without torch for tests of everything around the model.

Its hidden states carry the token ids, so that each stage sees the whole history, and the tail's
next token is a digest of it: a lost, mixed up or doubled cache changes the text.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import cast

from meshnet.errors import StageError
from meshnet.model.interface import CacheState, StageOutput, StageStep
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


def next_token(ids: list[int], vocab_size: int) -> int:
    """What the fake model says after `ids`."""
    digest = hashlib.sha256(array("i", ids).tobytes()).digest()
    return int.from_bytes(digest[:4], "big") % vocab_size


class FakeStage:
    """A StageModel whose layers do nothing."""

    def __init__(self, facts: ShardFacts) -> None:
        self._facts = facts

    @property
    def facts(self) -> ShardFacts:
        """What the stage is a piece of."""
        return self._facts

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
        return TailAnswer(token_id=next_token(history.ids, self._facts.vocab_size))

    def _ids(self, step: StageStep) -> list[int]:
        if step.start_layer == 0:
            return step.frame.token_ids()
        return [int(value) for value in array("f", step.frame.data)[::HIDDEN_SIZE]]
