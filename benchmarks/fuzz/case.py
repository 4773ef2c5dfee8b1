"""What a case is, and what cases are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

from benchmarks.fuzz.raw_http import PATIENCE_S, Request
from benchmarks.fuzz.steps import StepMaker
from benchmarks.fuzz.victims import Victim

REFUSED: Final = frozenset({400})
CLIENT_ERRORS: Final = frozenset({400, 401, 404, 405, 409, 413})


@dataclass(frozen=True)
class Case:
    """What to send, and what may come back.

    A case never is a step that a victim could take, so whatever it is answered, every victim must
    be as it was. Where a random change may leave a step well-formed, it is of another session.

    Attributes:
        kind: What is wrong with it.
        data: The request's bytes.
        allowed: Statuses that the shard may answer.
        method: The request's method, as far as it has one.
        must_answer: Whether closing the connection without an answer is wrong.
        patience_s: How long to wait for the answer.
        answer: The body of a 200, where it is known.
        members: Members that a problem must have.
        made: Sessions that it may have made.
    """

    kind: str
    data: bytes
    allowed: frozenset[int] = REFUSED
    method: str = "POST"
    must_answer: bool = True
    patience_s: float = PATIENCE_S
    answer: bytes | None = None
    members: Mapping[str, object] = field(default_factory=dict[str, object])
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """What cases for one shard are made from.

    Attributes:
        maker: Makes the steps that are spoilt.
        victims: The sessions that must not change.
    """

    maker: StepMaker
    victims: tuple[Victim, ...]

    def next_step(self, rng: Random) -> Request:
        """What a victim would take next."""
        return rng.choice(self.victims).next_step()

    def ghost_step(self, rng: Random) -> Request:
        """A step that continues a session which nobody has: a miss, and nothing is made."""
        past_len, n_tokens = rng.randint(1, 100), rng.randint(1, 4)
        body = self.maker.tensor(rng, n_tokens)
        return self.maker.step(f"ghost-{past_len}", past_len, n_tokens, body, step_id="g")
