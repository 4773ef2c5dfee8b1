"""Knows which shards are there and what route they make."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshnet.errors import Forbidden, InvalidRequest, MeshError, ModelLoading, RouteError
from meshnet.head.hop_client import HopClient
from meshnet.topology import HopSpec, Route, ShardFacts, build_route
from meshnet.wire.headers import PROTOCOL_VERSION, ROUTE
from meshnet.wire.messages import ShardInfo


@dataclass(frozen=True, slots=True)
class HopStatus:
    """One configured hop: what it last said of itself, or why it said nothing."""

    spec: HopSpec
    info: ShardInfo | None
    error: MeshError | None


class RouteBook:
    """The configured hops, asked again and again.

    Args:
        specs: The configured route, first hop first.
        clients: A client for each of its endpoints.
    """

    def __init__(self, specs: Sequence[HopSpec], clients: Mapping[str, HopClient]) -> None:
        self.clients = clients
        self._specs = tuple(specs)
        self._status = {
            spec.endpoint: HopStatus(spec, None, ModelLoading("not asked yet")) for spec in specs
        }

    @property
    def status(self) -> list[HopStatus]:
        """Every configured hop, in the route's order."""
        return list(self._status.values())

    async def refresh(self) -> None:
        """Ask every hop what it is."""
        found = await asyncio.gather(*(self._ask(spec) for spec in self._specs))
        self._status = {status.spec.endpoint: status for status in found}

    async def poll(self, every_s: float) -> None:
        """Refresh for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(every_s)

    async def is_ready(self, endpoint: str) -> bool:
        """Whether the hop takes steps now."""
        try:
            return (await self.clients[endpoint].readiness()).state == "ready"
        except MeshError:
            return False

    async def ready_route(self) -> Route:
        """The configured route; hops that were not ready when last asked are asked again.

        Raises:
            RouteError: A hop is not there or not ready, or the hops do not tile the model.
        """
        return build_route(self._specs, await self._facts(self._specs))

    async def pinned_route(self, specs: Sequence[HopSpec]) -> Route:
        """A caller's own route over configured hops.

        Raises:
            Forbidden: An endpoint is not among the configured; no connection was made.
            RouteError: A hop is not there or not ready.
            InvalidRequest: The hops do not tile the model.
        """
        for spec in specs:
            if spec.endpoint not in self._status:
                raise Forbidden(
                    f"{spec.endpoint[:200]} is not among this head's hops",
                    field=ROUTE,
                    value=spec.endpoint[:200],
                    allowed=sorted(self._status),
                )
        facts = await self._facts(specs)
        try:
            return build_route(specs, facts)
        except RouteError as error:  # here the caller's mistake, not a hop's
            raise InvalidRequest(f"{ROUTE}: {error.message}", field=ROUTE) from error

    async def _facts(self, specs: Sequence[HopSpec]) -> list[ShardFacts]:
        if any(self._status[spec.endpoint].info is None for spec in specs):
            await self.refresh()
        return [self._info(spec).facts() for spec in specs]

    def _info(self, spec: HopSpec) -> ShardInfo:
        status = self._status[spec.endpoint]
        if status.info is None:
            why = status.error.message if status.error else "unknown"
            raise RouteError(f"the hop {spec.endpoint} is not ready: {why}", endpoint=spec.endpoint)
        if status.info.protocol != PROTOCOL_VERSION:
            raise RouteError(
                f"the hop {spec.endpoint} speaks protocol {status.info.protocol}",
                field="protocol",
                value=status.info.protocol,
                allowed=PROTOCOL_VERSION,
                endpoint=spec.endpoint,
            )
        return status.info

    async def _ask(self, spec: HopSpec) -> HopStatus:
        try:
            return HopStatus(spec, await self.clients[spec.endpoint].describe(), None)
        except MeshError as error:
            return HopStatus(spec, None, error)
