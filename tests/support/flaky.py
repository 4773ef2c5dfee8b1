"""A shard behind a bad line: answers get lost, steps come twice, late, slowly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.topology import LayerSpan, ShardFacts
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
    _scope: Scope
    _body: bytes
    _app: ASGIApp
    _receive: Receive

    async def deliver(self) -> Reply:
        """Let the shard have it; the caller hears nothing of this."""
        messages: list[Message] = [{"type": "http.request", "body": self._body}]
        sent: list[Message] = []

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(dict(self._scope), receive, send)
        start, *parts = sent
        return Reply(start["status"], start["headers"], b"".join(p.get("body", b"") for p in parts))

    async def until_caller_leaves(self) -> None:
        """Say nothing for as long as the caller waits."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


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
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        session = Headers(scope=scope).get("x-meshnet-session", "")
        is_probe = session.startswith(PROBE_PREFIX)
        is_step = scope["path"] == "/v1/forward" and not is_probe
        self.n_steps += is_step
        on_request = self.on_step if is_step else self.on_other
        if on_request is None:
            await self.app(scope, receive, send)
            return
        n, path = self.n_steps if is_step else 0, scope["path"]
        body = await _read(receive)
        reply = await on_request(Delivery(n, path, is_probe, scope, body, self.app, receive))
        if reply is None:
            await _hang_up(receive, send)
        else:
            await _answer(reply, send)

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


async def _hang_up(receive: Receive, send: Send) -> None:
    cast("Any", send).__self__.transport.abort()  # uvicorn's own; ASGI has no word for it
    while (await receive())["type"] != "http.disconnect":
        pass


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
