"""Pure ASGI: notes each step that a shard is asked for, and can disturb one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshnet.wire.stream_messages import decode
from services.head.probe import PROBE_PREFIX


@dataclass(frozen=True)
class SeenStep:
    """What one step's headers said."""

    request: str
    session: str
    mode: str
    shape: str
    past_len: int
    start_layer: int
    step: str = ""
    epoch: int = 0
    fork_of: str = ""


@dataclass
class Recorder:
    """Stands before a shard's app; the head's own probes pass unseen.

    Attributes:
        steps: Every step asked for, in order.
        before_step: Called with each step before the shard sees it.
    """

    app: ASGIApp
    steps: list[SeenStep] = field(default_factory=list[SeenStep])
    closed: list[str] = field(default_factory=list[str])
    before_step: Callable[[SeenStep], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note, disturb, pass on."""
        if scope["type"] == "http" and scope["path"] == "/v1/forward":
            await self._note(Headers(scope=scope))
        if scope["type"] == "websocket":
            await self.app(scope, partial(self._receive, receive), send)
            return
        if scope["type"] == "http" and scope["method"] == "DELETE":
            session = scope["path"].rpartition("/")[2]
            if not session.startswith(PROBE_PREFIX):
                self.closed.append(session)
        await self.app(scope, receive, send)

    async def _receive(self, receive: Receive) -> Message:
        """A stream's next event, noted if it is a step."""
        event = await receive()
        if event["type"] == "websocket.receive":
            await self._note(Headers(decode(event["bytes"]).headers))
        return event

    async def _note(self, headers: Headers) -> None:
        seen = _seen(headers)
        if not seen.session.startswith(PROBE_PREFIX):
            self.steps.append(seen)
            if self.before_step is not None:
                await self.before_step(seen)


def _seen(headers: Headers) -> SeenStep:
    return SeenStep(
        request=headers.get("x-request-id", ""),
        session=headers.get("x-meshnet-session", ""),
        mode=headers.get("x-meshnet-cache", ""),
        shape=headers.get("x-meshnet-shape", ""),
        past_len=_number(headers.get("x-meshnet-past-len", "0")),
        start_layer=_number(headers.get("x-meshnet-start-layer", "-1")),
        step=headers.get("x-meshnet-step", ""),
        epoch=_number(headers.get("x-meshnet-epoch", "0")),
        fork_of=headers.get("x-meshnet-fork-of", ""),
    )


def _number(text: str) -> int:
    """What is no number is noted as -1: to refuse it is the shard's affair."""
    return int(text) if text.isdecimal() and len(text) < 20 else -1
