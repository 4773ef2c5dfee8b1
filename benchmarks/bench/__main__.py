"""How fast the mesh is, beside what else there is on this machine.

`python -m benchmarks.bench MODEL_FOLDER [--only PART] [--rounds 3] [--llama FOLDER]`: nodes,
heads and everything that they are compared with are processes of their own, asked from outside.
Writes benchmarks/results/bench.json after every part; numbers of parts that are not run stay as
they are. docs/benchmarks.md says what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from selectors import SelectSelector
from time import monotonic
from typing import Final

from benchmarks.bench import (
    decode,
    fidelity,
    first_token,
    hops,
    interruption,
    legs,
    llama,
    prefix,
    streams,
)
from benchmarks.bench.results import RESULTS_FILE, Result, load, merged, save
from benchmarks.bench.tables import render
from benchmarks.bench.workload import Workload

PARTS: Final[dict[str, Callable[[Workload], Awaitable[list[Result]]]]] = {
    "decode": decode.measure,
    "hops": hops.measure,
    "legs": legs.measure,
    "streams": streams.measure,
    "first-token": first_token.measure,
    "prefix": prefix.measure,
    "interruption": interruption.measure,
    "llama": llama.measure,
    "fidelity": fidelity.measure,
}


async def run(work: Workload, parts: Sequence[str], path: Path) -> list[Result]:
    """Measure some parts; every one is written as soon as it is done."""
    measured: list[Result] = []
    for part in parts:
        started_at = monotonic()
        results = await PARTS[part](work)
        save(path, merged(load(path), results))
        measured += results
        print(f"{part}: {monotonic() - started_at:.0f} s", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", choices=PARTS, help="one part instead of all")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each number")
    parser.add_argument("--tokens", type=int, default=128, help="length of a measured answer")
    parser.add_argument("--llama", type=Path, help="folder with llama-server and rpc-server")
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average at the start {os.getloadavg()[0]:.2f}", flush=True)
    work = Workload.of(
        args.model.resolve(), rounds=args.rounds, n_tokens=args.tokens, llama=args.llama
    )
    parts = [args.only] if args.only else list(PARTS)
    # epoll wakes whole milliseconds late, select does not: a leg is to take what it is to take.
    with asyncio.Runner(loop_factory=_loop_by_select) as runner:
        print(render(runner.run(run(work, parts, args.results))))


def _loop_by_select() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(SelectSelector())


if __name__ == "__main__":
    main()
