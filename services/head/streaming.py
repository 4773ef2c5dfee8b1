"""HTTP's side of a stream: server-sent events out, and a client that may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

ResultT = TypeVar("ResultT")

_PING_S = 15
_SEND_TIMEOUT_S = 60
"""A client that takes nothing for so long has gone; its place is needed."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """The client closed the connection before its answer was ready; nobody hears of this."""


class EventStream(EventSourceResponse):
    """Chunks as server-sent events; the generator is closed with the response, come what may."""

    def __init__(self, first: str, chunks: AsyncGenerator[str], headers: Mapping[str, str]) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]  # it takes bare dicts
            _events(first, chunks),
            sep="\n",  # many clients split on a blank line made of LF
            ping=_PING_S,
            send_timeout=_SEND_TIMEOUT_S,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            headers={**_HEADERS, **headers},
        )
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Left early, the generator is closed here and not by the collector."""
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


async def _events(first: str, chunks: AsyncGenerator[str]) -> AsyncGenerator[dict[str, str]]:
    yield {"data": first}
    async for chunk in chunks:
        yield {"data": chunk}


async def until_client_leaves(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Wait for `work`, but not longer than the client does.

    Starlette does not cancel a handler whose client has gone: it must look for itself.

    Raises:
        ClientLeft: It went; `work` was cancelled and has ended.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_client_leaves(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for part in (watcher, task):
            part.cancel()
            with suppress(asyncio.CancelledError, ClientLeft):
                await asyncio.wait({part})


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
