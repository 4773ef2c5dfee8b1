"""One step through a shard: check it, lease the session, run the stage, commit.

A step happens wholly, or that session's state is gone (law 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final, cast

import structlog

from meshnet.cache.entry import StepRef
from meshnet.cache.policy import CacheKey
from meshnet.cache.store import SessionCacheStore
from meshnet.errors import CacheMiss, InvalidRequest, ModelMismatch, PayloadTooLarge
from meshnet.ids import BootId, SessionId, StepId
from meshnet.model.interface import CacheState, StageModel, StageOutput, StageStep, StateCost
from meshnet.shard.compute import ComputeThread, Timed
from meshnet.shard.step_log import DecodeLog
from meshnet.topology import ShardFacts
from meshnet.wire import headers
from meshnet.wire.context import parse_context
from meshnet.wire.frames import Dtype, Frame, nbytes
from meshnet.wire.headers import StepHeaders

_log = structlog.get_logger(__name__)

_SCORE_BYTES: Final = 3400
"""What a token's score with twenty alternatives takes in memory; measured: 3,170."""


@dataclass(frozen=True, slots=True)
class ShardWorker:
    """Runs steps on one stage.

    Attributes:
        stage: The span of layers.
        store: The sessions' states.
        compute: Where the stage runs.
        decode_log: Which decode steps get a log line.
        boot_id: Which life of the process this is.
        check_begin: Raises if no session may begin now; one that is held goes on.
        max_step_tokens: The longest step, in tokens.
        kv_cache: False takes stateless steps only.
        push: False takes no step whose input another shard pushes, or whose output is to be pushed.
    """

    stage: StageModel
    store: SessionCacheStore[CacheState]
    compute: ComputeThread
    decode_log: DecodeLog
    boot_id: BootId
    check_begin: Callable[[], None]
    max_step_tokens: int
    kv_cache: bool = True
    push: bool = True

    def check(self, step: StepHeaders) -> int:
        """Check a step's headers against the stage, before its body is read.

        Returns:
            How many bytes the body must have; without the tensor, where another shard pushes it.

        Raises:
            ModelMismatch: The head believes in another model.
            CacheMiss: The head believes in another life of this process: what it fed that one is
                gone.
            InvalidRequest: A header does not fit this shard. Nothing was changed.
        """
        facts = self.stage.facts
        if step.fingerprint not in (None, facts.fingerprint):
            raise ModelMismatch(
                f"this shard runs {facts.fingerprint}, not {step.fingerprint}",
                field=headers.FINGERPRINT,
                expected=step.fingerprint,
                actual=facts.fingerprint,
            )
        start_layer = self._start_layer(step)
        _check_tensor(step, facts, takes_token_ids=start_layer == 0)
        n_tokens = step.shape[1]
        if n_tokens > self.max_step_tokens:
            raise PayloadTooLarge(
                f"a step of {n_tokens} tokens is too long",
                field=headers.SHAPE,
                value=n_tokens,
                allowed=self.max_step_tokens,
            )
        if step.past_len + n_tokens > facts.max_positions:
            raise InvalidRequest(
                f"position {step.past_len + n_tokens} is past the model's last",
                field=headers.PAST_LEN,
                value=step.past_len,
                allowed=f"0 to {facts.max_positions - n_tokens}",
            )
        if step.cache != "stateless" and not self.kv_cache:
            raise InvalidRequest(
                "this shard keeps no cache",
                field=headers.CACHE,
                value=step.cache,
                allowed="stateless",
            )
        if step.context_bytes > (longest := _max_context_bytes(facts)):
            raise PayloadTooLarge(
                f"a sampling context of {step.context_bytes} bytes is too long",
                field=headers.CONTEXT_BYTES,
                value=step.context_bytes,
                allowed=longest,
            )
        self._check_direct_return(step)
        self._check_life(step)
        n_tensor = nbytes(step.dtype, step.shape) if step.input_id is None else 0
        return n_tensor + step.context_bytes

    async def step(self, step: StepHeaders, body: bytes) -> Timed:
        """Run one checked step.

        Args:
            step: Headers that `check` has passed.
            body: The tensor, row-major little-endian, and the sampling context behind it.

        Raises:
            InvalidRequest: The body's length is not that of the headers, a token id is not in the
                vocabulary, or the context is malformed. Nothing was changed.
            SessionError: The session is not held at this position (see the store).
            CapacityError: No room, too many steps waiting, or no session may begin.
            StageError: The forward failed; the session's state was dropped.
        """
        began_at = perf_counter()
        work = self._read(step, body)
        read_ms = (perf_counter() - began_at) * 1000
        if step.cache == "stateless":
            done = await self.compute.step(self.stage, work)
        else:
            done = await self._cached(step, work)
        return replace(done, read_ms=read_ms)

    async def recall(self, step: StepHeaders) -> Timed | None:
        """What is known of a checked cached step before its input is there.

        Returns:
            What it put out, where it was the session's last one already. None: it may be run.

        Raises:
            StaleEpoch: The session was closed, or is steered by another head.
            CacheMiss: The session has gone on since.
        """
        answer = await self.store.look_up(*self._refer(step))
        return None if answer is None else _repeated(answer)

    def _read(self, step: StepHeaders, body: bytes) -> StageStep:
        n_tensor, vocab_size = nbytes(step.dtype, step.shape), self.stage.facts.vocab_size
        frame = Frame(step.dtype, step.shape, body[:n_tensor])
        context = parse_context(body[n_tensor:], vocab_size=vocab_size, n_tokens=frame.n_tokens)
        start_layer = self._start_layer(step)
        if start_layer == 0:
            _check_token_ids(frame, vocab_size)
        return StageStep(frame, start_layer, step.past_len, step.sampling, context)

    def session_cost(self) -> StateCost:
        """What a session takes of the store at most: its state, and the answer kept for a repeat.

        Scores, where a tail is asked for some, come on top.
        """
        state = self.stage.state_cost
        return StateCost(state.base_bytes, state.token_bytes + self._answer_nbytes(1, n_scores=0))

    async def close(self, session: SessionId, epoch: int = 0, *, keep: bool = False) -> int:
        """Free a session, or keep it for forks; idempotent. Returns how many states went.

        Raises:
            StaleEpoch: A newer epoch steers the session. Nothing was changed.
        """
        freed = await self.store.release(session, epoch, keep=keep)
        self.decode_log.forget(session)
        return freed

    async def _cached(self, step: StepHeaders, work: StageStep) -> Timed:
        key, ref = self._refer(step)
        lease = self.store.lease(
            key,
            ref,
            fresh=step.past_len == 0,
            need_bytes=self._need_bytes(work, begins=_begins(step)),
            new_state=lambda: self.stage.new_state(work.start_layer),
            check=lambda: self._check_room(step),
            fork_of=SessionId(step.fork_of) if step.fork_of else None,
        )
        async with lease as held:
            if held.replay is not None:
                return _repeated(held.replay)
            done = await self.compute.step(self.stage, work, held.state, key.session)
            held.commit(
                n_tokens=work.frame.n_tokens,
                answer=done.result,
                answer_nbytes=self._answer_nbytes(work.frame.n_tokens, work.n_scores),
            )
        self._log_step(step, key.session, done)
        return done

    def _refer(self, step: StepHeaders) -> tuple[CacheKey, StepRef]:
        """How the store knows a cached step."""
        session = SessionId(cast("str", step.session))  # check() has seen to it
        key = CacheKey(session, self._start_layer(step), self.stage.facts.span.end)
        return key, StepRef(StepId(step.step) if step.step else None, step.past_len, step.epoch)

    def _need_bytes(self, work: StageStep, *, begins: bool) -> int:
        """What a step adds: the state's growth, and the answer kept for a repeat.

        A fork comes to have memory of its own for the tokens before it, too.
        """
        held = 0 if begins else self.stage.state_nbytes(work.position)
        grown = self.stage.state_nbytes(work.position + work.frame.n_tokens)
        return grown - held + self._answer_nbytes(work.frame.n_tokens, work.n_scores)

    def _answer_nbytes(self, n_tokens: int, n_scores: int) -> int:
        """What an answer takes in memory, as long as it is kept."""
        facts = self.stage.facts
        if facts.span.end == facts.n_layers:
            return _SCORE_BYTES * n_scores
        return nbytes(cast("Dtype", facts.dtype), (n_tokens, facts.hidden_size))

    def _check_room(self, step: StepHeaders) -> None:
        self.compute.check_room()
        if _begins(step):
            self.check_begin()

    def _check_direct_return(self, step: StepHeaders) -> None:
        if not self.push:
            headers.refuse_direct_return(step, "this shard takes no part in direct return")
        if step.push_id and self.stage.facts.span.end == self.stage.facts.n_layers:
            raise InvalidRequest(
                "this shard is the tail: nobody goes on with what it puts out",
                field=headers.PUSH_TO,
                value=step.push_to,
                allowed=None,
            )

    def _check_life(self, step: StepHeaders) -> None:
        if step.cache == "stateless" or step.boot in (None, self.boot_id):
            return
        raise CacheMiss(
            f"this shard was restarted: it is {self.boot_id}, not {step.boot}",
            reason="restarted",
            held=0,
            expected=step.boot,
            actual=self.boot_id,
        )

    def _start_layer(self, step: StepHeaders) -> int:
        span = self.stage.facts.span
        start = span.start if step.start_layer is None else step.start_layer
        if start not in span:
            raise InvalidRequest(
                f"layer {start} is not in this shard's span {span}",
                field=headers.START_LAYER,
                value=start,
                allowed=f"{span.start} to {span.end - 1}",
            )
        return start

    def _log_step(self, step: StepHeaders, session: SessionId, done: Timed) -> None:
        steps = self.decode_log.note(session) if step.cache == "decode" else None
        if step.cache == "decode" and steps is None:
            return
        _log.info(
            step.cache,
            session_id=session,
            request_id=step.request_id,
            position=step.past_len,
            n_tokens=step.shape[1],
            steps=steps,
            queue_ms=round(done.queue_ms, 2),
            compute_ms=round(done.compute_ms, 2),
        )


def _repeated(answer: object) -> Timed:
    """A stored answer: nothing was run for it."""
    return Timed(cast("StageOutput", answer), 0.0, 0.0, batch_size=0)


def _begins(step: StepHeaders) -> bool:
    """Whether the session is not to be here before the step."""
    return step.past_len == 0 or step.fork_of is not None


def _check_tensor(step: StepHeaders, facts: ShardFacts, *, takes_token_ids: bool) -> None:
    """Dtype and shape must be what the start layer takes, before a byte is kept."""
    dtype = "int32" if takes_token_ids else facts.dtype
    if step.dtype != dtype:
        raise InvalidRequest(
            f"{headers.DTYPE} is {step.dtype}",
            field=headers.DTYPE,
            value=step.dtype,
            allowed=dtype,
        )
    shape = (1, step.shape[1]) if takes_token_ids else (1, step.shape[1], facts.hidden_size)
    if step.shape != shape:
        axes = "1,TOKENS" if takes_token_ids else f"1,TOKENS,{facts.hidden_size}"
        raise InvalidRequest(
            f"{headers.SHAPE} is {headers.render_shape(step.shape)}",
            field=headers.SHAPE,
            value=headers.render_shape(step.shape),
            allowed=axes,
        )


def _max_context_bytes(facts: ShardFacts) -> int:
    """What a model can need: JSON that is taken apart fills some twenty times its length.

    An id takes 8 bytes, and a position may have two: what is there, and what comes next. Of the
    vocabulary there is a bit a token, as base64. The rest is for bias and banned tokens.
    """
    return min(2**16 + 16 * facts.max_positions + facts.vocab_size // 4, headers.MAX_CONTEXT_BYTES)


def _check_token_ids(frame: Frame, vocab_size: int) -> None:
    bad = [i for i in frame.token_ids() if not 0 <= i < vocab_size]
    if bad:
        raise InvalidRequest(
            f"token id {bad[0]} is not in the vocabulary",
            field="body",
            value=bad[0],
            allowed=f"0 to {vocab_size - 1}",
        )
