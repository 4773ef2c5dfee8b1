"""Which shards go together: on one route, or in each other's place. Pure."""

from __future__ import annotations

from meshnet.errors import RouteError
from meshnet.topology import Hop, check_same_model


def fits(hop: Hop, through: Hop) -> bool:
    """Whether both can be on one route."""
    ours, theirs = hop.layers, through.layers
    return hop == through or ours.end <= theirs.start or theirs.end <= ours.start


def check_other_process(ours: Hop, theirs: Hop) -> None:
    """Find out whether two URLs lead to two shards.

    Raises:
        RouteError: It is one.
    """
    if ours.boot_id == theirs.boot_id:
        raise RouteError(
            f"{theirs.endpoint} is the same process as {ours.endpoint}",
            field="boot_id",
            value=theirs.boot_id,
            allowed="each shard once",
            endpoint=theirs.endpoint,
        )


def can_replace(other: Hop, hop: Hop) -> bool:
    """Whether the session of one can go on at the other, and every step it may come to need."""
    return (
        other.endpoint != hop.endpoint
        and other.layers == hop.layers
        and other.facts.kv_cache == hop.facts.kv_cache
        and other.facts.max_step_tokens >= hop.facts.max_step_tokens
        and other.facts.max_positions >= hop.facts.max_positions
        and _same_layers(other, hop)
    )


def _same_layers(other: Hop, hop: Hop) -> bool:
    try:
        check_same_model(hop, other)
    except RouteError:
        return False
    return True
