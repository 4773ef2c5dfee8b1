from __future__ import annotations

import asyncio

import pytest

from meshnet.head.background import Background
from tests.unit.fakes import turn_the_loop


class Work:
    """Ends when it is let go."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.ended = False

    async def __call__(self) -> None:
        await self.gate.wait()
        self.ended = True


async def fail() -> None:
    raise ValueError("broken")


async def test_work_is_waited_for() -> None:
    """finish() returns when the work has ended."""
    work = Work()
    async with Background() as background:
        caller = asyncio.create_task(background.finish(work()))
        await turn_the_loop()
        waited = not caller.done()
        work.gate.set()
        await caller

    assert (waited, work.ended) == (True, True)


async def test_a_cancelled_caller_leaves_the_work_going() -> None:
    """A cancelled caller stops waiting at once; the work ends later."""
    work = Work()
    async with Background() as background:
        caller = asyncio.create_task(background.finish(work()))
        await turn_the_loop()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        ended_with_its_caller = work.ended
        work.gate.set()
        await turn_the_loop()

    assert (ended_with_its_caller, work.ended) == (False, True)


async def test_work_of_a_cancelled_task_runs() -> None:
    """A task that is cancelled anew at every await still gets its work done."""
    work = Work()
    async with Background() as background:

        async def clean_up() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await background.finish(work())

        task = asyncio.create_task(clean_up())
        for _ in range(3):
            await turn_the_loop()
            task.cancel()
        await turn_the_loop()
        work.gate.set()

    assert (task.cancelled(), work.ended) == (True, True)


async def test_leaving_waits_for_all_work() -> None:
    """The block ends when the work of callers who left has ended."""
    works = [Work(), Work()]

    async def use() -> None:
        async with Background() as background:
            callers = [asyncio.create_task(background.finish(work())) for work in works]
            await turn_the_loop()
            for caller in callers:
                caller.cancel()

    user = asyncio.create_task(use())
    await turn_the_loop()
    works[0].gate.set()
    await turn_the_loop()
    waits_for_the_second = not user.done()
    works[1].gate.set()
    await user

    assert (waits_for_the_second, [work.ended for work in works]) == (True, [True, True])


async def test_leaving_waits_for_work_that_came_meanwhile() -> None:
    """Work begun while the block is ending is waited for too."""
    first, second = Work(), Work()
    background = Background()

    async def then_second() -> None:
        await first()
        later.append(asyncio.create_task(background.finish(second())))
        await turn_the_loop(3)

    later: list[asyncio.Task[None]] = []

    async def use() -> None:
        async with background:
            caller = asyncio.create_task(background.finish(then_second()))
            await turn_the_loop()
            caller.cancel()

    user = asyncio.create_task(use())
    await turn_the_loop()
    first.gate.set()
    await turn_the_loop()
    waits = not user.done()
    second.gate.set()
    await user

    assert (waits, second.ended) == (True, True)


async def test_a_failure_reaches_the_caller() -> None:
    """What the work raises is raised to who waits for it."""
    async with Background() as background:
        with pytest.raises(ValueError, match="broken"):
            await background.finish(fail())


async def test_a_failure_does_not_keep_the_block_open() -> None:
    """Work that failed after its caller left is over, and leaving raises nothing."""
    work = Work()

    async def fail_later() -> None:
        await work()
        await fail()

    async with Background() as background:
        caller = asyncio.create_task(background.finish(fail_later()))
        await turn_the_loop()
        caller.cancel()
        await turn_the_loop()
        work.gate.set()

    assert work.ended
