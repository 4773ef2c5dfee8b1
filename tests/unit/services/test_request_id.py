from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from meshnet.ids import is_token
from services.head.request_id import RequestIdMiddleware


async def nothing_to_receive() -> Message:
    raise AssertionError("the middleware reads no body")


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that answers two parts, and sets a header of its own."""
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


async def call(
    given: bytes | None, state: MutableMapping[str, Any] | None = None
) -> tuple[Scope, list[Message]]:
    """The scope as the app saw it, and what was sent."""
    sent: list[Message] = []
    scope: Scope = {
        "type": "http",
        "headers": [] if given is None else [(b"x-request-id", given)],
        **({} if state is None else {"state": state}),
    }

    async def send(message: Message) -> None:
        sent.append(message)

    await RequestIdMiddleware(answer)(scope, nothing_to_receive, send)
    return scope, sent


async def test_a_sane_id_is_kept() -> None:
    """The caller's id is the request's, and the answer carries it."""
    scope, sent = await call(b"my-id.1")

    assert scope["state"]["request_id"] == "my-id.1"
    assert sent[0]["headers"] == [(b"x-own", b"1"), (b"x-request-id", b"my-id.1")]


@pytest.mark.parametrize(
    "given", [None, b"", b"a b", b"a" * 129, b"\xe9", b"a\r\nset-cookie: x", b"a\n"]
)
async def test_another_id_is_replaced(given: bytes | None) -> None:
    """Without an id, or with one that could harm a log or a header, the request gets a new one."""
    scope, sent = await call(given)
    request_id: str = scope["state"]["request_id"]

    assert (request_id[:4], is_token(request_id)) == ("req_", True)
    assert (b"x-request-id", request_id.encode()) in sent[0]["headers"]


async def test_two_requests_have_two_ids() -> None:
    """A new id is new for each request."""
    ids = {(await call(None))[0]["state"]["request_id"] for _ in range(2)}

    assert len(ids) == 2


async def test_the_lifespans_state_stays() -> None:
    """The id stands beside what the lifespan has put there."""
    scope, _ = await call(b"id", state={"head": 1})

    assert scope["state"] == {"head": 1, "request_id": "id"}


async def test_the_body_passes_as_it_is_made() -> None:
    """Parts of a streamed answer are neither changed nor held back."""
    _, sent = await call(None)

    assert [message.get("body") for message in sent] == [None, b"a", b"b"]


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
async def test_other_scopes_pass_untouched(kind: str) -> None:
    """What is no HTTP request goes to the app as it came."""
    seen: list[tuple[Scope, Receive, Send]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def send(_: Message) -> None: ...

    await RequestIdMiddleware(app)({"type": kind}, nothing_to_receive, send)

    assert seen == [({"type": kind}, nothing_to_receive, send)]
