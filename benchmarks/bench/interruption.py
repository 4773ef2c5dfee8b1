"""A long prompt arrives: how long four streams that are being generated must wait."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Final

from benchmarks.bench.answers import gaps_s
from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import REUSE_VARIABLE, Endpoint, in_each_format, nodes
from benchmarks.bench.workload import STRIDE, Workload
from services.head.settings import HeadSettings

CHUNK_SLACK: Final = 1.2
TARGET: Final = 1.0
_FORMATS: Final = ("fp32", "int8")
_N_STREAMS: Final = 4
_ARRIVING_TOKENS: Final = 2048
_GAP: Final = "longest gap"
_LAST, _FIRST = "allowed by the last chunk", "allowed by the first chunk"
_CHUNK_TOKENS: Final[int] = HeadSettings.model_fields["prefill_chunk_tokens"].default


async def measure(work: Workload) -> list[Result]:
    """The longest gap between two tokens, over what one chunk of the prompt takes.

    Allowed is 1.2 times a chunk's time, and a step's. A chunk's time is from asking to the first
    token on the same nodes with nothing else to do. The last chunk is the longest one.
    """

    async def measure_format(weights: str) -> list[Result]:
        times: dict[str, list[float]] = {_GAP: [], _LAST: [], _FIRST: []}
        async with nodes(work, 2, weights, {REUSE_VARIABLE: "true"}) as two:
            for number in range(work.rounds + 1):
                first_s, last_s = await _chunks_s(work, two, 2 * number * STRIDE)
                gap_s, step_s = await _interrupt(work, two, (2 * number + 1) * STRIDE)
                times[_GAP].append(gap_s)
                times[_LAST].append(CHUNK_SLACK * last_s + step_s)
                times[_FIRST].append(CHUNK_SLACK * first_s + step_s)
        times = {name: values[1:] for name, values in times.items()}  # the first does not count
        name = f"longest gap while {_ARRIVING_TOKENS} tokens arrive"
        return [
            ratio(f"{name} over a chunk, {weights}", times, _GAP, _LAST, "lower", TARGET),
            ratio(f"{name} over the first chunk, {weights}", times, _GAP, _FIRST, "lower"),
            median_of(f"{name}, {weights}", times[_GAP], "s", "lower"),
        ]

    return await in_each_format(_FORMATS, measure_format)


async def _chunks_s(work: Workload, two: Endpoint, at: int) -> tuple[float, float]:
    """How long the first and the last chunk of a prompt of that length take, each by itself."""
    prompt = work.prompt(_ARRIVING_TOKENS, at=at)
    first = await two.ask(prompt[:_CHUNK_TOKENS], 1)
    await two.ask(prompt[:-_CHUNK_TOKENS], 1)
    last = await two.ask(prompt, 1)  # the rest is kept since a moment ago
    return first.first_token_s, last.first_token_s


async def _interrupt(work: Workload, two: Endpoint, at: int) -> tuple[float, float]:
    """Four streams, and a long prompt from `at` on once all of them run.

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
        arrived = await two.ask(work.prompt(_ARRIVING_TOKENS, at=at), 1)
    answers = [task.result() for task in running]
    during, otherwise = gaps_s(answers, arrived.asked_at, arrived.came_at[0])
    return max(during), median(otherwise)
