"""Who may use the endpoint: callers with a key, where any are configured, and how often each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet.errors import Unauthorized
from services.head.api_keys import ApiKeys, Caller

_PUBLIC: Final = frozenset({"/livez", "/health", "/readyz"})
"""What orchestrators ask, which have no key. All else needs one, paths that do not exist too."""


class AccessMiddleware:
    """Lets callers in who show a key; who they are is `caller` in the request's state.

    Args:
        app: What is guarded.
        keys: None asks for no key, and knows no caller.
        refuse: Makes the answer of an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys | None,
        refuse: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._keys = keys
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401; the request's body is not read then."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope["state"]["caller"] = self._caller(scope)
        except Unauthorized as error:
            response = await self._refuse(Request(scope), error)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if self._keys is None or scope["method"] == "OPTIONS" or scope["path"] in _PUBLIC:
            return None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("No API key: send yours as `Authorization: Bearer KEY`")
        caller = self._keys.caller(key.strip())
        if caller is None:
            raise Unauthorized("This API key is not known")
        return caller


def caller_name(request: Request) -> str:
    """The name of the key that was shown; "" where none is asked for."""
    caller = cast("Caller | None", request.state.caller)
    return "" if caller is None else caller.name


async def count_request(request: Request) -> None:
    """A dependency of the routes that generate: counts the request on its caller's key.

    Raises:
        RateLimited: The key was used too often of late.
    """
    caller = cast("Caller | None", request.state.caller)
    if caller is not None and caller.rate_limit is not None:
        await caller.rate_limit.count()
