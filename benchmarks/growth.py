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

from meshnet.generation import Sampling
from meshnet.head.hop_client import HopAnswer, HopClient, HopTimeouts, open_hop
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, Trace
from meshnet.head.route_book import RouteBook
from meshnet.ids import SessionId
from meshnet.topology import HopSpec, Route, even_spans
from meshnet.wire.frames import ITEMSIZE, Frame
from meshnet.wire.headers import StepHeaders
from services.cli.cluster import LocalCluster

PROMPT = list(range(1000, 1010))
N_TOKENS = 1010
STATELESS_LENGTHS = (50, 100, 200, 400, 600, 800, 1000)
WINDOW = 10
"""Steps to each side of a position whose median is its time."""
PLOT = Path(__file__).parents[1] / "docs/growth.svg"


class CountingHop(HopClient):
    """A hop that notes how many bytes of tensor each step took in and gave out."""

    def __init__(self, inner: HopClient) -> None:
        self.endpoint = inner.endpoint
        self.sent: list[int] = []
        self.received: list[int] = []
        self._inner = inner

    async def step(self, step: StepHeaders, body: bytes) -> HopAnswer:
        answer = await self._inner.step(step, body)
        self.sent.append(len(body))
        self.received.append(len(answer.result.data) if isinstance(answer.result, Frame) else 0)
        return answer

    async def close_session(self, session: SessionId) -> None:
        await self._inner.close_session(session)


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
        clients = [
            await stack.enter_async_context(open_hop(shard.url, HopTimeouts(), cluster.cluster_key))
            for shard in cluster.shards
        ]
        by_endpoint = {client.endpoint: client for client in clients}
        book = RouteBook([HopSpec(endpoint) for endpoint in by_endpoint], by_endpoint)
        route = await book.ready_route()
        hops = [CountingHop(client) for client in clients]
        facts = route.hops[0].facts
        growth = Growth(hidden_bytes=facts.hidden_size * ITEMSIZE["float32"])
        await _decode(_pipeline(route, hops), hops, growth)
        await _stateless(_pipeline(route, hops), growth)
        return growth


def _pipeline(route: Route, hops: Sequence[CountingHop]) -> Pipeline:
    return Pipeline(route, {hop.endpoint: hop for hop in hops}, HopTimesBook(), Trace())


async def _decode(pipeline: Pipeline, hops: Sequence[CountingHop], growth: Growth) -> None:
    ids = list(PROMPT)
    answer = await pipeline.step("prefill", ids, 0, Sampling())
    for hop in hops:
        hop.sent.clear()
        hop.received.clear()
    for _ in range(N_TOKENS):
        ids.append(answer.token_id or 0)
        started_at = perf_counter()
        answer = await pipeline.step("decode", ids[-1:], len(ids) - 1, Sampling())
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
            await pipeline.step("stateless", ids, 0, Sampling())
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
