"""One session on one route: activations go from hop to hop, the tail's answer comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain

from meshnet.errors import InputsDropped
from meshnet.generation import NO_CONTEXT, Sampling, SamplingContext
from meshnet.head.background import Background
from meshnet.head.call import Call, Shards, Trace
from meshnet.head.direct_return import DirectReturn
from meshnet.head.hop_session import HopSession
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.overlap import Step, run_alone, run_steps
from meshnet.head.prefixes import PrefixIndex, Source
from meshnet.head.recovery import Recovery, Tries
from meshnet.head.replay import InputLog, ReplayBudget, ReplayMode
from meshnet.ids import SessionId, new_id
from meshnet.topology import Route
from meshnet.wire.frames import Frame
from meshnet.wire.headers import CacheMode
from meshnet.wire.messages import TailAnswer


@dataclass(frozen=True, slots=True)
class PipelineKit:
    """What all pipelines of a head share.

    Attributes:
        times: Where the hops' times are noted.
        recovery: How failures are met.
        budget: Room for the inputs that are kept.
        replay: How they are fed again.
        prefixes: Which sessions another one may begin as a fork of.
        background: Where calls end that nobody waits for any more.
        prefill_chunk_tokens: The longest prefill step.
        direct: How decode steps may go from hop to hop; None is always by the head.
    """

    times: HopTimesBook
    recovery: Recovery
    budget: ReplayBudget
    replay: ReplayMode
    prefixes: PrefixIndex
    background: Background
    prefill_chunk_tokens: int
    direct: DirectReturn | None = None


class Pipeline:
    """Runs steps of one session over a route.

    Args:
        route: The hops in order.
        shards: Who can take a hop's place.
        kit: What it shares with the other pipelines.
        trace: Sent with every step.
        session: None is a new one.

    Attributes:
        n_cached: Tokens of the prompt that no hop had to compute; known after the prefill.
        times: Where the session's time goes.
    """

    def __init__(
        self,
        route: Route,
        shards: Shards,
        kit: PipelineKit,
        trace: Trace,
        session: SessionId | None = None,
    ) -> None:
        self.session = session or SessionId(new_id())
        self.n_cached = 0
        self.times = trace.times.begin()
        self._route = route
        self._kit = kit
        self._ids: list[int] = []
        self._hops = [
            HopSession(
                hop,
                self.session,
                shards=shards,
                log=InputLog(kit.budget, kit.replay),
                times=kit.times,
                background=kit.background,
                trace=trace,
                spent=self.times,
            )
            for hop in route.hops
        ]
        self._source = Source(self._hops, self._ids)

    @property
    def stateless(self) -> bool:
        """Whether some hop keeps no cache."""
        return self._route.stateless

    @property
    def max_step_tokens(self) -> int:
        """The longest step that every hop takes."""
        return self._route.max_step_tokens

    @property
    def background(self) -> Background:
        """Where to close it, so that a cancelled request cannot leave it open."""
        return self._kit.background

    async def prefill(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        context: SamplingContext = NO_CONTEXT,
        *,
        score: bool = False,
    ) -> TailAnswer:
        """Run a prompt in chunks, which follow each other from hop to hop.

        The tail samples after the last one only. What another session has of the prompt's beginning
        is not computed again, unless it is to be scored.

        Args:
            ids: The prompt.
            sampling: How the tail samples.
            context: What its answer depends on besides.
            score: Have every token but the first scored, in the answer's `prompt_scores`.

        Raises:
            MeshError: As `stateless_step`.
        """
        steps: list[Step] = []
        found = None if score else await self._fork(ids)
        self._kit.prefixes.begin(self._source, ids)
        for start, chunk in self._chunks(ids, len(self._ids) if found else 0):
            end = start + len(chunk)
            is_last = end == len(ids)
            asked = context if is_last else NO_CONTEXT
            if score:
                asked = asked.scoring(ids[start + 1 : end + 1])
            samples = sampling if is_last or score else None
            steps.append(self._step("prefill", chunk, start, samples, asked))
        answers = await self._run(steps)
        self.n_cached = min(hop.n_forked for hop in self._hops)
        if found is not None and not self.n_cached:
            self._kit.prefixes.note_missing(found)
        scores = tuple(chain.from_iterable(answer.prompt_scores for answer in answers))
        return answers[-1].model_copy(update={"prompt_scores": scores})

    async def decode(
        self, token_id: int, sampling: Sampling, context: SamplingContext = NO_CONTEXT
    ) -> TailAnswer:
        """Run the last token. Raises as `stateless_step`."""
        step = self._step("decode", [token_id], len(self._ids), sampling, context)
        (answer,) = await self._run([step])
        return answer

    async def stateless_step(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        context: SamplingContext = NO_CONTEXT,
        *,
        score: bool = False,
    ) -> TailAnswer:
        """Run a whole sequence, of which nothing is kept.

        Raises:
            RecoveryExhausted: A hop or a state was lost and did not come back in time.
            MeshError: What a hop refused a step with.
        """
        context = context.scoring(ids[1:]) if score else context
        step = self._step("stateless", ids, 0, sampling, context)
        return await run_alone(self._hops, step)

    async def close(self) -> None:
        """Free the session on every hop, or have it kept for others to begin with.

        A hop that cannot be reached frees it by its time to live.
        """
        keep = self._kit.prefixes.end(self._source)
        await asyncio.gather(*(hop.close(keep=keep) for hop in self._hops))

    async def _fork(self, ids: Sequence[int]) -> Source | None:
        """Begin with what another session has of the prompt; returns which one, if there is any."""
        found = await self._kit.prefixes.find(self._hops, list(ids))
        if found is None:
            return None
        source, n_tokens = found
        for hop, other in zip(self._hops, source.hops, strict=True):
            hop.fork(other, n_tokens)
        self._ids.extend(ids[:n_tokens])
        return source

    async def _run(self, steps: Sequence[Step]) -> list[TailAnswer]:
        """Run the steps that come next; every hop then holds their tokens."""
        answers: list[TailAnswer] = []
        is_lost = False
        while len(answers) < len(steps):
            left = steps[len(answers) :]
            try:
                if is_lost:
                    await self._feed_anew(left[0].tries)
                async with aclosing(run_steps(self._hops, left, self._kit.direct)) as passed:
                    async for step, answer in passed:
                        answers.append(answer)
                        self._ids.extend(step.call.frame.token_ids())
                        self._kit.prefixes.note_progress(self._source)
            except InputsDropped:
                is_lost = True
        return answers

    async def _feed_anew(self, tries: Tries) -> None:
        """Prefill everything on all hops: one of them lost it, and what it was fed was not kept."""
        for hop in self._hops:
            hop.forget()
        steps = [
            Step(Call("prefill", Frame.of_token_ids(chunk), start), tries)
            for start, chunk in self._chunks(self._ids)
        ]
        n_layers = self._route.hops[0].facts.n_layers
        with self.times.feeding_anew():
            async with aclosing(run_steps(self._hops, steps)) as passed:
                async for step, _ in passed:
                    tries.note_replay(step.call.frame.n_tokens * n_layers)

    def _step(
        self,
        mode: CacheMode,
        ids: Sequence[int],
        past_len: int,
        sampling: Sampling | None,
        context: SamplingContext,
    ) -> Step:
        call = Call(mode, Frame.of_token_ids(ids), past_len, sampling, context)
        return Step(call, self._kit.recovery.begin())

    def _chunks(self, ids: Sequence[int], first: int = 0) -> list[tuple[int, Sequence[int]]]:
        """The ids from the `first` on in pieces that every hop takes, each with its position."""
        size = min(self._kit.prefill_chunk_tokens, self.max_step_tokens)
        return [(start, ids[start : start + size]) for start in range(first, len(ids), size)]
