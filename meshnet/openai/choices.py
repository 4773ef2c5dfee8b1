"""Several generations as one stream of events, each with the index of its choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from meshnet.errors import MeshError
from meshnet.generation import TokenEvent

Events = AsyncGenerator[TokenEvent]
ChoiceEvents = AsyncGenerator[tuple[int, TokenEvent]]
Ready = asyncio.Queue[tuple[int, TokenEvent] | asyncio.Task[None]]


async def merge(generations: Sequence[Events]) -> ChoiceEvents:
    """Yield the events of all generations as they come, those of one in their order.

    Each generation runs in a task of its own and is closed by it: at its end, so that one that
    waits for its turn gets it, and when another one fails or this generator is closed early.

    Args:
        generations: Begun in this order. None runs ahead of whoever takes the events, but for one.

    Raises:
        MeshError: The first failure of any of them.
    """
    ready: Ready = asyncio.Queue()
    tasks = [
        asyncio.create_task(_run(index, events, ready)) for index, events in enumerate(generations)
    ]
    for task in tasks:
        task.add_done_callback(ready.put_nowait)
    n_running = len(tasks)
    try:
        while n_running:
            item = await ready.get()
            ready.task_done()
            if isinstance(item, tuple):
                yield item
            else:
                item.result()
                n_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(index: int, events: Events, ready: Ready) -> None:
    """Put the events where they are taken from, each after the one before was taken."""
    async with aclosing(events):
        async for event in events:
            ready.put_nowait((index, event))
            if event.finish_reason is not None:
                return
            await ready.join()
    raise MeshError("the generation ended without a finish reason")
