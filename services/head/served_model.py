"""One served model: its tokenizer, its shards, and the generations over them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import (
    monotonic,
    time,  # noqa: TID251  # a model card's `created` is a wall-clock second
)

from meshnet.grammar.compiler import GrammarCompiler
from meshnet.head.call import Trace
from meshnet.head.generator import Generator, TextModel
from meshnet.head.hop_client import HopClient
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.readiness import Readiness
from meshnet.head.route_book import PinnedShards, RouteBook
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.topology import HopSpec, Route
from services.head.probe import probe_over
from services.head.settings import HeadSettings, ModelSetting


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the routes work with once they know which model is asked for.

    Attributes:
        name: The id clients use.
        created: When it was opened, seconds since 1970.
    """

    name: str
    created: int
    tokenizer: ChatTokenizer
    grammars: GrammarCompiler
    book: RouteBook
    readiness: Readiness
    kit: PipelineKit
    generator: Generator

    def check_admission(self) -> None:
        """Find out whether a new request is taken.

        Raises:
            Draining: The head begins none.
            QueueFull: Too many wait already.
        """
        self.readiness.check_admission()
        self.generator.check_room()

    def pipeline(self, trace: Trace, pinned: Route | None) -> Pipeline:
        """A new session, on a pinned route, or on the one that is the least busy now.

        Raises:
            RouteError: There is none.
        """
        if pinned is not None:
            return Pipeline(pinned, PinnedShards(self.book), self.kit, trace)
        return Pipeline(self.book.route(), self.book, self.kit, trace)


@asynccontextmanager
async def open_model(
    setting: ModelSetting,
    tokenizer: ChatTokenizer,
    clients: Mapping[str, HopClient],
    kit: PipelineKit,
    settings: HeadSettings,
) -> AsyncGenerator[ServedModel]:
    """Look after a model's shards for as long as it is open."""
    specs = [HopSpec(hop.endpoint, hop.start_layer) for hop in setting.route]
    book = RouteBook(specs, clients, clock=monotonic, jitter=random.random)
    model = ServedModel(
        name=setting.name,
        created=int(time()),
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer),
        book=book,
        readiness=Readiness(book, probe_over(book, kit), kit.background),
        kit=kit,
        generator=Generator(
            text=TextModel(tokenizer.end_token_ids, tokenizer.new_detokenizer, tokenizer.encode),
            max_concurrent=settings.max_concurrent_requests,
            max_queued=settings.max_queued_requests,
        ),
    )
    poll = asyncio.create_task(model.readiness.poll(settings.route_poll_s))
    try:
        yield model
    finally:
        poll.cancel()
        with suppress(asyncio.CancelledError):
            await poll
        await asyncio.to_thread(model.grammars.close)  # a process, which is waited for
