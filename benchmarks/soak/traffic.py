"""Several clients at once, each with its own mix of requests; and what all of them came to."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Final

import httpx

from benchmarks.soak.asking import VIOLATIONS, Outcome, Reply, ask, judge
from benchmarks.soak.catalogue import INVALID, Question

HANG_S: Final = 180.0
_INVALID: Final = 0.05
_STREAMED: Final = 0.65
_LEAVING: Final = 0.2


@dataclass
class Record:
    """What all requests came to.

    Attributes:
        outcomes: Requests by outcome.
        violations: What must not be, each with the request.
        n_tokens: Of the answers that were exact.
        longest_pause_s: Between two events of one stream, or before the first.
    """

    outcomes: Counter[str] = field(default_factory=Counter[str])
    violations: list[str] = field(default_factory=list[str])
    n_tokens: int = 0
    longest_pause_s: float = 0.0

    def note(self, outcome: Outcome, what: str, reply: Reply | None = None) -> None:
        """Count a request."""
        self.outcomes[outcome] += 1
        if outcome in VIOLATIONS:
            self.violations.append(f"{outcome}: {what}: {reply}")
        if reply is not None:
            self.longest_pause_s = max(self.longest_pause_s, reply.longest_pause_s)
            self.n_tokens += reply.n_tokens if outcome is Outcome.EXACT else 0


@dataclass(frozen=True)
class Traffic:
    """Asks the head.

    Attributes:
        http: A client of it, more patient than `HANG_S`.
        model: The model's name.
        references: The questions and their undisturbed answers.
        record: Where everything is noted.
    """

    http: httpx.AsyncClient
    model: str
    references: list[tuple[Question, Reply]]
    record: Record

    async def run(self, n_clients: int, seconds: float, seed: int) -> None:
        """Let so many clients ask for so long; each finishes its last request."""
        ends_at = monotonic() + seconds
        clients = (self._client(ends_at, Random(f"{seed} client {i}")) for i in range(n_clients))  # noqa: S311  # reproducible
        await asyncio.gather(*clients)

    async def _client(self, ends_at: float, rng: Random) -> None:
        while monotonic() < ends_at:
            question, reference = rng.choice(self.references)
            if rng.random() < _INVALID:
                await self._ask_invalid(question, rng)
                continue
            stream = rng.random() < _STREAMED
            leaves = stream and rng.random() < _LEAVING
            leave_after = rng.randint(1, question.max_tokens) if leaves else None
            await self._ask(question, reference, stream=stream, leave_after=leave_after)

    async def _ask(
        self, question: Question, reference: Reply, *, stream: bool, leave_after: int | None
    ) -> None:
        """Ask, and again for as long as it is to be asked later."""
        body = question.body(self.model, stream=stream)
        while True:
            reply = await self._reply(body, question.name, leave_after)
            if reply is None:
                return
            outcome = judge(reply, reference)
            self.record.note(outcome, question.name, reply)
            if outcome is not Outcome.LATER:
                return
            await asyncio.sleep(reply.retry_after_s or 1.0)

    async def _ask_invalid(self, question: Question, rng: Random) -> None:
        change = rng.choice(INVALID)
        body = question.body(self.model, stream=False) | change
        reply = await self._reply(body, f"invalid {change}", None)
        if reply is None:
            return
        # While there is no route a request is not even looked at.
        outcome = judge(reply, reply)
        if reply.status == 400 and reply.error:
            outcome = Outcome.INVALID
        elif outcome is not Outcome.LATER:
            outcome = Outcome.ODD
        self.record.note(outcome, f"invalid {change}", reply)

    async def _reply(
        self, body: dict[str, object], what: str, leave_after: int | None
    ) -> Reply | None:
        """The reply; None where there was none, which is noted."""
        try:
            async with asyncio.timeout(HANG_S):
                return await ask(self.http, body, leave_after=leave_after)
        except TimeoutError:
            self.record.note(Outcome.HANG, f"{what}, {body['stream']=}")
        except (httpx.TransportError, ValueError) as error:
            self.record.note(Outcome.ODD, f"{what}, {body['stream']=}: {error!r}")
        return None
