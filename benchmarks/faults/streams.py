"""The proxy's side of kept-open streams: their messages as requests, so that faults meet them too.

Towards the head there is one stream. Each of its steps goes to the shard on a stream of its own, so
that one can be lost, late or doubled without the others.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable

from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from benchmarks.faults.http1 import Message
from meshnet.wire.stream_messages import PATH, SUBPROTOCOL, StreamMessage, decode, encode

_KEY = "authorization"
_READ_BYTES = 2**16

Answer = Callable[[Message], Awaitable[bytes | None]]


class HeadStream:
    """A stream that a head has opened.

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
        answer = await self._answer(as_request(step, self._opening.headers.get(_KEY, "")))
        if answer is None:
            self._writer.transport.abort()
        elif not self._writer.is_closing():
            self._protocol.send_binary(answer)
            self._flush()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            self._writer.write(data)


def as_request(step: StreamMessage, key: str) -> Message:
    """A stream's step as the POST that it stands for; `key` opens the shard."""
    headers = {**step.headers, _KEY: key}
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = "POST /v1/forward HTTP/1.1\r\n" + "".join(lines) + "\r\n"
    return Message(head.encode("latin-1"), step.body, headers, step.number)


async def exchange(step: Message, shard_port: int) -> bytes:
    """The shard's answer to a step of a stream, as a message of that stream.

    Raises:
        OSError: The shard cannot be reached.
        WebSocketException: It refused the stream, or broke it off.
    """
    headers = {name: value for name, value in step.headers.items() if name != _KEY}
    message = encode(StreamMessage(step.number or 0, headers, step.body))
    async with connect(
        f"ws://127.0.0.1:{shard_port}{PATH}",
        additional_headers={_KEY: step.headers[_KEY]},
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        compression=None,
        proxy=None,
        close_timeout=0,
    ) as stream:
        await stream.send(message)
        return await stream.recv(decode=False)
