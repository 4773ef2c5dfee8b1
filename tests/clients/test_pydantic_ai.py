"""pydantic-ai's Agent over the chat endpoint, against the real model."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.answers import ASK_FRUIT, ASK_WEATHER, WEATHER, Fruit, Place
from tests.clients.mesh import PROMPT, Greedy, Mesh


def _agent(mesh: Mesh, output_type: Any = str, **settings: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=mesh.base_url, api_key="any")
    model = OpenAIChatModel(mesh.model, provider=provider)
    return Agent(
        model, output_type=output_type, model_settings={"temperature": 0, **settings}, retries=0
    )


async def test_run(mesh: Mesh, greedy: Greedy) -> None:
    """`run` gives the text of a plain request, and counts its tokens."""
    result = await _agent(mesh).run(PROMPT)
    assert result.output == greedy.text
    assert result.usage.output_tokens == greedy.n_tokens


async def test_stream(mesh: Mesh, greedy: Greedy) -> None:
    """The deltas of `run_stream` join to the same text."""
    async with _agent(mesh).run_stream(PROMPT) as result:
        deltas = [delta async for delta in result.stream_text(delta=True)]
    assert "".join(deltas) == greedy.text
    assert len(deltas) > 1


async def test_output_by_tool_call(mesh: Mesh) -> None:
    """An output type is asked for as a required tool call, and comes as an instance."""
    result = await _agent(mesh, Fruit).run(ASK_FRUIT)
    assert (result.output.name, result.output.count) == ("plum", 3)


async def test_output_by_schema(mesh: Mesh) -> None:
    """An output type can be asked for as a response format, too."""
    result = await _agent(mesh, NativeOutput(Fruit)).run(ASK_FRUIT)
    assert (result.output.name, result.output.count) == ("plum", 3)


async def test_streamed_output(mesh: Mesh) -> None:
    """A streamed tool call grows to the same instance."""
    async with _agent(mesh, Fruit).run_stream(ASK_FRUIT) as result:
        fruit = await result.get_output()
    assert (fruit.name, fruit.count) == ("plum", 3)


async def test_output_function(mesh: Mesh) -> None:
    """An output function is called with the argument that its schema forces."""

    def get_weather(place: Place) -> str:
        """The weather in a city."""
        assert place.city == "Paris"
        return WEATHER

    result = await _agent(mesh, get_weather).run(ASK_WEATHER)
    assert result.output == WEATHER


async def test_broken_stream_raises(broken: Mesh) -> None:
    """A stream that fails half-way raises after its first text."""
    seen: list[str] = []
    async with _agent(broken).run_stream(PROMPT) as result:
        with pytest.raises(ModelAPIError):
            await _read(result, seen)
    assert "".join(seen)


async def _read(result: Any, seen: list[str]) -> None:
    async for delta in result.stream_text(delta=True, debounce_by=None):
        seen.append(delta)  # noqa: PERF401  # what came before the error counts
