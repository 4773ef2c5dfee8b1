"""A cluster under traffic whose shards die: every answer is right, nothing hangs, nothing grows.

`python -m benchmarks.soak MODEL_FOLDER [--minutes 30] [--seed N] [--standby]`: three shards (with a
second one for the middle layers, if asked for) and a head, one thread each. Answers to a catalogue
of requests are taken undisturbed; then four clients ask for them at random while shards are killed,
stopped for seconds, and told to end. Exits with 1, and prints what and the seed, where

- an answer is not the undisturbed one, to the letter, or comes to nothing that is documented;
- a request takes longer than 180 s;
- the memory of the head, or of a shard that lived for more than 5 minutes, is higher in the last
  quarter of its life than in the second, by more than 5 % and 15 MiB;
- a shard holds a session when all is over.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from tempfile import mkdtemp
from time import monotonic

import httpx

from benchmarks.results import RESULTS, write_result
from benchmarks.soak.asking import Outcome, Reply, ask
from benchmarks.soak.catalogue import Question, catalogue
from benchmarks.soak.killer import Killer
from benchmarks.soak.rss import SAMPLE_S, RssBook
from benchmarks.soak.traffic import HANG_S, Record, Traffic
from meshnet.topology import LayerSpan, even_spans
from services.cli.cluster import LocalCluster, Member

N_CLIENTS = 4
SETTLE_S = 120.0
"""For shards that were just killed to come back, and for the last sessions to be closed."""


@dataclass
class Soak:
    """A run and what came of it."""

    cluster: LocalCluster
    killer: Killer
    record: Record
    rss: RssBook
    left_over: list[str]
    seconds: float = 0.0

    async def run(self, http: httpx.AsyncClient, seconds: float, seed: int) -> None:
        model = str((await http.get("/v1/models")).json()["data"][0]["id"])
        references = [(q, await _reference(http, model, q)) for q in catalogue()]
        print(f"{len(references)} undisturbed answers are known", flush=True)
        traffic = Traffic(http, model, references, self.record)
        started_at = monotonic()
        watcher = asyncio.create_task(self._watch(started_at))
        try:
            await asyncio.gather(
                traffic.run(N_CLIENTS, seconds, seed), self.killer.run(seconds - SAMPLE_S)
            )
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        self.seconds = monotonic() - started_at
        self.left_over = await _left_over(self.cluster)

    async def _watch(self, started_at: float) -> None:
        """Look at the memory, and print a line a minute."""
        minute = 1
        while True:
            self.rss.sample(self.cluster.members)
            if monotonic() - started_at >= 60 * minute:
                print(self._line(minute), flush=True)
                minute += 1
            await asyncio.sleep(SAMPLE_S)

    def _line(self, minute: int) -> str:
        outcomes = ", ".join(f"{n} {name}" for name, n in self.record.outcomes.items())
        signals = ", ".join(f"{n} {name}" for name, n in self.killer.done.items())
        return f"{minute} min: {outcomes} | {signals} | {self.rss.latest(self.cluster.members)}"

    def violations(self) -> list[str]:
        growing = [f"it grew: {life.summary()}" for life in self.rss.long_lives if not life.is_flat]
        return [*self.record.violations, *growing, *self.left_over]

    def summary(self) -> dict[str, object]:
        outcomes, signals = self.record.outcomes, self.killer.done
        return {
            "minutes": round(self.seconds / 60, 1),
            "shards": len(self.cluster.shards),
            "requests": sum(outcomes.values()),
            "by_outcome": {str(outcome): outcomes[outcome] for outcome in Outcome},
            "kills": signals["kill"],
            "stops": signals["stop"],
            "terms": signals["term"],
            "wrong_texts": outcomes[Outcome.WRONG],
            "hangs": outcomes[Outcome.HANG],
            "left_over": self.left_over,
            "processes": self.rss.n_lives,
            "rss": [life.summary() for life in self.rss.long_lives],
            "longest_pause_s": round(self.record.longest_pause_s, 1),
            "tokens_per_s": round(self.record.n_tokens / self.seconds, 1),
            "tracebacks": {m.name: _tracebacks(m) for m in self.cluster.members},
        }


async def _reference(http: httpx.AsyncClient, model: str, question: Question) -> Reply:
    reply = await ask(http, question.body(model, stream=False))
    if reply.status != 200:
        raise RuntimeError(f"undisturbed, {question.name} was answered {reply}")
    return reply


async def _left_over(cluster: LocalCluster) -> list[str]:
    """What shards still hold; it waits until that is nothing, or for too long."""
    ends_at = monotonic() + SETTLE_S
    while True:
        held = await _held(cluster)
        if not held or monotonic() > ends_at:
            return held
        await asyncio.sleep(0.5)


async def _held(cluster: LocalCluster) -> list[str]:
    auth = {"authorization": f"Bearer {cluster.cluster_key}"}
    async with httpx.AsyncClient(trust_env=False, headers=auth, timeout=5.0) as http:
        told = await asyncio.gather(*(_cache(http, shard) for shard in cluster.shards))
    names = [shard.name for shard in cluster.shards]
    return [f"{name} holds {cache}" for name, cache in zip(names, told, strict=True) if cache]


async def _cache(http: httpx.AsyncClient, shard: Member) -> str:
    """What the shard's cache holds; empty for nothing."""
    try:
        answer = await http.get(f"{shard.url}/v1/shard")
    except httpx.TransportError as error:
        return repr(error)
    cache = answer.json().get("cache", answer.json())
    return "" if cache == {"sessions": 0, "leases": 0, "cached_bytes": 0} else str(cache)


def _tracebacks(member: Member) -> int:
    return member.log_path.read_text(errors="replace").count("Traceback") if member.log_path else 0


def spans(*, standby: bool) -> Sequence[LayerSpan]:
    """SmolLM2 in three; the standby has the middle layers."""
    three = even_spans(30, 3)
    return [*three, three[1]] if standby else three


async def soak(model: Path, seconds: float, seed: int, *, standby: bool) -> Soak:
    logs = Path(mkdtemp(prefix="meshnet-soak-"))
    print(f"Logs: {logs}", flush=True)
    cluster = LocalCluster(str(model), spans(standby=standby), threads=1, log_dir=logs)
    rng = Random(f"{seed} killer")  # noqa: S311  # reproducible
    run = Soak(cluster, Killer(cluster.shards, rng), Record(), RssBook(), [])
    async with (
        cluster,
        httpx.AsyncClient(base_url=cluster.head_url, trust_env=False, timeout=2 * HANG_S) as http,
    ):
        await run.run(http, seconds, seed)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**31))
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS / "soak.json")
    args = parser.parse_args()
    seconds = 60 * args.minutes
    run = asyncio.run(soak(args.model.resolve(), seconds, args.seed, standby=args.standby))
    write_result(args.results, {"seed": args.seed} | run.summary())
    print(args.results.read_text())
    violations = run.violations()
    for violation in violations[:20]:
        print(f"\n{violation}")
    if violations:
        print(f"\n{len(violations)} violations; the seed was {args.seed}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
