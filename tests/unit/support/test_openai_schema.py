"""The check against OpenAI's published schemas lets what is published pass, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Scope

from tests.support.openai_schema import SchemaCheck, validate

CHUNK: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None, "logprobs": None}],
    "usage": None,
}
ERROR: dict[str, Any] = {"error": {"message": "m", "type": "t", "param": None, "code": None}}


def test_what_may_be_null_may_be_null() -> None:
    """The document's `nullable` is honoured: of an enum, an object and a reference."""
    validate("CreateChatCompletionStreamResponse", CHUNK)


@pytest.mark.parametrize(
    ("name", "body", "fault"),
    [
        ("CreateChatCompletionStreamResponse", CHUNK | {"extra": 1}, "'extra' was unexpected"),
        ("CreateChatCompletionStreamResponse", CHUNK | {"created": "1"}, r"\$.created"),
        ("ErrorResponse", {"error": {**ERROR["error"], "code": 400}}, r"\$.error.code"),
        ("ResponseStreamEvent", {"type": "response.created"}, "'response' is a required"),
        ("ResponseStreamEvent", {"type": "made.up"}, "no alternative has the type 'made.up'"),
    ],
)
def test_what_is_not_published_is_a_fault(name: str, body: object, fault: str) -> None:
    """An unknown key, a wrong type, a missing key and an unknown kind of event are told."""
    with pytest.raises(AssertionError, match=fault):
        validate(name, body)


def test_extension_is_allowed_where_it_belongs() -> None:
    """A key of ours is allowed in the object that we document it for, and in no other."""
    delta = {"index": 0, "delta": {"reasoning_content": "a"}, "finish_reason": None}
    validate("CreateChatCompletionStreamResponse", CHUNK | {"choices": [delta]})
    with pytest.raises(AssertionError, match="'reasoning_content' was unexpected"):
        validate("CreateChatCompletionStreamResponse", CHUNK | {"reasoning_content": "a"})


async def _faults(path: str, response: Response, method: str = "POST") -> list[str]:
    faults: list[str] = []
    scope: Scope = {"type": "http", "method": method, "path": path}

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        del message

    await SchemaCheck(response, faults)(scope, receive, send)
    return faults


@pytest.mark.parametrize(
    ("path", "response"),
    [
        ("/v1/models", JSONResponse({"object": "list", "data": []})),
        ("/v1/chat/completions", JSONResponse(ERROR, status_code=400)),
        ("/tokenize", JSONResponse({"tokens": []})),  # nothing is published
    ],
)
async def test_published_answers_pass(path: str, response: Response) -> None:
    """Bodies, errors, and what is not OpenAI's."""
    assert await _faults(path, response) == []


async def test_each_event_of_a_stream_is_checked() -> None:
    """Of a stream's events, the one that is not as published is the fault."""
    events = ['{"error":{"message":"m"}}', "[DONE]"]
    body = "".join(f"data: {event}\n\n" for event in events)
    response = PlainTextResponse(body, media_type="text/event-stream")
    (fault,) = await _faults("/v1/chat/completions", response)
    assert fault.startswith("/v1/chat/completions: ErrorResponse at $.error")


async def test_body_that_is_no_json_is_a_fault() -> None:
    """An error in plain text is told, too; the answer to a preflight is nobody's body."""
    response = PlainTextResponse("Internal Server Error", status_code=500)
    assert len(await _faults("/v1/models", response, "GET")) == 1
    assert await _faults("/v1/models", response, "OPTIONS") == []
