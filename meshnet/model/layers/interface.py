"""What a stage runs: a span's decoder layers, and what stands before and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from meshnet.model.interface import CacheState, StateCost


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one session.

    Attributes:
        inputs: [n] int64 token ids where the model's first layer is run, else [n, hidden] hidden
            states.
        position: Tokens before them.
        state: The session's; None where nothing is kept.
    """

    inputs: torch.Tensor
    position: int
    state: CacheState | None


class Layers(Protocol):
    """The layers of a span, in whichever way they are run. Called under `inference_mode`."""

    @property
    def state_cost(self) -> StateCost:
        """See StageModel.state_cost."""
        ...

    def new_state(self, start_layer: int) -> CacheState:
        """An empty state for sessions that enter at `start_layer`."""
        ...

    def state_nbytes(self, n_tokens: int) -> int:
        """See StageModel.state_nbytes."""
        ...

    def run(self, start_layer: int, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Run the layers from `start_layer` to the span's end; states are extended.

        Args:
            start_layer: First layer to run.
            chunks: One of any length, or several of one token each, of different sessions.

        Returns:
            [n, hidden] for each chunk: after the final norm if the model's last layer is run.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] of what `run` gave for n tokens, [n, hidden]."""
        ...
