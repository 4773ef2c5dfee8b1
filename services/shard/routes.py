"""The shard's HTTP surface: wire protocol 1 (docs/wire-protocol.md), health and metrics."""

from __future__ import annotations

from hmac import compare_digest
from time import perf_counter
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from meshnet.errors import InvalidRequest, MeshError, ModelError, Unauthorized
from meshnet.ids import TOKEN_PATTERN, SessionId, is_token
from meshnet.shard.host import ShardHost
from meshnet.shard.mailbox import Mailbox
from meshnet.wire import headers, problems
from meshnet.wire.messages import ShardInfo
from services.shard.answers import Answer, refuse, run_step, wrong_length
from services.shard.metrics import ShardMetrics
from services.shard.settings import ShardSettings

# All of these are coroutines: FastAPI runs plain functions in threads, each a detour of 0.1 ms.


async def _host(request: Request) -> ShardHost:
    return cast("ShardHost", request.state.host)


async def _metrics(request: Request) -> ShardMetrics:
    return cast("ShardMetrics", request.state.metrics)


def _mailbox(request: Request) -> Mailbox:
    return cast("Mailbox", request.state.mailbox)


async def check_key(connection: HTTPConnection) -> None:
    """Refuse whoever does not carry the cluster key, where one is set.

    Raises:
        Unauthorized: It is missing or wrong.
    """
    settings = cast("ShardSettings", connection.state.settings)
    if settings.cluster_key is None:
        return
    expected = f"Bearer {settings.cluster_key.get_secret_value()}"
    given = connection.headers.get("authorization", "")
    if not compare_digest(given.encode(), expected.encode()):
        raise Unauthorized("the cluster key is missing or wrong", field="Authorization")


Host = Annotated[ShardHost, Depends(_host)]
Metrics = Annotated[ShardMetrics, Depends(_metrics)]

health = APIRouter()
protocol = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])


async def forward(request: Request) -> Response:
    """Run one step.

    The one path that is called for every token: a plain route, without FastAPI's dependencies.
    """
    await check_key(request)
    host, metrics = await _host(request), await _metrics(request)
    worker, began_at = host.worker, perf_counter()
    step = headers.parse(request.headers)
    # A caller that waits on a connection of its own is none that others could pass by.
    headers.refuse_direct_return(step, "direct return is for steps over a stream")
    expected = worker.check(step)
    check_s = perf_counter() - began_at
    body = await _read_body(request, expected)
    return as_response(await run_step(worker, _mailbox(request), metrics, step, body, check_s))


@protocol.delete("/sessions/{session}", status_code=204)
async def close_session(session: str, request: Request, host: Host) -> None:
    """Free a session, or keep it for forks. Closing one that is not here is no error."""
    if not is_token(session):
        raise InvalidRequest(
            "the session's id is malformed",
            field="session",
            value=session[:200],
            allowed=TOKEN_PATTERN,
        )
    epoch = headers.parse_epoch(_last(request, headers.EPOCH))
    keep = headers.parse_keep(_last(request, headers.KEEP))
    _mailbox(request).dismiss(SessionId(session))
    await host.worker.close(SessionId(session), epoch, keep=keep)


@protocol.get("/shard")
async def shard(host: Host) -> ShardInfo:
    """What this shard runs, and what it holds."""
    return await host.info()


@health.get("/livez")
@health.head("/livez", include_in_schema=False)
async def livez() -> dict[str, str]:
    """The event loop turns."""
    return {"status": "alive"}


@health.get("/readyz")
@health.head("/readyz", include_in_schema=False)
async def readyz(host: Host) -> JSONResponse:
    """Whether steps are taken; the body says why not."""
    readiness = host.readiness()
    status = 200 if readiness.state == "ready" else 503
    return JSONResponse(readiness.model_dump(), status_code=status)


@health.get("/metrics")
async def metrics_text(host: Host, metrics: Metrics) -> Response:
    """Numbers for Prometheus."""
    store = host.store
    text = metrics.render(await store.usage(), store.drops, store.n_forks)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _last(request: Request, header: str) -> str | None:
    """A header's last value: of several, a step's headers mean that one too."""
    given = request.headers.getlist(header)
    return given[-1] if given else None


async def _read_body(request: Request, expected: int) -> bytes:
    """Read exactly `expected` bytes; a body that claims or turns out another length is refused."""
    claimed = request.headers.get("content-length")
    if claimed is not None and claimed != str(expected):
        raise wrong_length(claimed, expected)
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > expected:
            raise wrong_length(f"more than {expected}", expected)
        parts.append(part)
    if length != expected:
        raise wrong_length(str(length), expected)
    return b"".join(parts)


def as_response(answer: Answer) -> Response:
    """An answer over HTTP."""
    return Response(answer.body, answer.status, answer.headers)


async def on_mesh_error(request: Request, error: Exception) -> Response:
    """Of whatever a route raises."""
    mesh_error = error if isinstance(error, MeshError) else ModelError(str(error))
    return as_response(refuse(mesh_error, await _metrics(request)))


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """No such path or method."""
    refused = cast("HTTPException", error)
    problem = problems.to_problem(InvalidRequest(str(refused.detail), field="path"))
    return JSONResponse(
        problem | {"status": refused.status_code, "value": request.url.path[:200]},
        status_code=refused.status_code,
        headers=refused.headers,
        media_type=problems.MEDIA_TYPE,
    )


async def on_caller_left(request: Request, error: Exception) -> Response:
    """The caller broke off in its body. Nobody reads this; 499 is what proxies log for it."""
    del request, error
    return Response(status_code=499)
