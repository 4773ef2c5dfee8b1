"""A generator over a pipeline that answers as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from meshnet.generation import (
    NO_CONTEXT,
    GenerationRequest,
    Sampling,
    SamplingContext,
    Stopping,
    TokenEvent,
)
from meshnet.head.background import Background
from meshnet.head.call import Trace
from meshnet.head.generator import Detokenizer, Generator, TextModel
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.prefixes import PrefixIndex
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.replay import ReplayBudget
from meshnet.head.route_book import RouteBook
from meshnet.topology import HopSpec
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeClock
from tests.unit.head.making import A, route_over

END = 99
SAMPLING = Sampling(temperature=0.5, seed=3)
PROMPT = (5, 6, 7)


class Spelling:
    """Writes 7 as "<7>"; 50 is half a character, which is written with what follows.

    END is a control token.
    """

    def __init__(self, *, skip_special_tokens: bool) -> None:
        self._held = ""
        self._skip = skip_special_tokens

    def push(self, token_id: int) -> str:
        text, self._held = self._held, ""
        if token_id == 50:
            self._held = text + "~"
            return ""
        return text if token_id == END and self._skip else f"{text}<{token_id}>"

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text


def spelling(*, skip_special_tokens: bool) -> Detokenizer:
    return Spelling(skip_special_tokens=skip_special_tokens)


def encode(text: str) -> list[int]:
    return [int(part) for part in text.replace("<", "").split(">") if part]


@dataclass(frozen=True)
class Asked:
    """What a pipeline was asked: the ids, and how."""

    what: str
    ids: tuple[int, ...]


Answer = int | str | Exception | TailAnswer | None


class FakePipeline(Pipeline):
    """Answers as told, one answer a step; notes what it is asked.

    Attributes:
        contexts: What each step's answer may depend on.
        samplings: How each was to be picked.
        scored: Whether the tokens of each were to be scored.
        fail_at: Raises these instead, by the number of the step.
        gate: Where a step waits, if it is closed.
    """

    def __init__(
        self, background: Background, answers: Sequence[Answer], **changed: object
    ) -> None:
        recovery = Recovery(
            RecoveryLimits(),
            note=lambda _: None,
            note_replay=lambda _: None,
            clock=FakeClock(),
            jitter=lambda: 0.0,
        )
        book = RouteBook([HopSpec(A)], {}, clock=FakeClock(), jitter=lambda: 0.0)
        budget = ReplayBudget(0)
        prefixes = PrefixIndex(budget, exact=True)
        kit = PipelineKit(HopTimesBook(), recovery, budget, "exact", prefixes, background, 512)
        super().__init__(route_over([A], **changed), book, kit, Trace())
        self._answers = iter(answers)
        self.asked: list[Asked] = []
        self.contexts: list[SamplingContext] = []
        self.samplings: list[Sampling] = []
        self.scored: list[bool] = []
        self.fail_at: dict[int, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = 0

    async def prefill(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        context: SamplingContext = NO_CONTEXT,
        *,
        score: bool = False,
    ) -> TailAnswer:
        self.scored.append(score)
        return await self._ask("prefill", ids, sampling, context)

    async def decode(
        self, token_id: int, sampling: Sampling, context: SamplingContext = NO_CONTEXT
    ) -> TailAnswer:
        self.scored.append(False)
        return await self._ask("decode", [token_id], sampling, context)

    async def stateless_step(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        context: SamplingContext = NO_CONTEXT,
        *,
        score: bool = False,
    ) -> TailAnswer:
        self.scored.append(score)
        return await self._ask("stateless", ids, sampling, context)

    async def _ask(
        self, what: str, ids: Sequence[int], sampling: Sampling, context: SamplingContext
    ) -> TailAnswer:
        assert self.closed == 0
        self.asked.append(Asked(what, tuple(ids)))
        self.samplings.append(sampling)
        self.contexts.append(context)
        await self.gate.wait()
        failure = self.fail_at.get(len(self.asked))
        if failure is not None:
            raise failure
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, TailAnswer):
            return answer
        if isinstance(answer, str):
            return TailAnswer(text=answer)
        return TailAnswer(token_id=answer)

    async def close(self) -> None:
        self.closed += 1


class Head:
    """A generator, and where its pipelines end."""

    def __init__(self, background: Background) -> None:
        self.background = background
        text = TextModel(frozenset({END}), spelling, encode)
        self.generator = Generator(text)

    def pipeline(self, answers: Sequence[Answer], **changed: object) -> FakePipeline:
        return FakePipeline(self.background, answers, **changed)

    def generate(
        self, pipeline: Pipeline, max_tokens: int = 8, **changed: object
    ) -> AsyncGenerator[TokenEvent]:
        """The events of a request for the prompt, other than usual in what is changed."""
        request = replace(GenerationRequest(PROMPT, max_tokens, SAMPLING), **changed)
        return self.generator.generate(request, lambda: pipeline)

    async def all(
        self, pipeline: Pipeline, max_tokens: int = 8, **changed: object
    ) -> list[TokenEvent]:
        """All of them."""
        return [event async for event in self.generate(pipeline, max_tokens, **changed)]

    async def texts(self, answers: Sequence[Answer], stopping: Stopping, **changed: object) -> str:
        """The texts of as many events as there are answers, and why it ended."""
        pipeline = self.pipeline(answers)
        events = await self.all(pipeline, len(answers), stopping=stopping, **changed)
        return "|".join(event.text for event in events) + f" {events[-1].finish_reason}"
