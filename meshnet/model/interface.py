"""What a shard needs of a piece of model, and nothing of how it is made. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from meshnet.errors import StageError
from meshnet.generation import NO_CONTEXT, Sampling, SamplingContext
from meshnet.topology import ShardFacts
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer


class CacheState(Protocol):
    """The cache state of one session on one stage; opaque to everyone but the stage."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory the state holds now."""
        ...

    def fork(self, n_tokens: int) -> Self | None:
        """A state of the first `n_tokens` tokens, at least one; None where it cannot be had.

        It costs nothing yet: both share memory until the fork's first step copies what it goes on
        with, and neither ever sees what the other one adds. Called in the event loop, while the
        compute thread may be extending this state: at least `n_tokens` were in it before.
        """
        ...


StageOutput = Frame | TailAnswer
"""Hidden states for the next hop, or the tail's answer."""


@dataclass(frozen=True, slots=True)
class StageStep:
    """One step's input to a stage.

    Attributes:
        frame: `[1, n]` int32 token ids where layer 0 is run, else `[1, n, hidden]` hidden states.
        start_layer: First layer to run, in the stage's span; the stage runs from it to its end.
        position: Tokens before this step; the step covers `[position, position + n)`.
        sampling: How the tail samples; None samples nothing.
        context: What its answer depends on besides. Where `next_ids` says what follows each token
            of the step, they are scored and nothing is sampled.

    `context` is empty where `sampling` is None; its ids and its mask fit the model, and leave a
    token to pick.
    """

    frame: Frame
    start_layer: int
    position: int
    sampling: Sampling | None = None
    context: SamplingContext = NO_CONTEXT

    @property
    def samples(self) -> bool:
        """Whether the tail is to pick a token: there is a place for one."""
        return self.sampling is not None and len(self.context.next_ids) < self.frame.n_tokens

    @property
    def n_scores(self) -> int:
        """How many tokens the tail scores: those of `next_ids`, and its own if that is asked for.

        Each with `sampling.top_logprobs` alternatives, which may be none.
        """
        tells_own = self.sampling is not None and self.sampling.top_logprobs is not None
        return len(self.context.next_ids) + (tells_own and self.samples)


@dataclass(frozen=True, slots=True)
class StateCost:
    """What a session's state takes: at most `base_bytes`, and `token_bytes` a token besides."""

    base_bytes: int
    token_bytes: int


class StageModel(Protocol):
    """A span of layers that can be run. Not thread-safe: one compute thread calls it."""

    @property
    def facts(self) -> ShardFacts:
        """What the stage is a piece of."""
        ...

    @property
    def state_cost(self) -> StateCost:
        """A bound on `state_nbytes` at any length."""
        ...

    def new_state(self, start_layer: int) -> CacheState:
        """An empty state for sessions that enter at `start_layer`."""
        ...

    def state_nbytes(self, n_tokens: int) -> int:
        """About how many bytes a state of `n_tokens` tokens takes, before it is made."""
        ...

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """Run the layers on one step.

        Args:
            step: The input; its shape and dtype were checked against `facts`.
            state: Mutated: extended by the step's tokens. None runs stateless.

        Raises:
            StageError: The forward failed or gave numbers that are not finite. The state must be
                discarded.
        """
        ...

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        """Run the next token of several sessions in one forward.

        Args:
            works: At least one. Each is a step of one token, with its session's own state, mutated
                as in `run`. All have the same `start_layer`; positions may differ, and no state is
                there twice.

        Returns:
            What became of each, in their order. A step that fails does so alone: its state must be
            discarded, the others' are whole.

        Raises:
            StageError: The forward failed for all. Every state must be discarded.
        """
        ...
