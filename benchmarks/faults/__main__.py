"""Every fault at every moment on every hop: `python -m benchmarks.faults MODEL_FOLDER`.

Runs 528 cells on real processes, prints one line each, and writes benchmarks/results/faults.json
and docs/failure-modes.md. Exits with 1 if a cell is not as expected. With a filter only the cells
that pass it are run, and nothing is written; neither with `--transport stream`, which sends the
steps over kept-open streams, nor with `--return direct` besides, where hidden states go from shard
to shard.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter

from benchmarks.faults.fleet import FaultCluster
from benchmarks.faults.matrix import FAULTS, FLEETS, HOPS, MOMENTS, WAYS, Cell, all_cells
from benchmarks.faults.report import PAGE, RESULTS, write
from benchmarks.faults.runner import run_cell
from benchmarks.faults.verdict import Verdict


async def run(model: Path, cells: Sequence[Cell], transport: str, hop_return: str) -> list[Verdict]:
    log_dir = Path(mkdtemp(prefix="meshnet-faults-"))
    print(f"{len(cells)} cells; logs are in {log_dir}", flush=True)
    verdicts: list[Verdict] = []
    async with FaultCluster(model, log_dir, transport, hop_return) as cluster:
        for at, cell in enumerate(cells, start=1):
            started_at = perf_counter()
            verdict = await run_cell(cluster, cell)
            verdicts.append(verdict)
            mark = "ok  " if verdict.is_as_expected else "FAIL"
            took_s = perf_counter() - started_at
            print(
                f"{at:3}/{len(cells)} {mark} {cell} {verdict.outcome:11}"
                f" {verdict.recovery_ms:8.0f} ms {took_s:5.1f} s  {verdict.detail}".rstrip(),
                flush=True,
            )
        print(f"{cluster.n_pushed} tensors went from shard to shard")
    return verdicts


def print_summary(verdicts: Sequence[Verdict], took_s: float) -> None:
    bad = [verdict for verdict in verdicts if not verdict.is_as_expected]
    print(f"\n{len(verdicts) - len(bad)} of {len(verdicts)} cells as expected, {took_s:.0f} s")
    for verdict in bad:
        print(f"FAIL {verdict.cell} {verdict.outcome}: {verdict.detail}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    for name, choices in {
        "fault": FAULTS,
        "when": MOMENTS,
        "hop": HOPS,
        "way": WAYS,
        "fleet": FLEETS,
    }.items():
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=choices, help="only these"
        )
    parser.add_argument(
        "--transport", choices=("post", "stream"), default="post", help="how steps go to the shards"
    )
    parser.add_argument(
        "--return",
        dest="hop_return",
        choices=("star", "direct"),
        default="star",
        help="which way hidden states go; direct needs --transport stream",
    )
    parser.add_argument("--no-write", action="store_true", help="leave the two files as they are")
    arguments = parser.parse_args()
    if arguments.hop_return == "direct" and arguments.transport != "stream":
        parser.error("--return direct needs --transport stream")
    return arguments


def chosen(arguments: argparse.Namespace) -> list[Cell]:
    names = ("fault", "when", "hop", "way", "fleet")
    return [
        cell
        for cell in all_cells()
        if all(getattr(cell, name) in getattr(arguments, name) for name in names)
    ]


def main() -> int:
    arguments = parse_arguments()
    cells = chosen(arguments)
    started_at = perf_counter()
    verdicts = asyncio.run(
        run(arguments.model.resolve(), cells, arguments.transport, arguments.hop_return)
    )
    print_summary(verdicts, perf_counter() - started_at)
    is_reference = len(cells) == len(all_cells()) and arguments.transport == "post"
    if is_reference and not arguments.no_write:
        write(verdicts)
        print(f"written: {RESULTS}, {PAGE}")
    return 0 if all(verdict.is_as_expected for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
