"""From a request to its tokens: prefill, decode, stop; and always clean up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from meshnet.errors import HopProtocolError, QueueFull
from meshnet.generation import GenerationRequest, SamplingContext, TokenEvent, is_allowed
from meshnet.head.pipeline import Pipeline
from meshnet.text.stop_strings import StopStrings
from meshnet.wire.messages import TailAnswer


class Detokenizer(Protocol):
    """Turns ids into text as they come; see meshnet.text."""

    def push(self, token_id: int) -> str:
        """What became printable with this token."""
        ...

    def finish(self) -> str:
        """What was still held back."""
        ...


class NewDetokenizer(Protocol):
    """Makes one for each generation."""

    def __call__(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh stream, with or without control tokens in its text."""
        ...


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the generator needs to know of the tokenizer.

    Attributes:
        end_token_ids: Each of them ends a sequence.
        new_detokenizer: One for each generation.
        encode: Text to ids, without special tokens; for tails that answer text only.
    """

    end_token_ids: frozenset[int]
    new_detokenizer: NewDetokenizer
    encode: Callable[[str], list[int]]


@dataclass
class Generator:
    """Runs generations over pipelines, so many at once; the others wait for their turn.

    Attributes:
        text: The tokenizer's part.
        max_concurrent: Generations at once.
        max_queued: Generations that may wait before new requests are refused.
        active: Generations running or waiting.
        idle: Set while there is none.
    """

    text: TextModel
    max_concurrent: int
    max_queued: int = 0
    active: int = field(default=0, init=False)
    idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _turns: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.idle.set()
        self._turns = asyncio.Semaphore(self.max_concurrent)

    def check_room(self) -> None:
        """Find out whether a request would be taken, whatever number of generations it makes.

        Nothing is reserved: ask just before the first of them begins.

        Raises:
            QueueFull: Too many wait already.
        """
        n_allowed = self.max_concurrent + self.max_queued
        if self.active >= n_allowed:
            raise QueueFull(
                f"{self.active} generations are running or waiting",
                value=self.active,
                allowed=n_allowed,
            )

    async def generate(
        self, request: GenerationRequest, open_pipeline: Callable[[], Pipeline]
    ) -> AsyncGenerator[TokenEvent]:
        """Yield the generated tokens, the last event with a finish reason.

        The session is freed on every hop when the iterator ends, fails, or is closed.

        Args:
            request: What to generate.
            open_pipeline: Begins the session; called once it is the request's turn.

        Raises:
            InvalidRequest: The grammar is too costly to follow.
            RecoveryExhausted: A hop or a state was lost and did not come back in time.
            MeshError: What a hop refused a step with.
        """
        self.active += 1
        self.idle.clear()
        try:
            async with self._turns:
                pipeline = open_pipeline()
                try:
                    answer = _Answer(request, self.text, pipeline)
                    async with aclosing(answer.events()) as events:
                        async for event in events:
                            yield event
                finally:
                    await pipeline.background.finish(pipeline.close())
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()


class _Answer:
    """One answer as it grows: its tokens, its text, and what the tail must know for the next."""

    def __init__(self, request: GenerationRequest, text: TextModel, pipeline: Pipeline) -> None:
        stopping, sampling = request.stopping, request.sampling
        self._request = request
        self._pipeline = pipeline
        self._encode = text.encode
        self._detokenizer = text.new_detokenizer(skip_special_tokens=request.skip_special_tokens)
        self._stops = StopStrings(stopping.strings, keep=stopping.keep_string)
        self._constraint = request.grammar.new_constraint() if request.grammar else None
        ends = stopping.token_ids | text.end_token_ids
        self._banned_early = tuple(sorted(ends))
        # What follows a grammar's end is no part of it: there the end is the end.
        goes_on = stopping.ignore_end and self._constraint is None
        self._ends = stopping.token_ids if goes_on else ends
        repeats = sampling.repetition_penalty != 1
        self._seen_ids = tuple(sorted(set(request.prompt_ids))) if repeats else ()
        self._ids = list(request.prompt_ids)
        self._n_taken = 0
        self._stateless = pipeline.stateless
        self._is_held = False
        """Whether the hops hold all tokens but the last."""

    async def events(self) -> AsyncGenerator[TokenEvent]:
        """One for each token; the last one has a finish reason."""
        answer = await self._next(score=self._request.score_prompt)
        event = self._take(answer) if self._request.max_tokens else _nothing(answer)
        yield event
        while event.finish_reason is None:
            event = self._take(await self._next())
            yield event

    async def _next(self, *, score: bool = False) -> TailAnswer:
        """The tail's answer after the tokens so far."""
        context = await self._context()
        answer = await self._step(context, score=score)
        self._check(answer, context, self._request.prompt_ids[1:] if score else ())
        return answer

    async def _step(self, context: SamplingContext, *, score: bool) -> TailAnswer:
        sampling = self._request.sampling
        if self._stateless:
            return await self._pipeline.stateless_step(self._ids, sampling, context, score=score)
        if self._is_held:
            return await self._pipeline.decode(self._ids[-1], sampling, context)
        answer = await self._pipeline.prefill(self._ids, sampling, context, score=score)
        self._is_held = True
        return answer

    async def _context(self) -> SamplingContext:
        """All that the next token depends on, besides the parameters and the model."""
        request, constraint = self._request, self._constraint
        is_early = self._n_taken < request.stopping.min_tokens and constraint is None
        generated_ids = self._ids[len(request.prompt_ids) :]
        return SamplingContext(
            prompt_ids=self._seen_ids,
            generated_ids=tuple(generated_ids) if request.sampling.penalised else (),
            logit_bias=dict(request.logit_bias),
            banned_ids=self._banned_early if is_early else (),
            # In a thread: a grammar can take its time, and the loop must not wait for it.
            allowed=await asyncio.to_thread(constraint.allowed) if constraint else None,
        )

    def _check(
        self, answer: TailAnswer, context: SamplingContext, scored_ids: tuple[int, ...]
    ) -> None:
        """Whether the tail did all that it was asked: one of a mixed fleet may know less."""
        token_id, score, mask = answer.token_id, answer.score, context.allowed
        if scored_ids != tuple(known.token_id for known in answer.prompt_scores):
            raise HopProtocolError("the tail scored other tokens of the prompt than it was told to")
        if self._request.sampling.top_logprobs is not None and (
            score is None or score.token_id != token_id
        ):
            raise HopProtocolError("the tail does not tell how likely its token was")
        if mask is not None and (token_id is None or not is_allowed(mask, token_id)):
            raise HopProtocolError("the tail does not follow the grammar")

    def _take(self, answer: TailAnswer) -> TokenEvent:
        """Extend the answer by the tail's."""
        if answer.token_id is None:
            text, is_end = self._take_text(answer.text)
        else:
            text, is_end = self._take_token(answer.token_id)
        self._n_taken += 1
        # A sequence that is sent whole may have outgrown what a step can carry.
        is_full = self._stateless and len(self._ids) > self._pipeline.max_step_tokens
        is_last = is_full or self._n_taken == self._request.max_tokens
        if is_end or is_last:
            text += self._detokenizer.finish()
        if self._n_taken > self._request.stopping.min_tokens:
            text = self._stops.push(text)
        is_end = is_end or self._stops.found
        if is_end or is_last:
            text += self._stops.finish()
        return TokenEvent(
            text,
            answer.token_id,
            finish_reason="stop" if is_end else "length" if is_last else None,
            score=answer.score,
            prompt_scores=answer.prompt_scores,
        )

    def _take_token(self, token_id: int) -> tuple[str, bool]:
        """What became printable with the token, and whether it is an end."""
        self._ids.append(token_id)
        if token_id in self._ends:
            return "", True
        if self._constraint is not None:
            self._constraint.accept(token_id)
        return self._detokenizer.push(token_id), False

    def _take_text(self, text: str | None) -> tuple[str, bool]:
        """From a tail of a mixed fleet that knows text only: no cache can be kept in step with it.

        The same as of a token: the text, and whether it is an end.
        """
        if text is None:
            raise HopProtocolError("the tail answered neither a token nor text")
        self._stateless = True
        self._ids.extend(self._encode(text))
        return text, not text


def _nothing(answer: TailAnswer) -> TokenEvent:
    """The one event where no token was asked for; the tail picked one in vain."""
    return TokenEvent("", finish_reason="length", prompt_scores=answer.prompt_scores, n_tokens=0)
