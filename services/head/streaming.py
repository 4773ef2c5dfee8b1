"""HTTP's side of a stream: server-sent events out, and a client that may leave at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from meshnet.errors import MeshError
from meshnet.openai.errors import ErrorBody, to_openai
from meshnet.openai.stream import Chunk
from services.head.server_timing import SERVER_TIMING

if TYPE_CHECKING:
    from services.head.head import Head

ResultT = TypeVar("ResultT")
Events = AsyncGenerator[Mapping[str, str | None]]

_SEND_TIMEOUT_S = 60
"""A client that takes nothing for so long has gone; its place is needed."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """The client closed the connection before its answer was ready; nobody hears of this."""


async def open_stream(
    request: Request,
    chunks: AsyncGenerator[Chunk],
    headers: Mapping[str, str],
    fail: Callable[[ErrorBody], Iterable[Chunk]],
    timing: Callable[[], str] | None = None,
) -> EventStream:
    """The response to a request that is answered by a stream.

    Its status is sent with the first chunk, so that an error until then has its own. If that takes
    longer than `stream_start_s`, the status goes first and comments keep the connection alive; an
    error is an event then.

    Args:
        request: Whose client is watched until there is a response, which does so itself.
        chunks: Closed with the response, or here if there is none.
        headers: Of the response.
        fail: How an error is told once the status is sent and no chunk is.
        timing: Where the time went so far, if the client asks for it: a header tells what it took
            up to here, and a comment at the stream's end all of it.

    Raises:
        ClientLeft: It went before there was a response.
        Exception: What `chunks` failed with before there was a response.
    """
    settings = cast("Head", request.state.head).settings
    source = _Source(chunks)
    try:
        first = source.begin()
        await _wait(first, request, settings.stream_start_s)
        if first.done():
            first.result()
    except BaseException:
        await source.close()
        raise
    events = _events(source, fail, request.state.request_id, timing)
    if timing is not None:
        headers = {**headers, SERVER_TIMING: timing()}
    return EventStream(source, events, headers, ping_s=settings.stream_ping_s)


class _Source:
    """Chunks, each of them waited for in a task of its own.

    sse-starlette cancels as anyio does: every await of its scope anew, those of a generator's
    clean-up too. Here the generator is cancelled once, by `close`, and ends in peace.
    """

    def __init__(self, chunks: AsyncGenerator[Chunk]) -> None:
        self._chunks = chunks
        self._next: asyncio.Task[Chunk | None] | None = None

    def begin(self) -> asyncio.Task[Chunk | None]:
        """Wait for the next chunk, if nobody does; None comes after the last one."""
        if self._next is None:
            self._next = asyncio.create_task(self._take())
        return self._next

    async def take(self) -> Chunk | None:
        """The next chunk. It is not lost to a wait that is cancelled."""
        chunk = await asyncio.shield(self.begin())
        self._next = None
        return chunk

    async def close(self) -> None:
        """End the wait, and the generator."""
        if self._next is not None:
            await _end(self._next)
        await self._chunks.aclose()

    async def _take(self) -> Chunk | None:
        return await anext(self._chunks, None)


class EventStream(EventSourceResponse):
    """Server-sent events; their source is closed with the response, come what may."""

    def __init__(
        self,
        source: _Source,
        events: Events,
        headers: Mapping[str, str],
        *,
        ping_s: float,
    ) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]  # it takes bare dicts
            events,
            sep="\n",  # many clients split on a blank line made of LF
            ping=ping_s,
            send_timeout=_SEND_TIMEOUT_S,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            headers={**_HEADERS, **headers},
        )
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Left early, its source is closed here and not by the collector."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.close()


async def _events(
    source: _Source,
    fail: Callable[[ErrorBody], Iterable[Chunk]],
    request_id: str,
    timing: Callable[[], str] | None,
) -> Events:
    """The source's events; it tells its errors itself, but for one before its first chunk."""
    try:
        chunk = await source.take()
    except Exception as error:
        for chunk in fail(to_openai(error, request_id=request_id).body):
            yield _event(chunk)
        if isinstance(error, MeshError):
            return
        raise
    while chunk is not None:
        yield _event(chunk)
        chunk = await source.take()
    if timing is not None:
        yield {"comment": f"{SERVER_TIMING.lower()} {timing()}"}  # clients pass over it


def _event(chunk: Chunk) -> Mapping[str, str | None]:
    data = chunk.data
    # ASCII only: clients that split lines as Python does would cut at a U+2028 in the text.
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return {"data": text, "event": chunk.event}


async def until_client_leaves(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Wait for `work`, but not longer than the client does.

    Starlette does not cancel a handler whose client has gone: it must look for itself.

    Raises:
        ClientLeft: It went; `work` was cancelled and has ended.
    """
    task = asyncio.create_task(work)
    try:
        await _wait(task, request)
        return task.result()
    finally:
        await _end(task)


async def _wait(task: asyncio.Task[Any], request: Request, limit_s: float | None = None) -> None:
    """Wait until the task is done, or for the limit; whatever happens, it goes on.

    Raises:
        ClientLeft: The client went, and the task is not done.
    """
    watcher = asyncio.create_task(_client_leaves(request))
    try:
        done, _ = await asyncio.wait(
            {task, watcher}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        await _end(watcher)
    if done == {watcher}:
        raise ClientLeft


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; what it failed with, if it did, is no news any more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
