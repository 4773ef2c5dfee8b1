"""Who must go: the expired, then what is kept, then the least recently used, never the leased.

Pure functions, which know neither states nor tokens, and keep no time: they are told what is held
and what time it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshnet.ids import SessionId


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What one shard's cache may hold.

    Attributes:
        ttl_s: Seconds an idle session is kept after its last step; an older one is expired.
        max_sessions: Sessions held at once, leased ones included.
        max_bytes: Bytes held at once: states, stored answers, and what leased steps may add.
    """

    ttl_s: float
    max_sessions: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a state belongs to: one session's layers `[start_layer, end_layer)`."""

    session: SessionId
    start_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class EntryView:
    """What the policy knows of one entry.

    Attributes:
        key: Names the entry in the plan.
        nbytes: Bytes it takes, reservations included.
        last_used: When its last step ended, seconds of the store's monotonic clock.
        leased: Whether a step is using it now.
        kept: Whether it was closed, and is there for forks only.
    """

    key: CacheKey
    nbytes: int
    last_used: float
    leased: bool
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """Room to be made besides the entries at hand: so many more sessions, so many more bytes."""

    sessions: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who goes, and why; in the order of last use, oldest first, but those that are kept first."""

    expired: tuple[CacheKey, ...]
    evicted: tuple[CacheKey, ...]


NOBODY_GOES: Final = Plan((), ())


def plan_room(
    entries: Sequence[EntryView], limits: CacheLimits, need: Need, *, now: float
) -> Plan | None:
    """Choose who goes, so that what stays and the need are within the limits together.

    All expired idle entries go, needed or not; then kept ones, then other idle ones, of both the
    least recently used first, and not one more than the need asks for.

    Args:
        entries: All that is held, apart from what the need already counts.
        limits: The store's limits.
        need: The room to be made.
        now: Seconds, of the clock that `last_used` was read from.

    Returns:
        The plan, or None where even without any idle entry there would be no room.
    """
    idle = sorted((e for e in entries if not e.leased), key=lambda e: e.last_used)
    expired = [e for e in idle if now - e.last_used > limits.ttl_s]
    by_age = idle[len(expired) :]  # the expired are the oldest, so they stand in front
    in_turn = sorted(by_age, key=lambda e: not e.kept)

    sessions_over = len(entries) - len(expired) + need.sessions - limits.max_sessions
    bytes_kept = sum(e.nbytes for e in entries) - sum(e.nbytes for e in expired)
    bytes_over = bytes_kept + need.nbytes - limits.max_bytes
    evicted: list[EntryView] = []
    while sessions_over > 0 or bytes_over > 0:
        if len(evicted) == len(in_turn):
            return None
        victim = in_turn[len(evicted)]
        evicted.append(victim)
        sessions_over -= 1
        bytes_over -= victim.nbytes
    return Plan(tuple(e.key for e in expired), tuple(e.key for e in evicted))
