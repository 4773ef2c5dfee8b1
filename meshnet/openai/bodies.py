"""The objects of OpenAI's document that all generating endpoints share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from meshnet.generation import FinishReason

AnswerFinish = FinishReason | Literal["tool_calls"]


class PromptTokensDetails(TypedDict):
    """`cached_tokens` were not computed again."""

    cached_tokens: int


class Usage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of an answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None

    def of(self, kind: str) -> dict[str, object]:
        """The first members of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Both counts and their sum, and how much of the prompt was not computed again."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
