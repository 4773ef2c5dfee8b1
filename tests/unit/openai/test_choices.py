from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import HopUnreachable, MeshError, QueueFull
from meshnet.generation import TokenEvent
from meshnet.openai.choices import merge
from tests.unit.openai.making import Generation, answer


async def merged(*generations: Generation) -> list[tuple[int, TokenEvent]]:
    return [item async for item in merge([generation.events() for generation in generations])]


def n_tasks() -> int:
    return len(asyncio.all_tasks())


async def test_one_generation_is_itself() -> None:
    """The events of a single generation come as they are, and it is closed at the end."""
    generation = Generation(*answer("abc"))

    assert await merged(generation) == [(0, event) for event in answer("abc")]
    assert not generation.is_open


async def test_no_generations_are_no_events() -> None:
    """Nothing to run is nothing at all."""
    assert await merged() == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
async def test_the_events_of_each_choice_come_in_their_order(lengths: list[int]) -> None:
    """Whatever their lengths, every choice's events come once, in order, with its index."""
    answers = [answer("abcdef"[:length], first_id=10 * length) for length in lengths]
    events = await merged(*(Generation(*events) for events in answers))

    assert len(events) == sum(lengths)
    for index, expected in enumerate(answers):
        assert [event for choice, event in events if choice == index] == expected


async def test_choices_do_not_wait_for_each_other() -> None:
    """While one choice computes, the events of the others come."""
    gate = asyncio.Event()
    slow, fast = Generation(gate, *answer("ab")), Generation(*answer("cd"))
    async with aclosing(merge([slow.events(), fast.events()])) as events:
        first = [await anext(events), await anext(events)]
        gate.set()
        rest = [item async for item in events]

    assert [index for index, _ in first] == [1, 1]
    assert [index for index, _ in rest] == [0, 0]


async def test_a_choice_that_has_ended_is_closed_at_once() -> None:
    """What a choice holds is freed while others go on: they may wait for just that."""
    turns = asyncio.Semaphore(1)

    async def in_turn(text: str) -> AsyncGenerator[TokenEvent]:
        async with turns:
            for event in answer(text):
                yield event

    events = [item async for item in merge([in_turn("aa"), in_turn("b"), in_turn("cc")])]

    assert [index for index, _ in events] == [0, 0, 1, 2, 2]


async def test_none_runs_far_ahead() -> None:
    """A reader that stops reading stops the generations: each is one event ahead at most."""
    generations = [Generation(*answer("abcdef")), Generation(*answer("abcdef"))]
    async with aclosing(merge([generation.events() for generation in generations])) as events:
        await anext(events)
        await asyncio.sleep(0.01)
        assert [generation.n_begun for generation in generations] == [1, 1]
        await anext(events)
        await asyncio.sleep(0.01)
        assert [generation.n_begun for generation in generations] == [2, 2]


async def test_the_first_failure_closes_all_others() -> None:
    """A choice that fails is the failure of all; those in the middle of a step are closed too."""
    never = asyncio.Event()
    before = n_tasks()
    waiting = Generation(TokenEvent("a", 10), never)
    idle = Generation(*answer("abc"))
    failing = Generation(TokenEvent("a", 10), HopUnreachable("shard 2 is gone"))
    with pytest.raises(HopUnreachable, match="shard 2 is gone"):
        await merged(waiting, idle, failing)

    assert [generation.is_open for generation in (waiting, idle, failing)] == [False] * 3
    assert n_tasks() == before


async def test_of_two_failures_the_first_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A second failure at the same time is no news: the loop does not log it either."""
    with pytest.raises(HopUnreachable, match="first"):
        await merged(Generation(HopUnreachable("first")), Generation(QueueFull("second")))
    gc.collect()  # only then does a task tell that nobody looked at its failure

    assert caplog.records == []


async def test_a_failure_comes_after_what_came_before_it() -> None:
    """Events of a choice that fails later are not lost."""
    failing = Generation(TokenEvent("a", 10), TokenEvent("b", 11), HopUnreachable("gone"))
    events = merge([failing.events()])

    assert [(await anext(events))[1].text for _ in range(2)] == ["a", "b"]
    with pytest.raises(HopUnreachable):
        await anext(events)


async def test_a_fault_of_ours_comes_out_as_it_is() -> None:
    """An error that is no MeshError closes all choices and keeps its class."""
    idle = Generation(*answer("abc"))
    with pytest.raises(ZeroDivisionError):
        await merged(idle, Generation(ZeroDivisionError("secret")))

    assert not idle.is_open


async def test_a_generation_that_just_ends_is_an_error() -> None:
    """Events that end without a finish reason are an error, never a quiet success."""
    with pytest.raises(MeshError, match="the generation ended without a finish reason"):
        await merged(Generation(TokenEvent("a", 10)), Generation(*answer("abc")))


@pytest.mark.parametrize("n_read", [1, 2, 3])
async def test_closing_early_closes_all(n_read: int) -> None:
    """Whoever stops reading closes every choice, in a step or not, and no task is left."""
    before = n_tasks()
    generations = [
        Generation(*answer("abc")),
        Generation(TokenEvent("a", 10), asyncio.Event()),
        Generation(asyncio.Event()),
    ]
    events = merge([generation.events() for generation in generations])
    for _ in range(n_read):
        await anext(events)
    await events.aclose()

    assert [generation.is_open for generation in generations] == [False, False, False]
    assert n_tasks() == before


async def test_cancelling_closes_all() -> None:
    """A cancelled reader leaves no choice open and no task behind."""
    before = n_tasks()
    generations = [Generation(asyncio.Event()), Generation(TokenEvent("a", 10), asyncio.Event())]
    reader = asyncio.create_task(merged(*generations))
    await asyncio.sleep(0.01)
    assert [generation.is_open for generation in generations] == [True, True]
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader

    assert [generation.is_open for generation in generations] == [False, False]
    assert n_tasks() == before


async def test_a_reader_that_is_cancelled_twice_still_closes_all() -> None:
    """Cleaning up goes on in the choices' own tasks: anyio cancels the reader again and again."""
    generations = [Generation(asyncio.Event()), Generation(TokenEvent("a", 10), asyncio.Event())]
    reader = asyncio.create_task(merged(*generations))
    await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.sleep(0.01)

    assert [generation.is_open for generation in generations] == [False, False]


async def test_what_was_never_read_is_never_begun() -> None:
    """Closed before the first event, nothing has begun."""
    generation = Generation(*answer("abc"))
    await merge([generation.events()]).aclose()

    assert generation.n_begun == 0
