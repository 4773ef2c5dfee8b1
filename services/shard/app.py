"""The shard as an ASGI app: `uvicorn services.shard.app:create_app --factory`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TypedDict

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from meshnet.cache.policy import CacheLimits
from meshnet.cache.store import SessionCacheStore
from meshnet.errors import MeshError
from meshnet.ids import BootId, new_id
from meshnet.model.interface import CacheState, StageModel
from meshnet.observability import configure_logging
from meshnet.shard.compute import ComputeThread
from meshnet.shard.host import ShardHost, StageLoader
from meshnet.shard.mailbox import Mailbox, MailboxLimits
from meshnet.shard.neighbours import Neighbours
from meshnet.shard.step_log import DecodeLog
from meshnet.topology import LayerSpan
from meshnet.wire import stream_messages
from meshnet.wire.messages import ShardLimits
from services.shard.metrics import ShardMetrics
from services.shard.routes import (
    forward,
    health,
    on_caller_left,
    on_http_exception,
    on_mesh_error,
    protocol,
)
from services.shard.settings import ShardSettings
from services.shard.stream import stream


class LifespanState(TypedDict):
    """What the lifespan hands to the routes, as `request.state`."""

    host: ShardHost
    mailbox: Mailbox
    neighbours: Neighbours
    metrics: ShardMetrics
    settings: ShardSettings


def create_app(
    settings: ShardSettings | None = None,
    *,
    stage: StageModel | None = None,
    clock: Callable[[], float] = monotonic,
) -> FastAPI:
    """Make the app. Once started, its `state.drain` ends sessions in order and begins none.

    Args:
        settings: None reads the environment (`MESHNET_SHARD_*`).
        stage: A ready stage instead of the settings' model, for tests.
        clock: Monotonic seconds, for the cache's TTL, the mailbox and the decode log.

    Raises:
        ValidationError: A setting is missing or malformed.
    """
    config = settings or ShardSettings()  # pyright: ignore[reportCallIssue]  # from environment
    configure_logging(config.log_format)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[LifespanState]:
        async with AsyncExitStack() as stack:
            # A model that cannot be split as asked stops the start here, with its reason.
            loader = _Ready(stage) if stage else await asyncio.to_thread(_plan, config)
            host = ShardHost(
                loader=loader,
                store=_new_store(config, clock),
                compute=await stack.enter_async_context(
                    ComputeThread(config.max_queued_steps, config.max_batch_sessions)
                ),
                decode_log=DecodeLog(clock),
                limits=_limits(config),
                boot_id=BootId(new_id()),
                kv_cache=config.kv_cache,
                push=config.push,
            )
            if stage:
                await host.load()
            else:
                await stack.enter_async_context(_background(host.load()))
            await stack.enter_async_context(_background(_sweep(host, config)))
            app.state.drain = partial(host.drain, config.drain_timeout_s)
            yield {
                "host": host,
                "mailbox": Mailbox(MailboxLimits(), clock),
                "neighbours": await stack.enter_async_context(Neighbours(_key_header(config))),
                "metrics": ShardMetrics(),
                "settings": config,
            }

    app = FastAPI(
        title="Meshnet shard", lifespan=lifespan, openapi_url=None, redirect_slashes=False
    )
    app.add_route("/v1/forward", forward, methods=["POST"])
    app.router.add_websocket_route(stream_messages.PATH, stream)
    app.include_router(health)
    app.include_router(protocol)
    app.add_exception_handler(MeshError, on_mesh_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_caller_left)
    return app


def _plan(settings: ShardSettings) -> StageLoader:
    # Here, not above: torch takes seconds to import, and an app with a stage of its own needs none.
    from meshnet.model.loading import plan_stage

    return plan_stage(
        settings.model,
        LayerSpan.parse(settings.layers),
        settings.stage_dtype,
        packing=settings.packing,
        n_threads=settings.threads,
    )


@dataclass(frozen=True)
class _Ready:
    """A stage that needs no loading."""

    stage: StageModel
    nbytes: int = 0

    def load(self, progress: Callable[[int], None]) -> StageModel:
        del progress
        return self.stage


def _new_store(
    settings: ShardSettings, clock: Callable[[], float]
) -> SessionCacheStore[CacheState]:
    limits = CacheLimits(
        ttl_s=settings.cache_ttl_seconds,
        max_sessions=settings.cache_max_sessions,
        max_bytes=settings.cache_max_bytes,
    )
    return SessionCacheStore(limits, clock=clock)


def _key_header(settings: ShardSettings) -> dict[str, str]:
    """What this shard shows to others: they have the same key."""
    if settings.cluster_key is None:
        return {}
    return {"authorization": f"Bearer {settings.cluster_key.get_secret_value()}"}


def _limits(settings: ShardSettings) -> ShardLimits:
    return ShardLimits(
        max_step_tokens=settings.max_step_tokens,
        max_sessions=settings.cache_max_sessions,
        cache_ttl_s=settings.cache_ttl_seconds,
        cache_bytes=settings.cache_max_bytes,
    )


async def _sweep(host: ShardHost, settings: ShardSettings) -> None:
    """Free expired sessions also while nobody calls."""
    while True:
        await asyncio.sleep(min(settings.cache_ttl_seconds / 4, 60.0))
        await host.store.sweep()


@asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Run `work` beside the body; cancel it when the body ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
