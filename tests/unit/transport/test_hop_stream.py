"""Over a shard that is a few lines: a WebSocket server on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from meshnet.errors import HopTimeout, HopUnreachable, MeshError
from meshnet.transport.hop_stream import HopStream, HopStreams, StreamLimits, open_streams
from meshnet.wire.stream_messages import (
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    PATH,
    SUBPROTOCOL,
    StreamMessage,
    decode,
    encode,
)
from tests.support.streams import eventually

HANDSHAKE = {"authorization": "Bearer k"}
STEP = {"x-step": "1"}
REQUIRED = StreamLimits(is_required=True, connect_s=10, first_pause_s=0.001)
LONG = 20.0
"""A limit that no test reaches, seconds."""

Behaviour = Callable[[ServerConnection], Awaitable[None]]


@dataclass
class Shard:
    """Does with every stream what it is told.

    Attributes:
        asked: The requests to open one.
        refusal: What they are answered, or None, and they are granted.
    """

    behave: Behaviour
    endpoint: str = ""
    asked: list[Request] = field(default_factory=list[Request])
    refusal: Response | None = None

    async def check(self, _: ServerConnection, request: Request) -> Response | None:
        self.asked.append(request)
        return self.refusal


@asynccontextmanager
async def served(
    behave: Behaviour, subprotocols: Sequence[Subprotocol] | None = (Subprotocol(SUBPROTOCOL),)
) -> AsyncGenerator[Shard]:
    shard = Shard(behave)
    async with serve(
        behave,
        "127.0.0.1",
        0,
        process_request=shard.check,
        subprotocols=subprotocols,
        close_timeout=0.1,
    ) as server:
        shard.endpoint = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield shard


@asynccontextmanager
async def stream_to(behave: Behaviour) -> AsyncGenerator[HopStream]:
    """One open stream."""
    async with (
        served(behave) as shard,
        open_streams(shard.endpoint, HANDSHAKE, REQUIRED) as streams,
    ):
        stream = await streams.get()
        assert stream is not None
        yield stream


async def receive(connection: ServerConnection) -> StreamMessage:
    return decode(await connection.recv(decode=False))


async def echo(connection: ServerConnection) -> None:
    """Answer every step with itself."""
    async for data in connection:
        asked = decode(data if isinstance(data, bytes) else b"")
        await connection.send(encode(StreamMessage(asked.number, asked.headers, asked.body, 200)))


async def be_silent(connection: ServerConnection) -> None:
    await connection.wait_closed()


async def hang_up(connection: ServerConnection) -> None:
    """Vanish with the first step."""
    await receive(connection)
    connection.transport.abort()


async def take_leave(connection: ServerConnection) -> None:
    """Close in order with the first step."""
    await receive(connection)


def exchange(stream: HopStream, body: bytes = b"", limit_s: float = LONG) -> asyncio.Task[bytes]:
    """Send a step; the task's result is the answer's body."""

    async def send() -> bytes:
        return (await stream.exchange(STEP, body, limit_s)).body

    return asyncio.create_task(send())


async def outcomes(*tasks: asyncio.Task[bytes]) -> list[object]:
    """What became of steps: the answer, or the class of the error."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(each) if isinstance(each, BaseException) else each for each in found]


# --- steps ---


async def test_a_step_is_one_message_and_its_answer_another() -> None:
    """Headers and body go over as they are, and the answer comes back with its status."""
    asked: list[StreamMessage] = []

    async def shard(connection: ServerConnection) -> None:
        asked.append(await receive(connection))
        await connection.send(encode(StreamMessage(asked[0].number, {"x": "y"}, b"out", 503)))
        await connection.wait_closed()

    async with stream_to(shard) as stream:
        answer = await stream.exchange(STEP, b"in", LONG)

    assert (asked[0].headers, asked[0].body, asked[0].status) == (STEP, b"in", 0)
    assert (answer.headers, answer.body, answer.status) == ({"x": "y"}, b"out", 503)


async def test_many_steps_are_on_a_stream_at_once_and_answered_in_any_order() -> None:
    """Each gets its own answer."""

    async def shard(connection: ServerConnection) -> None:
        asked = [await receive(connection) for _ in range(5)]
        for each in reversed(asked):
            await connection.send(encode(each))
        await connection.wait_closed()

    bodies = [bytes([i]) for i in range(5)]
    async with stream_to(shard) as stream:
        assert await outcomes(*(exchange(stream, body) for body in bodies)) == bodies


async def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    """It may be to a step that was cancelled, or to none at all."""

    async def shard(connection: ServerConnection) -> None:
        first, second = await receive(connection), await receive(connection)
        for answer in (first, StreamMessage(99, {}, b""), second, second):
            await connection.send(encode(answer))
        await connection.wait_closed()

    async with stream_to(shard) as stream:
        left = exchange(stream, b"a")
        await asyncio.sleep(0)
        left.cancel()

        assert await outcomes(left, exchange(stream, b"b")) == [asyncio.CancelledError, b"b"]


@pytest.mark.parametrize("end", [hang_up, take_leave], ids=["broken", "closed"])
async def test_the_end_of_a_stream_is_told_to_all_who_wait(end: Behaviour) -> None:
    """Their steps may or may not have been applied: the hop was unreachable."""
    async with stream_to(end) as stream:
        waiting = [exchange(stream) for _ in range(3)]

        assert await outcomes(*waiting) == [HopUnreachable] * 3


async def test_an_error_names_the_hop() -> None:
    """As those of a POST do, in words and as a member."""
    async with (
        served(hang_up) as shard,
        open_streams(shard.endpoint, HANDSHAKE, REQUIRED) as streams,
    ):
        stream = await streams.get()
        assert stream is not None
        with pytest.raises(HopUnreachable, match=f"{shard.endpoint} is not reachable") as caught:
            await stream.exchange(STEP, b"", LONG)

        assert caught.value.members == {"endpoint": shard.endpoint}


async def test_a_stream_that_has_ended_sends_nothing() -> None:
    """Who still has it is told so."""
    async with stream_to(hang_up) as stream:
        await outcomes(exchange(stream))

        with pytest.raises(HopUnreachable) as caught:
            await stream.exchange(STEP, b"", LONG)
        assert caught.value.__cause__ is not None


async def test_a_step_that_is_not_answered_in_time_ends_the_stream_for_all() -> None:
    """It may be open on one side only; the others find out at once, not by their own limits."""
    async with stream_to(be_silent) as stream:
        others = [exchange(stream), exchange(stream)]

        assert await outcomes(exchange(stream, limit_s=0.01), *others) == [
            HopTimeout,
            HopUnreachable,
            HopUnreachable,
        ]


async def test_a_shard_that_reads_nothing_is_a_time_out() -> None:
    """What is sent counts as well: nothing is kept for it without end."""

    async def deaf(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await connection.wait_closed()

    async with stream_to(deaf) as stream:
        many = [exchange(stream, bytes(2**18), limit_s=0.2) for _ in range(40)]

        assert set(await outcomes(*many)) <= {HopTimeout, HopUnreachable}


@pytest.mark.parametrize("message", ["text", b"", b"x" * 15, bytes(12) + b"\xff\0\0\0{}"])
async def test_a_message_that_is_none_ends_the_stream(message: str | bytes) -> None:
    """Nobody knows whose answer it was."""

    async def shard(connection: ServerConnection) -> None:
        await receive(connection)
        await connection.send(message)
        await connection.wait_closed()

    async with stream_to(shard) as stream:
        assert await outcomes(exchange(stream)) == [HopUnreachable]


async def test_an_answer_that_is_too_long_is_not_read() -> None:
    """The stream ends where it claims its length, before any of it came."""

    async def shard(connection: ServerConnection) -> None:
        await receive(connection)
        binary_of_64_bit_length = b"\x82\x7f"
        claimed = (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big")
        connection.transport.write(binary_of_64_bit_length + claimed)
        await connection.wait_closed()

    async with stream_to(shard) as stream:
        assert await outcomes(exchange(stream)) == [HopUnreachable]


# --- what has no answer ---


async def test_what_is_pushed_is_one_message() -> None:
    """It is sent as it is, and nothing is waited for."""
    got: asyncio.Queue[StreamMessage] = asyncio.Queue()

    async def shard(connection: ServerConnection) -> None:
        got.put_nowait(await receive(connection))
        await connection.wait_closed()

    async with stream_to(shard) as stream:
        assert await stream.push(StreamMessage(0, STEP, b"in"))
        async with asyncio.timeout(LONG):
            assert await got.get() == StreamMessage(0, STEP, b"in")


async def test_nothing_is_pushed_to_who_does_not_read() -> None:
    """It is not waited for, and no more than some messages are kept for it."""

    async def deaf(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await connection.wait_closed()

    async with stream_to(deaf) as stream, asyncio.timeout(LONG):
        taken = [await stream.push(StreamMessage(0, STEP, bytes(2**18))) for _ in range(100)]

    assert (taken[0], taken[-1]) == (True, False)


async def test_nothing_is_pushed_over_a_stream_that_has_ended() -> None:
    """Who still has it is told so."""
    async with stream_to(hang_up) as stream:
        await outcomes(exchange(stream))

        assert not await stream.push(StreamMessage(0, STEP, b"in"))


async def test_nothing_is_pushed_that_is_too_long_for_a_message() -> None:
    """The other side would end the stream for it."""
    async with stream_to(echo) as stream:
        assert not await stream.push(StreamMessage(0, STEP, bytes(MAX_BODY_BYTES + 1)))
        assert await outcomes(exchange(stream, b"a")) == [b"a"]


async def test_a_push_that_meets_the_end_of_a_stream_was_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who reads tells the others."""

    async def break_off(*_: object) -> None:
        raise ConnectionClosedError(None, None)

    async with stream_to(be_silent) as stream:
        monkeypatch.setattr(ClientConnection, "send", break_off)

        assert not await stream.push(StreamMessage(0, STEP, b"in"))


async def test_a_stream_that_is_given_up_ends_for_all() -> None:
    """At once, without a word to the other side."""
    async with stream_to(be_silent) as stream:
        waiting = [exchange(stream) for _ in range(2)]
        await asyncio.sleep(0)
        stream.give_up()

        assert await outcomes(*waiting) == [HopUnreachable] * 2


# --- how streams are opened ---


async def test_the_round_trip_is_measured_when_a_stream_is_opened() -> None:
    """By a ping, long before one is due."""
    async with stream_to(echo) as stream:

        async def is_measured() -> bool:
            return stream.round_trip_s > 0

        await eventually(is_measured, within_s=LONG)


async def test_a_step_may_wait_without_a_limit() -> None:
    """Until the stream ends."""
    async with stream_to(be_silent) as stream:
        asked = asyncio.create_task(stream.exchange(STEP, b"", None))
        await asyncio.wait({asked}, timeout=0.05)
        assert not asked.done()
        stream.give_up()

        assert isinstance(await asyncio.wait_for(_error_of(asked), LONG), HopUnreachable)


async def _error_of(task: asyncio.Task[StreamMessage]) -> BaseException | None:
    await asyncio.wait({task})
    return task.exception()


async def test_a_stream_is_asked_for_under_its_path_with_the_key() -> None:
    """The cluster key goes with the handshake, and what form the messages have."""
    async with served(echo) as shard, open_streams(shard.endpoint, HANDSHAKE, REQUIRED) as streams:
        await streams.get()
        (request,) = shard.asked

    assert request.path == PATH
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["sec-websocket-protocol"] == SUBPROTOCOL
    assert "sec-websocket-extensions" not in request.headers


async def test_nobody_waits_for_a_stream_that_is_not_required() -> None:
    """There is none at first; it is opened meanwhile, and is there later."""
    async with (
        served(echo) as shard,
        open_streams(shard.endpoint, HANDSHAKE, StreamLimits()) as streams,
    ):
        assert await streams.get() is None

        stream = await opened(streams)
        assert await outcomes(exchange(stream, b"a")) == [b"a"]
        assert await streams.get() is stream


async def test_no_stream_is_opened_that_nobody_wants() -> None:
    """A hop that is not used has no connection."""
    async with served(echo) as shard, open_streams(shard.endpoint, HANDSHAKE, REQUIRED):
        await asyncio.sleep(0.05)

        assert shard.asked == []


async def test_a_required_stream_that_cannot_be_opened_is_an_unreachable_hop() -> None:
    """The step is not sent in another way."""
    async with served(echo) as shard, open_streams(shard.endpoint, HANDSHAKE, REQUIRED) as streams:
        shard.refusal = refused(HTTPStatus.NOT_FOUND)
        with pytest.raises(HopUnreachable, match="no stream") as caught:
            await streams.get()

        assert caught.value.members == {"endpoint": shard.endpoint}


async def test_a_stream_that_has_ended_is_followed_by_another() -> None:
    """After a pause, and only where a step wants it."""
    n_streams = 0

    async def first_hangs_up(connection: ServerConnection) -> None:
        nonlocal n_streams
        n_streams += 1
        await (hang_up if n_streams == 1 else echo)(connection)

    async with (
        served(first_hangs_up) as shard,
        open_streams(shard.endpoint, HANDSHAKE, REQUIRED) as streams,
    ):
        first = await streams.get()
        assert first is not None
        assert await outcomes(exchange(first)) == [HopUnreachable]

        await asyncio.sleep(0.05)
        assert len(shard.asked) == 1
        second = await opened(streams)
        assert await outcomes(exchange(second, b"a")) == [b"a"]


class Pauses:
    """Sleeps that end when they are told to.

    Attributes:
        asked: The seconds of each.
    """

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._begun = asyncio.Semaphore(0)
        self._ended = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._begun.release()
        await self._ended.acquire()

    def end(self) -> None:
        self._ended.release()

    async def begin(self) -> None:
        """Wait for the next one."""
        async with asyncio.timeout(LONG):
            await self._begun.acquire()


@asynccontextmanager
async def kept(shard: Shard, pauses: Pauses, limits: StreamLimits) -> AsyncGenerator[HopStreams]:
    """Streams whose pauses are the test's."""
    streams = HopStreams(shard.endpoint, HANDSHAKE, limits, pauses)
    keeping = asyncio.create_task(streams.keep())
    yield streams
    keeping.cancel()
    await asyncio.wait({keeping})


LIMITS = StreamLimits(first_pause_s=1, longest_pause_s=5)


@pytest.mark.parametrize("status", [404, 401, 403, 500, 200])
async def test_a_shard_without_streams_is_asked_now_and_then(status: int) -> None:
    """However many steps there are, it is asked after pauses, which grow up to a limit."""
    pauses = Pauses()
    async with served(echo) as shard, kept(shard, pauses, LIMITS) as streams:
        shard.refusal = refused(HTTPStatus(status))
        for n in range(1, 6):
            for _ in range(10):
                assert await streams.get() is None
            await pauses.begin()
            assert len(shard.asked) == n
            assert await streams.get() is None
            pauses.end()

    assert pauses.asked[:5] == [1, 2, 4, 5, 5]


async def test_pauses_begin_anew_when_a_stream_has_brought_an_answer() -> None:
    """One that opens and answers nothing has not proven anything."""
    pauses, n_streams = Pauses(), 0

    async def third_answers(connection: ServerConnection) -> None:
        nonlocal n_streams
        n_streams += 1
        if n_streams == 3:
            await connection.send(encode(await receive(connection)))

    async with served(third_answers) as shard, kept(shard, pauses, LIMITS) as streams:
        for n in range(1, 5):
            await streams.get()
            if n == 3:
                await outcomes(exchange(await opened(streams)))
            await pauses.begin()
            await streams.get()
            pauses.end()

    assert pauses.asked[:4] == [1, 2, 1, 2]


@pytest.mark.parametrize(("n_pushed", "second_pause"), [(1, 2), (2, 1)])
async def test_pauses_begin_anew_when_a_stream_was_open_at_a_second_push(
    n_pushed: int, second_pause: float
) -> None:
    """Nothing answers it: one that ends with the first push has not proven anything."""
    pauses, n_streams = Pauses(), 0

    async def second_takes(connection: ServerConnection) -> None:
        nonlocal n_streams
        n_streams += 1
        if n_streams == 2:
            for _ in range(n_pushed):
                await receive(connection)

    async with served(second_takes) as shard, kept(shard, pauses, LIMITS) as streams:
        for n in range(1, 3):
            await streams.get()
            for _ in range(n_pushed if n == 2 else 0):
                await (await opened(streams)).push(StreamMessage(0, STEP, b""))
            await pauses.begin()
            pauses.end()

    assert pauses.asked[:2] == [1, second_pause]


async def test_a_required_stream_is_tried_without_longer_pauses() -> None:
    """Steps wait for it."""
    pauses = Pauses()
    limits = StreamLimits(is_required=True, first_pause_s=1)
    async with served(echo) as shard, kept(shard, pauses, limits) as streams:
        shard.refusal = refused(HTTPStatus.NOT_FOUND)
        for _ in range(3):
            with pytest.raises(HopUnreachable):
                await streams.get()
            await pauses.begin()
            pauses.end()

    assert set(pauses.asked) == {1}


async def test_a_shard_that_is_not_there_has_no_stream() -> None:
    """A refused connection is like a refused stream."""
    pauses = Pauses()
    async with served(echo) as shard:
        pass
    async with kept(shard, pauses, LIMITS) as streams:
        assert await streams.get() is None
        await pauses.begin()


async def test_an_https_endpoint_is_asked_over_tls() -> None:
    """And where that fails there is no stream."""
    first: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first.append(await reader.read(2))
        writer.close()

    pauses = Pauses()
    server = await asyncio.start_server(note, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        shard = Shard(echo, f"https://127.0.0.1:{port}")
        async with kept(shard, pauses, LIMITS) as streams:
            assert await streams.get() is None
            await pauses.begin()

    assert first == [b"\x16\x03"]


async def test_a_redirect_is_not_followed() -> None:
    """The key is shown to the endpoint that is configured, and to no other."""
    pauses = Pauses()
    async with (
        served(echo) as elsewhere,
        served(echo) as shard,
        kept(shard, pauses, LIMITS) as streams,
    ):
        location = elsewhere.endpoint.replace("http", "ws") + PATH
        shard.refusal = Response(307, "Temporary Redirect", Headers(location=location))
        assert await streams.get() is None
        await pauses.begin()

    assert (len(shard.asked), elsewhere.asked) == (1, [])


async def test_a_server_that_does_not_name_our_messages_is_not_used() -> None:
    """It would accept any stream, and answer nothing: it is left at once."""
    pauses, left = Pauses(), asyncio.Event()

    async def stranger(connection: ServerConnection) -> None:
        await connection.wait_closed()
        left.set()

    async with (
        served(stranger, subprotocols=None) as shard,
        kept(shard, pauses, LIMITS) as streams,
    ):
        assert await streams.get() is None
        await pauses.begin()
        assert await streams.get() is None
        await left.wait()


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy meant for the internet never sees the mesh's traffic."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with stream_to(echo) as stream:
        assert await outcomes(exchange(stream, b"a")) == [b"a"]


async def test_the_stream_is_closed_with_the_block() -> None:
    """In order, and whoever waits is told."""
    closed = asyncio.Event()

    async def shard(connection: ServerConnection) -> None:
        async for _ in connection:
            pass
        closed.set()

    async with stream_to(shard) as stream:
        waiting = exchange(stream)
        await asyncio.sleep(0)
    await closed.wait()

    assert await outcomes(waiting) == [HopUnreachable]


async def opened(streams: HopStreams) -> HopStream:
    """The next stream, when it is there."""
    async with asyncio.timeout(LONG):
        while True:
            try:
                stream = await streams.get()
            except MeshError:
                stream = None
            if stream is not None:
                return stream
            await asyncio.sleep(0.001)


def refused(status: HTTPStatus) -> Response:
    return Response(status, status.phrase, Headers())
