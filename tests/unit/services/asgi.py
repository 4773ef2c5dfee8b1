"""One request to an ASGI app, without a socket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass
class Answer:
    """What an app sent, and the scope as it left it."""

    scope: Scope
    messages: list[Message] = field(default_factory=list[Message])

    @property
    def status(self) -> int:
        """Of the answer."""
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(message.get("body", b"") for message in self.messages)


async def nothing_to_receive() -> Message:
    """No body is to be read."""
    raise AssertionError("nothing here reads a body")


async def ask(
    app: ASGIApp,
    path: str = "/",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Answer:
    """Call the app."""
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        "state": dict(state or {}),
    }
    answer = Answer(scope)

    async def send(message: Message) -> None:
        answer.messages.append(message)

    await app(scope, nothing_to_receive, send)
    return answer


async def passes_untouched(middleware: ASGIApp, seen: list[tuple[Scope, Receive, Send]]) -> bool:
    """Whether what is no HTTP request reaches the app, which notes it in `seen`, as it came."""

    async def send(_: Message) -> None: ...

    scope: Scope = {"type": "lifespan"}
    await middleware(scope, nothing_to_receive, send)
    return seen == [({"type": "lifespan"}, nothing_to_receive, send)]
