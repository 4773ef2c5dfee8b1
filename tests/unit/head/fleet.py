"""Shards that describe themselves and run nothing, and a book of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import httpx
import pytest

from meshnet.errors import MeshError, ModelLoading, RouteError
from meshnet.head.route_book import HopStatus, RouteBook
from meshnet.model.fake_stage import fake_facts
from meshnet.topology import Hop, HopSpec, LayerSpan, ShardFacts
from meshnet.wire.messages import ShardInfo
from tests.unit.fakes import FakeClock, shard_info
from tests.unit.head.making import A, B, hop_client, problem

HALVES: Final = {A: "0-2", B: "2-4"}
AWAY: Final = httpx.ConnectError("refused")
LOADING: Final = ModelLoading("reading")


@dataclass
class FakeShard:
    """Describes itself, or is away or loading."""

    facts: ShardFacts
    boot_id: str
    draining: bool = False
    sessions: int = 0
    failure: MeshError | Exception | None = None
    lie: dict[str, object] = field(default_factory=dict[str, object])
    asked: int = 0

    @property
    def info(self) -> ShardInfo:
        return shard_info(self.facts, self.boot_id, draining=self.draining, sessions=self.sessions)

    async def __call__(self, _: httpx.Request) -> httpx.Response:
        self.asked += 1
        if isinstance(self.failure, MeshError):
            return problem(self.failure)
        if self.failure is not None:
            raise self.failure
        return httpx.Response(200, json=self.info.model_dump() | self.lie)


class Fleet:
    """Shards by endpoint and span, and a book of them."""

    def __init__(
        self, spans: Mapping[str, str], specs: Sequence[HopSpec] | None = None, jitter: float = 1.0
    ) -> None:
        self.shards = {
            endpoint: FakeShard(fake_facts(LayerSpan.parse(span)), f"{endpoint[-1]}-1")
            for endpoint, span in spans.items()
        }
        self.clock = FakeClock()
        self.book = RouteBook(
            specs or [HopSpec(endpoint) for endpoint in spans],
            {endpoint: hop_client(endpoint, shard) for endpoint, shard in self.shards.items()},
            clock=self.clock,
            jitter=lambda: jitter,
        )

    def __getitem__(self, endpoint: str) -> FakeShard:
        return self.shards[endpoint]

    def change(self, endpoint: str, **changed: object) -> None:
        """Let a shard run something else from now on."""
        self[endpoint].facts = replace(self[endpoint].facts, **changed)

    def status(self, endpoint: str) -> HopStatus:
        (status,) = [s for s in self.book.status if s.spec.endpoint == endpoint]
        return status

    def hop(self, endpoint: str) -> Hop:
        (hop,) = [hop for hop in self.book.unproven() if hop.endpoint == endpoint]
        return hop

    def prove(self) -> None:
        """Let a token have gone through all shards that can be used."""
        self.book.mark_proven(self.book.unproven())

    async def asked(self, *, later_s: float = 0.0) -> Fleet:
        self.clock.now += later_s
        await self.book.refresh()
        return self

    async def proven(self) -> Fleet:
        await self.asked()
        self.prove()
        return self

    def alternative(self, endpoint: str = A) -> str | None:
        hop = self.hop(endpoint)
        self.prove()
        other = self.book.alternative(hop)
        return other.endpoint if other else None

    def route(self) -> list[str]:
        return [hop.endpoint for hop in self.book.route().hops]

    def no_route(self) -> RouteError:
        with pytest.raises(RouteError) as caught:
            self.book.route()
        return caught.value
