from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence

import pytest

from meshnet.errors import QueueFull, StageError
from meshnet.generation import Sampling
from meshnet.ids import SessionId
from meshnet.model.fake_stage import FakeStage, FakeState, fake_facts, next_token
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.shard.compute import ComputeThread, Timed
from meshnet.shard.scheduler import Job, StepScheduler
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import turn_the_loop

PROMPT = [5, 6, 7]


class Gate:
    """Holds the compute thread until it is let go."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self._entered.set()
        self._open.wait(10)
        self.ended = True
        return "through"

    async def entered(self) -> None:
        await asyncio.to_thread(self._entered.wait, 10)

    def open(self) -> None:
        self._open.set()


class GateStage(FakeStage):
    """Passes a gate in each step that is a chunk; fails in what it is told to."""

    def __init__(self) -> None:
        super().__init__(fake_facts(LayerSpan(0, 4)))
        self.gate = Gate()
        self.order: list[list[int]] = []
        self.idents: set[int] = set()
        self.failing_id: int | None = None
        self.failing_batch: Exception | None = None

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        ids = step.frame.token_ids()
        self.order.append(ids)
        self.idents.add(threading.get_ident())
        if len(ids) > 1:
            self.gate()
        output = super().run(step, state)
        if self.failing_id in ids:
            raise StageError("not finite")
        return output

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        if self.failing_batch is not None:
            raise self.failing_batch
        return super().run_batch(works)


class Bench:
    """A thread, a stage, and sessions that hold the prompt."""

    def __init__(self, compute: ComputeThread) -> None:
        self.compute = compute
        self.stage = GateStage()

    def decode(self, session: str, token_id: int) -> asyncio.Task[Timed]:
        """One token of a session."""
        step = StageStep(Frame.of_token_ids([token_id]), 0, len(PROMPT), Sampling())
        return self._start(step, session)

    def chunk(self, session: str = "p") -> asyncio.Task[Timed]:
        """A prompt, whose step the gate holds."""
        return self._start(StageStep(Frame.of_token_ids(PROMPT), 0, 0, Sampling()), session)

    async def held(self) -> asyncio.Task[Timed]:
        """A prompt whose step has begun."""
        chunk = self.chunk()
        await self.stage.gate.entered()
        return chunk

    def _start(self, step: StageStep, session: str) -> asyncio.Task[Timed]:
        state = FakeState(list(PROMPT) if step.position else [])
        return asyncio.create_task(self.compute.step(self.stage, step, state, SessionId(session)))


@pytest.fixture
async def bench() -> AsyncGenerator[Bench]:
    async with ComputeThread(max_queued=4, max_batch=4) as compute:
        yield Bench(compute)


def says(*ids: int) -> TailAnswer:
    """The fake model's answer to ids."""
    return TailAnswer(token_id=next_token(list(ids), 64))


# --- functions ---


async def test_a_function_runs_off_the_loop(bench: Bench) -> None:
    """The function runs on another thread, and its result comes back."""
    assert await bench.compute.run(threading.get_ident) != threading.get_ident()


async def test_functions_and_steps_run_on_the_same_thread(bench: Bench) -> None:
    """There is one compute thread, so a stage is never entered twice at once."""
    loader = await bench.compute.run(threading.get_ident)
    bench.stage.gate.open()
    await asyncio.gather(bench.chunk(), bench.decode("a", 8), bench.decode("b", 9))

    assert bench.stage.idents == {loader}


async def test_a_functions_failure_reaches_the_caller(bench: Bench) -> None:
    """What the function raises is raised by run(), as it is."""

    def fail() -> None:
        raise StageError("no memory")

    with pytest.raises(StageError, match="no memory"):
        await bench.compute.run(fail)


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_caller_stays_until_the_function_ended(
    bench: Bench, cancels: int
) -> None:
    """However often it is cancelled, run() does not return while the function is running."""
    gate = Gate()
    caller = asyncio.create_task(bench.compute.run(gate))
    await gate.entered()
    for _ in range(cancels):
        caller.cancel()
        await turn_the_loop()
        assert not caller.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert gate.ended


# --- steps ---


async def test_a_step_is_answered_by_the_stage(bench: Bench) -> None:
    """A decode that is alone, too, runs as a batch: of one."""
    done = await bench.decode("a", 8)

    assert (done.result, done.batch_size) == (says(*PROMPT, 8), 1)
    assert bench.stage.batch_sizes == [1]


async def test_a_stateless_step_runs_alone(bench: Bench) -> None:
    """It is no part of a batch, though it has one token."""
    step = StageStep(Frame.of_token_ids([8]), 0, 0, Sampling())
    done = await bench.compute.step(bench.stage, step)

    assert (done.result, bench.stage.batch_sizes) == (says(8), [])


async def test_decodes_that_wait_run_as_one_batch(bench: Bench) -> None:
    """What comes during a step runs together after it; each gets its own answer."""
    chunk = await bench.held()
    decodes = [bench.decode("a", 8), bench.decode("b", 9), bench.decode("c", 10)]
    await turn_the_loop()
    bench.stage.gate.open()
    answers = [done.result for done in await asyncio.gather(chunk, *decodes)]

    assert answers == [says(*PROMPT), *(says(*PROMPT, i) for i in (8, 9, 10))]
    assert bench.stage.batch_sizes == [3]
    assert [(await decode).batch_size for decode in decodes] == [3, 3, 3]


async def test_waiting_and_computing_are_told_apart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queue time ends where compute time starts, in milliseconds."""
    # queued; looked at; begun; computed; ended; looked at
    ticks = iter([10.0, 10.125, 10.25, 10.75, 10.8, 10.9])
    monkeypatch.setattr("meshnet.shard.compute.perf_counter", lambda: next(ticks))
    done = await bench.decode("a", 8)

    assert (done.queue_ms, done.compute_ms) == (250.0, 500.0)


async def test_a_step_that_fails_in_a_batch_fails_alone(bench: Bench) -> None:
    """Its error is its caller's; its mates are answered."""
    bench.stage.failing_id = 9
    chunk = await bench.held()
    decodes = [bench.decode("a", 8), bench.decode("b", 9), bench.decode("c", 10)]
    await turn_the_loop()
    bench.stage.gate.open()
    await chunk
    answers = await asyncio.gather(*decodes, return_exceptions=True)
    results = [done.result if isinstance(done, Timed) else type(done) for done in answers]

    assert results == [says(*PROMPT, 8), StageError, says(*PROMPT, 10)]


@pytest.mark.parametrize("failure", [StageError("not finite"), RuntimeError("out of memory")])
async def test_a_batch_that_fails_fails_for_all(bench: Bench, failure: Exception) -> None:
    """Whatever the stage raises reaches every caller, and the thread goes on."""
    bench.stage.failing_batch = failure
    chunk = await bench.held()
    decodes = [bench.decode("a", 8), bench.decode("b", 9)]
    await turn_the_loop()
    bench.stage.gate.open()
    await chunk
    failed = await asyncio.gather(*decodes, return_exceptions=True)
    bench.stage.failing_batch = None

    assert failed == [failure, failure]
    assert (await bench.decode("a", 8)).result == says(*PROMPT, 8)


async def test_a_chunk_that_fails_is_its_callers_failure(bench: Bench) -> None:
    """A step that runs alone raises what the stage raised."""
    bench.stage.failing_id = PROMPT[0]
    bench.stage.gate.open()
    with pytest.raises(StageError, match="not finite"):
        await bench.chunk()


class ForgetfulStage(GateStage):
    """Answers one step less than it was given."""

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        return super().run_batch(works)[1:]


async def test_a_stage_that_forgets_a_step_fails_for_all(bench: Bench) -> None:
    """No caller waits for ever, and none gets another's answer."""
    bench.stage = ForgetfulStage()
    with pytest.raises(ValueError, match="shorter"):
        await bench.decode("a", 8)


# --- turns ---


async def test_a_chunk_runs_between_batches(bench: Bench) -> None:
    """Decodes, a chunk and decodes again, where all of them wait."""
    first = await bench.held()
    waiting = [bench.chunk("q"), bench.decode("a", 8), bench.decode("b", 9)]
    await turn_the_loop()
    bench.stage.gate.open()
    await asyncio.gather(first, *waiting)

    assert bench.stage.order == [PROMPT, [8], [9], PROMPT]


def pausing(monkeypatch: pytest.MonkeyPatch, *pauses_s: float) -> Iterator[float]:
    """Makes the scheduler ask for these pauses, one after the other."""
    pauses = iter(pauses_s)

    def pause_s(scheduler: StepScheduler[Job], now: float) -> float:
        del scheduler, now
        return next(pauses)

    monkeypatch.setattr(StepScheduler, "pause_s", pause_s)
    return pauses


async def test_after_a_pause_a_batch_begins(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody need come for it."""
    pauses = pausing(monkeypatch, 0.001, 0.001, 0.0, 0.0)
    done = await bench.decode("a", 8)

    assert (done.batch_size, list(pauses)) == (1, [])


async def test_who_comes_during_a_pause_ends_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has both, and does not wait for the rest of the pause."""
    pausing(monkeypatch, 3600.0, 0.0, 0.0)
    decodes = [bench.decode("a", 8), bench.decode("b", 9)]

    assert [done.batch_size for done in await asyncio.gather(*decodes)] == [2, 2]


# --- places ---


async def test_too_many_steps_are_refused(bench: Bench) -> None:
    """With max_queued steps running or waiting, the next one is refused and never run."""
    chunk = await bench.held()
    waiting = [bench.decode(session, 8) for session in "abc"]
    await turn_the_loop()
    with pytest.raises(QueueFull) as caught:
        await bench.decode("d", 9)
    bench.stage.gate.open()
    await asyncio.gather(chunk, *waiting)

    assert caught.value.members == {"field": "queue", "value": 4, "allowed": 4}
    assert [9] not in bench.stage.order


async def test_a_place_is_free_again_when_a_step_has_ended(bench: Bench) -> None:
    """Callers that run one step after another are never refused, also where steps fail."""
    bench.stage.failing_id = 9
    for _ in range(3):
        decodes = [
            bench.decode(session, i) for session, i in zip("abcd", (8, 9, 9, 8), strict=True)
        ]
        await asyncio.gather(*decodes, return_exceptions=True)
        bench.compute.check_room()


# --- cancellation ---


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_caller_stays_until_its_step_ended(bench: Bench, cancels: int) -> None:
    """However often it is cancelled, step() does not return while the step is running."""
    caller = await bench.held()
    for _ in range(cancels):
        caller.cancel()
        await turn_the_loop()
        assert not caller.done()
    bench.stage.gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller

    assert bench.stage.gate.ended


@pytest.mark.parametrize("kind", ["decode", "chunk"])
async def test_a_cancelled_step_that_waits_is_not_run(bench: Bench, kind: str) -> None:
    """Its caller goes at once, its place is free, and the others run."""
    first = await bench.held()
    waiting = bench.decode("a", 8) if kind == "decode" else bench.chunk("q")
    others = [bench.decode("b", 9), bench.decode("c", 10)]
    await turn_the_loop()
    waiting.cancel()
    await asyncio.wait({waiting})
    bench.compute.check_room()
    bench.stage.gate.open()
    await asyncio.gather(first, *others)

    assert waiting.cancelled()
    assert bench.stage.order == [PROMPT, [9], [10]]


async def test_nobody_is_warned_of_a_failure_whose_caller_left(bench: Bench) -> None:
    """A step that fails after its caller was cancelled is no unhandled error of the loop."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    bench.stage.failing_id = PROMPT[0]
    caller = await bench.held()
    caller.cancel()
    await turn_the_loop()
    bench.stage.gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller
    del caller
    await turn_the_loop()

    assert complaints == []


# --- the end ---


async def test_leaving_waits_for_what_runs_and_what_waits() -> None:
    """The block ends after the last step, and the loop turns meanwhile."""
    gate, steps, leaves = Gate(), list[asyncio.Task[Timed]](), asyncio.Event()

    async def use() -> None:
        async with ComputeThread(max_queued=4, max_batch=4) as compute:
            bench = Bench(compute)
            bench.stage.gate = gate
            steps.extend([await bench.held(), bench.chunk("q"), bench.decode("a", 8)])
            await turn_the_loop()
            leaves.set()

    user = asyncio.create_task(use())
    await leaves.wait()
    await turn_the_loop()
    assert not user.done()
    gate.open()
    await user

    assert [step.result().result for step in steps] == [
        says(*PROMPT),
        says(*PROMPT),
        says(*PROMPT, 8),
    ]
