"""A stream to one shard: opened when somebody wants it, kept open, opened again after a pause.

The only place that sees websockets, and its errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, NegotiationError, WebSocketException
from websockets.protocol import State
from websockets.typing import Subprotocol

from meshnet.errors import HopTimeout, HopUnreachable, InvalidRequest
from meshnet.wire import stream_messages
from meshnet.wire.stream_messages import StreamMessage

_log = structlog.get_logger(__name__)

_CLOSE_S: Final = 1.0
"""How long the other side may take over its leave."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Whether there must be a stream, and how often one is opened.

    Attributes:
        is_required: Steps wait for a stream, which is then tried at every first pause; else there
            may be none for a while.
        connect_s: How long opening one may take.
        first_pause_s: From the end of a stream to the next attempt. Every further pause is twice as
            long, until a stream has served.
        longest_pause_s: The longest pause.
        ping_s: A stream that is silent for so long is asked for a word, and given up after as long
            again.
    """

    is_required: bool = False
    connect_s: float = 5.0
    first_pause_s: float = 0.25
    longest_pause_s: float = 15.0
    ping_s: float = 20.0


class HopStream:
    """One open stream: many steps at once, each answered when it has run.

    Args:
        endpoint: Of the shard.
        connection: Whoever opened it also closes it.

    Attributes:
        has_served: Whether it has brought an answer to a step, or was still open at a second push.
    """

    def __init__(self, endpoint: str, connection: ClientConnection) -> None:
        self.has_served = False
        self._has_pushed = False
        self._endpoint = endpoint
        self._connection = connection
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[StreamMessage | None]] = {}

    @property
    def round_trip_s(self) -> float:
        """What the last ping took; 0 before the first one is answered."""
        return self._connection.latency

    async def exchange(
        self, headers: Mapping[str, str], body: bytes, limit_s: float | None
    ) -> StreamMessage:
        """Send a step, and wait for its answer; without a limit until the stream ends.

        Where none comes in time the whole stream is given up: it may be open on this side only.

        Raises:
            HopUnreachable: The stream broke; the step may or may not have been applied.
            HopTimeout: No answer in time; likewise.
        """
        number = next(self._numbers)
        answered: asyncio.Future[StreamMessage | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        message = stream_messages.encode(StreamMessage(number, headers, body))
        try:
            async with asyncio.timeout(limit_s):
                await self._connection.send(message)
                answer = await answered
        except TimeoutError as error:
            self.give_up()
            raise HopTimeout(
                f"{self._endpoint} did not answer in time", endpoint=self._endpoint
            ) from error
        except ConnectionClosed as error:
            raise _unreachable(self._endpoint, str(error)) from error
        finally:
            del self._waiting[number]
        if answer is None:
            raise _unreachable(self._endpoint, "the stream broke")
        return answer

    async def push(self, message: StreamMessage) -> bool:
        """Send what has no answer, at once or not at all.

        Returns:
            Whether it was sent. It is not where it is too long, the stream has ended, or the other
            side is slow to read: nobody is to wait for it.
        """
        if len(message.body) > stream_messages.MAX_BODY_BYTES or not self._takes_at_once():
            return False
        try:
            await self._connection.send(stream_messages.encode(message))
        except ConnectionClosed:
            return False
        self.has_served = self._has_pushed
        self._has_pushed = True
        return True

    def _takes_at_once(self) -> bool:
        """Whether to send a message is no wait; see `write_limit`."""
        n_unsent = self._connection.transport.get_write_buffer_size()
        is_open = self._connection.state is State.OPEN  # else it would wait for the end
        return is_open and n_unsent <= stream_messages.MAX_MESSAGE_BYTES

    def give_up(self) -> None:
        """End the stream at once, for all that wait for something on it."""
        self._connection.transport.abort()

    async def ping(self) -> None:
        """Have the round trip measured, now and not only after a silence; waits for nothing."""
        with suppress(ConnectionClosed):  # as who reads will find
            await self._connection.ping()

    async def read(self) -> None:
        """Hand out answers until the stream ends, and tell those who still wait for one."""
        try:
            async for data in self._connection:
                self._hand_out(stream_messages.decode(_bytes(data)))
        except (ConnectionClosed, InvalidRequest) as error:
            _log.info("stream broke", hop=self._endpoint, reason=str(error))
        finally:
            for answered in self._waiting.values():
                _settle(answered, None)

    def _hand_out(self, answer: StreamMessage) -> None:
        if answer.number in self._waiting:
            self.has_served = True
            _settle(self._waiting[answer.number], answer)


class HopStreams:
    """The streams to one shard, one after the other.

    Args:
        endpoint: `http://host:port`.
        headers: What a stream is asked for with.
        limits: Whether there must be one.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        limits: StreamLimits,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._endpoint = endpoint
        self._headers = headers
        self._limits = limits
        self._sleep = sleep
        self._stream: HopStream | None = None
        self._wanted = asyncio.Event()
        self._tried = asyncio.Event()

    def now(self) -> HopStream | None:
        """The stream that is open now; where there is none, one is wanted from now on."""
        if self._stream is None:
            self._wanted.set()
        return self._stream

    async def get(self) -> HopStream | None:
        """The stream that is open now, or None if there is none and none is required.

        Raises:
            HopUnreachable: One is required, and could not be opened.
        """
        if self.now() is None and self._limits.is_required:
            await self._tried.wait()
            if self._stream is None:
                raise _unreachable(self._endpoint, "there is no stream")
        return self._stream

    async def keep(self) -> None:
        """Open a stream when one is wanted, and serve it to its end; for ever."""
        limits = self._limits
        pause_s = limits.first_pause_s
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if await self._serve_one() or limits.is_required:
                pause_s = limits.first_pause_s
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, limits.longest_pause_s)

    async def _serve_one(self) -> bool:
        """Open a stream and read it to its end. Returns whether it was of any use."""
        try:
            connection = await self._open()
        except (OSError, WebSocketException) as error:
            _log.info("no stream", hop=self._endpoint, reason=str(error))
            self._tell()
            return False
        stream = self._stream = HopStream(self._endpoint, connection)
        self._tell()
        try:
            await stream.ping()
            await stream.read()
            return stream.has_served
        finally:
            self._stream = None
            await connection.close()

    def _tell(self) -> None:
        """Wake who waits; who comes later waits for the next attempt."""
        self._tried.set()
        self._tried.clear()

    async def _open(self) -> ClientConnection:
        connection = await _Connect(
            "ws" + self._endpoint.removeprefix("http") + stream_messages.PATH,
            subprotocols=[Subprotocol(stream_messages.SUBPROTOCOL)],
            additional_headers=self._headers,
            proxy=None,  # one meant for the internet must not carry the mesh's traffic
            compression=None,  # hidden states do not get shorter by it
            open_timeout=self._limits.connect_s,
            ping_interval=self._limits.ping_s,
            ping_timeout=self._limits.ping_s,
            close_timeout=_CLOSE_S,
            max_size=stream_messages.MAX_MESSAGE_BYTES,
            write_limit=2 * stream_messages.MAX_MESSAGE_BYTES,  # two are sent without a wait
        )
        if connection.subprotocol != stream_messages.SUBPROTOCOL:
            await connection.close()
            raise NegotiationError(f"it does not speak {stream_messages.SUBPROTOCOL}")
        return connection


class _Connect(connect):
    """Follows no redirect: the cluster key is for the endpoint that is configured."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


@asynccontextmanager
async def open_streams(
    endpoint: str, headers: Mapping[str, str], limits: StreamLimits
) -> AsyncGenerator[HopStreams]:
    """Streams to one shard; the last one is closed at the end of the block."""
    streams = HopStreams(endpoint, headers, limits)
    keeping = asyncio.create_task(streams.keep())
    try:
        yield streams
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data  # text is no message, as decode() finds


def _settle(answered: asyncio.Future[StreamMessage | None], answer: StreamMessage | None) -> None:
    if not answered.done():  # its waiter may just be giving up
        answered.set_result(answer)


def _unreachable(endpoint: str, why: str) -> HopUnreachable:
    return HopUnreachable(f"{endpoint} is not reachable: {why}", endpoint=endpoint)
