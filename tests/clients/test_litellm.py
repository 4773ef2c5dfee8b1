"""litellm by its two routes to such servers, against the real model."""

from __future__ import annotations

import importlib
import json
from typing import Any

import openai
import pytest

from tests.clients.answers import ASK_FRUIT, ASK_WEATHER, WEATHER_TOOL, Fruit
from tests.clients.mesh import PROMPT, Greedy, Mesh


@pytest.fixture(scope="module")
def litellm() -> Any:
    """The package; it fetches a price list when it is imported, unless it is told not to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        return importlib.import_module("litellm")


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(request: pytest.FixtureRequest, litellm: Any) -> Any:
    """`completion` by one of the routes."""

    def completion(mesh: Mesh, content: str, **parameters: Any) -> Any:
        return litellm.completion(
            model=f"{request.param}/{mesh.model}",
            api_base=mesh.base_url,
            api_key="any",
            num_retries=0,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            **parameters,
        )

    return completion


def test_chat(ask: Any, mesh: Mesh, greedy: Greedy) -> None:
    """`completion` gives the text of a plain request, and counts its tokens."""
    answer = ask(mesh, PROMPT)
    assert answer.choices[0].message.content == greedy.text
    assert answer.usage.completion_tokens == greedy.n_tokens


def test_stream(ask: Any, mesh: Mesh, greedy: Greedy) -> None:
    """The deltas of a stream join to the same text."""
    chunks = ask(mesh, PROMPT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy.text


async def test_async_client(litellm: Any, mesh: Mesh, greedy: Greedy) -> None:
    """`acompletion` gives the same text."""
    answer = await litellm.acompletion(
        model=f"openai/{mesh.model}",
        api_base=mesh.base_url,
        api_key="any",
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0,
    )
    assert answer.choices[0].message.content == greedy.text


def test_tool_call(ask: Any, mesh: Mesh) -> None:
    """A required tool is called with the argument that its schema forces."""
    answer = ask(
        mesh,
        ASK_WEATHER,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    # One route leaves additionalProperties out, and the model makes some up.
    assert json.loads(call.function.arguments)["city"] == "Paris"
    assert answer.choices[0].finish_reason == "tool_calls"


def test_structured_output(ask: Any, mesh: Mesh) -> None:
    """A pydantic model as response format gives JSON of it."""
    answer = ask(mesh, ASK_FRUIT, response_format=Fruit)
    assert Fruit.model_validate_json(answer.choices[0].message.content).count == 3


def test_text_completion(litellm: Any, mesh: Mesh) -> None:
    """`text_completion` gives the text of a plain request to that endpoint."""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{mesh.model}",
        api_base=mesh.base_url,
        api_key="any",
        prompt=PROMPT,
        temperature=0,
        max_tokens=12,
    )
    plain = mesh.post("completions", prompt=PROMPT, temperature=0, max_tokens=12)
    assert answer.choices[0].text == plain["choices"][0]["text"]


def test_too_long_prompt(ask: Any, litellm: Any, mesh: Mesh) -> None:
    """A prompt longer than the context is litellm's own kind of error."""
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(mesh, "word " * 9000)


def test_unknown_model(ask: Any, litellm: Any, mesh: Mesh) -> None:
    """An unknown model is litellm's NotFoundError."""
    with pytest.raises(litellm.NotFoundError):
        ask(Mesh(mesh.url, "nope"), PROMPT)


def test_broken_stream_raises(ask: Any, broken: Mesh) -> None:
    """A stream that fails half-way raises after its first text."""
    seen: list[str] = []
    with pytest.raises(openai.APIError):
        seen.extend(
            chunk.choices[0].delta.content or "" for chunk in ask(broken, PROMPT, stream=True)
        )
    assert "".join(seen)
