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


async def test_a_result_is_had_from_the_task() -> None:
    """start() gives the task, and with it what the work returned."""

    async def seven() -> int:
        return 7

    async with Background() as background:
        assert await background.start(seven()) == 7


async def test_work_that_was_only_started_is_waited_for() -> None:
    """Leaving waits for work that nobody else waits for."""
    work = Work()
    async with Background() as background:
        background.start(work())
        work.gate.set()

    assert work.ended


async def test_work_that_fails_unheard_is_no_fault_of_the_loop() -> None:
    """A failure that nobody waits for is taken note of."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    async with Background() as background:
        background.start(fail())
    await turn_the_loop()

    assert complaints == []


async def test_work_that_was_cancelled_is_over() -> None:
    """A task that the loop cancelled does not keep the block open."""
    async with Background() as background:
        task = background.start(Work()())
        await turn_the_loop()
        task.cancel()

    assert task.cancelled()


async def test_work_that_does_not_end_is_cancelled_at_last() -> None:
    """Leaving waits no longer than it was told."""
    work = Work()
    async with Background(exit_s=0.0) as background:
        task = background.start(work())

    assert (task.cancelled(), work.ended) == (True, False)


async def test_work_that_does_not_want_to_end_is_cancelled_again() -> None:
    """One cancellation may be met by cleaning up; leaving waits for the end."""
    cancelled: list[int] = []

    async def stubborn() -> None:
        for nth in range(3):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(nth)

    async with Background(exit_s=0.0) as background:
        background.start(stubborn())
        await turn_the_loop()

    assert cancelled == [0, 1, 2]
