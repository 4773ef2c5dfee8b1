"""Two real shards under malformed requests: nothing breaks, grows, or changes.

`python -m benchmarks.fuzz MODEL_FOLDER [--seconds 300] [--seed N]`: a first hop and a tail, each a
process of its own, hold a few sessions of known content. Then come requests that must be refused.
Exits with 1, and prints the seed and what was sent, where

- an answer is a 5xx (but `stage_failed` for hidden states that are not finite), or a refusal is no
  problem document of a known code, or there is none at all;
- the cache holds anything else than before, or a session goes on otherwise than undisturbed;
- memory grew by more than 64 MiB and one longest body, or the log holds a traceback.

A case is made of the seed, the shard's name and the case's number alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory

from benchmarks.fuzz.siege import Siege, besieged
from benchmarks.fuzz.victims import Broken
from benchmarks.results import RESULTS, write_result
from meshnet.text.model_files import read_facts
from meshnet.topology import LayerSpan


async def fuzz(model: Path, seconds: float, seed: int) -> list[Siege]:
    n_layers = read_facts(model).n_layers or 0
    spans = {"first": LayerSpan(0, 3), "tail": LayerSpan(n_layers - 3, n_layers)}
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        sieges = [
            await stack.enter_async_context(
                besieged(name, str(model), span, seed=seed, log_dir=logs)
            )
            for name, span in spans.items()
        ]
        await asyncio.gather(*(_run(siege, seconds) for siege in sieges))
        return sieges


async def _run(siege: Siege, seconds: float) -> None:
    try:
        await siege.run(seconds)
    except Broken as error:
        siege.tally.fault(*error.args)


def summary(sieges: list[Siege], seconds: float, seed: int) -> dict[str, object]:
    return {
        "seconds": seconds,
        "seed": seed,
        "shards": {
            siege.shard.name: {
                "layers": str(siege.bench.maker.info.facts().span),
                "requests": siege.tally.requests,
                "by_status": dict(sorted(siege.tally.statuses.items())),
                "by_code": dict(sorted(siege.tally.codes.items())),
                "by_kind": dict(sorted(siege.tally.kinds.items())),
                "victims_checked": siege.tally.victims_checked,
                "rss_mib": {k: round(n / 2**20, 1) for k, n in siege.tally.rss_bytes.items()},
                "violations": siege.tally.n_faults,
            }
            for siege in sieges
        },
    }


def print_tables(sieges: list[Siege]) -> None:
    print("| shard | requests | victims checked | RSS warm | RSS peak | RSS end | violations |")
    print("|---|---|---|---|---|---|---|")
    for siege in sieges:
        tally = siege.tally
        rss = [f"{tally.rss_bytes.get(kind, 0) / 2**20:.1f}" for kind in ("warm", "peak", "end")]
        cells = [siege.shard.name, tally.requests, tally.victims_checked, *rss, tally.n_faults]
        print(f"| {' | '.join(map(str, cells))} |")
    for title in ("statuses", "codes", "kinds"):
        counts = [Counter[str](getattr(siege.tally, title)) for siege in sieges]
        print(f"\n| {title} | {' | '.join(siege.shard.name for siege in sieges)} |")
        print(f"|---|{'---|' * len(sieges)}")
        for key in sorted(set[str]().union(*counts)):
            print(f"| {key} | {' | '.join(str(count[key]) for count in counts)} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**31))
    parser.add_argument("--results", type=Path, default=RESULTS / "fuzz.json")
    args = parser.parse_args()
    sieges = asyncio.run(fuzz(args.model.resolve(), args.seconds, args.seed))
    print_tables(sieges)
    write_result(args.results, summary(sieges, args.seconds, args.seed))
    return _tell_faults(sieges, args.seed)


def _tell_faults(sieges: list[Siege], seed: int) -> int:
    """Print what was wrong, and how to see it again; the exit code."""
    for siege in sieges:
        for what, examples in siege.tally.faults.items():
            print(f"\n{siege.shard.name}: {what} ({len(examples)} times)\n  {examples[0]}")
    n_faults = sum(siege.tally.n_faults for siege in sieges)
    if n_faults:
        print(f"\n{n_faults} violations; to run the same again: --seed {seed}")
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
