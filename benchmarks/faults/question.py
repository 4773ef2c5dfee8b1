"""The one request of every cell: asked of a head, in one piece or as a stream, within a limit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import httpx

from benchmarks.faults.matrix import N_TOKENS, Way

PROMPT: Final = "Explain in a few sentences why the sky is blue."
"""Its first 16 tokens, greedy, meet no end token."""
_PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class SeenError:
    """An error as the client got it.

    Attributes:
        status: Of the answer; None for an event in a stream that had begun.
        code: The error's; None where it has none, or where the connection broke.
        retry_after: The header.
        text: For people.
    """

    status: int | None
    code: str | None
    retry_after: str | None
    text: str


@dataclass
class Reply:
    """What came, and when, in seconds since the request."""

    text: str = ""
    finish_reason: str | None = None
    is_done: bool = False
    error: SeenError | None = None
    hung: bool = False
    asked_at: float = field(default_factory=perf_counter)
    event_s: list[float] = field(default_factory=list[float])
    total_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether it ended as a reply of so many tokens does."""
        return self.is_done and self.finish_reason == "length" and self.error is None


async def ask(head_url: str, way: Way, *, limit_s: float, n_tokens: int = N_TOKENS) -> Reply:
    """Ask; never longer than the limit, and no error is raised."""
    body = {
        "model": "",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": n_tokens,
        "stream": way == "stream",
    }
    reply = Reply()
    async with httpx.AsyncClient(base_url=head_url, trust_env=False, timeout=limit_s) as client:
        try:
            async with asyncio.timeout(limit_s):
                body["model"] = await _served_model(client)
                reply.asked_at = perf_counter()
                async with client.stream("POST", _PATH, json=body) as response:
                    await _read(response, reply)
        except (TimeoutError, httpx.TimeoutException):
            reply.hung = True
        except httpx.TransportError as error:
            reply.error = SeenError(None, None, None, repr(error))
    reply.total_s = perf_counter() - reply.asked_at
    return reply


async def _served_model(client: httpx.AsyncClient) -> str:
    return (await client.get("/v1/models")).json()["data"][0]["id"]


async def _read(response: httpx.Response, reply: Reply) -> None:
    if response.status_code != 200:
        await response.aread()
        reply.error = _error(response)
    elif response.headers["content-type"].startswith("application/json"):
        await response.aread()
        choice = response.json()["choices"][0]
        reply.text, reply.finish_reason = choice["message"]["content"], choice["finish_reason"]
        reply.is_done = True
    else:
        await _read_events(response, reply)


def _error(response: httpx.Response) -> SeenError:
    try:
        code = response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):  # not in OpenAI's shape
        code = "not an OpenAI error"
    retry_after = response.headers.get("retry-after")
    return SeenError(response.status_code, code, retry_after, response.text[:200])


async def _read_events(response: httpx.Response, reply: Reply) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            reply.is_done = True
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            reply.error = SeenError(None, event["error"]["code"], None, data[:200])
            reply.event_s.append(perf_counter() - reply.asked_at)
            continue
        choice = event["choices"][0]
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
        if content := choice["delta"].get("content"):
            reply.text += content
            reply.event_s.append(perf_counter() - reply.asked_at)
