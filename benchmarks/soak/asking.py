"""One request to the head, and what became of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic
from typing import Any, Final

import httpx


class Outcome(StrEnum):
    """What a request came to."""

    EXACT = "exact"
    LEFT = "left"
    """We left in mid-stream, and what had come was right so far."""
    INVALID = "invalid"
    """Refused as it should be."""
    LATER = "later"
    """A 503 with Retry-After before the first byte; asked again."""
    BROKE_OFF = "broke_off"
    """An error event in the stream: a shard did not come back in time."""
    WRONG = "wrong"
    HANG = "hang"
    ODD = "odd"
    """Anything that is not documented."""


VIOLATIONS: Final = frozenset({Outcome.WRONG, Outcome.HANG, Outcome.ODD})
_LATER_CODES: Final = frozenset({"shard_unavailable", "model_loading", "server_overloaded"})


@dataclass
class Reply:
    """What came, as far as it came."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    n_tokens: int = 0
    error: dict[str, Any] | None = None
    retry_after_s: float | None = None
    left: bool = False
    longest_pause_s: float = 0.0

    @property
    def content(self) -> tuple[str, str | None, int]:
        """What is compared."""
        return self.text, self.finish_reason, self.n_tokens


async def ask(
    http: httpx.AsyncClient, body: dict[str, object], *, leave_after: int | None = None
) -> Reply:
    """Send one request and read its answer.

    Args:
        http: A client of the head.
        body: The request.
        leave_after: Close the connection after so many events of a stream.

    Raises:
        httpx.TransportError: The head cannot be reached, or broke off.
    """
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        reply = Reply(response.status_code)
        if response.status_code == 200 and body["stream"]:
            await _read_stream(response, reply, leave_after)
        else:
            _read_body(json.loads(await response.aread()), reply)
            reply.retry_after_s = float(response.headers.get("retry-after", "nan"))
    return reply


def _read_body(body: dict[str, Any], reply: Reply) -> None:
    if "error" in body:
        reply.error = body["error"]
        return
    choice = body["choices"][0]
    reply.text, reply.finish_reason = choice["message"]["content"], choice["finish_reason"]
    reply.n_tokens = body["usage"]["completion_tokens"]


async def _read_stream(response: httpx.Response, reply: Reply, leave_after: int | None) -> None:
    last_at, n_events = monotonic(), 0
    async for event in _events(response):
        now = monotonic()
        reply.longest_pause_s, last_at = max(reply.longest_pause_s, now - last_at), now
        n_events += 1
        reply.error = event.get("error", reply.error)
        for choice in event.get("choices", ()):
            reply.text += choice["delta"].get("content", "")
            reply.finish_reason = choice["finish_reason"] or reply.finish_reason
        if event.get("usage"):
            reply.n_tokens = event["usage"]["completion_tokens"]
        if n_events == leave_after:
            reply.left = True
            return


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def judge(reply: Reply, reference: Reply) -> Outcome:
    """What a reply is, next to the undisturbed one."""
    if reply.status == 503 and reply.error:
        later = reply.retry_after_s is not None and reply.retry_after_s > 0
        return Outcome.LATER if later and reply.error["code"] in _LATER_CODES else Outcome.ODD
    if reply.status != 200:
        return Outcome.ODD
    if not reference.text.startswith(reply.text):
        return Outcome.WRONG
    if reply.error:
        known = reply.error.get("code") == "shard_unavailable"
        return Outcome.BROKE_OFF if known else Outcome.ODD
    if reply.left:
        return Outcome.LEFT
    return Outcome.EXACT if reply.content == reference.content else Outcome.WRONG
