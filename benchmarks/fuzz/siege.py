"""One shard under fire: batches of cases, and after each a look at whether anything changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic
from typing import Final

from benchmarks.fuzz.case import Bench, Case
from benchmarks.fuzz.kinds import random_case
from benchmarks.fuzz.raw_http import Answer, NoAnswer, Request, exchange
from benchmarks.fuzz.steps import StepMaker
from benchmarks.fuzz.verdict import fault, outcome
from benchmarks.fuzz.victims import Broken, Victim, close, new_victim
from benchmarks.resident import forget_peak, resident_bytes
from meshnet.topology import LayerSpan
from meshnet.wire.messages import CacheUse, ShardInfo
from services.cli.cluster import PROGRAM, ClusterWatcher, Member
from services.cli.serving import free_port

N_VICTIMS: Final = 4
BATCH: Final = 24
AT_ONCE: Final = 6
WARM_UP_BATCHES: Final = 8
EXTRA_BYTES: Final = 64 * 1024**2
CHECK_EVERY_S: Final = 5.0
SETTLE_S: Final = 10.0
KEY: Final = "fuzz-cluster-key"
_LONG: Final = "86400"
"""Seconds to live: no victim may go by itself."""


@dataclass
class Tally:
    """What came of it.

    Attributes:
        requests: Cases sent.
        statuses: Answers by status, as text; "none" where there was none.
        codes: Answers by problem code.
        kinds: Cases by kind.
        victims_checked: How often a victim went on as if nothing had been.
        faults: What was wrong, with an example of each.
        rss_bytes: Resident memory after the warm-up, at the peak since, and in the end.
    """

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter[str])
    codes: Counter[str] = field(default_factory=Counter[str])
    kinds: Counter[str] = field(default_factory=Counter[str])
    victims_checked: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    rss_bytes: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def n_faults(self) -> int:
        """How often something was wrong."""
        return sum(map(len, self.faults.values()))

    def note(self, case: Case, answer: Answer | NoAnswer) -> None:
        """Count one answer, and keep what is wrong with it."""
        self.requests += 1
        self.kinds[case.kind] += 1
        self.statuses[str(answer.status) if isinstance(answer, Answer) else "none"] += 1
        self.codes[outcome(answer)] += 1
        if wrong := fault(case, answer):
            got = answer.body[:300] if isinstance(answer, Answer) else b""
            self.fault(f"{case.kind}: {wrong}", f"sent {case.data[:500]!r}\n  got {got!r}")

    def fault(self, what: str, example: str = "") -> None:
        """Keep something wrong."""
        self.faults.setdefault(what, []).append(example)


@dataclass
class Siege:
    """A shard process and what is done to it.

    Attributes:
        shard: The process.
        port: Where it listens.
        bench: What cases are made from.
        seed: Of the cases, together with the shard's name and a case's number.
        cache: What the cache must hold after every batch.
    """

    shard: Member
    port: int
    bench: Bench
    seed: int
    cache: CacheUse
    tally: Tally = field(default_factory=Tally)

    async def run(self, seconds: float) -> None:
        """Send cases for so long; faults go to the tally.

        Raises:
            Broken: State changed; the cases of the batch before are in the text.
        """
        numbers = count()
        for _ in range(WARM_UP_BATCHES):
            await self._batch(numbers)
        forget_peak(self.shard.pid)
        self.tally.rss_bytes["warm"] = resident_bytes(self.shard.pid, "VmRSS")
        ends_at = monotonic() + seconds
        next_check, turn = monotonic() + CHECK_EVERY_S, 0
        while monotonic() < ends_at:
            await self._batch(numbers)
            if monotonic() > next_check:
                await self._check_victim(self.bench.victims[turn % N_VICTIMS])
                next_check, turn = monotonic() + CHECK_EVERY_S, turn + 1
        for victim in self.bench.victims:
            await self._check_victim(victim)
        await self._check_end()

    async def _batch(self, numbers: count[int]) -> None:
        cases: list[Case] = []
        for number in (next(numbers) for _ in range(BATCH)):
            rng = Random(f"{self.seed} {self.shard.name} {number}")  # noqa: S311  # reproducible
            cases.append(random_case(self.bench, rng))
        for start in range(0, BATCH, AT_ONCE):
            await asyncio.gather(*(self._try(case) for case in cases[start : start + AT_ONCE]))
        try:
            await self._check_cache()
        except Broken as error:
            sent = "\n  ".join(f"{case.kind}: {case.data[:500]!r}" for case in cases)
            raise Broken(str(error), f"after one of\n  {sent}") from error

    async def _try(self, case: Case) -> None:
        answer = await exchange(
            self.port, case.data, method=case.method, patience_s=case.patience_s
        )
        self.tally.note(case, answer)
        for session in case.made:
            await close(self.port, self.bench.maker, session)

    async def _check_cache(self) -> None:
        """The cache holds what it held; a caller that left is given a moment to be noticed."""
        ends_at = monotonic() + SETTLE_S
        while (cache := (await _describe(self.port, self.bench.maker)).cache) != self.cache:
            if monotonic() > ends_at:
                raise Broken(f"the cache holds {cache}, not {self.cache}")
            await asyncio.sleep(0.02)

    async def _check_victim(self, victim: Victim) -> None:
        await victim.check(self.port)
        self.tally.victims_checked += 1

    async def _check_end(self) -> None:
        alive = await exchange(self.port, Request("GET", "/livez").adding("Host", "x").encode())
        if not isinstance(alive, Answer) or alive.status != 200:
            raise Broken(f"/livez is answered {alive}")
        rss = self.tally.rss_bytes
        rss["end"] = resident_bytes(self.shard.pid, "VmRSS")
        rss["peak"] = resident_bytes(self.shard.pid, "VmHWM")
        allowed = rss["warm"] + EXTRA_BYTES + self._largest_body()
        if rss["peak"] > allowed:
            self.tally.fault(f"it took {rss['peak']} bytes, {allowed} are allowed")
        if self.shard.log_path and "Traceback" in self.shard.log_path.read_text(errors="replace"):
            self.tally.fault("its log holds a traceback")

    def _largest_body(self) -> int:
        info = self.bench.maker.info
        width = 1 if self.bench.maker.takes_ids else info.hidden_size
        return 4 * info.limits.max_step_tokens * width


@asynccontextmanager
async def besieged(
    name: str, model: str, span: LayerSpan, *, seed: int, log_dir: Path
) -> AsyncGenerator[Siege]:
    """A shard of its own, with sessions in it, until the block ends."""
    port = free_port()
    command = (*PROGRAM, "shard", "--model", model, "--layers", str(span), "--threads", "1")
    env = {"MESHNET_SHARD_CLUSTER_KEY": KEY, "MESHNET_SHARD_CACHE_TTL_SECONDS": _LONG}
    shard = Member(name, command, port, env, log_dir / f"{name}.log")
    await shard.start()
    try:
        await shard.wait_ready(ClusterWatcher(), 300.0)
        yield await _prepare(shard, port, seed)
    finally:
        await shard.stop()


async def _prepare(shard: Member, port: int, seed: int) -> Siege:
    request = Request("GET", "/v1/shard").adding("Host", "shard")
    answer = await exchange(port, request.adding("Authorization", f"Bearer {KEY}").encode())
    if not isinstance(answer, Answer):
        raise Broken(f"{shard.name} does not say what it is")
    maker = StepMaker(ShardInfo.model_validate_json(answer.body), KEY)
    victims: list[Victim] = []
    for i in range(N_VICTIMS):
        rng = Random(f"{seed} {shard.name} victim {i}")  # noqa: S311  # reproducible
        victims.append(await new_victim(port, maker, f"victim-{i}", rng))
    cache = (await _describe(port, maker)).cache
    return Siege(shard, port, Bench(maker, tuple(victims)), seed, cache)


async def _describe(port: int, maker: StepMaker) -> ShardInfo:
    answer = await exchange(port, maker.request("GET", "/v1/shard").encode())
    if not isinstance(answer, Answer) or answer.status != 200:
        raise Broken(f"the shard does not say what it is: {answer}")
    return ShardInfo.model_validate_json(answer.body)
