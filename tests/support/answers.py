"""Answers of a head by path: in one piece, or streamed and put together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from meshnet.model.fake_stage import next_token
from tests.support.mesh import VOCAB_SIZE
from tests.support.streams import DONE

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def answer(client: httpx.AsyncClient, path: str, **body: object) -> Any:  # noqa: ANN401  # JSON
    """The body of an answer in one piece."""
    response = await client.post(path, json=body)
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code}: {response.text}")
    return response.json()


async def stream(client: httpx.AsyncClient, path: str, **body: object) -> list[Any]:
    """The bodies of all chunks of a stream, which ends as it should."""
    *events, done = await raw_stream(client, path, **body)
    if done != DONE:
        raise AssertionError(f"the stream ends with {done}")
    return [json.loads(event) for event in events]


async def raw_stream(client: httpx.AsyncClient, path: str, **body: object) -> list[str]:
    """The data of all events of a stream."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        text = (await response.aread()).decode()
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code}: {text}")
    lines = text.splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


async def refusal(
    client: httpx.AsyncClient, path: str, **body: object
) -> tuple[int, dict[str, str | None]]:
    """Status and error of an answer that is one."""
    response = await client.post(path, json=body)
    return response.status_code, response.json()["error"]


def texts_of(chunks: Sequence[Any]) -> list[str]:
    """The text of each choice of a streamed answer."""
    texts: dict[int, str] = {}
    for part in parts_of(chunks):
        delta: dict[str, Any] = part.get("delta", {"content": part.get("text")})
        texts[part["index"]] = texts.get(part["index"], "") + (delta.get("content") or "")
    return [texts[index] for index in sorted(texts)]


def finishes_of(chunks: Sequence[Any]) -> list[tuple[int, str]]:
    """Every choice's index and finish reason, as they come."""
    parts = parts_of(chunks)
    return [(part["index"], part["finish_reason"]) for part in parts if part["finish_reason"]]


def parts_of(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """What all chunks tell of choices."""
    return [part for chunk in chunks for part in chunk["choices"]]


def fake_ids(prompt_ids: Sequence[int], n_tokens: int) -> list[int]:
    """The tokens that the fake model answers with."""
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        ids.append(next_token(ids, VOCAB_SIZE))
    return ids[len(prompt_ids) :]
