"""The head as an ASGI app: `uvicorn services.head.app:create_app --factory`. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import TypedDict, cast

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from meshnet.errors import MeshError
from meshnet.observability import configure_logging
from meshnet.openai.errors import error_body, to_openai
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.wire.headers import REQUEST_ID
from services.head.head import Head, open_head
from services.head.request_id import RequestIdMiddleware
from services.head.routes import openai, operations
from services.head.settings import HeadSettings
from services.head.streaming import ClientLeft

_log = structlog.get_logger(__name__)


class LifespanState(TypedDict):
    """What the lifespan hands to the routes, as `request.state`."""

    head: Head


def create_app(
    settings: HeadSettings | None = None, *, tokenizer: ChatTokenizer | None = None
) -> FastAPI:
    """Make the app. Once started, its `state.drain` ends requests in order and begins none.

    Args:
        settings: None reads the environment (`MESHNET_HEAD_*`).
        tokenizer: A tokenizer instead of the settings' model's, for tests.

    Raises:
        ValidationError: A setting is missing or malformed.
    """
    config = settings or HeadSettings()  # pyright: ignore[reportCallIssue]  # from environment
    configure_logging(config.log_format)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[LifespanState]:
        loaded = tokenizer or await asyncio.to_thread(ChatTokenizer.load, config.model)
        async with open_head(config, loaded) as head:
            app.state.drain = head.drain
            poll = asyncio.create_task(head.readiness.poll(config.route_poll_s))
            try:
                yield {"head": head}
            finally:
                poll.cancel()
                with suppress(asyncio.CancelledError):
                    await poll

    app = FastAPI(title="Meshnet", lifespan=lifespan, redirect_slashes=False)
    app.include_router(openai)
    app.include_router(operations)
    app.add_middleware(RequestIdMiddleware)
    app.add_exception_handler(MeshError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)
    app.add_exception_handler(Exception, _on_error)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """The one place where an error becomes an answer."""
    head = cast("Head", request.state.head)
    answer = to_openai(error, request_id=request.state.request_id)
    head.metrics.count_refusal(answer.body["error"]["code"] or answer.body["error"]["type"])
    _log.warning(
        "request failed",
        request_id=request.state.request_id,
        status=answer.status,
        code=answer.body["error"]["code"],
        reason=str(error),
    )
    headers = {REQUEST_ID: request.state.request_id}  # Starlette answers a 500 past our middleware
    if answer.retry_after_s:
        headers["Retry-After"] = str(answer.retry_after_s)
    return JSONResponse(answer.body, status_code=answer.status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No such path or method."""
    del request
    refused = cast("HTTPException", error)
    body = error_body(str(refused.detail), "invalid_request_error")
    return JSONResponse(body, status_code=refused.status_code, headers=refused.headers)


async def _on_client_left(request: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what proxies log for it."""
    del request, error
    return Response(status_code=499)
