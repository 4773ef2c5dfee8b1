"""Runs steps of one session over its hops, each hop on another one of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from meshnet.errors import HopProtocolError, InputsDropped
from meshnet.head.attempt import Attempt
from meshnet.head.call import Call
from meshnet.head.direct_return import DirectReturn
from meshnet.head.hop_session import HopSession
from meshnet.head.recovery import Tries
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Step:
    """One step over all hops.

    Attributes:
        call: The tail's, but for its input: the frame is the first hop's.
        tries: What its failures may cost, over all hops.
    """

    call: Call
    tries: Tries


async def run_steps(
    hops: Sequence[HopSession], steps: Sequence[Step], direct: DirectReturn | None = None
) -> AsyncGenerator[tuple[Step, TailAnswer]]:
    """Yield each step with the tail's answer, in order.

    Each hop takes the steps in order, one at a time. Between two hops one result waits at most, and
    the hop that has the next one then waits itself. When a hop fails, or this generator is closed
    early, the other hops' calls are cancelled, and nothing of them runs on here.

    Args:
        hops: First to last; nobody else uses them meanwhile.
        steps: Each begins where the one before it ends.
        direct: How a single step may go from hop to hop; None is by this head.

    Raises:
        InputsDropped: A hop lost the session and cannot be fed alone. It is counted as one of the
            step's tries.
        RecoveryExhausted: A limit of a step's tries was reached.
        MeshError: What a hop refused a step with.
    """
    if len(steps) == 1:
        yield steps[0], await run_alone(hops, steps[0], direct)  # nothing to overlap it with
        return
    answers = asyncio.Queue[TailAnswer | asyncio.Task[None]]()
    tasks = _start(hops, steps, answers.put)
    for task in tasks:
        task.add_done_callback(answers.put_nowait)
    try:
        for step in steps:
            yield step, await _next_answer(answers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_alone(
    hops: Sequence[HopSession], step: Step, direct: DirectReturn | None = None
) -> TailAnswer:
    """The tail's answer to one step. Raises as `run_steps`."""
    none_at_all: list[Attempt | None] = [None] * len(hops)
    with direct.attempts(hops, step.call) if direct else nullcontext(none_at_all) as attempts:
        frame = step.call.frame
        for hop, attempt in zip(hops[:-1], attempts, strict=False):
            frame = await _hidden_of(hop, step, frame, attempt)
        return await _answer_of(hops[-1], step, frame, attempts[-1])


async def _next_answer(answers: asyncio.Queue[TailAnswer | asyncio.Task[None]]) -> TailAnswer:
    """The next one; raises what a hop failed with instead."""
    while not isinstance(answer := await answers.get(), TailAnswer):
        answer.result()
    return answer


def _start(
    hops: Sequence[HopSession],
    steps: Sequence[Step],
    put_answer: Callable[[TailAnswer], Awaitable[None]],
) -> list[asyncio.Task[None]]:
    """A task for each hop."""
    inputs = [asyncio.Queue[Frame](maxsize=1) for _ in hops]
    inputs[0] = asyncio.Queue()
    for step in steps:
        inputs[0].put_nowait(step.call.frame)
    work = [
        _work(partial(_hidden_of, hop), steps, source.get, sink.put)
        for hop, (source, sink) in zip(hops[:-1], pairwise(inputs), strict=True)
    ]
    work.append(_work(partial(_answer_of, hops[-1]), steps, inputs[-1].get, put_answer))
    return [asyncio.create_task(one) for one in work]


async def _work(
    run: Callable[[Step, Frame], Awaitable[ResultT]],
    steps: Sequence[Step],
    get: Callable[[], Awaitable[Frame]],
    put: Callable[[ResultT], Awaitable[None]],
) -> None:
    """What one hop does: it takes a step's input from the hop before, and gives its result on."""
    for step in steps:
        await put(await run(step, await get()))


async def _hidden_of(
    hop: HopSession, step: Step, frame: Frame, attempt: Attempt | None = None
) -> Frame:
    """What a hop that is no tail makes of its input."""
    call = step.call
    result = await _run(hop, Call(call.mode, frame, call.past_len), step.tries, attempt)
    endpoint = hop.hop.endpoint
    if not isinstance(result, Frame):
        raise HopProtocolError(f"{endpoint} answered as a tail", endpoint=endpoint)
    if result.n_tokens != frame.n_tokens:
        raise HopProtocolError(
            f"{endpoint} answered {result.n_tokens} tokens to {frame.n_tokens}", endpoint=endpoint
        )
    return result


async def _answer_of(
    tail: HopSession, step: Step, frame: Frame, attempt: Attempt | None = None
) -> TailAnswer:
    """What the tail answers to its input."""
    result = await _run(tail, replace(step.call, frame=frame), step.tries, attempt)
    if not isinstance(result, TailAnswer):
        endpoint = tail.hop.endpoint
        raise HopProtocolError(f"{endpoint} answered hidden states", endpoint=endpoint)
    return result


async def _run(
    hop: HopSession, call: Call, tries: Tries, attempt: Attempt | None
) -> Frame | TailAnswer:
    try:
        return await hop.step(call, tries, attempt)
    except InputsDropped as dropped:
        tries.count(dropped)
        raise
