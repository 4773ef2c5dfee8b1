"""Whether a request would be served: a route is ready once a token went through it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from meshnet.errors import Draining, MeshError, RouteError
from meshnet.head.background import Background
from meshnet.head.route_book import RouteBook
from meshnet.topology import Hop, Route

_PATIENCE_S: Final = 5.0
"""How long a request waits for a route before it is refused."""

HeadState = Literal["loading", "probing", "ready", "degraded", "draining"]


@dataclass(frozen=True, slots=True)
class ReadyState:
    """What `/readyz` says.

    Attributes:
        state: `loading` before the first route, `probing` while a token is on its way, `degraded`
            where a shard is missing.
        serves: Whether a request would be taken now.
        reason: What is missing, or None.
    """

    state: HeadState
    serves: bool = False
    reason: str | None = None


class Readiness:
    """Proves the shards of the book, and says how far they are.

    Args:
        book: The shards.
        probe: Runs one token over a route; raises what it fails with.
        background: Where probes end.
    """

    def __init__(
        self,
        book: RouteBook,
        probe: Callable[[Route], Awaitable[None]],
        background: Background,
    ) -> None:
        self._book = book
        self._probe = probe
        self._background = background
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._was_ready = False
        self._draining = False

    def drain(self) -> None:
        """Serve no new request from now on."""
        self._draining = True

    def check_admission(self) -> None:
        """Find out whether new requests are taken at all.

        Raises:
            Draining: They are to go elsewhere.
        """
        if self._draining:
            raise Draining("this head finishes its requests and takes no new one")

    async def poll(self, every_s: float) -> None:
        """Look after the shards for ever; one that hangs in its probe holds up no other."""
        while True:
            await self._book.refresh()
            self._start_probes()
            await asyncio.sleep(every_s)

    async def route(self) -> Route:
        """The route that takes the longest sequences, by which a request is judged.

        Shards that were not ready when last asked are asked again.

        Raises:
            RouteError: There is none.
        """
        with suppress(RouteError):
            return self._book.widest_route()
        await self._book.refresh()
        self._start_probes()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while self._probing:
                    with suppress(RouteError):
                        return self._book.widest_route()
                    await asyncio.wait(self._probing.values(), return_when=asyncio.FIRST_COMPLETED)
        return self._book.widest_route()

    def state(self) -> ReadyState:
        """How far it is."""
        if self._draining:
            return ReadyState("draining", reason="finishing its requests, taking no new one")
        missing = self._missing()
        try:
            self._book.route()
        except RouteError as error:
            if self._was_ready:
                return ReadyState("degraded", reason=error.message)
            state = "probing" if self._probing else "loading"
            return ReadyState(state, reason=error.message)
        return ReadyState("degraded" if missing else "ready", serves=True, reason=missing)

    def _missing(self) -> str | None:
        """The first shard that is not used, and why."""
        for status in self._book.status:
            if status.error is not None:
                return f"{status.spec.endpoint}: {status.error.message}"
            if status.info is not None and status.info.draining:
                return f"{status.spec.endpoint}: it is draining"
            if not status.is_proven:
                return f"{status.spec.endpoint}: no token went through it yet"
        return None

    def _start_probes(self) -> None:
        """Run a token through every shard that was not yet proven in its present life."""
        for hop in self._book.unproven():
            if hop.endpoint in self._probing:
                continue  # perhaps on another one's route
            try:
                route = self._book.route(through=hop)
            except RouteError:
                continue  # other shards are missing; this one's turn comes
            probe = self._background.start(self._prove(hop, route))
            for each in route.hops:
                self._probing.setdefault(each.endpoint, probe)

    async def _prove(self, hop: Hop, route: Route) -> None:
        try:
            await self._probe(route)
        except MeshError as error:
            culprit = error.members.get("endpoint", hop.endpoint)
            self._book.set_aside(culprit if isinstance(culprit, str) else hop.endpoint, error)
        else:
            self._book.mark_proven(route.hops)
            self._was_ready = True
        finally:
            mine = asyncio.current_task()
            self._probing = {at: task for at, task in self._probing.items() if task is not mine}
