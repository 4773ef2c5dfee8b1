"""Knows which shards are there, how they are, and what route they make."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from meshnet.errors import Forbidden, InvalidRequest, MeshError, ModelLoading, RouteError
from meshnet.head.hop_client import HopClient
from meshnet.head.matching import can_replace, check_other_process, fits
from meshnet.topology import (
    Hop,
    HopSpec,
    Route,
    build_route,
    check_same_model,
    choose_route,
    make_hop,
)
from meshnet.wire.headers import PROTOCOL_VERSION, ROUTE
from meshnet.wire.messages import ShardInfo

_log = structlog.get_logger(__name__)

_BACKOFF_S: Final = 0.25
_MAX_BACKOFF_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class HopStatus:
    """One configured shard: what it last said of itself, or why it is not used.

    Attributes:
        spec: As configured.
        info: None while it is set aside.
        error: Why it is set aside, or cannot be on a route with the others.
        proven: The boot id of the life that a probe's token went through.
        failures: How often in a row it was set aside.
        ask_at: Not asked before this time of the clock.
    """

    spec: HopSpec
    info: ShardInfo | None = None
    error: MeshError | None = None
    proven: str | None = None
    failures: int = 0
    ask_at: float = 0.0

    @property
    def is_proven(self) -> bool:
        """Whether a probe went through this life of the shard."""
        return self.info is not None and self.proven == self.info.boot_id


class RouteBook:
    """The configured shards, asked again and again.

    Args:
        specs: The configured shards. Several may run the same layers: then each can take over
            from the others.
        clients: A client for each of their endpoints.
        clock: Monotonic seconds.
        jitter: A number in [0, 1), fresh at each call.
    """

    def __init__(
        self,
        specs: Sequence[HopSpec],
        clients: Mapping[str, HopClient],
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self._clients = clients
        self._clock = clock
        self._jitter = jitter
        self._sessions: Counter[str] = Counter()
        self._model: dict[str, Hop] = {}  # what proven shards said of it, gone ones included
        self._usable: list[Hop] = []
        self._status = {
            spec.endpoint: HopStatus(spec, error=ModelLoading("not asked yet")) for spec in specs
        }

    @property
    def status(self) -> list[HopStatus]:
        """Every configured shard, in the order configured."""
        return list(self._status.values())

    def client(self, endpoint: str) -> HopClient:
        """The way to a shard."""
        return self._clients[endpoint]

    def enter(self, endpoint: str) -> None:
        """Count a session as served there."""
        self._sessions[endpoint] += 1

    def leave(self, endpoint: str) -> None:
        """Count it no more."""
        self._sessions[endpoint] -= 1

    def sessions(self, endpoint: str) -> int:
        """How many sessions of this head a shard serves."""
        return self._sessions[endpoint]

    async def refresh(self) -> None:
        """Ask every shard what it is, but those that are set aside for a while yet."""
        now = self._clock()
        due = [status.spec.endpoint for status in self.status if status.ask_at <= now]
        await asyncio.gather(*(self._ask(endpoint) for endpoint in due))

    async def look(self, hop: Hop) -> Hop:
        """What the shard of `hop` is now; the same layers of it.

        Raises:
            MeshError: It is not there, not ready, or speaks another protocol.
        """
        info = await self._describe(hop.endpoint)
        return _hop(HopSpec(hop.endpoint, hop.layers.start), info)

    def set_aside(self, endpoint: str, failure: MeshError) -> None:
        """Use the shard for nothing new for a while; each time in a row for longer."""
        status = self._status[endpoint]
        if status.info is None and self._clock() < status.ask_at:
            return  # the same fault, met by another session or probe
        longest = min(_BACKOFF_S * 2 ** min(status.failures, 16), _MAX_BACKOFF_S)
        pause_s = longest * (0.5 + self._jitter() / 2)
        self._status[endpoint] = replace(
            status,
            info=None,
            error=failure,
            proven=None,
            failures=status.failures + 1,
            ask_at=self._clock() + pause_s,
        )
        self._sort_out()
        if not status.failures:
            _log.warning("shard set aside", hop=endpoint, code=failure.code, reason=failure.message)

    def mark_proven(self, hops: Iterable[Hop]) -> None:
        """Note that a token went through these hops."""
        for hop in hops:
            status = self._status[hop.endpoint]
            self._status[hop.endpoint] = replace(status, proven=hop.boot_id, failures=0, ask_at=0.0)
            self._model[hop.endpoint] = hop
        self._sort_out()

    def unproven(self) -> list[Hop]:
        """The shards that are there, and that no token went through in this life of theirs."""
        return [h for h in self._usable if not self._status[h.endpoint].is_proven]

    def alternative(self, hop: Hop) -> Hop | None:
        """The least busy other proven shard that can take over from `hop`, if there is one."""
        others = [other for other in self._proven() if can_replace(other, hop)]
        return min(others, key=self._load, default=None)

    def route(self, through: Hop | None = None) -> Route:
        """The least busy route over proven shards.

        Args:
            through: A shard that the route is to contain; then others need no proof.

        Raises:
            RouteError: There is none; says what is missing, or why a shard was refused.
        """
        if through is not None:

            def unwanted(hop: Hop) -> tuple[int, ...]:
                return not self._status[hop.endpoint].is_proven, *self._load(hop)

            return choose_route([hop for hop in self._usable if fits(hop, through)], unwanted)
        return self._over_proven(self._load)

    def widest_route(self) -> Route:
        """The route over proven shards that takes the longest sequences. Raises as `route`."""
        return self._over_proven(lambda hop: (-hop.facts.max_session_tokens,))

    def route_for(self, n_tokens: int, has_room: Callable[[Hop], bool]) -> Route:
        """The least busy route over proven shards that can hold a session of so many tokens.

        Args:
            n_tokens: Of prompt and answer.
            has_room: Whether a shard has room for it now. Where several go on at a layer, one that
                has is taken before one that has not.

        Raises:
            RouteError: There is none.
        """

        def full(hop: Hop) -> tuple[int, ...]:
            return not has_room(hop), *self._load(hop)

        able = [hop for hop in self._proven() if n_tokens <= hop.facts.max_session_tokens]
        try:
            return choose_route(able, full)
        except RouteError as error:
            self.route()  # raises what is missing, if anything is
            raise RouteError(f"no route can hold a session of {n_tokens} tokens now") from error

    async def pinned_route(self, specs: Sequence[HopSpec]) -> Route:
        """A caller's own route over configured shards.

        Raises:
            Forbidden: An endpoint is not among the configured; no connection was made.
            RouteError: A shard is not there or not ready.
            InvalidRequest: The shards do not tile the model.
        """
        for spec in specs:
            if spec.endpoint not in self._status:
                raise Forbidden(
                    f"{spec.endpoint[:200]} is not among this head's hops",
                    field=ROUTE,
                    value=spec.endpoint[:200],
                    allowed=sorted(self._status),
                )
        if any(self._status[spec.endpoint].info is None for spec in specs):
            await self.refresh()
        infos = [self._info(spec.endpoint) for spec in specs]
        try:
            pairs = zip(specs, infos, strict=True)
            return build_route([_hop(spec, info) for spec, info in pairs])
        except RouteError as error:  # here the caller's mistake, not a hop's
            raise InvalidRequest(f"{ROUTE}: {error.message}", field=ROUTE) from error

    def _proven(self) -> list[Hop]:
        return [hop for hop in self._usable if self._status[hop.endpoint].is_proven]

    def _over_proven(self, load: Callable[[Hop], tuple[int, ...]]) -> Route:
        try:
            return choose_route(self._proven(), load)
        except RouteError as error:
            raise self._explained() from error

    def _sort_out(self) -> None:
        """Find the shards that may be used for something new: there, not draining, of one model.

        Which model is said by the shards that were proven, also those that are gone, as long as
        one of them is there; else by the first one configured.
        """
        if not any(status.is_proven for status in self.status):
            self._model.clear()
        self._usable = []
        for status in self.status:
            if status.info is None or status.info.draining:
                continue
            try:
                hop = _hop(status.spec, status.info)
                for other in (*self._model.values(), *self._usable):
                    check_same_model(other, hop)
                for other in self._usable:
                    check_other_process(other, hop)
            except RouteError as error:
                self._note_error(status, error)
            else:
                self._note_error(status, None)
                self._usable.append(hop)

    def _note_error(self, status: HopStatus, error: MeshError | None) -> None:
        self._status[status.spec.endpoint] = replace(status, error=error)

    def _load(self, hop: Hop) -> tuple[int, int]:
        info = self._status[hop.endpoint].info
        return self._sessions[hop.endpoint], info.cache.sessions if info else 0

    def _explained(self) -> RouteError:
        """Why there is no route over proven shards, as far as one reason can say it."""
        for status in self.status:
            if status.error is not None:
                members = {"endpoint": status.spec.endpoint, **status.error.members}
                return RouteError(
                    f"the hop {status.spec.endpoint} is not ready: {status.error.message}",
                    **members,
                )
        try:
            choose_route(self._usable, self._load)
        except RouteError as error:
            return error
        return RouteError("no token went through the route yet")

    def _info(self, endpoint: str) -> ShardInfo:
        status = self._status[endpoint]
        if status.info is None:
            why = status.error.message if status.error else "unknown"
            raise RouteError(f"the hop {endpoint} is not ready: {why}", endpoint=endpoint)
        if status.info.draining:
            raise RouteError(f"the hop {endpoint} is draining", endpoint=endpoint)
        return status.info

    async def _ask(self, endpoint: str) -> None:
        try:
            await self._describe(endpoint)
        except MeshError as error:
            self.set_aside(endpoint, error)

    async def _describe(self, endpoint: str) -> ShardInfo:
        info = await self._clients[endpoint].describe()
        if info.protocol != PROTOCOL_VERSION:
            raise RouteError(
                f"the hop {endpoint} speaks protocol {info.protocol}",
                field="protocol",
                value=info.protocol,
                allowed=PROTOCOL_VERSION,
                endpoint=endpoint,
            )
        status = self._status[endpoint]
        self._status[endpoint] = replace(status, info=info, error=None)
        self._sort_out()
        return info


def _hop(spec: HopSpec, info: ShardInfo) -> Hop:
    return make_hop(spec, info.facts(), info.boot_id)


class PinnedShards:
    """The shards of a route that a caller chose: none takes another's place.

    Args:
        book: Where the shards are looked up.
    """

    def __init__(self, book: RouteBook) -> None:
        self._book = book
        self.client = book.client
        self.look = book.look
        self.set_aside = book.set_aside
        self.enter = book.enter
        self.leave = book.leave

    def alternative(self, hop: Hop) -> Hop | None:
        """Nobody."""
        del hop
