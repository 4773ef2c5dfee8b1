"""Work that must end even when the request it belongs to was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Background:
    """Runs coroutines as tasks of its own, and waits for all of them when it is left.

    Args:
        exit_s: How long it waits then; what runs longer is cancelled.
    """

    def __init__(self, exit_s: float = 3.0) -> None:
        self._exit_s = exit_s
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Background:
        return self

    async def __aexit__(self, *_: object) -> None:
        ends_at = asyncio.get_running_loop().time() + self._exit_s
        while self._tasks:
            left_s = ends_at - asyncio.get_running_loop().time()
            if left_s <= 0:
                for task in self._tasks:
                    task.cancel()
            await asyncio.wait(self._tasks, timeout=max(left_s, 0.1))

    def start(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Run `work` to its end; whoever wants its result awaits a shield of the task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end and wait for it; a cancelled caller stops waiting, `work` goes on.

        Needed since anyio cancels every await of a cancelled scope anew: cleaning up in a `finally`
        of the request's own task would be cut short.
        """
        await asyncio.shield(self.start(work))

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # taken note of, lest the loop warns of one that nobody waited for
