"""The objects of OpenAI's document that this server sends, with every key that it requires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

from meshnet.generation import FinishReason


class Usage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Message(TypedDict):
    """The whole answer of one choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(TypedDict):
    """One choice of an answer in one piece."""

    index: int
    message: Message
    finish_reason: FinishReason
    logprobs: None


class ChatCompletion(TypedDict):
    """An answer in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[Choice]
    usage: Usage


class Delta(TypedDict):
    """What one chunk adds."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChunkChoice(TypedDict):
    """One choice of a chunk."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: None


class Chunk(TypedDict):
    """One piece of a streamed answer; `usage` is there only if the client asked for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


@dataclass(frozen=True, slots=True)
class Completion:
    """What every piece of one answer carries. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


def usage(*, prompt_tokens: int, completion_tokens: int) -> Usage:
    """Both counts and their sum."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_completion(
    completion: Completion, text: str, finish_reason: FinishReason, counts: Usage
) -> ChatCompletion:
    """The body of an answer in one piece."""
    return {
        "id": completion.id,
        "object": "chat.completion",
        "created": completion.created,
        "model": completion.model,
        "system_fingerprint": completion.system_fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": finish_reason,
                "logprobs": None,
            }
        ],
        "usage": counts,
    }


def chunk(completion: Completion, choices: list[ChunkChoice]) -> Chunk:
    """A chunk without `usage`."""
    return {
        "id": completion.id,
        "object": "chat.completion.chunk",
        "created": completion.created,
        "model": completion.model,
        "system_fingerprint": completion.system_fingerprint,
        "choices": choices,
    }
