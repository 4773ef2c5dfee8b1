from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from meshnet.errors import HopTimeout, MeshError
from meshnet.openai.errors import ErrorBody
from meshnet.openai.stream import DONE, Chunk
from services.head.streaming import ClientLeft, EventStream, open_stream, until_client_leaves
from tests.unit.fakes import turn_the_loop

NEVER_S = 3600.0
SOON_S = 0.01


def fail(error: ErrorBody) -> Iterable[Chunk]:
    return [Chunk({"failed": error["error"]["code"]}), DONE]


@dataclass
class Source:
    """Chunks that come once they are let go, and what became of their generator.

    Attributes:
        failure: What it fails with in place of its first chunk.
        gate: Opens the way to the first one.
        more: Opens the way to the others.
        cancelled: Whether a wait of it was cancelled.
        closed: How often it ended, in whatever way.
    """

    failure: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    begun: bool = False
    cancelled: bool = False
    closed: int = 0

    @classmethod
    def ready(cls) -> Source:
        source = cls()
        source.gate.set()
        source.more.set()
        return source

    async def chunks(self) -> AsyncGenerator[Chunk]:
        self.begun = True
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            yield Chunk({"n": 1, "text": "\u2028"})
            await self.more.wait()
            yield Chunk({"n": 2}, event="named")
            yield DONE
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            await asyncio.sleep(0)  # cleaning up takes a while
            self.closed += 1


@dataclass
class Client:
    """Stays until it leaves; what it was sent.

    Attributes:
        takes: Lets the client take the next message.
        kept_alive: Set at its second comment.
    """

    start_s: float = NEVER_S
    ping_s: float = NEVER_S
    left: asyncio.Event = field(default_factory=asyncio.Event)
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    kept_alive: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[Message] = field(default_factory=list[Message])

    def __post_init__(self) -> None:
        self.takes.set()
        settings = SimpleNamespace(stream_start_s=self.start_s, stream_ping_s=self.ping_s)
        head = SimpleNamespace(settings=settings)
        state = {"request_id": "req_1", "head": head}
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "state": state}
        self.request = Request(self.scope, self.receive)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        self.sent.append(message)
        if self.body.count(": keep-alive\n\n") == 2:
            self.kept_alive.set()

    async def open(
        self, chunks: AsyncGenerator[Chunk], timing: Callable[[], str] | None = None
    ) -> EventStream:
        return await open_stream(self.request, chunks, {"x-own": "1"}, fail, timing)

    async def read(self, stream: EventStream) -> None:
        await stream(self.scope, self.receive, self.send)

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def left_alone(source: Source) -> bool:
    """Whether the source's generator has ended, and no task runs but the test's own."""
    await turn_the_loop()
    return source.closed == 1 and asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture(autouse=True)
def no_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """sse-starlette's watcher of signals would outlive the test."""
    monkeypatch.setattr("sse_starlette.sse._ensure_watcher_started_on_this_loop", lambda: None)


# The answer.


async def test_chunks_are_events() -> None:
    """JSON in ASCII on one line, some with a name, and the last word; LF and nothing else."""
    source, client = Source.ready(), Client()
    await client.read(await client.open(source.chunks()))

    assert client.body == (
        'data: {"n":1,"text":"\\u2028"}\n\nevent: named\ndata: {"n":2}\n\ndata: [DONE]\n\n'
    )
    assert await left_alone(source)


async def test_the_head_of_a_stream() -> None:
    """No cache and no proxy holds events back; the route's own headers are there."""
    source, client = Source.ready(), Client()
    await client.read(await client.open(source.chunks()))
    headers = dict(client.sent[0]["headers"])

    assert client.sent[0]["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert (headers[b"cache-control"], headers[b"x-accel-buffering"]) == (b"no-cache", b"no")
    assert headers[b"x-own"] == b"1"


async def test_a_client_that_asks_is_told_where_the_time_went() -> None:
    """A header says it up to the first chunk, and a comment behind the last one all of it."""
    source, client = Source.ready(), Client()
    told = iter(["total;dur=1.000", "total;dur=2.000"])
    await client.read(await client.open(source.chunks(), lambda: next(told)))
    headers = dict(client.sent[0]["headers"])

    assert headers[b"server-timing"] == b"total;dur=1.000"
    assert client.body.endswith("data: [DONE]\n\n: server-timing total;dur=2.000\n\n")


# Before the status is sent.


@pytest.mark.parametrize("error", [HopTimeout("late"), ZeroDivisionError()])
async def test_an_early_error_is_raised(error: Exception) -> None:
    """What fails before there is a response can be answered with its own status."""
    source, client = Source(error), Client()
    source.gate.set()
    with pytest.raises(type(error)):
        await client.open(source.chunks())

    assert client.sent == []
    assert await left_alone(source)


async def test_a_client_that_leaves_early_ends_the_source() -> None:
    """Nobody is there to be answered: the wait is cancelled, and nothing is left."""
    source, client = Source(), Client()
    opening = asyncio.create_task(client.open(source.chunks()))
    await turn_the_loop()
    client.left.set()
    with pytest.raises(ClientLeft):
        await opening

    assert source.cancelled
    assert await left_alone(source)


async def test_a_handler_that_is_cancelled_ends_the_source() -> None:
    """A head that stops leaves nothing either."""
    source, client = Source(), Client()
    opening = asyncio.create_task(client.open(source.chunks()))
    await turn_the_loop()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening

    assert source.cancelled
    assert await left_alone(source)


# After it.


async def test_a_late_first_chunk_is_waited_for() -> None:
    """The status goes ahead, the source is not disturbed, and comments come until it speaks."""
    source, client = Source(), Client(start_s=SOON_S, ping_s=SOON_S)
    stream = await client.open(source.chunks())
    assert (source.begun, source.cancelled, source.closed) == (True, False, 0)
    reading = asyncio.create_task(client.read(stream))
    await client.kept_alive.wait()
    assert client.sent[0]["status"] == 200
    source.gate.set()
    source.more.set()
    await reading

    comments, _, events = client.body.partition("data: ")
    assert set(comments.split("\n\n")) == {": keep-alive", ""}
    assert events.endswith("data: [DONE]\n\n")
    assert (source.cancelled, await left_alone(source)) == (False, True)


async def test_a_late_error_is_an_event() -> None:
    """An error after the status is told as `fail` says, and the stream ends."""
    source, client = Source(HopTimeout("late")), Client(start_s=SOON_S)
    stream = await client.open(source.chunks())
    source.gate.set()
    await client.read(stream)

    assert client.body == 'data: {"failed":"shard_unavailable"}\n\ndata: [DONE]\n\n'
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert await left_alone(source)


async def test_a_late_fault_of_ours_is_an_event_and_is_raised() -> None:
    """The client learns no more than the id, the server's log learns the fault."""
    source, client = Source(ZeroDivisionError()), Client(start_s=SOON_S)
    stream = await client.open(source.chunks())
    source.gate.set()
    with pytest.raises(ZeroDivisionError):
        await client.read(stream)

    assert client.body == 'data: {"failed":null}\n\ndata: [DONE]\n\n'
    assert await left_alone(source)


async def test_an_error_after_the_first_chunk_is_the_sources_own_affair() -> None:
    """It tells that itself; what it raises then is not told a second time."""

    async def chunks() -> AsyncGenerator[Chunk]:
        yield Chunk({"n": 1})
        yield DONE
        raise ZeroDivisionError

    client = Client()
    stream = await client.open(chunks())
    with pytest.raises(ZeroDivisionError):
        await client.read(stream)

    assert client.body == 'data: {"n":1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("start_s", [NEVER_S, SOON_S], ids=["early", "late"])
@pytest.mark.parametrize("after", ["opening", "status", "first chunk"])
async def test_a_client_that_leaves_closes_the_source_once(start_s: float, after: str) -> None:
    """Gone before the response begins, after its status, or while the next chunk is waited for."""
    source, client = Source(), Client(start_s=start_s)
    if start_s == NEVER_S:
        source.gate.set()
    stream = await client.open(source.chunks())
    if after == "opening":
        client.takes.clear()
        client.left.set()
    reading = asyncio.create_task(client.read(stream))
    await turn_the_loop()
    if after == "first chunk":
        source.gate.set()
        await turn_the_loop()
        assert client.body.count("data: ") == 1
    client.left.set()
    await reading

    assert await left_alone(source)


async def test_a_response_that_is_cancelled_closes_the_source() -> None:
    """A server that ends its tasks leaves no generation."""
    source, client = Source(), Client(start_s=SOON_S)
    reading = asyncio.create_task(client.read(await client.open(source.chunks())))
    await turn_the_loop()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading

    assert await left_alone(source)


# In one piece.


async def test_work_is_waited_for() -> None:
    """Its result comes out, and so does what it fails with."""

    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    async def failure() -> int:
        raise MeshError("no")

    assert await until_client_leaves(Client().request, work()) == 7
    with pytest.raises(MeshError, match="no"):
        await until_client_leaves(Client().request, failure())


async def test_work_ends_with_its_client() -> None:
    """It is cancelled, and has ended before anybody hears of it."""
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    client = Client()
    client.left.set()
    with pytest.raises(ClientLeft):
        await until_client_leaves(client.request, work())

    assert ended == [True]


async def test_a_body_that_comes_late_is_no_leaving() -> None:
    """Only the end of the connection ends the wait."""
    messages: list[Message] = [{"type": "http.request", "body": b"x"}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def work() -> str:
        await turn_the_loop()
        return json.dumps(messages)

    request = Request({"type": "http"}, receive)
    assert await until_client_leaves(request, work()) == "[]"
