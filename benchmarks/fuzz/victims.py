"""Sessions that must not notice the fuzzing, and how one sees that they did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.fuzz.raw_http import Answer, Request, exchange
from benchmarks.fuzz.steps import StepMaker, with_context
from meshnet.wire import headers

N_MADE: Final = 2
N_CONTINUED: Final = 3


class Broken(Exception):
    """The shard broke a promise; the text says which."""


@dataclass
class Victim:
    """A session of known content.

    Attributes:
        session: Its id.
        maker: Makes its steps.
        steps: Two that make it, and those that would follow.
        past_len: Tokens it holds.
        answers: The steps' answers in an undisturbed run.
        epoch: Rises whenever the session is made anew.
    """

    session: str
    maker: StepMaker
    steps: Sequence[Request]
    past_len: int
    answers: Sequence[bytes] = ()
    epoch: int = 1000

    @property
    def last_answer(self) -> bytes:
        """The answer to the step committed last, which a repeat must give again."""
        return self.answers[N_MADE - 1]

    def last_step(self) -> Request:
        """The step committed last."""
        return self.steps[N_MADE - 1].having(headers.EPOCH, str(self.epoch))

    def next_step(self) -> Request:
        """The step that it would take next."""
        return self.steps[N_MADE].having(headers.EPOCH, str(self.epoch))

    async def make(self, port: int) -> None:
        """Bring the session to where it is to be."""
        await self._run(port, self.steps[:N_MADE])

    async def check(self, port: int) -> None:
        """Continue it, which must go as without any fuzzing; then make it anew.

        Raises:
            Broken: It did not.
        """
        answers = await self._run(port, self.steps[N_MADE:])
        if answers != self.answers[N_MADE:]:
            raise Broken(f"{self.session} went on otherwise than undisturbed")
        await self.remake(port)

    async def rehearse(self, port: int) -> None:
        """Run all its steps undisturbed, to know the answers; then make it anew."""
        self.answers = await self._run(port, self.steps)
        await self.remake(port)

    async def remake(self, port: int) -> None:
        """End the session and make it anew."""
        await close(port, self.maker, self.session)
        self.epoch += 10
        await self.make(port)

    async def _run(self, port: int, steps: Sequence[Request]) -> list[bytes]:
        answers: list[bytes] = []
        for step in steps:
            answer = await exchange(port, step.having(headers.EPOCH, str(self.epoch)).encode())
            if not isinstance(answer, Answer) or answer.status != 200:
                raise Broken(f"a well-formed step of {self.session} was answered {answer}")
            answers.append(answer.body)
        return answers


async def new_victim(port: int, maker: StepMaker, session: str, rng: Random) -> Victim:
    """Make a session whose every answer is known from a first, undisturbed run."""
    lengths = [rng.randint(2, 24), *(1 for _ in range(N_MADE - 1 + N_CONTINUED))]
    pasts = [sum(lengths[:i]) for i in range(len(lengths))]
    steps = [
        with_context(
            maker.step(session, past, n, maker.tensor(rng, n), step_id=f"{session}-at-{past}"),
            maker.context(rng),
        )
        for past, n in zip(pasts, lengths, strict=True)
    ]
    victim = Victim(session, maker, steps, pasts[N_MADE])
    await victim.rehearse(port)
    return victim


async def close(port: int, maker: StepMaker, session: str) -> None:
    """Free a session.

    Raises:
        Broken: It was not freed.
    """
    answer = await exchange(port, maker.closing(session).encode())
    if not isinstance(answer, Answer) or answer.status != 204:
        raise Broken(f"{session} could not be closed: {answer}")
