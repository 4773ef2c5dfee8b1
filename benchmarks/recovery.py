"""What it costs to lose one of three hops at 1000 tokens.

`python -m benchmarks.recovery MODEL_FOLDER`: three shard processes with one thread each; the middle
one loses the session after 1000 tokens. Measures the pause and the layer-tokens computed again:
fed again alone, in calls of the original lengths (exact) or in bulk (fast), against a prefill of
everything on all hops, in bulk, and against having generated it (what the original lengths would
cost on all hops).
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.library_head import LibraryHead, open_library_head
from benchmarks.results import RESULTS, write_result
from meshnet.generation import Sampling
from meshnet.head.pipeline import Pipeline
from meshnet.head.replay import ReplayMode
from meshnet.topology import Route, even_spans
from services.cli.cluster import LocalCluster

LENGTH = 1000
PROMPT = [1000 + i for i in range(40)]
LOST = 1
"""The hop that loses the session: the middle one of three."""
GREEDY = Sampling()


@dataclass(frozen=True)
class Cost:
    """One way to recover: the pause beyond an ordinary token, and what was computed again."""

    way: str
    generated_s: float
    pause_s: float
    layer_tokens: int


async def measure(model: Path) -> list[Cost]:
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        cluster = await stack.enter_async_context(
            LocalCluster(str(model), even_spans(30, 3), threads=1, log_dir=logs)
        )
        head = await stack.enter_async_context(open_library_head(cluster))
        route = await head.route()
        ways: list[tuple[str, ReplayMode, int]] = [
            ("one hop, exact", "exact", 2**30),
            ("one hop, fast", "fast", 2**30),
            ("all hops, in bulk", "exact", 0),
        ]
        return [await _cost(head, route, *way) for way in ways]


async def _cost(
    head: LibraryHead, route: Route, way: str, mode: ReplayMode, budget_bytes: int
) -> Cost:
    head.replay, head.replay_max_bytes = mode, budget_bytes
    head.replayed_layer_tokens = 0
    pipeline = head.pipeline(route)
    started_at = perf_counter()
    token_id = (await pipeline.prefill(PROMPT, GREEDY)).token_id or 0
    steps_s: list[float] = []
    while len(PROMPT) + len(steps_s) < LENGTH:
        token_id = await _decode(pipeline, token_id, steps_s)
    generated_s = perf_counter() - started_at
    lost = route.hops[LOST]
    await head.book.client(lost.endpoint).close_session(pipeline.session, epoch=0)
    await _decode(pipeline, token_id, steps_s)
    await pipeline.close()
    pause_s = steps_s[-1] - median(steps_s[-20:])
    return Cost(way, round(generated_s, 1), round(pause_s, 2), head.replayed_layer_tokens)


async def _decode(pipeline: Pipeline, token_id: int, steps_s: list[float]) -> int:
    started_at = perf_counter()
    answer = await pipeline.decode(token_id, GREEDY)
    steps_s.append(perf_counter() - started_at)
    return answer.token_id or 0


def print_table(costs: list[Cost]) -> None:
    *_, full = costs
    exact = costs[0]
    rows = [(c.way, c.pause_s, c.layer_tokens) for c in costs]
    rows.append(("all hops, as generated", exact.generated_s, LENGTH * 30))
    print(
        "| fed again | pause, s | layer-tokens | pause over all in bulk | layer-tokens over all |"
    )
    print("|---|---|---|---|---|")
    for way, pause_s, layer_tokens in rows:
        pause, work = pause_s / full.pause_s, layer_tokens / full.layer_tokens
        print(f"| {way} | {pause_s:.2f} | {layer_tokens} | {pause:.2f} | {work:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    costs = asyncio.run(measure(parser.parse_args().model.resolve()))
    print_table(costs)
    write_result(RESULTS / "recovery.json", [asdict(cost) for cost in costs])


if __name__ == "__main__":
    main()
