"""Token events to an answer: server-sent events, or one body.

One event is one generated token, the end token included, so events are what `usage` counts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from meshnet.errors import MeshError
from meshnet.generation import FinishReason, TokenEvent
from meshnet.openai.bodies import (
    ChatCompletion,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    Usage,
    chat_completion,
    chunk,
    usage,
)
from meshnet.openai.errors import ErrorBody, to_openai

DONE: Final = "[DONE]"


async def sse_chunks(
    events: AsyncGenerator[TokenEvent],
    completion: Completion,
    *,
    prompt_tokens: int,
    include_usage: bool,
    request_id: str,
) -> AsyncGenerator[str]:
    """The data of one server-sent event after another, `[DONE]` last.

    Nothing is yielded before the first token event is there: take the first item before the
    response's status is sent, and an error until then can still be answered with its own status.
    From then on an error is one event in OpenAI's shape in place of the closing chunk.

    Args:
        events: One generation. Closed at the end, also when this generator is closed early.
        completion: What every chunk carries.
        prompt_tokens: The prompt's length, for the usage.
        include_usage: Whether a last chunk carries the counts.
        request_id: What the client is told of an error of ours.

    Raises:
        MeshError: Before the first token event.
        Exception: After the error event and `[DONE]`, if it is a fault of ours and no MeshError.
    """
    chunks = _ChunkWriter(completion, with_usage=include_usage)
    completion_tokens = 1
    async with aclosing(events):
        event = await _next(events)
        yield chunks.choice({"role": "assistant", "content": ""})
        try:
            while True:
                if event.text:
                    yield chunks.choice({"content": event.text})
                if event.finish_reason is not None:
                    break
                event = await _next(events)
                completion_tokens += 1
        except Exception as error:
            # Most clients take a stream that just ends for a success.
            yield _dump(to_openai(error, request_id=request_id).body)
            yield DONE
            if isinstance(error, MeshError):
                return
            raise
        yield chunks.choice({}, event.finish_reason)
        if include_usage:
            counts = usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
            yield chunks.usage(counts)
        yield DONE


async def collect(
    events: AsyncGenerator[TokenEvent], completion: Completion, *, prompt_tokens: int
) -> ChatCompletion:
    """The answer in one piece.

    Args:
        events: One generation. Closed at the end.
        completion: What the body carries.
        prompt_tokens: The prompt's length, for the usage.

    Raises:
        MeshError: The generation failed; what was generated is lost.
    """
    texts: list[str] = []
    async with aclosing(events):
        while True:
            event = await _next(events)
            texts.append(event.text)
            if event.finish_reason is not None:
                break
    counts = usage(prompt_tokens=prompt_tokens, completion_tokens=len(texts))
    return chat_completion(completion, "".join(texts), event.finish_reason, counts)


class _ChunkWriter:
    """Chunks of one answer as JSON."""

    def __init__(self, completion: Completion, *, with_usage: bool) -> None:
        self._completion = completion
        self._with_usage = with_usage

    def choice(self, delta: Delta, finish_reason: FinishReason | None = None) -> str:
        choice: ChunkChoice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": None,
        }
        body = chunk(self._completion, [choice])
        if self._with_usage:
            body["usage"] = None
        return _dump(body)

    def usage(self, counts: Usage) -> str:
        body = chunk(self._completion, [])
        body["usage"] = counts
        return _dump(body)


async def _next(events: AsyncGenerator[TokenEvent]) -> TokenEvent:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise MeshError("the generation ended without a finish reason") from None


def _dump(body: Chunk | ErrorBody) -> str:
    # ASCII only: clients that split lines as Python does would cut at a U+2028 in the text.
    return json.dumps(body, separators=(",", ":"))
