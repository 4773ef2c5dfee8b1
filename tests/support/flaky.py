"""A shard behind a bad line: answers get lost, steps come twice, late, slowly or not at all."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.topology import LayerSpan, ShardFacts
from meshnet.wire.stream_messages import StreamMessage, decode, encode
from services.head.probe import PROBE_PREFIX
from services.shard.app import create_app as create_shard
from services.shard.settings import ShardSettings
from tests.support.mesh import VOCAB_SIZE, Shard, shard_settings
from tests.support.recorder import Recorder
from tests.support.serving import serve

_PROBE_RUN = (0, 1)


class CountingStage(FakeStage):
    """Notes what it ran: position and number of tokens, in order.

    A head's probe is one token at position 0, and is left out; so give prompts of two and more.
    """

    def __init__(self, facts: ShardFacts) -> None:
        super().__init__(facts)
        self.runs: list[tuple[int, int]] = []

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """As the fake stage, noted."""
        run = (step.position, step.frame.n_tokens)
        if run != _PROBE_RUN:
            self.runs.append(run)
        return super().run(step, state)


def counting_stage(start: int, end: int) -> CountingStage:
    """A piece of the fake model of four layers."""
    return CountingStage(fake_facts(LayerSpan(start, end), 4, VOCAB_SIZE))


@dataclass(frozen=True)
class Reply:
    """What the shard answered to one delivery.

    Attributes:
        slowly: It is to reach the caller byte by byte.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    slowly: bool = False


@dataclass(frozen=True)
class Delivery:
    """One request that came over the line, and can be given to the shard as often as wanted.

    Attributes:
        n: Which of the line's steps it is, from 1; 0 for what is no step.
        path: What was asked for.
        is_probe: Whether a head's probe asked.
    """

    n: int
    path: str
    is_probe: bool
    _deliver: Callable[[], Awaitable[Reply]]
    _caller_left: Callable[[], Awaitable[object]]

    async def deliver(self) -> Reply:
        """Let the shard have it; the caller hears nothing of this."""
        return await self._deliver()

    async def until_caller_leaves(self) -> None:
        """Say nothing for as long as the caller waits."""
        await self._caller_left()


OnRequest = Callable[[Delivery], Awaitable[Reply | None]]
"""What happens to a request: the answer to it, or None, and the connection is closed."""


@dataclass
class Line:
    """Pure ASGI, outermost: what a head sends passes here first.

    Attributes:
        on_step: What happens to steps; the head's probes pass untouched.
        on_other: What happens to everything else, and to the probes.
        n_steps: Steps so far.
    """

    app: ASGIApp
    on_step: OnRequest | None = None
    on_other: OnRequest | None = None
    n_steps: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or do what the test wants."""
        if scope["type"] == "websocket":
            await _Streamed(self, receive, send).run(scope)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        session = Headers(scope=scope).get("x-meshnet-session", "")
        is_probe, n, on_request = self.note(session, is_step=scope["path"] == "/v1/forward")
        if on_request is None:
            await self.app(scope, receive, send)
            return
        body = await _read(receive)

        async def deliver() -> Reply:
            return await _deliver(self.app, scope, body)

        async def caller_left() -> None:
            await _left(receive)

        reply = await on_request(Delivery(n, scope["path"], is_probe, deliver, caller_left))
        if reply is None:
            _hang_up(send)
            await _left(receive)
        else:
            await _answer(reply, send)

    def note(self, session: str, *, is_step: bool) -> tuple[bool, int, OnRequest | None]:
        """Count what came. Returns whether a probe asked, the step's number, and what happens."""
        is_probe = session.startswith(PROBE_PREFIX)
        is_step = is_step and not is_probe
        self.n_steps += is_step
        return is_probe, self.n_steps if is_step else 0, self.on_step if is_step else self.on_other

    def reset(self) -> None:
        """Be a good line, and count anew."""
        self.on_step = self.on_other = None
        self.n_steps = 0


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _deliver(app: ASGIApp, scope: Scope, body: bytes) -> Reply:
    messages: list[Message] = [{"type": "http.request", "body": body}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(dict(scope), receive, send)
    start, *parts = sent
    return Reply(start["status"], start["headers"], b"".join(p.get("body", b"") for p in parts))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _hang_up(send: Send) -> None:
    cast("Any", send).__self__.transport.abort()  # uvicorn's own; ASGI has no word for it


async def _answer(reply: Reply, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)}
    )
    if reply.slowly:
        for byte in reply.body:
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": b""})
        return
    await send({"type": "http.response.body", "body": reply.body})


class _Streamed:
    """A stream that passes a line: each of its messages is a delivery."""

    def __init__(self, line: Line, receive: Receive, send: Send) -> None:
        self._line = line
        self._receive = receive
        self._send = send
        self._to_shard: asyncio.Queue[Message] = asyncio.Queue()
        self._waiting: defaultdict[int, deque[asyncio.Future[Reply]]] = defaultdict(deque)
        self._left = asyncio.Event()

    async def run(self, scope: Scope) -> None:
        """Pass messages on until one side leaves."""
        shard = asyncio.ensure_future(self._line.app(scope, self._to_shard.get, self._from_shard))
        passing: set[asyncio.Task[None]] = set()
        while not self._left.is_set():
            event = await self._receive()
            if event["type"] == "websocket.receive":
                passing.add(asyncio.create_task(self._pass(decode(event["bytes"]), event)))
            else:
                self._to_shard.put_nowait(event)
            if event["type"] == "websocket.disconnect":
                self._left.set()
        await shard
        for waiting in passing:
            waiting.cancel()  # what the shard has not answered by now it never will
        for ended in await asyncio.gather(*passing, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _pass(self, asked: StreamMessage, event: Message) -> None:
        session = asked.headers.get("x-meshnet-session", "")
        is_probe, n, on_request = self._line.note(session, is_step=True)

        async def deliver() -> Reply:
            answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            self._waiting[asked.number].append(answered)
            self._to_shard.put_nowait(dict(event))
            return await answered

        delivery = Delivery(n, "/v1/forward", is_probe, deliver, self._left.wait)
        reply = await (on_request(delivery) if on_request else deliver())
        if reply is None:
            _hang_up(self._send)
        elif not self._left.is_set():
            headers = {name.decode(): value.decode() for name, value in reply.headers}
            answer = StreamMessage(asked.number, headers, reply.body, reply.status)
            await self._send({"type": "websocket.send", "bytes": encode(answer)})

    async def _from_shard(self, message: Message) -> None:
        if message["type"] != "websocket.send":
            await self._send(message)
            return
        answer = decode(message["bytes"])
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        reply = Reply(answer.status, headers, answer.body)
        self._waiting[answer.number].popleft().set_result(reply)


@dataclass
class LinedShard:
    """A served shard, what it ran, and the line to it."""

    shard: Shard
    line: Line
    stage: CountingStage

    @property
    def url(self) -> str:
        """Where it is."""
        return self.shard.url

    def reset(self) -> None:
        """Forget what was seen."""
        self.line.reset()
        self.stage.runs.clear()
        self.shard.recorder.steps.clear()
        self.shard.recorder.closed.clear()
        self.shard.recorder.before_step = None


@asynccontextmanager
async def serve_lined(
    stage: CountingStage, *, settings: ShardSettings | None = None, port: int = 0
) -> AsyncGenerator[LinedShard]:
    """Serve one stage behind a line."""
    recorder = Recorder(create_shard(settings or shard_settings(), stage=stage))
    line = Line(recorder)
    async with serve(line, port) as served:
        yield LinedShard(Shard(served, recorder), line, stage)
