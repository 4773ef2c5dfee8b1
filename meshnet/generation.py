"""What a generation asks for and what it yields; no tensors, no HTTP."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


class Sampling(BaseModel):
    """How the tail picks a token. Travels as JSON in `X-Meshnet-Sampling`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=0.0, ge=0.0, le=2.0, allow_inf_nan=False)
    """0 is greedy; so is anything under 1e-5, where a softmax would overflow."""
    top_p: float = Field(default=1.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Keep the most likely tokens whose probabilities reach this sum, never fewer than one."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature < 1e-5


def uniform(seed: int, position: int) -> float:
    """The draw for the token at `position`: a number in [0, 1).

    A pure function of its arguments, so that a recovery, a retry or the company a request has in a
    batch never changes a draw (law 10: no global generator).
    """
    message = f"{seed}:{position}".encode()
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: 64 could round up to 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: the prompt's token ids, at least one, and what to make of them."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token, or the end.

    `text` is what became printable with it: "" while a character is incomplete, and for an end
    token. The last event of a generation, and only it, has a `finish_reason`.
    """

    text: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
