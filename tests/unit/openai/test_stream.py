from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from meshnet.errors import HopUnreachable, MeshError, QueueFull
from meshnet.generation import TokenEvent
from meshnet.openai.bodies import Completion
from meshnet.openai.stream import DONE, collect, sse_chunks

COMPLETION = Completion(id="chatcmpl-1", created=5, model="m", system_fingerprint="fp_1")
HELLO = [
    TokenEvent("Hel", 10),
    TokenEvent("", 11),
    TokenEvent("lo 🌶\u2028", 12),
    TokenEvent("", 2, "stop"),
]


class Generation:
    """A generation of given events, which knows whether it was closed."""

    def __init__(self, events: Sequence[TokenEvent | Exception]) -> None:
        self._events = events
        self.closed = False

    async def run(self) -> AsyncGenerator[TokenEvent]:
        try:
            for event in self._events:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.closed = True


def stream(generation: Generation, *, include_usage: bool = False) -> AsyncGenerator[str]:
    return sse_chunks(
        generation.run(),
        COMPLETION,
        prompt_tokens=7,
        include_usage=include_usage,
        request_id="req_1",
    )


async def chunks(
    events: Sequence[TokenEvent | Exception], *, include_usage: bool = False
) -> list[str]:
    return [data async for data in stream(Generation(events), include_usage=include_usage)]


def choices(data: Sequence[str]) -> list[tuple[dict[str, str], str | None]]:
    parsed = [json.loads(item)["choices"][0] for item in data]
    return [(choice["delta"], choice["finish_reason"]) for choice in parsed]


async def test_a_stream_is_role_text_reason_done() -> None:
    """The order is the role, each piece of text, one closing chunk, and the end mark."""
    *data, done = await chunks(HELLO)

    assert choices(data) == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo 🌶\u2028"}, None),
        ({}, "stop"),
    ]
    assert done == DONE


async def test_every_chunk_carries_the_same_identity() -> None:
    """Id, object, created, model and fingerprint are the same in all chunks, usage's too."""
    *data, _ = await chunks(HELLO, include_usage=True)

    for item in map(json.loads, data):
        assert (item["id"], item["created"], item["model"]) == ("chatcmpl-1", 5, "m")
        assert item["object"] == "chat.completion.chunk"
        assert item["system_fingerprint"] == "fp_1"


async def test_every_choice_has_the_required_keys() -> None:
    """A chunk's choice has index, delta, finish_reason and logprobs, null where empty."""
    *data, _ = await chunks(HELLO)

    for item in map(json.loads, data):
        assert item["choices"][0].keys() == {"index", "delta", "finish_reason", "logprobs"}
        assert item["choices"][0]["index"] == 0
        assert item["choices"][0]["logprobs"] is None


async def test_the_official_client_reads_every_chunk() -> None:
    """Each chunk is valid for openai-python's own model of it."""
    *data, _ = await chunks(HELLO, include_usage=True)

    for item in data:
        ChatCompletionChunk.model_validate_json(item, strict=True)


async def test_usage_is_one_last_chunk_when_asked_for() -> None:
    """Asked for, usage is null in all chunks but the last, which has no choices."""
    *data, last, _ = await chunks(HELLO, include_usage=True)

    assert [json.loads(item)["usage"] for item in data] == [None] * 4
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
    }


async def test_usage_is_not_sent_unasked() -> None:
    """Unasked, no chunk has usage and each has a choice."""
    *data, _ = await chunks(HELLO)

    assert all("usage" not in json.loads(item) for item in data)
    assert all(json.loads(item)["choices"] for item in data)


async def test_no_data_holds_a_line_end() -> None:
    """No event's data can be cut by a client that splits lines as Python does."""
    assert all(len(data.splitlines()) == 1 for data in await chunks(HELLO))


async def test_text_of_the_last_event_comes_before_the_reason() -> None:
    """Text that arrives with the finish reason has a chunk of its own."""
    *data, _ = await chunks([TokenEvent("a", 10), TokenEvent("b", 11, "length")])

    assert choices(data)[-2:] == [({"content": "b"}, None), ({}, "length")]


async def test_an_error_before_the_first_event_is_raised() -> None:
    """While nothing is sent an error can still have its own status: it is raised."""
    generation = Generation([QueueFull("too many")])
    with pytest.raises(QueueFull):
        await anext(stream(generation))

    assert generation.closed


async def test_nothing_is_sent_before_the_first_event() -> None:
    """The role comes with the first token event, not before it."""
    generation = Generation(HELLO)
    data = stream(generation)

    assert choices([await anext(data)]) == [({"role": "assistant", "content": ""}, None)]
    await data.aclose()


async def test_an_error_in_the_stream_is_an_event_and_no_reason() -> None:
    """A lost shard is an error event and the end mark; no chunk has a finish reason."""
    *data, error, done = await chunks([*HELLO[:3], HopUnreachable("shard 2 is gone")])

    assert done == DONE
    assert all(reason is None for _, reason in choices(data))
    assert json.loads(error) == {
        "error": {
            "message": "shard 2 is gone",
            "type": "server_error",
            "param": None,
            "code": "shard_unavailable",
        }
    }


async def test_a_fault_of_ours_is_told_and_then_raised() -> None:
    """A bug is told to the client without internals, and then goes on to the log."""
    data = stream(Generation([*HELLO[:1], ZeroDivisionError("secret")]))
    *_, error, done = [await anext(data) for _ in range(4)]

    assert json.loads(error)["error"]["message"] == "Internal error; the request's id is req_1"
    assert done == DONE
    with pytest.raises(ZeroDivisionError):
        await anext(data)


async def test_a_generation_that_just_ends_is_an_error() -> None:
    """Events that end without a finish reason are an error, never a quiet success."""
    *_, error, done = await chunks(HELLO[:3])

    assert json.loads(error)["error"]["type"] == "server_error"
    assert done == DONE
    with pytest.raises(MeshError, match="without a finish reason"):
        await collect(Generation(HELLO[:3]).run(), COMPLETION, prompt_tokens=7)


@pytest.mark.parametrize("n_read", [1, 2])
async def test_closing_the_stream_closes_the_generation(n_read: int) -> None:
    """A client that leaves early ends the generation, so that every hop is told."""
    generation = Generation(HELLO)
    data = stream(generation)
    for _ in range(n_read):
        await anext(data)
    await data.aclose()

    assert generation.closed


async def test_one_body_is_the_same_answer() -> None:
    """The body holds the joined text, the reason and the counts, with all required keys."""
    body = await collect(Generation(HELLO).run(), COMPLETION, prompt_tokens=7)

    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello 🌶\u2028", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11},
    }
    ChatCompletion.model_validate(body, strict=True)


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
async def test_at_the_limit_the_count_is_the_limit(n_tokens: int) -> None:
    """Every generated token is counted, with and without text, in a body and in a stream."""
    events = [*(TokenEvent("", n) for n in range(n_tokens - 1)), TokenEvent("a", 9, "length")]
    body = await collect(Generation(events).run(), COMPLETION, prompt_tokens=7)
    *_, last, _ = await chunks(events, include_usage=True)

    assert body["usage"]["completion_tokens"] == n_tokens
    assert json.loads(last)["usage"] == body["usage"]


async def test_tokens_of_a_tail_that_knows_text_only_are_counted() -> None:
    """Events without ids are tokens like others, the one that ends the answer too."""
    events = [TokenEvent("a"), TokenEvent("b"), TokenEvent("", None, "stop")]
    body = await collect(Generation(events).run(), COMPLETION, prompt_tokens=7)

    assert body["usage"]["completion_tokens"] == 3


async def test_an_error_leaves_no_body() -> None:
    """A generation that fails half-way is its error, and closed."""
    generation = Generation([*HELLO[:2], HopUnreachable("gone")])
    with pytest.raises(HopUnreachable):
        await collect(generation.run(), COMPLETION, prompt_tokens=7)

    assert generation.closed
