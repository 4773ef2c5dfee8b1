"""HTTP/1.1 by hand: also what no client library would send, and whatever comes back."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

PATIENCE_S: Final = 20.0
"""How long an answer that must come may take on a busy machine; longer is a hang."""
SHORT_PATIENCE_S: Final = 0.1
"""How long to wait where the shard rightly waits for more."""
_RECEIVED_AT_ONCE: Final = 2**16


@dataclass(frozen=True)
class Request:
    """A request, of which every part may be wrong."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def having(self, name: str, value: str | bytes) -> Request:
        """With this header instead of any of that name."""
        return self.without(name).adding(name, value)

    def adding(self, name: str, value: str | bytes) -> Request:
        """With one more header, though there may be one of that name."""
        data = value.encode() if isinstance(value, str) else value
        return replace(self, headers=(*self.headers, (name.encode(), data)))

    def without(self, name: str) -> Request:
        """Without any header of that name."""
        key = name.encode().lower()
        return replace(self, headers=tuple(h for h in self.headers if h[0].lower() != key))

    def having_body(self, body: bytes) -> Request:
        """With another body."""
        return replace(self, body=body)

    def head(self) -> bytes:
        """All before the body."""
        lines = [f"{self.method} {self.path} HTTP/1.1".encode("latin-1", "replace")]
        lines += [name + b": " + value for name, value in self.headers]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def encode(self) -> bytes:
        """The request as bytes; a length is added where nothing is said of it."""
        names = {name.lower() for name, _ in self.headers}
        if names & {b"content-length", b"transfer-encoding"}:
            return self.head() + self.body
        return self.having("Content-Length", str(len(self.body))).head() + self.body


def chunked(body: bytes, size: int) -> bytes:
    """A body in chunks of `size` bytes."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class NoAnswer(Enum):
    """How an answer can fail to come."""

    CLOSED = "closed without an answer"
    SILENT = "no answer"


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes


async def exchange(
    port: int, data: bytes, *, method: str = "POST", patience_s: float = PATIENCE_S
) -> Answer | NoAnswer:
    """Send bytes on a connection of their own, and read the first final answer.

    On a bare socket: asyncio's streams give up reading when sending fails, and lose the answer of a
    server that refused a long request before its end.
    """
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)  # noqa: FBT003  # its one way to say it
        talking = [
            asyncio.create_task(_send(loop, connection, data)),
            asyncio.create_task(_receive(loop, connection, reader)),
        ]
        try:
            return await asyncio.wait_for(_read_answer(reader, method), patience_s)
        except TimeoutError:
            return NoAnswer.SILENT
        except asyncio.IncompleteReadError:
            return NoAnswer.CLOSED
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)


async def _send(loop: asyncio.AbstractEventLoop, connection: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # an early answer may end the sending
        await loop.sock_sendall(connection, data)


async def _receive(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, reader: asyncio.StreamReader
) -> None:
    with suppress(ConnectionError):
        while part := await loop.sock_recv(connection, _RECEIVED_AT_ONCE):
            reader.feed_data(part)
    reader.feed_eof()


async def _read_answer(reader: asyncio.StreamReader, method: str) -> Answer:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        status = int(first.split(" ")[1])
        if status >= 200:  # not an interim "100 Continue"
            break
    headers = {name.lower(): value.strip() for name, _, value in (n.partition(":") for n in lines)}
    if method == "HEAD" or status in {204, 304}:
        return Answer(status, headers, b"")
    return Answer(status, headers, await _read_body(reader, headers))


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    if headers.get("transfer-encoding") != "chunked":
        return await reader.read()
    parts: list[bytes] = []
    while size := int(await reader.readuntil(b"\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)
