"""What the generations of this head may come to take of each hop's cache. Pure, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from meshnet.topology import Hop, Route


class Reservations:
    """Counts bytes and sessions by shard, over all models of a head.

    Counted is what a session is placed with: one that another shard takes over, or that another
    head began, is not seen here. There the shard's own limits stand.
    """

    def __init__(self) -> None:
        self._nbytes: Counter[str] = Counter()
        self._sessions: Counter[str] = Counter()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, on_room: Callable[[], None]) -> None:
        """Have it called whenever there is more room."""
        self._watchers.append(on_room)

    def nbytes(self, endpoint: str) -> int:
        """What is reserved on a shard."""
        return self._nbytes[endpoint]

    def has_room(self, hop: Hop, n_tokens: int) -> bool:
        """Whether a shard has room now for one more session, of so many tokens."""
        facts = hop.facts
        return (
            self._sessions[hop.endpoint] < facts.max_sessions
            and self._nbytes[hop.endpoint] + facts.session_bytes(n_tokens) <= facts.cache_bytes
        )

    def fits(self, route: Route, n_tokens: int) -> bool:
        """Whether every hop has room; a route that keeps no state needs none."""
        return route.stateless or all(self.has_room(hop, n_tokens) for hop in route.hops)

    def reserve(self, route: Route, n_tokens: int) -> None:
        """Count a session that fits."""
        self._count(route, n_tokens, 1)

    def grow(self, route: Route) -> bool:
        """Count a session as one token longer, if every hop has room for that; returns whether."""
        hops = () if route.stateless else route.hops
        if any(
            self._nbytes[hop.endpoint] + hop.facts.state_token_bytes > hop.facts.cache_bytes
            for hop in hops
        ):
            return False
        for hop in hops:
            self._nbytes[hop.endpoint] += hop.facts.state_token_bytes
        return True

    def give_back(self, route: Route, n_tokens: int) -> None:
        """Count a session no more, and tell those who watch."""
        self._count(route, n_tokens, -1)
        for on_room in self._watchers:
            on_room()

    def _count(self, route: Route, n_tokens: int, sign: int) -> None:
        if route.stateless:
            return
        for hop in route.hops:
            self._sessions[hop.endpoint] += sign
            self._nbytes[hop.endpoint] += sign * hop.facts.session_bytes(n_tokens)
