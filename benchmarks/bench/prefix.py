"""The time to the first token of a prompt that begins as another one did, over that one's."""

from __future__ import annotations

from typing import Final

from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import REUSE_VARIABLE, nodes
from benchmarks.bench.workload import STRIDE, Workload

TARGET: Final = 0.2
_SHARED: Final = 500
_OWN: Final = 20
_FIRST: Final = "first"
_SECOND: Final = "second"


async def measure(work: Workload) -> list[Result]:
    """A fresh prefix in each round, of two prompts that end otherwise."""
    times: dict[str, list[float]] = {_FIRST: [], _SECOND: []}
    async with nodes(work, 2, "fp32", {REUSE_VARIABLE: "true"}) as two:
        for number in range(work.rounds + 1):
            shared = work.prompt(_SHARED, at=number * STRIDE)
            for place, name in enumerate((_FIRST, _SECOND)):
                own = work.prompt(_OWN, at=(2 * number + place) * _OWN)
                answer = await two.ask([*shared, *own], 1)
                times[name].append(answer.first_token_s)
    times = {name: values[1:] for name, values in times.items()}  # the first round does not count
    what = f"first token after {_SHARED} shared tokens and {_OWN} more"
    return [
        ratio(f"{what}: second over first, fp32", times, _SECOND, _FIRST, "lower", TARGET),
        median_of(f"{what}, first, fp32", times[_FIRST], "s", "lower"),
        median_of(f"{what}, second, fp32", times[_SECOND], "s", "lower"),
    ]
