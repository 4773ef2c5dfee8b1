"""The `openai` package, both its clients, against the real model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.answers import ASK_FRUIT, ASK_WEATHER, WEATHER_TOOL, Fruit
from tests.clients.mesh import PROMPT, Greedy, Mesh

MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0}
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(mesh: Mesh) -> OpenAI:
    return OpenAI(base_url=mesh.base_url, api_key="any", max_retries=0)


def test_chat(client: OpenAI, mesh: Mesh, greedy: Greedy) -> None:
    """`create` gives the text of a plain request, and counts its tokens."""
    answer = client.chat.completions.create(model=mesh.model, messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == greedy.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == greedy.n_tokens


def test_stream(client: OpenAI, mesh: Mesh, greedy: Greedy) -> None:
    """The deltas of a stream join to the same text."""
    chunks = client.chat.completions.create(
        model=mesh.model, messages=MESSAGES, stream=True, **GREEDY
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy.text


async def test_async_client(mesh: Mesh, greedy: Greedy) -> None:
    """The asynchronous client gets the same, in one piece and streamed."""
    async with AsyncOpenAI(base_url=mesh.base_url, api_key="any", max_retries=0) as client:
        ask: Any = client.chat.completions.create
        answer = await ask(model=mesh.model, messages=MESSAGES, **GREEDY)
        stream = await ask(model=mesh.model, messages=MESSAGES, stream=True, **GREEDY)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert answer.choices[0].message.content == text == greedy.text


def test_stream_helper_with_two_choices(client: OpenAI, mesh: Mesh, greedy: Greedy) -> None:
    """The stream helper puts several choices and the counts together."""
    with client.chat.completions.stream(
        model=mesh.model, messages=MESSAGES, n=2, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == [greedy.text] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * greedy.n_tokens


def test_parsed_answer(client: OpenAI, mesh: Mesh) -> None:
    """`parse` sends a pydantic model as a strict schema and gets an instance."""
    answer = client.chat.completions.parse(
        model=mesh.model,
        messages=[{"role": "user", "content": ASK_FRUIT}],
        response_format=Fruit,
        temperature=0,
    )
    fruit = answer.choices[0].message.parsed
    assert fruit is not None
    assert (fruit.name, fruit.count) == ("plum", 3)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_tool_call(client: OpenAI, mesh: Mesh, choice: Any) -> None:
    """A required and a named call come with the arguments that the schema forces."""
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=[{"role": "user", "content": ASK_WEATHER}],
        tools=[WEATHER_TOOL],
        tool_choice=choice,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_tool_call(client: OpenAI, mesh: Mesh) -> None:
    """The stream helper puts a call together from its pieces."""
    with client.chat.completions.stream(
        model=mesh.model,
        messages=[{"role": "user", "content": ASK_WEATHER}],
        tools=[WEATHER_TOOL],
        tool_choice="required",
        temperature=0,
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert choice.finish_reason == "tool_calls"


def test_tool_result_goes_back(client: OpenAI, mesh: Mesh) -> None:
    """A conversation with a call and its result is taken, and gets an answer."""
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    answer = client.chat.completions.create(
        model=mesh.model,
        messages=[
            {"role": "user", "content": ASK_WEATHER},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        tools=[WEATHER_TOOL],
        tool_choice="none",
        **SHORT,
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_completions(client: OpenAI, mesh: Mesh) -> None:
    """A completion of two prompts has two choices, each the one of its prompt alone."""
    prompts = ["One, two, three,", "The capital of France is"]
    alone = [
        client.completions.create(model=mesh.model, prompt=prompt, **SHORT).choices[0].text
        for prompt in prompts
    ]
    both = client.completions.create(model=mesh.model, prompt=prompts, **SHORT)
    assert [choice.text for choice in both.choices] == alone
    assert [choice.index for choice in both.choices] == [0, 1]


def test_echo_with_logprobs(client: OpenAI, mesh: Mesh) -> None:
    """An echoed prompt comes back with a score for each of its tokens but the first."""
    answer = client.completions.create(
        model=mesh.model, prompt="One, two,", echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("One, two,")
    assert "".join(scores.tokens) == answer.choices[0].text
    assert scores.token_logprobs[0] is None
    assert all(score < 0 for score in scores.token_logprobs[1:])


def test_streamed_completion(client: OpenAI, mesh: Mesh) -> None:
    """The pieces of a streamed completion join to the text of one that is not streamed."""
    ask: dict[str, Any] = {"model": mesh.model, "prompt": "One, two, three,", **SHORT}
    whole = client.completions.create(**ask).choices[0].text
    chunks = client.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_responses(client: OpenAI, mesh: Mesh, greedy: Greedy) -> None:
    """The newer endpoint gives the chat endpoint's text."""
    answer = client.responses.create(model=mesh.model, input=PROMPT, temperature=0)
    assert answer.output_text == greedy.text
    assert answer.status == "completed"
    assert answer.usage.output_tokens == greedy.n_tokens


def test_cut_answers(client: OpenAI, mesh: Mesh) -> None:
    """Either endpoint says that its answer was cut, and is as long as it may be."""
    answer = client.chat.completions.create(
        model=mesh.model, messages=MESSAGES, max_completion_tokens=3
    )
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)
    response = client.responses.create(model=mesh.model, input=PROMPT, max_output_tokens=3)
    assert (response.status, response.usage.output_tokens) == ("incomplete", 3)
    assert response.incomplete_details.reason == "max_output_tokens"


def test_streamed_response(client: OpenAI, mesh: Mesh, greedy: Greedy) -> None:
    """Its stream helper puts the same text together, event by event."""
    with client.responses.stream(model=mesh.model, input=PROMPT, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert "".join(deltas) == answer.output_text == greedy.text


def test_parsed_response(client: OpenAI, mesh: Mesh) -> None:
    """`responses.parse` gets an instance of a pydantic model."""
    answer = client.responses.parse(
        model=mesh.model, input=ASK_FRUIT, text_format=Fruit, temperature=0
    )
    assert answer.output_parsed is not None
    assert answer.output_parsed.name == "plum"


def test_models(client: OpenAI, mesh: Mesh) -> None:
    """The model is listed, and can be retrieved by its id."""
    assert [model.id for model in client.models.list()] == [mesh.model]
    assert client.models.retrieve(mesh.model).id == mesh.model


def test_unknown_model(client: OpenAI) -> None:
    """An unknown model is the client's NotFoundError, with the code and the request's id."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


def test_length_error_of_parse(client: OpenAI, mesh: Mesh) -> None:
    """JSON cut by `max_tokens` is the client's own error, never half an object."""
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=mesh.model, messages=MESSAGES, response_format=Fruit, max_tokens=2
        )


def test_broken_stream_raises(broken: Mesh) -> None:
    """A stream that fails half-way raises after its first text."""
    client = OpenAI(base_url=broken.base_url, api_key="any", max_retries=0)
    stream = client.chat.completions.create(
        model=broken.model, messages=MESSAGES, stream=True, max_tokens=50
    )
    seen: list[str] = []
    with pytest.raises(openai.APIError):
        seen.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(seen)
