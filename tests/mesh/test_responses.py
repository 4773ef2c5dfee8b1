"""`POST /v1/responses` over a served mesh, by the official client and by the bytes it reads."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, pydantic_function_tool
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, TypeAdapter

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.topology import LayerSpan
from tests.support.fake_mesh import BreakingStage, byte_tokenizer
from tests.support.mesh import Mesh, fake_stages, fake_text, number_tokenizer, serve_mesh, spell

# One loop and one mesh for the whole file.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
N_TOKENS = 8
N_POSITIONS = 4096  # tools are told of in many bytes
TEXT = fake_text(PROMPT, N_TOKENS)
TWO = fake_text(PROMPT, 2)
THIRD = int(fake_text(PROMPT, 3).split("<")[-1][:-1])
ASK: dict[str, Any] = {
    "model": "fake",
    "input": spell(PROMPT),
    "temperature": 0,
    "max_output_tokens": N_TOKENS,
}
OFFICIAL = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)


class Light(BaseModel):
    """What an answer, or a call's arguments, can be held to."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    is_on: bool


LIGHT_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "set_light",
    "parameters": Light.model_json_schema(),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncGenerator[Mesh]:
    async with serve_mesh(fake_stages((0, 2), (2, 4))) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncGenerator[AsyncOpenAI]:
    async with _client_of(mesh) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ending() -> AsyncGenerator[AsyncOpenAI]:
    """A client of a mesh whose answer ends by itself after two tokens."""
    tokenizer = number_tokenizer(end_token_ids=frozenset({THIRD}))
    async with serve_mesh(fake_stages((0, 4)), tokenizer) as served, _client_of(served) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def writing() -> AsyncGenerator[AsyncOpenAI]:
    """A client of a mesh whose model writes bytes, so that it can write what it must."""
    async with _serve_bytes(FakeStage) as served, _client_of(served) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def breaking() -> AsyncGenerator[Mesh]:
    """A mesh that fails in the middle of each answer."""
    async with _serve_bytes(BreakingStage) as served:
        yield served


@asynccontextmanager
async def _serve_bytes(kind: type[FakeStage]) -> AsyncGenerator[Mesh]:
    tokenizer = byte_tokenizer(N_POSITIONS)
    facts = fake_facts(LayerSpan(0, 4), 4, tokenizer.vocab_size)
    stage = kind(replace(facts, max_positions=N_POSITIONS))
    async with serve_mesh([stage], tokenizer) as served:
        yield served


def _client_of(mesh: Mesh) -> AsyncOpenAI:
    # Plain: a proxy of the machine's environment is none of the test's.
    http = DefaultAsyncHttpxClient(trust_env=False)
    return AsyncOpenAI(
        base_url=f"{mesh.head.url}/v1", api_key="any", max_retries=0, http_client=http
    )


def _responses(client: AsyncOpenAI) -> Any:  # noqa: ANN401  # overloads want each parameter's type
    return client.responses


async def _create(client: AsyncOpenAI, **parameters: object) -> Response:
    return await _responses(client).create(**(ASK | parameters))


async def _stream(client: AsyncOpenAI, **parameters: object) -> AsyncGenerator[Any]:
    async for event in await _responses(client).create(**(ASK | parameters), stream=True):
        yield event


async def _events(client: AsyncOpenAI, **parameters: object) -> list[Any]:
    return [event async for event in _stream(client, **parameters)]


def _call_of(response: Response) -> ResponseFunctionToolCall:
    [call] = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    return call


def _comparable(response: Response) -> dict[str, Any]:
    """What two answers to one request have in common: all but ids, times and what was cached."""
    body = cast("dict[str, Any]", response.to_dict())
    del body["usage"]["input_tokens_details"]
    for item in cast("list[dict[str, Any]]", body["output"]):
        del item["id"]
        item.pop("call_id", None)
    return {
        name: value
        for name, value in body.items()
        if name not in ("id", "created_at", "completed_at")
    }


async def test_an_answer_has_its_text_and_counts(client: AsyncOpenAI) -> None:
    """`create` gives the model's text, why it ended, and true counts."""
    response = await _create(client)

    Response.model_validate(response.to_dict())
    assert response.output_text == TEXT
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (4, 8)
    assert response.usage.total_tokens == 12


async def test_an_answer_that_ends_is_completed(ending: AsyncOpenAI) -> None:
    """An answer that the model ends is completed, and not before it was asked for."""
    response = await _create(ending)

    assert (response.status, response.output_text) == ("completed", TWO)
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at


@pytest.mark.parametrize("kind", ["message", "call", "logprobs"])
async def test_a_stream_ends_with_the_plain_answer(
    client: AsyncOpenAI, writing: AsyncOpenAI, kind: str
) -> None:
    """Each event is valid, and the last one holds what `create` answers, but for ids and times."""
    parameters: dict[str, Any] = {
        "message": {"metadata": {"a": "b"}, "instructions": spell([9])},
        "call": {"tools": [LIGHT_TOOL], "tool_choice": "required", "max_output_tokens": 200},
        "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    }[kind]
    used = writing if kind == "call" else client
    events = await _events(used, **parameters)

    for event in events:
        OFFICIAL.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert _comparable(events[-1].response) == _comparable(await _create(used, **parameters))


async def test_deltas_are_the_text(client: AsyncOpenAI) -> None:
    """The deltas of a stream join to the text, and there is one a token."""
    events = await _events(client)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]

    assert "".join(deltas) == TEXT
    assert len(deltas) == N_TOKENS


async def test_every_event_is_named_by_its_type(mesh: Mesh) -> None:
    """On the wire an event has a name, which is its type; there is no end mark."""
    async with mesh.client.stream("POST", "/v1/responses", json=ASK | {"stream": True}) as answer:
        text = "".join([part async for part in answer.aiter_text()])
    events = [block.split("\n") for block in text.strip().split("\n\n")]

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [name for name, _ in events] == [
        f"event: {json.loads(data.removeprefix('data: '))['type']}" for _, data in events
    ]
    assert events[-1][0] == "event: response.incomplete"


async def test_the_stream_helper_puts_the_response_together(ending: AsyncOpenAI) -> None:
    """`responses.stream` takes every event, and its final response is the answer."""
    async with _responses(ending).stream(**ASK) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()

    assert events[-1].type == "response.completed"
    assert response.output_text == TWO


async def test_a_conversation_goes_on_with_the_output(client: AsyncOpenAI) -> None:
    """A response's output items are input of the next request, after what was asked."""
    first = await _create(client)
    items = [{"role": "user", "content": spell(PROMPT)}, *(i.to_dict() for i in first.output)]
    following = await _create(client, input=[*items, {"role": "user", "content": spell([9])}])
    answer_ids = [int(word) for word in TEXT.strip("<>").split("><")]

    assert following.usage is not None
    assert following.usage.input_tokens == 4 + N_TOKENS + 1
    assert following.output_text == fake_text([*PROMPT, *answer_ids, 9], N_TOKENS)


async def test_instructions_come_first(client: AsyncOpenAI) -> None:
    """The instructions are the conversation's first message."""
    response = await _create(client, instructions=spell([9]))

    assert response.instructions == spell([9])
    assert response.output_text == fake_text([9, *PROMPT], N_TOKENS)


async def test_sampling_is_the_chat_endpoints(client: AsyncOpenAI) -> None:
    """An extension, such as a bias, works as it does for a chat."""
    chat = cast("Any", client.chat.completions)
    messages = [{"role": "user", "content": spell(PROMPT)}]
    extension = {"extra_body": {"logit_bias": {"7": 5}, "stop": ["<9>"]}}
    answer = await chat.create(
        model="fake", messages=messages, temperature=0, max_tokens=N_TOKENS, **extension
    )

    response = await _create(client, **extension)
    assert response.output_text == answer.choices[0].message.content != TEXT


async def test_scores_are_told_on_demand(client: AsyncOpenAI) -> None:
    """Asked for, each token of the text has its score and its alternatives."""
    parameters = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await _create(client, **parameters)
    [message] = cast("list[Any]", response.output)
    scores = message.content[0].logprobs

    assert "".join(score.token for score in scores) == TEXT
    assert all(score.logprob <= 0 for score in scores)
    assert all(len(score.top_logprobs) == 2 for score in scores)
    assert response.top_logprobs == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "set_light"}])
async def test_a_forced_call_is_made(writing: AsyncOpenAI, choice: object) -> None:
    """A call that must be made is the output, with arguments as its schema has them."""
    response = await _create(
        writing,
        tools=[LIGHT_TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    call = _call_of(response)

    assert (response.status, call.name, call.status) == ("completed", "set_light", "completed")
    Light.model_validate_json(call.arguments)
    assert call.call_id
    assert response.to_dict()["tool_choice"] == choice


async def test_a_calls_result_can_be_given_back(writing: AsyncOpenAI) -> None:
    """A call and its result, as openai's own loop sends them, are a conversation."""
    asked: dict[str, Any] = {"role": "user", "content": "Light?"}
    call = _call_of(
        await _create(
            writing,
            input=[asked],
            tools=[LIGHT_TOOL],
            tool_choice={"type": "function", "name": "set_light"},
            max_output_tokens=200,
        )
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    response = await _create(writing, input=[asked, call.to_dict(), result], tools=[LIGHT_TOOL])

    assert response.usage is not None
    assert response.usage.output_tokens == N_TOKENS


async def test_a_call_is_parsed_by_the_stream_helper(writing: AsyncOpenAI) -> None:
    """A pydantic model as a tool comes back as an instance."""
    function = cast("dict[str, Any]", pydantic_function_tool(Light, name="set_light"))["function"]
    tool = {"type": "function", **function}
    parameters: dict[str, Any] = {
        **ASK,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "set_light"},
        "max_output_tokens": 200,
    }
    async with _responses(writing).stream(**parameters) as stream:
        response = await stream.get_final_response()
    [call] = response.output

    assert Light.model_validate(call.parsed_arguments) == Light.model_validate_json(call.arguments)


async def test_an_answer_is_held_to_a_schema(writing: AsyncOpenAI) -> None:
    """`responses.parse` gets an instance of the pydantic model that it sent."""
    response = await _responses(writing).parse(
        **(ASK | {"max_output_tokens": 200}), text_format=Light
    )

    assert response.status == "completed"
    assert isinstance(response.output_parsed, Light)


async def test_a_failure_in_the_middle_raises(breaking: Mesh) -> None:
    """A stream that fails half-way is an exception of the client's, after what came before."""
    seen: list[str] = []
    async with _client_of(breaking) as client:
        with pytest.raises(openai.APIError) as caught:
            await _note_types(_stream(client), seen)

    assert "response.output_text.delta" in seen
    assert not {"response.completed", "response.incomplete"} & set(seen)
    assert caught.value.code == "server_error"


async def _note_types(events: AsyncGenerator[Any], seen: list[str]) -> None:
    async for event in events:
        seen.append(event.type)  # noqa: PERF401  # what came before an error counts


async def test_a_failed_stream_ends_with_the_failed_response(breaking: Mesh) -> None:
    """On the wire an error is followed by the response, failed, with what there was of it."""
    answer = await breaking.client.post("/v1/responses", json=ASK | {"stream": True})
    lines = [line for line in answer.text.split("\n") if line.startswith("data: ")]
    *_, error, failed = [json.loads(line.removeprefix("data: ")) for line in lines]

    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert error["message"] == error["error"]["message"] == failed["response"]["error"]["message"]
    assert answer.headers["x-request-id"] in error["message"]
    OFFICIAL.validate_python(error)
    OFFICIAL.validate_python(failed)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"extra_body": {"logit_bias": {"64": 1}}}, "logit_bias"),
    ],
)
async def test_a_refusal_names_its_parameter(
    client: AsyncOpenAI, parameters: dict[str, Any], param: str
) -> None:
    """What is refused is a BadRequestError that names this endpoint's parameter."""
    with pytest.raises(openai.BadRequestError) as caught:
        await _create(client, **parameters)

    assert caught.value.param == param


async def test_a_schema_that_cannot_be_enforced_is_refused(client: AsyncOpenAI) -> None:
    """A schema with a keyword that cannot be followed is refused by its place here."""
    schema = {"type": "json_schema", "name": "s", "schema": {"not": {"type": "string"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await _create(client, text={"format": schema})

    assert str(caught.value.param).startswith("text.format")
    assert "not" in caught.value.message


async def test_unknown_parameters_are_listed_in_a_header(mesh: Mesh) -> None:
    """A stray of some framework is accepted, and named in the answer's headers."""
    answer = await mesh.client.post("/v1/responses", json=ASK | {"invented": 1})

    assert answer.status_code == 200
    assert answer.headers["x-ignored-params"] == "invented"
