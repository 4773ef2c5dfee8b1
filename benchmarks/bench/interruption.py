"""A long prompt arrives: how long four streams that are being generated must wait."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Final

from benchmarks.bench.answers import gaps_s
from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import Endpoint, in_each_format, nodes
from benchmarks.bench.workload import Workload
from services.head.settings import HeadSettings

CHUNK_SLACK: Final = 1.2
TARGET: Final = 1.0
_FORMATS: Final = ("fp32", "int8")
_N_STREAMS: Final = 4
_ARRIVING_TOKENS: Final = 2048
_GAP, _ALLOWED = "longest gap", "allowed"
_CHUNK_TOKENS: Final[int] = HeadSettings.model_fields["prefill_chunk_tokens"].default


async def measure(work: Workload) -> list[Result]:
    """The longest gap between two tokens, over what one chunk of the prompt takes.

    Allowed is 1.2 times a chunk's time, and a step's. A chunk's time is that of a prompt of one
    chunk from asking to its first token, on the same nodes with nothing else to do.
    """

    async def measure_format(weights: str) -> list[Result]:
        gaps: list[float] = []
        allowed: list[float] = []
        async with nodes(work, 2, weights) as two:
            for _ in range(work.rounds + 1):
                chunk = await two.ask(work.prompt(_CHUNK_TOKENS), 1)
                gap_s, step_s = await _interrupt(work, two)
                gaps.append(gap_s)
                allowed.append(CHUNK_SLACK * chunk.first_token_s + step_s)
        raw = {_GAP: gaps[1:], _ALLOWED: allowed[1:]}
        name = f"longest gap while {_ARRIVING_TOKENS} tokens arrive"
        return [
            ratio(f"{name} over a chunk, {weights}", raw, _GAP, _ALLOWED, "lower", TARGET),
            median_of(f"{name}, {weights}", raw[_GAP], "s", "lower"),
        ]

    return await in_each_format(_FORMATS, measure_format)


async def _interrupt(work: Workload, two: Endpoint) -> tuple[float, float]:
    """Four streams, and a long prompt once all of them run.

    Returns:
        The longest gap of a stream until the prompt's first token, and what a gap is otherwise.
    """
    begun = [asyncio.Event() for _ in range(_N_STREAMS)]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(
                two.ask(work.prompt(at=_ARRIVING_TOKENS * index), work.n_tokens, event.set)
            )
            for index, event in enumerate(begun)
        ]
        for event in begun:
            await event.wait()
        arrived = await two.ask(work.prompt(_ARRIVING_TOKENS), 1)
    answers = [task.result() for task in running]
    during, otherwise = gaps_s(answers, arrived.asked_at, arrived.came_at[0])
    return max(during), median(otherwise)
