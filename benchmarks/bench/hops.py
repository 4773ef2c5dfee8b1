"""What a hop costs beyond what it computes, by either way that steps can go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.bench.decode import ONE, TWO, decode_rate
from benchmarks.bench.heads import Ways, heads
from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import Endpoint, in_each_format, nodes
from benchmarks.bench.small_model import N_LAYERS, save_small_model
from benchmarks.bench.workload import Workload

TARGETS_MS: Final = {"stream": 0.3, "POST": 1.5}
TWO_OVER_ONE: Final = {"stream": 0.96, "POST": 0.93}
STREAM: Final = {"MESHNET_HEAD_HOP_TRANSPORT": "stream"}
POST: Final = {"MESHNET_HEAD_HOP_TRANSPORT": "post"}
_WAYS: Final[Ways] = {"stream": STREAM, "POST": POST}
_COUNTS: Final = (1, 4)
_OVERHEAD_FORMATS: Final = ("int4",)
_RATIO_FORMATS: Final = ("fp32",)


async def measure(work: Workload) -> list[Result]:
    """The hops' overhead with one answer at a time, and two nodes against one, by either way."""

    async def measure_overhead(weights: str) -> list[Result]:
        return await _overheads(work, weights, weights)

    async def measure_ratio(weights: str) -> list[Result]:
        return [await _two_over_one(work, weights, way) for way in _WAYS]

    return [
        *await _bare_overheads(work),
        *await in_each_format(_OVERHEAD_FORMATS, measure_overhead),
        *await in_each_format(_RATIO_FORMATS, measure_ratio),
    ]


async def _two_over_one(work: Workload, weights: str, way: str) -> Result:
    env = _WAYS[way]
    async with nodes(work, 2, weights, env) as two, nodes(work, 1, weights, env) as one:
        rates = await work.in_turn({ONE: one, TWO: two}, lambda side: decode_rate(work, side))
    name = f"two nodes over one node by {way}, {weights}"
    return ratio(name, rates, TWO, ONE, "higher", TWO_OVER_ONE[way])


async def _bare_overheads(work: Workload) -> list[Result]:
    """Where nearly nothing is computed: a model's weights drive a hop's own code out of caches."""
    with TemporaryDirectory() as folder:
        save_small_model(Path(folder))
        small = replace(work, model=Path(folder), n_layers=N_LAYERS, ids=(0,))
        return await _overheads(small, "fp32", "a model that computes nothing")


async def _overheads(work: Workload, weights: str, whom: str) -> list[Result]:
    return [result for n in _COUNTS for result in await _overheads_over(work, n, weights, whom)]


async def _overheads_over(work: Workload, n_shards: int, weights: str, whom: str) -> list[Result]:
    async with heads(work, n_shards, weights, _WAYS) as sides:
        taken = await work.in_turn(sides, lambda side: overhead_ms(work, side))
    hops = "one hop" if n_shards == 1 else f"{n_shards} hops"
    return [
        median_of(
            f"a step beyond queue and compute by {way}, {hops}, {whom}",
            *(taken[way], "ms a hop", "lower", TARGETS_MS[way]),
        )
        for way in sides
    ]


async def overhead_ms(work: Workload, side: Endpoint) -> float:
    """The mean over the hops of their median in the last steps, which are those of one answer."""
    await side.ask(work.prompt(), work.n_tokens)
    told: list[dict[str, Any]] = (await side.http.get("/v1/cluster")).json()["hops"]
    return fmean(float(hop["overhead_ms"]) for hop in told)
