"""The head as an ASGI app: `uvicorn services.head.app:create_app --factory`. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, TypedDict, cast

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from meshnet.errors import MeshError
from meshnet.observability import configure_logging
from meshnet.openai.errors import error_body, to_openai
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.wire.headers import REQUEST_ID
from services.head.access import AccessMiddleware
from services.head.api_keys import api_keys_of
from services.head.head import Head, open_head
from services.head.openapi import document
from services.head.processing_time import PROCESSING_MS, ProcessingTimeMiddleware
from services.head.request_id import RequestIdMiddleware
from services.head.routes.generation import generation
from services.head.routes.models import models
from services.head.routes.operations import operations
from services.head.routes.responses import responses
from services.head.routes.tokens import tokens
from services.head.server_timing import SERVER_TIMING
from services.head.settings import HeadSettings
from services.head.streaming import ClientLeft

_log = structlog.get_logger(__name__)

_METHODS: Final = ("GET", "HEAD", "POST", "OPTIONS")
_EXPOSED: Final = (REQUEST_ID, PROCESSING_MS, SERVER_TIMING, "retry-after", "x-ignored-params")
"""What a web page's script may read of an answer's headers."""


class LifespanState(TypedDict):
    """What the lifespan hands to the routes, as `request.state`."""

    head: Head


def create_app(
    settings: HeadSettings | None = None, *, tokenizer: ChatTokenizer | None = None
) -> FastAPI:
    """Make the app. Once started, its `state.drain` ends requests in order and begins none.

    Args:
        settings: None reads the environment (`MESHNET_HEAD_*`).
        tokenizer: A tokenizer instead of each model's own, for tests.

    Raises:
        ValidationError: A setting is missing or malformed.
    """
    config = settings or HeadSettings()
    configure_logging(config.log_format)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[LifespanState]:
        tokenizers = {
            served.name: tokenizer or await asyncio.to_thread(ChatTokenizer.load, served.model)
            for served in config.served
        }
        async with open_head(config, tokenizers) as head:
            app.state.drain = head.drain
            yield {"head": head}

    app = _App(title="Meshnet", lifespan=lifespan, redirect_slashes=False)
    app.cors_origins = config.cors_origins
    for router in (generation, responses, models, tokens, operations):
        app.include_router(router)
    document(app)
    app.add_middleware(AccessMiddleware, keys=api_keys_of(config), refuse=_on_error)
    app.add_exception_handler(MeshError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)
    app.add_exception_handler(Exception, _on_error)
    return app


class _App(FastAPI):
    """Has some middleware outside Starlette's own, so that an answer 500 passes it too."""

    cors_origins: Sequence[str] = ()

    def build_middleware_stack(self) -> ASGIApp:
        """As FastAPI's; CORS is outermost, so that a page may read why it was refused."""
        return CORSMiddleware(
            RequestIdMiddleware(ProcessingTimeMiddleware(super().build_middleware_stack())),
            allow_origins=self.cors_origins,
            allow_methods=_METHODS,
            allow_headers=("*",),  # SDKs send a dozen of their own
            expose_headers=_EXPOSED,
        )


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
    headers: dict[str, str] = {}
    if answer.retry_after_s:
        headers["Retry-After"] = str(answer.retry_after_s)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(answer.body, status_code=answer.status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No such path or method."""
    refused = cast("HTTPException", error)
    message = f"{refused.detail}: {request.method[:20]} {request.url.path[:100]}"
    body = error_body(message, "invalid_request_error")
    return JSONResponse(body, status_code=refused.status_code, headers=refused.headers)


async def _on_client_left(request: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what proxies log for it."""
    del request, error
    return Response(status_code=499)
