"""The proof of a route: one token, over every hop of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from meshnet.errors import HopProtocolError, MeshError
from meshnet.generation import Sampling
from meshnet.head.call import Trace
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.recovery import RecoveryLimits
from meshnet.head.route_book import PinnedShards, RouteBook
from meshnet.ids import SessionId, new_id
from meshnet.topology import Route

PROBE_PREFIX: Final = "probe-"
"""How the ids of the sessions begin that prove a route."""
_RECOVERY_S: Final = 5.0


def probe_over(book: RouteBook, kit: PipelineKit) -> Callable[[Route], Awaitable[None]]:
    """Runs one token over a route, once: what fails is tried again by the next poll."""
    limits = RecoveryLimits(max_rebuilds=1, timeout_s=_RECOVERY_S)
    kit = replace(kit, recovery=replace(kit.recovery, limits=limits, note=_ignore))

    async def probe(route: Route) -> None:
        session = SessionId(f"{PROBE_PREFIX}{new_id()}")
        pipeline = Pipeline(route, PinnedShards(book), kit, Trace(), session)
        try:
            step = pipeline.stateless_step if route.stateless else pipeline.prefill
            answer = await step([0], Sampling())
            if answer.token_id is None and answer.text is None:
                raise HopProtocolError("the tail answered neither a token nor text")
        finally:
            await kit.background.finish(pipeline.close())

    return probe


def _ignore(failure: MeshError) -> None:
    del failure
