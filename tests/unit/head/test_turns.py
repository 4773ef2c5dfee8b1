from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from meshnet.errors import QueueFull, RouteError, StageError
from meshnet.generation import TokenEvent
from meshnet.head.admission import Admission, Ticket
from meshnet.head.reservations import Reservations
from meshnet.head.turns import Turns
from meshnet.topology import Hop, Route
from tests.unit.fakes import turn_the_loop
from tests.unit.head.making import A, B, route_over

CACHE_BYTES = 100
ROUTE = route_over([A, B], state_token_bytes=1, cache_bytes=CACHE_BYTES)
EVENTS = [TokenEvent("a", 1), TokenEvent("b", 2, "length")]


@dataclass
class Desk:
    """Places for two, and what happened there.

    Attributes:
        log: Which generations began and ended, in order.
        failure: What generations end with, if set.
        no_route: What is said instead of a route, if set.
        may_hold: What the last generation was given to ask.
    """

    reservations: Reservations = field(default_factory=Reservations)
    max_waiting: int = 9
    log: list[str] = field(default_factory=list[str])
    failure: Exception | None = None
    no_route: RouteError | None = None
    may_hold: Callable[[int], bool] = field(init=False)

    def __post_init__(self) -> None:
        admission = Admission(self.reservations, max_running=2, max_waiting=self.max_waiting)
        self.turns = Turns(admission, self.reservations)

    @property
    def counts(self) -> tuple[int, int]:
        """Generations that run, and that wait."""
        return self.turns.admission.n_running, self.turns.admission.n_waiting

    def run(
        self, name: str = "", n_tokens: int = 3, *, follows: bool = False
    ) -> AsyncGenerator[TokenEvent]:
        """A generation of two tokens."""

        def find(has_room: Callable[[Hop], bool]) -> Route:
            del has_room
            if self.no_route is not None:
                raise self.no_route
            return ROUTE

        async def generate(
            route: Route, may_hold: Callable[[int], bool]
        ) -> AsyncGenerator[TokenEvent]:
            assert route is ROUTE
            self.log.append(f"{name} began")
            self.may_hold = may_hold
            try:
                for event in EVENTS:
                    yield event
                if self.failure is not None:
                    raise self.failure
            finally:
                self.log.append(f"{name} ended")

        return self.turns.run(Ticket("", n_tokens, find, follows), generate)

    async def running(self, n: int) -> list[AsyncGenerator[TokenEvent]]:
        """Generations that have their first token."""
        generations = [self.run(str(i)) for i in range(n)]
        for events in generations:
            await anext(events)
        return generations


async def all_of(events: AsyncGenerator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in events]


async def test_with_a_free_place_it_begins_at_once() -> None:
    """The events are those of the generation, which is over then."""
    desk = Desk()
    events = await all_of(desk.run("x"))

    assert (events, desk.log, desk.counts) == (EVENTS, ["x began", "x ended"], (0, 0))


async def test_over_the_limit_they_wait_for_their_turn() -> None:
    """Nothing is begun for those that wait; they go on one by one, the first one first."""
    desk = Desk()
    generations = await desk.running(2)
    waiting = [asyncio.create_task(all_of(desk.run(name))) for name in ("first", "second")]
    await turn_the_loop()
    meanwhile, counts = list(desk.log), desk.counts
    await generations[0].aclose()
    await asyncio.gather(*waiting)
    await generations[1].aclose()

    assert (meanwhile, counts) == (["0 began", "1 began"], (2, 2))
    assert desk.log[2:] == [
        "0 ended",
        "first began",
        "first ended",
        "second began",
        "second ended",
        "1 ended",
    ]


async def test_without_room_they_wait_too() -> None:
    """A place is free, but not the cache; and it is, once the one that holds it is closed."""
    desk = Desk()
    holding = desk.run("big", n_tokens=CACHE_BYTES)
    await anext(holding)
    waiting = asyncio.create_task(all_of(desk.run()))
    await turn_the_loop()
    counts = desk.counts
    await holding.aclose()

    assert (counts, await waiting, desk.reservations.nbytes(A)) == ((1, 1), EVENTS, 0)


async def test_room_that_another_model_gives_back_is_used() -> None:
    """Two models on the same shards share what these can hold."""
    desk = Desk()
    other = Desk(desk.reservations)
    holding = other.run("big", n_tokens=CACHE_BYTES)
    await anext(holding)
    waiting = asyncio.create_task(all_of(desk.run()))
    await turn_the_loop()
    counts = desk.counts
    await holding.aclose()

    assert (counts, await waiting) == ((0, 1), EVENTS)


async def test_a_generation_is_told_whether_it_may_go_on() -> None:
    """What it holds more is counted, and free when it is closed."""
    desk = Desk()
    events = desk.run(n_tokens=90)
    await anext(events)
    told = [desk.may_hold(n_tokens) for n_tokens in (90, 100, 101)]
    reserved = desk.reservations.nbytes(A)
    await events.aclose()

    assert (told, reserved) == ([True, True, False], 100)
    assert desk.reservations.nbytes(A) == 0


@pytest.mark.parametrize("follows", [False, True])
async def test_one_too_many_is_refused(follows: bool) -> None:
    """Where nobody may wait, what cannot begin is told so, unless it is of a request taken."""
    desk = Desk(max_waiting=0)
    generations = await desk.running(2)
    late = asyncio.create_task(all_of(desk.run("late", follows=follows)))
    await turn_the_loop()
    counts = desk.counts
    for events in generations:
        await events.aclose()

    assert counts == (2, follows)
    if follows:
        assert await late == EVENTS
    else:
        with pytest.raises(QueueFull):
            await late
    assert desk.counts == (0, 0)


async def test_without_a_route_it_is_over() -> None:
    """Where there is none when its turn has come, that is raised, and others are not held up."""
    desk = Desk()
    desk.no_route = RouteError("there is none")
    with pytest.raises(RouteError, match="there is none"):
        await all_of(desk.run())
    desk.no_route = None

    assert (desk.counts, await all_of(desk.run())) == ((0, 0), EVENTS)


async def test_without_a_route_all_that_wait_are_over() -> None:
    """The one whose turn it is is told, and then the next one."""
    desk = Desk()
    generations = await desk.running(2)
    waiting = [asyncio.create_task(all_of(desk.run())) for _ in range(2)]
    await turn_the_loop()
    desk.no_route = RouteError("there is none")
    await generations[0].aclose()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    await generations[1].aclose()

    assert (outcomes, desk.counts) == ([desk.no_route] * 2, (0, 0))


async def test_a_failure_frees_the_place() -> None:
    """It is raised as it is."""
    desk = Desk()
    desk.failure = StageError("x")
    with pytest.raises(StageError):
        await all_of(desk.run("x"))

    assert (desk.log, desk.counts) == (["x began", "x ended"], (0, 0))


async def test_who_leaves_the_line_leaves_no_gap() -> None:
    """A waiting generation that is cancelled never begins, and the one behind it does."""
    desk = Desk()
    generations = await desk.running(2)
    leaving, staying = (asyncio.create_task(all_of(desk.run(name))) for name in "ab")
    await turn_the_loop()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    counts = desk.counts
    await generations[0].aclose()
    events = await staying
    await generations[1].aclose()

    assert (counts, events, desk.counts) == ((2, 1), EVENTS, (0, 0))
    assert "a began" not in desk.log


async def test_who_leaves_as_its_turn_comes_passes_it_on() -> None:
    """Cancelled in the moment that a place is free: the next one has it."""
    desk = Desk()
    generations = await desk.running(2)
    leaving, staying = (asyncio.create_task(all_of(desk.run(name))) for name in "ab")
    await turn_the_loop()
    leaving.cancel()
    await generations[0].aclose()
    with suppress(asyncio.CancelledError):
        await leaving
    events = await staying
    await generations[1].aclose()

    assert (events, desk.counts, desk.reservations.nbytes(A)) == (EVENTS, (0, 0), 0)
    assert "a began" not in desk.log


async def test_who_leaves_after_its_turn_came_frees_the_place() -> None:
    """Cancelled when the place is its own already, before it has begun."""
    desk = Desk()
    generations = await desk.running(2)
    leaving = asyncio.create_task(all_of(desk.run("a")))
    await turn_the_loop()
    await generations[0].aclose()
    leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving
    await generations[1].aclose()

    assert (desk.counts, desk.reservations.nbytes(A)) == ((0, 0), 0)
    assert "a began" not in desk.log


async def test_one_never_begun_takes_no_place() -> None:
    """Closed before its first token was asked for, it was never there."""
    desk = Desk()
    await desk.run().aclose()

    assert (desk.log, desk.counts, desk.turns.idle.is_set()) == ([], (0, 0), True)


async def test_it_is_idle_while_nothing_runs() -> None:
    """Who waits for the running generations to end is told when the last one has."""
    desk = Desk()
    idle = [desk.turns.idle.is_set()]
    generations = await desk.running(2)
    idle.append(desk.turns.idle.is_set())
    for events in generations:
        await events.aclose()
        idle.append(desk.turns.idle.is_set())

    assert idle == [True, False, False, True]


async def test_it_is_not_idle_while_one_waits() -> None:
    """A generation that waits is to be served too, so the last one's end is waited for."""
    desk = Desk()
    generations = await desk.running(2)
    waiting = asyncio.create_task(all_of(desk.run()))
    await turn_the_loop()
    for events in generations:
        await events.aclose()
    idle = [desk.turns.idle.is_set()]
    await waiting
    idle.append(desk.turns.idle.is_set())

    assert idle == [False, True]
