"""langchain-openai's ChatOpenAI against the real model."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

from tests.clients.answers import ASK_FRUIT, ASK_WEATHER, WEATHER_TOOL, Fruit
from tests.clients.mesh import PROMPT, Greedy, Mesh


def _chat(mesh: Mesh, **parameters: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=mesh.model,
        base_url=mesh.base_url,
        api_key="any",
        temperature=0,
        max_retries=0,
        **parameters,
    )


def test_chat(mesh: Mesh, greedy: Greedy) -> None:
    """`invoke` gives the text of a plain request, and counts its tokens."""
    answer = _chat(mesh).invoke(PROMPT)
    assert answer.content == greedy.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == greedy.n_tokens


def test_stream(mesh: Mesh, greedy: Greedy) -> None:
    """A stream joins to the same text and carries the counts."""
    chunks = list(_chat(mesh, stream_usage=True).stream(PROMPT))
    assert "".join(chunk.content for chunk in chunks) == greedy.text
    counts = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [count["output_tokens"] for count in counts] == [greedy.n_tokens]


async def test_async_stream(mesh: Mesh, greedy: Greedy) -> None:
    """The asynchronous stream gives the same text."""
    stream = _chat(mesh).astream(PROMPT)
    assert "".join([chunk.content async for chunk in stream]) == greedy.text


def test_bound_tool(mesh: Mesh) -> None:
    """A bound tool that is chosen by name is called with the forced argument."""
    bound = _chat(mesh).bind_tools([WEATHER_TOOL], tool_choice="get_weather")
    (call,) = bound.invoke(ASK_WEATHER).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


def test_streamed_tool_call(mesh: Mesh) -> None:
    """The chunks of a streamed call add up to one call."""
    bound = _chat(mesh).bind_tools([WEATHER_TOOL], tool_choice="any")
    first, *rest = bound.stream(ASK_WEATHER)
    for chunk in rest:
        first += chunk
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(mesh: Mesh, method: Literal["json_schema", "function_calling"]) -> None:
    """`with_structured_output` gives an instance, by response format and by tool call."""
    fruit = _chat(mesh).with_structured_output(Fruit, method=method).invoke(ASK_FRUIT)
    assert isinstance(fruit, Fruit)
    assert fruit.size in ("small", "large")


def test_too_long_prompt(mesh: Mesh) -> None:
    """A prompt longer than the context is LangChain's own kind of error, not just any 400."""
    with pytest.raises(ContextOverflowError):
        _chat(mesh).invoke("word " * 9000)


def test_broken_stream_raises(broken: Mesh) -> None:
    """A stream that fails half-way raises after its first text."""
    seen: list[Any] = []
    with pytest.raises(openai.APIError):
        seen.extend(chunk.content for chunk in _chat(broken).stream(PROMPT))
    assert "".join(seen)
