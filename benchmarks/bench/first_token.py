"""The time to the first token after a long prompt: two nodes against transformers by itself."""

from __future__ import annotations

from typing import Final

from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import Side, in_each_format, nodes, transformers_alone
from benchmarks.bench.workload import Workload

TARGET: Final = 1.1
_FORMATS: Final = ("fp32", "bf16")
_LENGTHS: Final = (512, 2048)
_THREADS: Final = 2
"""Of transformers: as many as both nodes together, which is all of a machine with two cores."""
_TWO: Final = "two nodes"


async def measure(work: Workload) -> list[Result]:
    """Prompts of each length, with weights that are the same on both sides."""

    async def measure_format(weights: str) -> list[Result]:
        alone_name = f"transformers {weights}"
        results: list[Result] = []
        async with (
            transformers_alone(work, threads=_THREADS, weights=weights) as alone,
            nodes(work, 2, weights) as two,
        ):
            for length in _LENGTHS:
                times = await work.in_turn(
                    {alone_name: alone, _TWO: two},
                    lambda side, length=length: first_token_s(work, side, length),
                )
                what = f"first token after {length}"
                name = f"{what}: two nodes over transformers, {weights}"
                results += [
                    ratio(name, times, _TWO, alone_name, "lower", TARGET),
                    median_of(f"{what}, {weights}", times[_TWO], "s", "lower"),
                    median_of(f"{what}, {alone_name}", times[alone_name], "s", "lower"),
                ]
        return results

    return await in_each_format(_FORMATS, measure_format)


async def first_token_s(work: Workload, side: Side, length: int) -> float:
    """The time from asking to the first token after a prompt of so many tokens."""
    return (await side.ask(work.prompt(length), 1)).first_token_s
