"""The head's parts, wired together once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

from meshnet.head.background import Background
from meshnet.head.direct_return import FAR_S, DirectReturn, HopReturn
from meshnet.head.hop_client import HopTimeouts, open_hop
from meshnet.head.hop_times import HopTimesBook, StepLimits
from meshnet.head.pipeline import PipelineKit
from meshnet.head.prefixes import PrefixIndex
from meshnet.head.readiness import HeadState, ReadyState
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.replay import ReplayBudget
from meshnet.head.reservations import Reservations
from meshnet.openai.models import require_served
from meshnet.text.tokenizer import ChatTokenizer
from services.head.metrics import HeadMetrics
from services.head.served_model import ServedModel, open_model
from services.head.settings import HeadSettings

_UNREADY: Final[tuple[HeadState, ...]] = ("draining", "degraded", "loading", "probing")
"""Of models that do not serve, the first state here that one of them has is the head's."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the routes work with."""

    settings: HeadSettings
    metrics: HeadMetrics
    models: Mapping[str, ServedModel]

    def model(self, name: str) -> ServedModel:
        """The model of that name.

        Raises:
            ModelNotFound: There is none; lists those that there are.
        """
        require_served(name, list(self.models))
        return self.models[name]

    def readiness(self) -> ReadyState:
        """How far it is with its models."""
        return overall({name: model.readiness.state() for name, model in self.models.items()})

    async def drain(self) -> None:
        """Take no new request, and wait until the running ones have ended, or for the limit."""
        for model in self.models.values():
            model.readiness.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_s):
                for model in self.models.values():
                    await model.turns.idle.wait()


def overall(states: Mapping[str, ReadyState]) -> ReadyState:
    """One state for several models, each reason with its model's name.

    A head is ready if all of its models are, and degraded while one at least serves.
    """
    if len(states) == 1:
        (only,) = states.values()
        return only
    reason = "; ".join(f"{name}: {each.reason}" for name, each in states.items() if each.reason)
    found = {each.state for each in states.values()}
    if found == {"ready"}:
        return ReadyState("ready", serves=True)
    if any(each.serves for each in states.values()):
        return ReadyState("degraded", serves=True, reason=reason)
    return ReadyState(next(state for state in _UNREADY if state in found), reason=reason)


@asynccontextmanager
async def open_head(
    settings: HeadSettings, tokenizers: Mapping[str, ChatTokenizer]
) -> AsyncGenerator[Head]:
    """Connect to the hops; at the end wait for sessions to be closed, then for connections.

    Args:
        settings: Of the head.
        tokenizers: By the names of the models.
    """
    async with AsyncExitStack() as stack:
        key = settings.cluster_key.get_secret_value() if settings.cluster_key else None
        timeouts = HopTimeouts(settings.connect_timeout_s, settings.probe_timeout_s)
        clients = {
            endpoint: await stack.enter_async_context(
                open_hop(endpoint, timeouts, key, settings.hop_transport)
            )
            for endpoint in {hop.endpoint for served in settings.served for hop in served.route}
        }
        metrics = HeadMetrics()
        kit = _kit(settings, metrics, await stack.enter_async_context(Background()))
        reservations = Reservations()
        metrics.watch_hops(clients, reservations)
        models: dict[str, ServedModel] = {}
        for served in settings.served:
            opened = open_model(
                served, tokenizers[served.name], clients, kit, reservations, settings
            )
            models[served.name] = await stack.enter_async_context(opened)
            metrics.watch(served.name, models[served.name].turns.admission)
        yield Head(settings, metrics, models)


def _direct_return(way: HopReturn) -> DirectReturn | None:
    if way == "star":
        return None
    return DirectReturn(monotonic, FAR_S if way == "auto" else 0.0)


def _kit(settings: HeadSettings, metrics: HeadMetrics, background: Background) -> PipelineKit:
    limits = RecoveryLimits(settings.max_rebuilds_per_token, settings.recovery_timeout_s)
    budget = ReplayBudget(settings.replay_max_bytes)
    return PipelineKit(
        times=HopTimesBook(
            StepLimits(
                min(settings.min_step_timeout_s, settings.step_timeout_s), settings.step_timeout_s
            )
        ),
        recovery=Recovery(
            limits,
            note=metrics.count_rebuild,
            note_replay=metrics.count_replay,
            clock=monotonic,
            jitter=random.random,
        ),
        budget=budget,
        replay=settings.replay,
        prefixes=PrefixIndex(budget, exact=settings.replay == "exact", reuse=settings.prefix_reuse),
        background=background,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        direct=_direct_return(settings.hop_return),
    )
