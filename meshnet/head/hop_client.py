"""Talks to one shard over HTTP. The only place that sees httpx, and its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from meshnet.errors import HopError, HopProtocolError, HopTimeout, HopUnreachable, InvalidRequest
from meshnet.ids import SessionId
from meshnet.wire import headers, problems
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import ShardInfo, ShardReadiness, TailAnswer

BodyT = TypeVar("BodyT", bound=BaseModel)

# The pool is larger than what admission lets through, and uvicorn's keep-alive is longer than ours:
# a connection is never used in the moment that the other side closes it.
_POOL = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=3.0)


@dataclass(frozen=True, slots=True)
class HopTimeouts:
    """How long a hop may take."""

    connect_s: float = 5.0
    step_s: float = 120.0
    probe_s: float = 5.0
    """For what computes nothing: descriptions, readiness, closing a session."""


@dataclass(frozen=True, slots=True)
class HopAnswer:
    """What a hop answered to a step, and where the time went, in milliseconds."""

    result: Frame | TailAnswer
    step_ms: float
    queue_ms: float
    compute_ms: float


class HopClient:
    """One shard, through one httpx client.

    Args:
        endpoint: `http://host:port`.
        http: Made by `open_hop`, which also closes it.
        timeouts: How long it may take.
    """

    def __init__(self, endpoint: str, http: httpx.AsyncClient, timeouts: HopTimeouts) -> None:
        self.endpoint = endpoint
        self._http = http
        self._timeouts = timeouts

    async def step(self, step: StepHeaders, body: bytes) -> HopAnswer:
        """Send one step.

        Raises:
            HopUnreachable: No connection, or it broke; the step may or may not have been applied.
            HopTimeout: No answer in time; likewise.
            HopProtocolError: An answer that is not of this protocol.
            MeshError: Whatever the shard refused the step with, as the class it raised.
        """
        started_at = perf_counter()
        response = await self._send(
            "POST",
            "/v1/forward",
            content=body,
            headers={"content-type": "application/octet-stream", **headers.render(step)},
            read_s=self._timeouts.step_s,
        )
        return HopAnswer(
            self._read_step(response),
            step_ms=(perf_counter() - started_at) * 1000,
            queue_ms=_milliseconds(response, headers.QUEUE_MS),
            compute_ms=_milliseconds(response, headers.COMPUTE_MS),
        )

    async def close_session(self, session: SessionId) -> None:
        """Free a session on the shard; idempotent. Raises as `step`."""
        await self._send("DELETE", f"/v1/sessions/{session}", read_s=self._timeouts.probe_s)

    async def describe(self) -> ShardInfo:
        """What the shard says of itself. Raises as `step`."""
        response = await self._send("GET", "/v1/shard", read_s=self._timeouts.probe_s)
        return self._read_json(response, ShardInfo)

    async def readiness(self) -> ShardReadiness:
        """How far the shard is; also one that is not ready answers. Raises as `step`."""
        response = await self._send(
            "GET", "/readyz", read_s=self._timeouts.probe_s, accept_status=503
        )
        return self._read_json(response, ShardReadiness)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        read_s: float,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        accept_status: int = 200,
    ) -> httpx.Response:
        connect_s = self._timeouts.connect_s
        timeout = httpx.Timeout(read_s, connect=connect_s, pool=connect_s)
        try:
            response = await self._http.request(
                method, path, content=content, headers=headers, timeout=timeout
            )
        except httpx.HTTPError as error:
            raise self._translate(error) from error
        if response.is_success or response.status_code == accept_status:
            return response
        raise problems.from_problem(
            response.content, status=response.status_code, endpoint=self.endpoint
        )

    def _translate(self, error: httpx.HTTPError) -> HopError:
        """The only mapper from httpx."""
        what = str(error) or type(error).__name__
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
            return HopTimeout(f"{self.endpoint} did not answer in time", endpoint=self.endpoint)
        if isinstance(error, httpx.DecodingError):
            return HopProtocolError(
                f"{self.endpoint} answered what cannot be decoded: {what}", endpoint=self.endpoint
            )
        return HopUnreachable(f"{self.endpoint} is not reachable: {what}", endpoint=self.endpoint)

    def _read_step(self, response: httpx.Response) -> Frame | TailAnswer:
        if response.headers.get("content-type", "").startswith("application/json"):
            return self._read_json(response, TailAnswer)
        shape = response.headers.get(headers.SHAPE, "")
        try:
            dtype = headers.parse_dtype(response.headers.get(headers.DTYPE, ""))
            return Frame(dtype, headers.parse_shape(shape), response.content)
        except InvalidRequest as error:
            raise HopProtocolError(
                f"{self.endpoint} answered no frame: {error.message}", endpoint=self.endpoint
            ) from error

    def _read_json(self, response: httpx.Response, kind: type[BodyT]) -> BodyT:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise HopProtocolError(
                f"{self.endpoint} answered no {kind.__name__}: {error.error_count()} faults",
                endpoint=self.endpoint,
            ) from error


@asynccontextmanager
async def open_hop(
    endpoint: str, timeouts: HopTimeouts, cluster_key: str | None = None
) -> AsyncGenerator[HopClient]:
    """A client for one shard, closed at the end of the block."""
    auth = {} if cluster_key is None else {"authorization": f"Bearer {cluster_key}"}
    # trust_env=False: a proxy meant for the internet must not carry the mesh's traffic.
    async with httpx.AsyncClient(
        base_url=endpoint, headers=auth, limits=_POOL, trust_env=False
    ) as http:
        yield HopClient(endpoint, http, timeouts)


def _milliseconds(response: httpx.Response, name: str) -> float:
    try:
        return float(response.headers.get(name, 0.0))
    except ValueError:
        return 0.0
