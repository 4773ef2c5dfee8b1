"""One stream: two nodes against transformers by itself, and against one node of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import Side, in_each_format, nodes, transformers_alone
from benchmarks.bench.workload import Workload

OVER_TRANSFORMERS: Final = {"fp32": 1.25, "int8": 2.2, "int4": 2.7}
ALONE: Final = "transformers fp32"
ONE: Final = "one node"
TWO: Final = "two nodes"


async def measure(work: Workload) -> list[Result]:
    """Tokens a second with each format of weights; every process has one thread."""
    alone_rates: list[float] = []
    async with transformers_alone(work, threads=1, weights="fp32") as alone:

        async def measure_format(weights: str) -> list[Result]:
            rates = await _rates(work, alone, weights)
            alone_rates.append(median(rates[ALONE]))
            return _compare(weights, rates)

        results = await in_each_format(OVER_TRANSFORMERS, measure_format)
    return [*results, median_of(f"decode on one node, {ALONE}", alone_rates, "tokens/s", "higher")]


async def _rates(work: Workload, alone: Side, weights: str) -> dict[str, list[float]]:
    async with nodes(work, 2, weights) as two, nodes(work, 1, weights) as one:
        return await work.in_turn(
            {ALONE: alone, ONE: one, TWO: two}, lambda side: decode_rate(work, side)
        )


async def decode_rate(work: Workload, side: Side) -> float:
    """Tokens a second of one stream."""
    return (await side.ask(work.prompt(), work.n_tokens)).tokens_per_s


def _compare(weights: str, rates: Mapping[str, Sequence[float]]) -> list[Result]:
    name = f"decode: two nodes over transformers fp32, {weights}"
    results = [ratio(name, rates, TWO, ALONE, "higher", OVER_TRANSFORMERS[weights])]
    name = f"decode: two nodes over one node, {weights}"
    results += [ratio(name, rates, TWO, ONE, "higher")]
    for side in (ONE, TWO):
        results += [median_of(f"decode on {side}, {weights}", rates[side], "tokens/s", "higher")]
    return results
