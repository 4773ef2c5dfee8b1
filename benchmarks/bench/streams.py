"""Many streams at once on the same two nodes."""

from __future__ import annotations

import asyncio
from typing import Final

from benchmarks.bench.answers import tokens_per_s_together
from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import Side, in_each_format, nodes
from benchmarks.bench.workload import PROMPT_TOKENS, Workload

EIGHT_OVER_ONE: Final = 4.5
SIXTEEN_OVER_EIGHT: Final = 1.0
_FORMATS: Final = ("int8",)
_COUNTS: Final = {"one stream": 1, "eight streams": 8, "sixteen streams": 16}


async def measure(work: Workload) -> list[Result]:
    """Eight streams over one, and sixteen over eight, in sum of tokens a second."""

    async def measure_format(weights: str) -> list[Result]:
        async with nodes(work, 2, weights) as two:
            sums = await work.in_turn(_COUNTS, lambda n: rate_together(work, two, n))
        one, eight, sixteen = _COUNTS
        return [
            ratio(f"eight streams over one, {weights}", sums, eight, one, "higher", EIGHT_OVER_ONE),
            ratio(
                *(f"sixteen streams over eight, {weights}", sums, sixteen, eight, "higher"),
                target=SIXTEEN_OVER_EIGHT,
            ),
            *(
                median_of(f"{name} in sum, {weights}", sums[name], "tokens/s", "higher")
                for name in (eight, sixteen)
            ),
        ]

    return await in_each_format(_FORMATS, measure_format)


async def rate_together(work: Workload, side: Side, n_streams: int) -> float:
    """Tokens a second of so many streams in sum; each has its own prompt."""
    prompts = [work.prompt(at=index * PROMPT_TOKENS) for index in range(n_streams)]
    asked = [side.ask(prompt, work.n_tokens) for prompt in prompts]
    return tokens_per_s_together(await asyncio.gather(*asked))
