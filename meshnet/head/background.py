"""Work that must end even when the request it belongs to was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType


class Background:
    """Runs coroutines as tasks of its own, and waits for all of them when it is left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Background:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` to its end and wait for it; a cancelled caller stops waiting, `work` goes on.

        Needed since anyio cancels every await of a cancelled scope anew: cleaning up in a `finally`
        of the request's own task would be cut short.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)
