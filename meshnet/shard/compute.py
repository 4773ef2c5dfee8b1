"""One thread that computes, so that the event loop never does, and a bounded queue before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Generic, TypeVar

from meshnet.errors import QueueFull

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Timed(Generic[ResultT]):
    """A result and where its time went, in milliseconds."""

    result: ResultT
    queue_ms: float
    compute_ms: float


class ComputeThread:
    """Runs functions one after the other, in the order they came.

    Args:
        max_queued: Functions that may wait or run at once.
    """

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queued = 0
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def __aenter__(self) -> ComputeThread:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What still runs ends by itself; waiting for it here would block the loop.
        await asyncio.to_thread(self._executor.shutdown)

    def check_room(self) -> None:
        """Find out whether a function would be taken, before anything is given up for it.

        Raises:
            QueueFull: Too many functions wait already.
        """
        if self._queued >= self._max_queued:
            raise QueueFull(
                f"{self._queued} steps are waiting",
                field="queue",
                value=self._queued,
                allowed=self._max_queued,
            )

    async def run(self, function: Callable[[], ResultT]) -> Timed[ResultT]:
        """Run `function` on the thread and wait for it.

        A cancelled caller does not return before the function has ended: what it works on (a
        session's state) must not be given away while it is being written.

        Raises:
            QueueFull: Too many functions wait already; nothing was run.
        """
        self.check_room()
        queued_at = perf_counter()

        def timed() -> Timed[ResultT]:
            started_at = perf_counter()
            result = function()
            ended_at = perf_counter()
            return Timed(result, (started_at - queued_at) * 1000, (ended_at - started_at) * 1000)

        self._queued += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, timed)
        future.add_done_callback(self._leave)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            raise

    def _leave(self, future: asyncio.Future[Timed[ResultT]]) -> None:
        self._queued -= 1
        if not future.cancelled():
            future.exception()  # taken note of, lest the loop warns when the caller has gone


async def _settled(future: asyncio.Future[ResultT]) -> None:
    """Wait until `future` is done, through further cancellations of the waiting task."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({future})
