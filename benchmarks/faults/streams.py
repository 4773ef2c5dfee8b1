"""The proxy's side of kept-open streams: their messages as requests, so that faults meet them too.

Towards the head, and towards a shard that pushes, there is one stream. Each of its messages goes to
the shard on a stream of its own, so that one can be lost, late or doubled without the others.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Mapping

from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from benchmarks.faults.http1 import Message
from meshnet.wire.headers import BOOT
from meshnet.wire.stream_messages import PATH, SUBPROTOCOL, StreamMessage, decode, encode

_KEY = "authorization"
_OPENED_WITH = (_KEY, BOOT.lower())
_READ_BYTES = 2**16

Answer = Callable[[Message], Awaitable[bytes | None]]


class HeadStream:
    """A stream that a head has opened, or another shard.

    Args:
        opening: The request by which it did.
        writer: Of the connection.
        answer: Gives the answer to a step; None breaks the stream off.
    """

    def __init__(self, opening: Message, writer: StreamWriter, answer: Answer) -> None:
        self._opening = opening
        self._writer = writer
        self._answer = answer
        self._protocol = ServerProtocol(subprotocols=[Subprotocol(SUBPROTOCOL)])

    async def serve(self, reader: StreamReader) -> None:
        """Pass steps on until either side leaves."""
        passing: set[asyncio.Task[None]] = set()
        data = self._opening.raw
        while data:
            self._protocol.receive_data(data)
            for event in self._protocol.events_received():
                if isinstance(event, Request):
                    self._protocol.send_response(self._protocol.accept(event))
                elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                    passing.add(asyncio.create_task(self._pass(decode(bytes(event.data)))))
            self._flush()
            data = await reader.read(_READ_BYTES)
        if passing:
            await asyncio.wait(passing)

    async def _pass(self, step: StreamMessage) -> None:
        opened_with = {k: v for k, v in self._opening.headers.items() if k in _OPENED_WITH}
        answer = await self._answer(as_request(step, opened_with))
        if answer is None:
            self._writer.transport.abort()
        elif answer and not self._writer.is_closing():
            self._protocol.send_binary(answer)
            self._flush()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            self._writer.write(data)


def as_request(step: StreamMessage, opened_with: Mapping[str, str]) -> Message:
    """A stream's message as the POST that it stands for; a shard is to be asked with the headers.

    Those of a pushed tensor say which life of the shard is meant, as those of a step do themselves.
    """
    headers = {**opened_with, **step.headers}
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = "POST /v1/forward HTTP/1.1\r\n" + "".join(lines) + "\r\n"
    return Message(head.encode("latin-1"), step.body, headers, step.number)


async def exchange(step: Message, shard_port: int) -> bytes:
    """The shard's answer to a step of a stream, as a message of that stream.

    Raises:
        OSError: The shard cannot be reached.
        WebSocketException: It refused the stream, or broke it off.
    """
    async with _connected(shard_port, {_KEY: step.headers[_KEY]}, close_timeout_s=0) as stream:
        await stream.send(_as_message(step))
        return await stream.recv(decode=False)


async def push(pushed: Message, shard_port: int) -> None:
    """Give a shard what another one pushes. Raises as `exchange`."""
    handshake = {name: pushed.headers[name] for name in _OPENED_WITH}
    async with _connected(shard_port, handshake, close_timeout_s=1) as stream:
        await stream.send(_as_message(pushed))


def _connected(shard_port: int, handshake: Mapping[str, str], close_timeout_s: float) -> connect:
    return connect(
        f"ws://127.0.0.1:{shard_port}{PATH}",
        additional_headers=handshake,
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        compression=None,
        proxy=None,
        close_timeout=close_timeout_s,
    )


def _as_message(request: Message) -> bytes:
    headers = {name: value for name, value in request.headers.items() if name != _KEY}
    return encode(StreamMessage(request.number or 0, headers, request.body))
