"""What a token costs as the text grows: bytes between hops, and time, with caches and without.

`python -m benchmarks.growth MODEL_FOLDER`: two shard processes with one thread each. Prints a
table and draws docs/growth.svg. Exits with 1 if a decoded token carries other than
hidden x itemsize bytes from hop to hop.
"""
# pyright: reportUnknownMemberType=false
# matplotlib types its keyword arguments loosely.

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import matplotlib as mpl

mpl.use("svg")  # no display is needed

from matplotlib import pyplot as plt

from benchmarks.library_head import WatchedHop, open_hops, open_library_head
from meshnet.generation import Sampling
from meshnet.head.hop_client import HopAnswer, HopClient
from meshnet.head.pipeline import Pipeline
from meshnet.topology import even_spans
from meshnet.wire.frames import ITEMSIZE, Frame
from meshnet.wire.headers import StepHeaders
from services.cli.cluster import LocalCluster

PROMPT = list(range(1000, 1010))
N_TOKENS = 1010
STATELESS_LENGTHS = (50, 100, 200, 400, 600, 800, 1000)
WINDOW = 10
"""Steps to each side of a position whose median is its time."""
PLOT = Path(__file__).parents[1] / "docs/growth.svg"


class CountingHop(WatchedHop):
    """A hop that notes how many bytes of tensor each step took in and gave out."""

    def __init__(self, inner: HopClient) -> None:
        super().__init__(inner)
        self.sent: list[int] = []
        self.received: list[int] = []

    async def step(
        self, step: StepHeaders, body: bytes, *, limit_s: float, max_answer_bytes: int
    ) -> HopAnswer:
        answer = await super().step(step, body, limit_s=limit_s, max_answer_bytes=max_answer_bytes)
        self.sent.append(len(body))
        self.received.append(len(answer.result.data) if isinstance(answer.result, Frame) else 0)
        return answer


@dataclass
class Growth:
    """Milliseconds a token by length, and bytes between the hops by token."""

    cached_ms: list[float] = field(default_factory=list[float])
    stateless_ms: dict[int, float] = field(default_factory=dict[int, float])
    bytes_between: list[int] = field(default_factory=list[int])
    hidden_bytes: int = 0

    def cached_at(self, n_tokens: int) -> float:
        return median(self.cached_ms[n_tokens - WINDOW : n_tokens + WINDOW])


async def measure(model: Path) -> Growth:
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        cluster = await stack.enter_async_context(
            LocalCluster(str(model), even_spans(30, 2), threads=1, log_dir=logs)
        )
        hops = [CountingHop(hop) for hop in await stack.enter_async_context(open_hops(cluster))]
        head = await stack.enter_async_context(open_library_head(cluster, hops))
        route = await head.route()
        growth = Growth(hidden_bytes=route.hops[0].facts.hidden_size * ITEMSIZE["float32"])
        await _decode(head.pipeline(route), hops, growth)
        await _stateless(head.pipeline(route), growth)
        return growth


async def _decode(pipeline: Pipeline, hops: Sequence[CountingHop], growth: Growth) -> None:
    answer = await pipeline.prefill(PROMPT, Sampling())
    for hop in hops:
        hop.sent.clear()
        hop.received.clear()
    for _ in range(N_TOKENS):
        started_at = perf_counter()
        answer = await pipeline.decode(answer.token_id or 0, Sampling())
        growth.cached_ms.append((perf_counter() - started_at) * 1000)
    if hops[0].received != hops[1].sent:
        raise RuntimeError("the second hop was not sent what the first one answered")
    growth.bytes_between = hops[1].sent
    await pipeline.close()


async def _stateless(pipeline: Pipeline, growth: Growth) -> None:
    for length in STATELESS_LENGTHS:
        ids = [1000 + i % 1000 for i in range(length)]
        times: list[float] = []
        for _ in range(3):
            started_at = perf_counter()
            await pipeline.stateless_step(ids, Sampling())
            times.append((perf_counter() - started_at) * 1000)
        growth.stateless_ms[length] = median(times)


def print_table(growth: Growth) -> None:
    print("| tokens so far | bytes between hops | ms a token, cached | ms a token, stateless |")
    print("|---|---|---|---|")
    print(f"| 10 | {growth.bytes_between[9]} | {growth.cached_at(10):.1f} | |")
    for length in STATELESS_LENGTHS:
        cached, stateless = growth.cached_at(length), growth.stateless_ms[length]
        between = growth.bytes_between[length - 1]
        print(f"| {length} | {between} | {cached:.1f} | {stateless:.1f} |")
    ratio = growth.cached_at(1000) / growth.cached_at(50)
    stateless_ratio = growth.stateless_ms[1000] / growth.stateless_ms[50]
    print(
        f"\nms a token at 1000 over ms a token at 50: {ratio:.2f} (stateless {stateless_ratio:.1f})"
    )


def draw(growth: Growth) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    lengths = range(WINDOW, N_TOKENS - WINDOW)
    axes.plot(lengths, [growth.cached_at(n) for n in lengths], label="cached (decode step)")
    axes.plot(
        list(growth.stateless_ms),
        list(growth.stateless_ms.values()),
        "o--",
        label="stateless (full prefill)",
    )
    axes.set(xlabel="tokens so far", ylabel="ms a token", yscale="log")
    axes.set_title("SmolLM2-135M over two shards, one thread each, fp32")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    growth = asyncio.run(measure(parser.parse_args().model))
    print_table(growth)
    draw(growth)
    exact = {growth.bytes_between[9], growth.bytes_between[999]} == {growth.hidden_bytes}
    print(f"\nbytes at token 10 and 1000 are hidden x itemsize = {growth.hidden_bytes}: {exact}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
