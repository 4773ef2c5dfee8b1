"""Two shards and a head on this machine answer a question: `python -m benchmarks.demo FOLDER`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from tempfile import mkdtemp

from meshnet.topology import even_spans
from services.cli.chat import chat
from services.cli.cluster import LocalCluster
from services.cli.progress import LoadingLines
from services.cli.serving import share_of_cores

QUESTION = "Why is the sky blue? Answer in three sentences."
SPANS = even_spans(30, 2)


async def demo(model: Path) -> None:
    lines = LoadingLines(["shard-1", "shard-2", "head"], live=True)
    cluster = LocalCluster(
        str(model),
        SPANS,
        threads=share_of_cores(len(SPANS)),
        log_dir=Path(mkdtemp(prefix="meshnet-")),
        watcher=lines,
    )
    with lines:
        async with cluster:
            lines.stop()
            print(f"\n> {QUESTION}\n")
            await asyncio.to_thread(
                chat, QUESTION, url=cluster.base_url, max_tokens=96, temperature=0.0, stats=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    asyncio.run(demo(parser.parse_args().model.resolve()))


if __name__ == "__main__":
    main()
