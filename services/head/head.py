"""The head's parts, wired together once."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath
from time import (
    monotonic,
    time,  # noqa: TID251  # a model card's `created` is a wall-clock second
)

from meshnet.head.background import Background
from meshnet.head.generator import Generator, TextModel
from meshnet.head.hop_client import HopTimeouts, open_hop
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.route_book import RouteBook
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.topology import HopSpec
from services.head.metrics import HeadMetrics
from services.head.settings import HeadSettings


@dataclass(frozen=True, slots=True)
class Head:
    """What the routes work with."""

    settings: HeadSettings
    model_name: str
    started_at: int
    tokenizer: ChatTokenizer
    book: RouteBook
    times: HopTimesBook
    generator: Generator
    metrics: HeadMetrics


@asynccontextmanager
async def open_head(settings: HeadSettings, tokenizer: ChatTokenizer) -> AsyncGenerator[Head]:
    """Connect to the hops; at the end wait for sessions to be closed, then for connections."""
    async with AsyncExitStack() as stack:
        key = settings.cluster_key.get_secret_value() if settings.cluster_key else None
        timeouts = HopTimeouts(settings.connect_timeout_s, settings.step_timeout_s)
        specs = [HopSpec(hop.endpoint, hop.start_layer) for hop in settings.route]
        clients = {
            endpoint: await stack.enter_async_context(open_hop(endpoint, timeouts, key))
            for endpoint in {spec.endpoint for spec in specs}
        }
        book = RouteBook(specs, clients)
        metrics = HeadMetrics()
        background = await stack.enter_async_context(Background())
        yield Head(
            settings=settings,
            model_name=settings.served_model_name or PurePath(settings.model).name,
            started_at=int(time()),
            tokenizer=tokenizer,
            book=book,
            times=HopTimesBook(),
            generator=_generator(settings, tokenizer, book, metrics, background),
            metrics=metrics,
        )


def _generator(
    settings: HeadSettings,
    tokenizer: ChatTokenizer,
    book: RouteBook,
    metrics: HeadMetrics,
    background: Background,
) -> Generator:
    return Generator(
        text=TextModel(tokenizer.end_token_ids, tokenizer.new_detokenizer, tokenizer.encode),
        recovery=Recovery(
            RecoveryLimits(settings.max_rebuilds_per_token, settings.recovery_timeout_s),
            is_ready=book.is_ready,
            note=metrics.count_rebuild,
            clock=monotonic,
            jitter=random.random,
        ),
        background=background,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_concurrent=settings.max_concurrent_requests,
    )
