"""Shards with a stream to each, which push to each other; nothing goes over a socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, cast

import httpx

from meshnet.errors import HopTimeout, HopUnreachable, MeshError
from meshnet.head.direct_return import DirectReturn
from meshnet.head.hop_client import HopClient, HopTimeouts
from meshnet.head.hop_times import HopTimesBook, StepLimits
from meshnet.head.recovery import RecoveryLimits
from meshnet.ids import SessionId
from meshnet.shard.mailbox import Mailbox, MailboxLimits
from meshnet.transport.hop_stream import HopStream, HopStreams
from meshnet.wire import headers
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from meshnet.wire.headers import parse as parse_headers
from meshnet.wire.stream_messages import StreamMessage
from tests.unit.head.making import A, B, C, LiveShard, Mesh, open_mesh, problem, well

SPANS: Final = {A: "0-1", B: "1-3", C: "3-4"}
NEVER: Final = RecoveryLimits(max_rebuilds=100, timeout_s=1e6, backoff_s=1, max_backoff_s=4)


@dataclass
class Net:
    """What streams and pushes pass.

    Attributes:
        closed: The shards to which no stream is open.
        cut_off: The pairs of shards of which the first cannot reach the second.
        losing: The pairs between which what is pushed is lost.
        round_trip_s: To every shard.
        given_up: The endpoints whose stream was given up, one for each time.
    """

    shards: Mapping[str, RelayingShard] = field(default_factory=dict[str, "RelayingShard"])
    closed: set[str] = field(default_factory=set[str])
    cut_off: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    losing: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    round_trip_s: float = 0.0
    given_up: list[str] = field(default_factory=list[str])


class RelayingShard(LiveShard):
    """A live shard that is asked over a stream, too.

    Attributes:
        net: Set by `open_relay`.
        relayed: The steps that took part in direct return.
    """

    net: Net
    mailbox: Mailbox

    def restart(self, *, away_s: float = 0.0) -> None:
        super().restart(away_s=away_s)
        self.mailbox = Mailbox(MailboxLimits(), self._clock)
        self.relayed: list[StepHeaders] = []

    def client(self) -> HopClient:
        http = httpx.AsyncClient(base_url=self.endpoint, transport=httpx.MockTransport(self))
        return HopClient(self.endpoint, http, HopTimeouts(), _Streams(self))

    async def exchange(self, step: StepHeaders, body: bytes) -> httpx.Response:
        """A step of a stream."""
        self.steps.append(step)
        if self._clock() < self.away_until:
            raise httpx.ConnectError("cut")
        disturbance = self.disturbed.pop(0) if self.disturbed else well
        try:
            return await disturbance(lambda: self._run(step, body))
        except MeshError as error:
            return problem(error)

    async def _run(self, step: StepHeaders, body: bytes) -> httpx.Response:
        self._worker.check(step)
        if step.input_id or step.push_id:
            self.relayed.append(step)
        if step.input_id is not None:
            body = (await self.mailbox.take(step)).data + body
        self.mailbox.dismiss(SessionId(step.session or ""))
        response = await super()._run(step, body)
        if step.push_id is not None:
            response.headers[headers.PUSHED] = "1" if self._push(step, response) else "0"
        return response

    def _push(self, step: StepHeaders, response: httpx.Response) -> bool:
        pair = self.endpoint, step.push_to or ""
        other = self.net.shards[step.push_to or ""]
        if pair in self.net.cut_off or step.push_boot != other.boot_id:
            return False
        shape = headers.parse_shape(response.headers[headers.SHAPE])
        if pair not in self.net.losing:
            other.mailbox.put(step.push_id or "", Frame("float32", shape, response.content))
        return True


class _Streams(HopStreams):
    """A stream that is open or not."""

    def __init__(self, shard: RelayingShard) -> None:
        self._shard = shard
        self._only = _ShardStream(shard)

    def now(self) -> HopStream | None:
        return None if self._shard.endpoint in self._shard.net.closed else self._only

    async def get(self) -> HopStream | None:
        return self.now()


class _ShardStream(HopStream):
    def __init__(self, shard: RelayingShard) -> None:
        self._shard = shard

    @property
    def round_trip_s(self) -> float:
        return self._shard.net.round_trip_s

    def give_up(self) -> None:
        self._shard.net.given_up.append(self._shard.endpoint)

    async def exchange(
        self, headers: Mapping[str, str], body: bytes, limit_s: float | None
    ) -> StreamMessage:
        at = self._shard.endpoint
        try:
            answer = await self._shard.exchange(parse_headers(headers), body)
        except httpx.ReadTimeout as error:
            raise HopTimeout(f"{at} is late", endpoint=at) from error
        except httpx.HTTPError as error:
            raise HopUnreachable(f"{at} is not reachable", endpoint=at) from error
        return StreamMessage(1, dict(answer.headers), answer.content, answer.status_code)


@asynccontextmanager
async def open_relay(
    spans: Mapping[str, str] = SPANS,
    *,
    limits: RecoveryLimits = NEVER,
    max_bytes: int = 10**6,
    least_round_trip_s: float = 0.0,
    step_limit_s: float = 20.0,
    push: bool = True,
) -> AsyncGenerator[tuple[Mesh, Net]]:
    """Shards that can push, or say that they do not, and a head that lets them."""
    net = Net()
    RelayingShard.net = net
    opened = open_mesh(spans, RelayingShard, limits=limits, max_bytes=max_bytes, push=push)
    async with opened as mesh:
        net.shards = cast("Mapping[str, RelayingShard]", mesh.shards)
        mesh.kit = replace(
            mesh.kit,
            times=HopTimesBook(StepLimits(least_s=step_limit_s, most_s=step_limit_s)),
            direct=DirectReturn(mesh.clock, least_round_trip_s),
        )
        yield mesh, net
