from __future__ import annotations

from collections.abc import Mapping

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from meshnet.errors import RateLimited, Unauthorized
from services.head.access import AccessMiddleware, caller_name, count_request
from services.head.api_keys import ApiKeys, Caller, digest_of
from services.head.rate_limit import RateLimit
from tests.unit.services.asgi import Answer, ask, passes_untouched

ALICE = Caller("alice", digest_of("mesh_a"))
KEYS = ApiKeys([ALICE])


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Unauthorized)
    return PlainTextResponse(f"{request.url.path}: {error}", 401)


async def call(
    keys: ApiKeys | None,
    path: str = "/v1/models",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """An answer by the guarded app is empty."""
    guarded = AccessMiddleware(PlainTextResponse(), keys, refuse)
    return await ask(guarded, path, method=method, headers=headers)


@pytest.mark.parametrize("authorization", ["Bearer mesh_a", "bearer mesh_a", "Bearer  mesh_a "])
async def test_a_key_opens(authorization: str) -> None:
    """A known key as bearer token passes, and whose it is stands in the state."""
    answer = await call(KEYS, headers={"Authorization": authorization})

    assert (answer.status, answer.scope["state"]["caller"]) == (200, ALICE)


@pytest.mark.parametrize(
    ("authorization", "words"),
    [
        (None, "No API key"),
        ("", "No API key"),
        ("Bearer", "No API key"),
        ("Bearer ", "No API key"),
        ("Basic mesh_a", "No API key"),
        ("mesh_a", "No API key"),
        ("Bearer mesh_b", "not known"),
        ("Bearer mesh_a mesh_a", "not known"),
        (f"Bearer {digest_of('mesh_a')}", "not known"),
    ],
)
async def test_no_key_or_another_is_refused(authorization: str | None, words: str) -> None:
    """Without a known key the app sees nothing, and the answer repeats nothing that was shown."""
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = await call(KEYS, headers=headers)

    assert answer.status == 401
    assert words in answer.body.decode()
    assert "mesh_" not in answer.body.decode()
    assert "caller" not in answer.scope["state"]


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/metrics", "/version", "/docs", "/nothing", "/livez/", "/readyz/x"]
)
async def test_every_other_path_needs_a_key(path: str) -> None:
    """What is not on the short list is closed, whether it exists or not."""
    assert (await call(KEYS, path)).status == 401


@pytest.mark.parametrize("path", ["/livez", "/health", "/readyz"])
async def test_health_needs_none(path: str) -> None:
    """Orchestrators have no key."""
    answer = await call(KEYS, path)

    assert (answer.status, answer.scope["state"]["caller"]) == (200, None)


async def test_options_need_none() -> None:
    """A browser asks what is allowed before it shows a key."""
    assert (await call(KEYS, method="OPTIONS")).status == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer whatever"}])
async def test_without_keys_everybody_passes(headers: dict[str, str]) -> None:
    """A head without keys asks for none, and knows nobody."""
    answer = await call(None, headers=headers)

    assert (answer.status, answer.scope["state"]["caller"]) == (200, None)


async def test_what_is_no_request_passes() -> None:
    """The lifespan has no key to show."""
    seen: list[tuple[Scope, Receive, Send]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    assert await passes_untouched(AccessMiddleware(app, KEYS, refuse), seen)


def request_of(caller: Caller | None) -> Request:
    return Request({"type": "http", "state": {"caller": caller}})


@pytest.mark.parametrize(("caller", "name"), [(ALICE, "alice"), (None, "")])
def test_a_caller_goes_by_its_keys_name(caller: Caller | None, name: str) -> None:
    """Where no key is asked for, all callers are one."""
    assert caller_name(request_of(caller)) == name


async def test_a_limited_key_is_counted() -> None:
    """Each request counts, and one too many is refused."""
    request = request_of(Caller("a", "", RateLimit("1/day")))
    await count_request(request)
    with pytest.raises(RateLimited):
        await count_request(request)


@pytest.mark.parametrize("caller", [None, ALICE])
async def test_others_are_not_limited(caller: Caller | None) -> None:
    """Nobody, and a key without a limit, may ask as often as they like."""
    for _ in range(100):
        await count_request(request_of(caller))
