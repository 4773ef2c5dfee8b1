"""Talks to one shard: over HTTP, and for short steps over a stream if there is one.

The only place that sees httpx, and its errors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from meshnet.errors import HopError, HopProtocolError, HopTimeout, HopUnreachable, InvalidRequest
from meshnet.ids import SessionId
from meshnet.transport.hop_stream import HopStream, HopStreams, StreamLimits, open_streams
from meshnet.wire import headers, problems, stream_messages
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import ShardInfo, TailAnswer

BodyT = TypeVar("BodyT", bound=BaseModel)

HopTransport = Literal["auto", "post", "stream"]
"""How steps go to a shard: each as a POST, or over a kept-open stream; `auto` is over a stream
while there is one. What is too long for a stream's message is a POST always."""

# The pool is larger than what admission lets through, and uvicorn's keep-alive is longer than ours:
# a connection is never used in the moment that the other side closes it.
_POOL = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=3.0)


_MAX_JSON_BYTES: Final = 1024**2
"""Descriptions, problems and tails' answers are far shorter."""


@dataclass(frozen=True, slots=True)
class HopTimeouts:
    """How long a hop may take to connect, and to answer what is no step."""

    connect_s: float = 5.0
    probe_s: float = 3.0
    """For what computes nothing: descriptions, closing a session."""


@dataclass(frozen=True, slots=True)
class HopAnswer:
    """What a hop answered to a step, and where the time went, in milliseconds.

    Attributes:
        pushed: Whether the result went to another shard as well, where that was asked for.
    """

    result: Frame | TailAnswer
    step_ms: float
    """The round trip as the head sees it; the others are parts of it."""
    queue_ms: float
    compute_ms: float
    serialise_ms: float
    """Making and reading headers and bodies, on both sides."""
    pushed: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """A successful answer, read to its end."""

    headers: Mapping[str, str]
    """Asked for by names in lower case."""
    body: bytes


class HopClient:
    """One shard, through one httpx client and one stream at a time.

    Args:
        endpoint: `http://host:port`.
        http: Made by `open_hop`, which also closes it.
        timeouts: How long it may take.
        streams: Likewise made and closed by `open_hop`; None has every step go by POST.
    """

    def __init__(
        self,
        endpoint: str,
        http: httpx.AsyncClient,
        timeouts: HopTimeouts,
        streams: HopStreams | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._http = http
        self._timeouts = timeouts
        self._streams = streams

    @property
    def stream(self) -> HopStream | None:
        """The stream that is open now; where there is none, one is opened meanwhile."""
        return None if self._streams is None else self._streams.now()

    async def step(
        self, step: StepHeaders, body: bytes, *, limit_s: float, max_answer_bytes: int
    ) -> HopAnswer:
        """Send one step.

        Args:
            step: Its headers.
            body: The tensor, row-major little-endian.
            limit_s: How long the answer may take, once there is a connection.
            max_answer_bytes: The longest answer; a longer one is not read to its end.

        Raises:
            HopUnreachable: No connection, or it broke; the step may or may not have been applied.
            HopTimeout: No answer in time; likewise.
            HopProtocolError: An answer that is not of this protocol.
            MeshError: Whatever the shard refused the step with, as the class it raised.
        """
        stream = await self._stream_for(max(len(body), max_answer_bytes))
        if stream is not None:
            return await self.step_on(stream, step, body, limit_s)
        started_at = perf_counter()
        named = headers.render(step)
        made_s = perf_counter() - started_at
        response = await self._post(named, body, limit_s, max_answer_bytes)
        return self._as_answer(response, started_at, made_s)

    async def step_on(
        self, stream: HopStream, step: StepHeaders, body: bytes, limit_s: float | None
    ) -> HopAnswer:
        """Send one step over a stream. Raises as `step`.

        Unlike a POST, the wait for the answer may be cancelled.
        """
        started_at = perf_counter()
        named = headers.render(step)
        made_s = perf_counter() - started_at
        answer = await stream.exchange(named, body, limit_s)
        response = self._check(answer.status, answer.headers, answer.body)
        return self._as_answer(response, started_at, made_s)

    async def close_session(self, session: SessionId, epoch: int, *, keep: bool = False) -> None:
        """Free a session on the shard, or have it kept for forks; idempotent. Raises as `step`.

        Steps of it in this epoch or before, still on their way, are refused from then on.
        """
        named = {headers.EPOCH: str(epoch)} | ({headers.KEEP: "1"} if keep else {})
        await self._send("DELETE", f"/v1/sessions/{session}", headers=named)

    async def describe(self) -> ShardInfo:
        """What the shard says of itself. Raises as `step`."""
        response = await self._send("GET", "/v1/shard")
        return self._read_json(response, ShardInfo)

    def _as_answer(self, response: _Answer, started_at: float, made_s: float) -> HopAnswer:
        """The answer to a step that was begun then, and took so long to make."""
        came_at = perf_counter()
        result = self._read_step(response)
        ended_at = perf_counter()
        own_ms = (made_s + ended_at - came_at) * 1000
        return HopAnswer(
            result,
            step_ms=(ended_at - started_at) * 1000,
            queue_ms=_milliseconds(response, headers.QUEUE_MS),
            compute_ms=_milliseconds(response, headers.COMPUTE_MS),
            serialise_ms=own_ms + _milliseconds(response, headers.SERIALISE_MS),
            pushed=response.headers.get(headers.PUSHED.lower()) == "1",
        )

    async def _stream_for(self, longest: int) -> HopStream | None:
        """The stream, if there is one and neither step nor answer is too long for it."""
        if self._streams is None or longest > stream_messages.MAX_BODY_BYTES:
            return None
        return await self._streams.get()

    async def _post(
        self, named: dict[str, str], body: bytes, limit_s: float, max_answer_bytes: int
    ) -> _Answer:
        return await self._send(
            "POST",
            "/v1/forward",
            content=body,
            headers={"content-type": "application/octet-stream", **named},
            limit_s=limit_s,
            max_bytes=max(max_answer_bytes, _MAX_JSON_BYTES),
        )

    async def _send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        limit_s: float | None = None,
        max_bytes: int = _MAX_JSON_BYTES,
    ) -> _Answer:
        limit_s = limit_s or self._timeouts.probe_s
        connect_s = self._timeouts.connect_s
        timeout = httpx.Timeout(limit_s, connect=connect_s, pool=connect_s)
        try:
            async with self._http.stream(
                method, path, content=content, headers=headers, timeout=timeout
            ) as response:
                body = await self._read(response, perf_counter() + limit_s, max_bytes)
        except httpx.HTTPError as error:
            raise self._translate(error) from error
        return self._check(response.status_code, response.headers, body)

    def _check(self, status: int, headers: Mapping[str, str], body: bytes) -> _Answer:
        """Take a success; anything else is raised as what it was refused with."""
        if httpx.codes.is_success(status):
            return _Answer(headers, body)
        raise problems.from_problem(body, status=status, endpoint=self.endpoint)

    async def _read(self, response: httpx.Response, ends_at: float, max_bytes: int) -> bytes:
        """The whole body; httpx limits the wait for each part of it, not for all of them."""
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > max_bytes:
                raise HopProtocolError(
                    f"{self.endpoint} answered more than {max_bytes} bytes", endpoint=self.endpoint
                )
            if perf_counter() > ends_at:
                raise self._timed_out()
        return bytes(body)

    def _timed_out(self) -> HopTimeout:
        return HopTimeout(f"{self.endpoint} did not answer in time", endpoint=self.endpoint)

    def _translate(self, error: httpx.HTTPError) -> HopError:
        """The only mapper from httpx."""
        what = str(error) or type(error).__name__
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
            return self._timed_out()
        if isinstance(error, httpx.DecodingError):
            return HopProtocolError(
                f"{self.endpoint} answered what cannot be decoded: {what}", endpoint=self.endpoint
            )
        return HopUnreachable(f"{self.endpoint} is not reachable: {what}", endpoint=self.endpoint)

    def _read_step(self, response: _Answer) -> Frame | TailAnswer:
        if response.headers.get("content-type", "").startswith("application/json"):
            return self._read_json(response, TailAnswer)
        shape = response.headers.get(headers.SHAPE.lower(), "")
        try:
            dtype = headers.parse_dtype(response.headers.get(headers.DTYPE.lower(), ""))
            return Frame(dtype, headers.parse_shape(shape), response.body)
        except InvalidRequest as error:
            raise HopProtocolError(
                f"{self.endpoint} answered no frame: {error.message}", endpoint=self.endpoint
            ) from error

    def _read_json(self, response: _Answer, kind: type[BodyT]) -> BodyT:
        try:
            return kind.model_validate_json(response.body)
        except ValidationError as error:
            raise HopProtocolError(
                f"{self.endpoint} answered no {kind.__name__}: {error.error_count()} faults",
                endpoint=self.endpoint,
            ) from error


@asynccontextmanager
async def open_hop(
    endpoint: str,
    timeouts: HopTimeouts,
    cluster_key: str | None = None,
    transport: HopTransport = "auto",
) -> AsyncGenerator[HopClient]:
    """A client for one shard, closed at the end of the block."""
    auth = {} if cluster_key is None else {"authorization": f"Bearer {cluster_key}"}
    # trust_env=False: a proxy meant for the internet must not carry the mesh's traffic.
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=endpoint, headers=auth, limits=_POOL, trust_env=False)
        )
        if transport == "post":
            streams = None
        else:
            limits = StreamLimits(transport == "stream", timeouts.connect_s)
            streams = await stack.enter_async_context(open_streams(endpoint, auth, limits))
        yield HopClient(endpoint, http, timeouts, streams)


def _milliseconds(response: _Answer, name: str) -> float:
    try:
        return float(response.headers.get(name.lower(), 0.0))
    except ValueError:
        return 0.0
