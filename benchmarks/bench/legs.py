"""What distance costs: every leg between processes takes a while, and a token takes some legs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from benchmarks.bench.delay import Delay
from benchmarks.bench.heads import heads
from benchmarks.bench.hops import POST, STREAM
from benchmarks.bench.results import Result, ratio
from benchmarks.bench.sides import Endpoint, in_each_format
from benchmarks.bench.workload import Workload

TARGET: Final = 1.1
_FORMATS: Final = ("fp32",)
_SHARDS: Final = (2, 4)
_ONE_WAY_MS: Final = (5, 20, 50)
_N_TOKENS: Final = 24
"""Of an answer: at 50 ms and eight legs a token takes most of half a second."""
_RETURN_VARIABLE: Final = "MESHNET_HEAD_HOP_RETURN"
"""Left to itself a head goes over from star to direct return once hops are far."""
_TAKEN, _LEGS = "measured", "without delay, and the legs"


class Way(NamedTuple):
    """A way to drive shards: a head's settings, and how many legs a token takes over n of them."""

    settings: dict[str, str]
    legs: Callable[[int], int]


def _star(n_shards: int) -> int:
    return 2 * n_shards


def _direct(n_shards: int) -> int:
    return n_shards + 1


WAYS: Final[dict[str, Way]] = {
    "star by POST": Way(POST, _star),
    "star by stream": Way({**STREAM, _RETURN_VARIABLE: "star"}, _star),
    "direct return": Way({**STREAM, _RETURN_VARIABLE: "direct"}, _direct),
}


async def measure(work: Workload) -> list[Result]:
    """Milliseconds a token, over those without delay and the legs' together.

    Whoever goes to a shard goes through a proxy of its own that keeps everything back, each way.
    """

    async def measure_format(weights: str) -> list[Result]:
        return [result for n in _SHARDS for result in await _over(work, n, weights)]

    return await in_each_format(_FORMATS, measure_format)


async def _over(work: Workload, n_shards: int, weights: str) -> list[Result]:
    delay = Delay()
    settings = {name: way.settings for name, way in WAYS.items()}

    async def token_ms(case: tuple[Endpoint, int]) -> float:
        side, delay.one_way_s = case[0], case[1] / 1000
        answer = await side.ask(work.prompt(), _N_TOKENS)
        return median(b - a for a, b in pairwise(answer.came_at)) * 1000

    results: list[Result] = []
    async with heads(work, n_shards, weights, settings, delay) as sides:
        for name, way in WAYS.items():
            cases = {str(ms): (sides[name], ms) for ms in (0, *_ONE_WAY_MS)}
            taken = await work.in_turn(cases, token_ms)
            for ms in _ONE_WAY_MS:
                legs_ms = way.legs(n_shards) * ms
                raw = {_TAKEN: taken[str(ms)], _LEGS: [own_ms + legs_ms for own_ms in taken["0"]]}
                what = f"ms a token over {way.legs(n_shards)} legs of {ms} ms, {name}"
                results.append(ratio(f"{what}, {weights}", raw, _TAKEN, _LEGS, "lower", TARGET))
    return results
