"""What operators and orchestrators ask: health, the cluster's view, numbers."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from services.head.cluster_view import ClusterView, cluster_view
from services.head.routes.request import HeadDep

operations = APIRouter()


@operations.get("/livez")
@operations.head("/livez", include_in_schema=False)
@operations.get("/health")
@operations.head("/health", include_in_schema=False)
async def livez() -> dict[str, str]:
    """The event loop turns."""
    return {"status": "alive"}


@operations.get("/readyz")
@operations.head("/readyz", include_in_schema=False)
async def readyz(head: HeadDep) -> JSONResponse:
    """Whether a request would be served; the body says why not."""
    ready = head.readiness()
    body = {"state": ready.state, "reason": ready.reason}
    return JSONResponse(body, status_code=200 if ready.serves else 503)


@operations.get("/version")
@operations.head("/version", include_in_schema=False)
async def show_version() -> dict[str, str]:
    """The installed release."""
    return {"version": version("meshnet")}


@operations.get("/v1/cluster")
@operations.head("/v1/cluster", include_in_schema=False)
async def cluster(head: HeadDep) -> ClusterView:
    """The hops, what each says of itself, and where the time of recent decode steps went."""
    return cluster_view(head)


@operations.get("/metrics", response_class=PlainTextResponse)
@operations.head("/metrics", include_in_schema=False)
async def metrics(head: HeadDep) -> Response:
    """Numbers for Prometheus."""
    return Response(head.metrics.render(), media_type=CONTENT_TYPE_LATEST)
