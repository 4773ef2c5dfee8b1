"""openai-agents over both endpoints, against the real model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.answers import ASK_FRUIT, ASK_WEATHER, WEATHER, Fruit
from tests.clients.mesh import PROMPT, Greedy, Mesh

set_tracing_disabled(disabled=True)

FREE = ModelSettings(temperature=0)
FORCED = ModelSettings(temperature=0, tool_choice="required")


def _model(kind: str, mesh: Mesh, client: AsyncOpenAI) -> Model:
    if kind == "chat":
        return OpenAIChatCompletionsModel(mesh.model, openai_client=client)
    return OpenAIResponsesModel(mesh.model, openai_client=client)


@pytest_asyncio.fixture(params=["chat", "responses"])
async def model(request: pytest.FixtureRequest, mesh: Mesh) -> AsyncGenerator[Model]:
    """The same model behind either endpoint."""
    async with AsyncOpenAI(base_url=mesh.base_url, api_key="any", max_retries=0) as client:
        yield _model(request.param, mesh, client)


def _agent(model: Model, settings: ModelSettings, **rest: Any) -> Agent:
    return Agent(name="test", model=model, model_settings=settings, **rest)


async def test_run(model: Model, greedy: Greedy) -> None:
    """`run` gives the text of a plain request."""
    result = await Runner.run(_agent(model, FREE), PROMPT)
    assert result.final_output == greedy.text


async def test_stream(model: Model, greedy: Greedy) -> None:
    """The deltas of `run_streamed` join to the same text."""
    result = Runner.run_streamed(_agent(model, FREE), PROMPT)
    text = "".join([_delta_of(event) async for event in result.stream_events()])
    assert text == result.final_output == greedy.text


def _delta_of(event: Any) -> str:
    is_text = event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    return event.data.delta if is_text else ""


async def test_tool(model: Model) -> None:
    """A required tool is run with the argument that its schema forces."""

    @function_tool
    def get_weather(city: Literal["Paris"]) -> str:
        """The weather in a city."""
        assert city == "Paris"
        return WEATHER

    agent = _agent(model, FORCED, tools=[get_weather], tool_use_behavior="stop_on_first_tool")
    result = await Runner.run(agent, ASK_WEATHER)
    assert result.final_output == WEATHER


async def test_output_type(model: Model) -> None:
    """An output type comes as an instance."""
    result = await Runner.run(_agent(model, FREE, output_type=Fruit), ASK_FRUIT)
    assert (result.final_output.name, result.final_output.count) == ("plum", 3)


@pytest.mark.parametrize("kind", ["chat", "responses"])
async def test_broken_stream_raises(broken: Mesh, kind: str) -> None:
    """A stream that fails half-way raises after its first text."""
    seen: list[str] = []
    async with AsyncOpenAI(base_url=broken.base_url, api_key="any", max_retries=0) as client:
        result = Runner.run_streamed(_agent(_model(kind, broken, client), ModelSettings()), PROMPT)
        with pytest.raises(openai.APIError):
            await _read(result, seen)
    assert "".join(seen)


async def _read(result: Any, seen: list[str]) -> None:
    async for event in result.stream_events():
        seen.append(_delta_of(event))  # noqa: PERF401  # what came before the error counts
