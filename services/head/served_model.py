"""One served model: its tokenizer, its shards, and the generations over them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import (
    monotonic,
    time,  # noqa: TID251  # a model card's `created` is a wall-clock second
)

from meshnet.generation import GenerationRequest, TokenEvent
from meshnet.grammar.compiler import GrammarCompiler
from meshnet.head.admission import Admission, Ticket, tokens_to_reserve
from meshnet.head.call import Trace
from meshnet.head.generator import Generator, TextModel
from meshnet.head.hop_client import HopClient
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.readiness import Readiness
from meshnet.head.reservations import Reservations
from meshnet.head.route_book import PinnedShards, RouteBook
from meshnet.head.turns import Turns
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.topology import Hop, HopSpec, Route
from services.head.probe import probe_over
from services.head.settings import HeadSettings, ModelSetting


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from, and where it is to go.

    Attributes:
        caller: The name of its API key; "" where none is asked for.
        trace: Sent with every step.
        max_positions: The context by which it was judged.
        pinned: The route that the caller chose, if it did.
    """

    caller: str
    trace: Trace
    max_positions: int
    pinned: Route | None = None


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
    turns: Turns
    open_answer_tokens: int

    def check_admission(self, caller: str) -> None:
        """Find out whether a caller's new request is taken.

        Raises:
            Draining: The head begins none.
            QueueFull: Too many of the caller's wait already.
        """
        self.readiness.check_admission()
        self.turns.admission.check_room(caller)

    def generate(
        self, request: GenerationRequest, origin: Origin, *, follows: bool
    ) -> AsyncGenerator[TokenEvent]:
        """The tokens of a generation, which begins when it is its turn.

        Args:
            request: What to generate.
            origin: Who asks, and where it is to run.
            follows: It is of a request of which another generation came before it.

        Raises:
            QueueFull: It would have to wait, and too many of its caller do.
            RouteError: There is no route when its turn has come.
            MeshError: As Generator.generate.
        """
        pinned = origin.pinned
        n_tokens = tokens_to_reserve(
            len(request.prompt_ids),
            request.max_tokens,
            max_positions=origin.max_positions,
            open_answer_tokens=self.open_answer_tokens,
        )
        shards = self.book if pinned is None else PinnedShards(self.book)

        def find_route(has_room: Callable[[Hop], bool]) -> Route:
            return pinned or self.book.route_for(n_tokens, has_room)

        def begin(route: Route, may_hold: Callable[[int], bool]) -> AsyncGenerator[TokenEvent]:
            return self.generator.generate(
                request, lambda: Pipeline(route, shards, self.kit, origin.trace), may_hold
            )

        ticket = Ticket(origin.caller, n_tokens, find_route, follows)
        return self.turns.run(ticket, begin)


@asynccontextmanager
async def open_model(
    setting: ModelSetting,
    tokenizer: ChatTokenizer,
    clients: Mapping[str, HopClient],
    kit: PipelineKit,
    reservations: Reservations,
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
            TextModel(tokenizer.end_token_ids, tokenizer.new_detokenizer, tokenizer.encode)
        ),
        turns=Turns(
            Admission(
                reservations,
                max_running=settings.max_concurrent_requests,
                max_waiting=settings.max_queued_requests,
            ),
            reservations,
        ),
        open_answer_tokens=settings.open_answer_tokens,
    )
    poll = asyncio.create_task(model.readiness.poll(settings.route_poll_s))
    try:
        yield model
    finally:
        poll.cancel()
        with suppress(asyncio.CancelledError):
            await poll
        await asyncio.to_thread(model.grammars.close)  # a process, which is waited for
