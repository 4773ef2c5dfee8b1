"""Streamed answers, read event by event; and waiting for what must come to be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import httpx

from tests.support.mesh import body_of

DONE = "[DONE]"


@asynccontextmanager
async def open_stream(
    client: httpx.AsyncClient, content: str, **parameters: object
) -> AsyncGenerator[AsyncGenerator[str]]:
    """A streamed request: the data of each event, as it comes."""
    body = body_of(content, stream=True, **parameters)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise AssertionError(f"{response.status_code}: {response.text}")
        yield _data(response)


async def _data(response: httpx.Response) -> AsyncGenerator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def read_stream(client: httpx.AsyncClient, content: str, **parameters: object) -> list[str]:
    """The data of every event of one request."""
    async with open_stream(client, content, **parameters) as events:
        return [event async for event in events]


def delta_of(event: str) -> str:
    """The text that one event adds."""
    chunk: dict[str, Any] = {} if event == DONE else json.loads(event)
    choices: list[dict[str, Any]] = chunk.get("choices", [])
    return "".join(choice["delta"].get("content", "") for choice in choices)


def text_of(events: Iterable[str]) -> str:
    """The text of a whole stream."""
    return "".join(map(delta_of, events))


async def eventually(is_so: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Wait until it is so. Returns the seconds it took."""
    started_at = perf_counter()
    while not await is_so():
        waited_s = perf_counter() - started_at
        if waited_s > within_s:
            raise AssertionError(f"not so after {waited_s:.1f} s")
        await asyncio.sleep(0.01)
    return perf_counter() - started_at
