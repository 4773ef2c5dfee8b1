from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import pytest

from meshnet.errors import QueueFull, StageError
from meshnet.shard.compute import ComputeThread
from tests.unit.fakes import turn_the_loop

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


class Gate:
    """A function that stays on the compute thread until it is let go."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self._entered.set()
        self._open.wait(10)
        self.ended = True
        return "through"

    async def entered(self) -> None:
        await asyncio.to_thread(self._entered.wait, 10)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
async def compute() -> AsyncGenerator[ComputeThread]:
    async with ComputeThread(max_queued=2) as thread:
        yield thread


def fail() -> None:
    raise StageError("not finite")


async def test_a_function_runs_off_the_loop(compute: ComputeThread) -> None:
    """The function runs on another thread, and its result comes back."""
    done = await compute.run(threading.get_ident)

    assert done.result != threading.get_ident()


async def test_every_function_runs_on_the_same_thread(compute: ComputeThread) -> None:
    """There is one compute thread, so a stage is never entered twice at once."""
    idents = [(await compute.run(threading.get_ident)).result for _ in range(3)]

    assert len(set(idents)) == 1


async def test_functions_run_in_the_order_they_came(compute: ComputeThread) -> None:
    """The one that waits runs after the one that came before it."""
    gate, order = Gate(), list[str]()
    first = asyncio.create_task(compute.run(lambda: order.append(gate())))
    await gate.entered()
    second = asyncio.create_task(compute.run(lambda: order.append("second")))
    await turn_the_loop()
    gate.open()
    await asyncio.gather(first, second)

    assert order == ["through", "second"]


async def test_waiting_and_computing_are_told_apart(
    compute: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queue time ends where compute time starts, in milliseconds."""
    ticks = iter([10.0, 10.25, 10.75])
    monkeypatch.setattr("meshnet.shard.compute.perf_counter", lambda: next(ticks))
    done = await compute.run(lambda: None)

    assert (done.queue_ms, done.compute_ms) == (250.0, 500.0)


async def test_a_failure_reaches_the_caller(compute: ComputeThread) -> None:
    """What the function raises is raised by run(), as it is."""
    with pytest.raises(StageError, match="not finite"):
        await compute.run(fail)


async def test_a_failure_stops_nothing(compute: ComputeThread) -> None:
    """After a function that raised, more than max_queued times, the next one runs."""
    for _ in range(3):
        with pytest.raises(StageError):
            await compute.run(fail)

    assert (await compute.run(lambda: 5)).result == 5


async def test_too_many_functions_are_refused(compute: ComputeThread) -> None:
    """With max_queued functions running or waiting, the next one is refused and never run."""
    gate, ran = Gate(), list[bool]()
    waiting = [asyncio.create_task(compute.run(gate)) for _ in range(2)]
    await gate.entered()
    with pytest.raises(QueueFull) as caught:
        await compute.run(lambda: ran.append(True))
    gate.open()
    await asyncio.gather(*waiting)

    assert caught.value.members == {"field": "queue", "value": 2, "allowed": 2}
    assert ran == []


async def test_a_place_is_free_again_when_run_returns(compute: ComputeThread) -> None:
    """Callers that run one function after another are never refused."""
    for _ in range(5):
        await asyncio.gather(compute.run(lambda: None), compute.run(lambda: None))


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_caller_stays_until_the_function_ended(
    compute: ComputeThread, cancels: int
) -> None:
    """However often it is cancelled, run() does not return while the function is running."""
    gate = Gate()
    caller = asyncio.create_task(compute.run(gate))
    await gate.entered()
    for _ in range(cancels):
        caller.cancel()
        await turn_the_loop()
        assert not caller.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert gate.ended


async def test_a_caller_cancelled_in_the_queue_stays_too(compute: ComputeThread) -> None:
    """A function still waiting when its caller is cancelled is waited for all the same."""
    gate, ran = Gate(), list[bool]()
    running = asyncio.create_task(compute.run(gate))
    await gate.entered()
    waiting = asyncio.create_task(compute.run(lambda: ran.append(True)))
    await turn_the_loop()
    waiting.cancel()
    await turn_the_loop()
    assert not waiting.done()
    gate.open()
    await running
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert ran == [True]


async def test_nobody_is_warned_of_a_failure_whose_caller_left(compute: ComputeThread) -> None:
    """A function that fails after its caller was cancelled is no unhandled error of the loop."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    gate = Gate()

    def fail_later() -> None:
        gate()
        fail()

    caller = asyncio.create_task(compute.run(fail_later))
    await gate.entered()
    caller.cancel()
    await turn_the_loop()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller
    del caller
    await turn_the_loop()

    assert complaints == []


async def test_a_cancelled_callers_place_is_free_again(compute: ComputeThread) -> None:
    """A place is held until the function has ended, and no longer."""
    for _ in range(3):
        gate = Gate()
        caller = asyncio.create_task(compute.run(gate))
        await gate.entered()
        caller.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await caller

    assert (await compute.run(lambda: 5)).result == 5


async def test_leaving_waits_for_what_runs() -> None:
    """The block ends after the function that runs, and the loop turns meanwhile."""
    gate = Gate()

    async def use() -> None:
        async with ComputeThread(max_queued=1) as compute:
            caller = asyncio.create_task(compute.run(gate))
            await gate.entered()
        await caller

    user = asyncio.create_task(use())
    await gate.entered()
    await turn_the_loop()
    assert not user.done()
    gate.open()
    await user

    assert gate.ended


class DroppingExecutor(ThreadPoolExecutor):
    """Cancels what it is given, as an executor does that is shut down meanwhile."""

    def submit(
        self,
        fn: Callable[ParametersT, ResultT],
        /,
        *args: ParametersT.args,
        **kw: ParametersT.kwargs,
    ) -> Future[ResultT]:
        del fn, args, kw
        dropped: Future[ResultT] = Future()
        dropped.cancel()
        return dropped


async def test_a_dropped_function_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function cancelled in the queue ends run(), and its place is free again."""
    monkeypatch.setattr("meshnet.shard.compute.ThreadPoolExecutor", DroppingExecutor)
    async with ComputeThread(max_queued=1) as compute:
        for _ in range(3):
            with pytest.raises(asyncio.CancelledError):
                await compute.run(lambda: None)
