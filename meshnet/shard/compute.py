"""One thread that computes, so that the event loop never does, and a bounded queue before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Final, TypeVar

from meshnet.errors import QueueFull
from meshnet.ids import SessionId
from meshnet.model.interface import CacheState, StageModel, StageOutput, StageStep
from meshnet.shard.scheduler import Job, StepScheduler

ResultT = TypeVar("ResultT")

_LEAST_PAUSE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Timed:
    """What a stage put out for a step, and where the time went.

    Attributes:
        result: The output.
        queue_ms: How long it waited for the thread, milliseconds.
        compute_ms: How long it ran; in a batch, how long the batch did.
        batch_size: How many steps ran together.
        read_ms: How long it took before to read its body, milliseconds.
    """

    result: StageOutput
    queue_ms: float
    compute_ms: float
    batch_size: int
    read_ms: float = 0.0


Outcome = Timed | BaseException


@dataclass(eq=False, slots=True)
class _Pending(Job):
    """A step, what runs it, and what its caller waits for."""

    stage: StageModel
    outcome: asyncio.Future[Outcome]


class ComputeThread:
    """Runs steps on one thread: what the scheduler takes next, when it says so.

    Args:
        max_queued: Steps that may wait or run at once.
        max_batch: Steps that may run as one batch.
    """

    def __init__(self, max_queued: int, max_batch: int) -> None:
        self._max_queued = max_queued
        self._scheduler: StepScheduler[_Pending] = StepScheduler(max_batch)
        self._pending: set[_Pending] = set()
        self._busy = False
        self._pause: asyncio.TimerHandle | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def __aenter__(self) -> ComputeThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._pending:
            await asyncio.wait([job.outcome for job in self._pending])
        # What else runs ends by itself; waiting for it here would block the loop.
        await asyncio.to_thread(self._executor.shutdown)

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Run on the thread what is no step, such as loading the stage.

        A cancelled caller does not return before the function has ended.
        """
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            raise

    def check_room(self) -> None:
        """Find out whether a step would be taken, before anything is given up for it.

        Raises:
            QueueFull: Too many steps wait already.
        """
        n_pending = len(self._pending)
        if n_pending >= self._max_queued:
            raise QueueFull(
                f"{n_pending} steps are waiting",
                field="queue",
                value=n_pending,
                allowed=self._max_queued,
            )

    async def step(
        self,
        stage: StageModel,
        step: StageStep,
        state: CacheState | None = None,
        session: SessionId | None = None,
    ) -> Timed:
        """Run one step, in a batch with others where that can be.

        A cancelled caller does not return before its step has ended: what it works on (a session's
        state) must not be given away while it is being written. A step that still waits is not
        run.

        Args:
            stage: What runs the step; all steps have the same one.
            step: The step.
            state: The session's state, mutated; None runs a stateless step.
            session: Whose state it is. No other step of the session may be here.

        Raises:
            QueueFull: Too many steps wait already; nothing was run.
            StageError: The step failed, by itself or with its batch. The state must be discarded.
        """
        self.check_room()
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        job = _Pending(step, state, session, perf_counter(), stage, outcome)
        self._pending.add(job)
        self._scheduler.add(job)
        self._start_next()
        try:
            done = await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if self._scheduler.remove(job):
                self._pending.remove(job)
                outcome.cancel()
            await _settled(outcome)
            raise
        if isinstance(done, BaseException):
            raise done
        return done

    def _start_next(self) -> None:
        """Let the thread begin what is next, if it is free and need not wait for more."""
        if self._busy:
            return
        if self._pause is not None:
            self._pause.cancel()
        now = perf_counter()
        if pause_s := self._scheduler.pause_s(now):
            # Not under a loop's resolution: uvloop takes that for no pause, and would spin.
            due_s = max(pause_s, _LEAST_PAUSE_S)
            self._pause = asyncio.get_running_loop().call_later(due_s, self._start_next)
        elif jobs := self._scheduler.take(now):
            self._busy = True
            self._start(jobs)

    def _start(self, jobs: list[_Pending]) -> None:
        loop = asyncio.get_running_loop()
        self._executor.submit(_run, jobs).add_done_callback(
            lambda ran: loop.call_soon_threadsafe(self._finish, jobs, ran)
        )

    def _finish(self, jobs: list[_Pending], ran: Future[list[Outcome]]) -> None:
        self._busy = False
        self._scheduler.ended(jobs, perf_counter())
        self._start_next()  # before anything else: the thread is not to wait
        error = ran.exception()
        outcomes = ran.result() if error is None else [error] * len(jobs)
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._pending.remove(job)
            job.outcome.set_result(outcome)


def _run(jobs: list[_Pending]) -> list[Outcome]:
    """Run what was taken together; on the thread."""
    first, began_at = jobs[0], perf_counter()
    if first.is_decode:
        works = [(job.step, job.state) for job in jobs if job.state is not None]
        outcomes = first.stage.run_batch(works)
    else:
        outcomes = [first.stage.run(first.step, first.state)]
    compute_ms = (perf_counter() - began_at) * 1000
    return [
        outcome
        if isinstance(outcome, BaseException)
        else Timed(outcome, (began_at - job.queued_at) * 1000, compute_ms, len(jobs))
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]


async def _settled(future: asyncio.Future[ResultT]) -> None:
    """Wait until `future` is done, through further cancellations of the waiting task."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({future})
