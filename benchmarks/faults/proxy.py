"""A TCP proxy in front of one shard that understands HTTP/1.1: where faults of the network happen.

Each request, and each step of a stream, goes to the shard on a connection of its own. Towards the
head connections are kept alive; where the shard cannot be reached or breaks off, the head's
connection is closed: it is never sent an answer that the shard did not give. asyncio sets
TCP_NODELAY on both sides.
"""

from __future__ import annotations

import asyncio
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from websockets.exceptions import WebSocketException

from benchmarks.faults import streams
from benchmarks.faults.http1 import Message, read_answer, read_request
from meshnet.wire.stream_messages import UNANSWERED
from services.cli.serving import free_port

Intercept = Callable[[Message], Awaitable[bytes | None]]
"""What becomes of a session's step or DELETE: the bytes of the answer, None closes the head's
connection."""


class Proxy:
    """Listens on 127.0.0.1 and passes on to a port there, as a context manager.

    Attributes:
        port: Where it listens.
        shard_port: Where the shard listens.
        intercept: Asked instead of `forward` for what belongs to a session; None is no fault.
        delay_s: One way, for everything to and from the shard.
        in_flight: Steps and DELETEs that have come and are not dealt with yet.
        n_pushed: Tensors of other shards that were passed on.
    """

    def __init__(self, shard_port: int) -> None:
        self.port = free_port()
        self.intercept: Intercept | None = None
        self.delay_s = 0.0
        self.in_flight = 0
        self.n_pushed = 0
        self.shard_port = shard_port
        self._writers: set[StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """What the head's route names."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await asyncio.gather(*(_close(writer) for writer in list(self._writers)))

    def clear(self) -> None:
        """No fault from here on."""
        self.intercept = None
        self.delay_s = 0.0

    async def forward(self, request: Message) -> bytes | None:
        """The shard's answer; None where it cannot be reached, or broke off."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        try:
            answer = await self._exchange(request)
        except (OSError, IncompleteReadError, WebSocketException):
            return None
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return answer

    async def _exchange(self, request: Message) -> bytes:
        if request.number == UNANSWERED:
            await streams.push(request, self.shard_port)
            self.n_pushed += 1
            return b""
        if request.number is not None:
            return await streams.exchange(request, self.shard_port)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.shard_port)
        try:
            # A port without a listener can be given to the very socket that asks for it.
            if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):
                raise ConnectionRefusedError("connected to itself")
            writer.write(request.raw)
            await writer.drain()
            return (await read_answer(reader)).raw
        finally:
            await _close(writer)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while request := await read_request(reader):
                if request.opens_stream:
                    await streams.HeadStream(request, writer, self._answer).serve(reader)
                    break
                answer = await self._answer(request)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (OSError, IncompleteReadError):
            pass  # the head has gone
        finally:
            self._writers.discard(writer)
            await _close(writer)

    async def _answer(self, request: Message) -> bytes | None:
        if request.session is None:
            return await self.forward(request)
        self.in_flight += 1
        try:
            return await (self.intercept or self.forward)(request)
        finally:
            self.in_flight -= 1


async def _close(writer: StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
