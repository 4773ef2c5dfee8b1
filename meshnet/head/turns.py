"""Waiting for one's turn: the tasks' side of admission."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from functools import partial

from meshnet.errors import MeshError
from meshnet.generation import TokenEvent
from meshnet.head.admission import Admission, Ticket
from meshnet.head.reservations import Reservations
from meshnet.topology import Route


class Turns:
    """Runs a model's generations, so many at once; the others wait for their turn.

    Args:
        admission: Says whose turn it is.
        reservations: Tells when there is more room in the caches.

    Attributes:
        idle: Set while no generation runs or waits.
    """

    def __init__(self, admission: Admission, reservations: Reservations) -> None:
        self.admission = admission
        self.idle = asyncio.Event()
        self.idle.set()
        self._routes: dict[Ticket, asyncio.Future[Route | MeshError]] = {}
        reservations.watch(self._go_on)

    async def run(
        self,
        ticket: Ticket,
        generate: Callable[[Route, Callable[[int], bool]], AsyncGenerator[TokenEvent]],
    ) -> AsyncGenerator[TokenEvent]:
        """Yield the events of a generation, which begins when it is the ticket's turn.

        Its place and what is reserved for it are free again once the generation has been closed.

        Args:
            ticket: A fresh one.
            generate: Begins it; told the route, and whether it may hold so many tokens.

        Raises:
            QueueFull: It would have to wait, and too many of its caller do.
            MeshError: There was no route when its turn came; or what the generation raises.
        """
        with self._waiting(ticket) as turn:
            route = await turn
            if isinstance(route, MeshError):
                raise route
            may_hold = partial(self.admission.may_hold, ticket)
            async with aclosing(generate(route, may_hold)) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _waiting(self, ticket: Ticket) -> Generator[asyncio.Future[Route | MeshError]]:
        """Let the ticket wait, and then run, until the block is left."""
        turn = self._routes[ticket] = asyncio.get_running_loop().create_future()
        self.idle.clear()
        self.admission.join(ticket)
        try:
            self._go_on()
            self.admission.check_place(ticket)
            yield turn
        finally:
            del self._routes[ticket]
            self.admission.leave(ticket)
            self._go_on()
            if not self._routes:
                self.idle.set()

    def _go_on(self) -> None:
        """Let begin what may begin now."""
        while (ticket := self.admission.next()) is not None:
            outcome = self._begin(ticket)
            if outcome is None:
                return
            turn = self._routes[ticket]
            if not turn.done():  # cancelled; its task is about to leave
                turn.set_result(outcome)

    def _begin(self, ticket: Ticket) -> Route | MeshError | None:
        """The ticket's route, or why it has none; or None while there is no room."""
        try:
            return self.admission.begin(ticket)
        except MeshError as error:
            self.admission.leave(ticket)
            return error
