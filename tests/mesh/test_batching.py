"""Steps of several sessions in one forward: who shares one, what goes between, who fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from meshnet.errors import StageError
from meshnet.model.fake_stage import fake_facts, next_token
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.topology import LayerSpan
from tests.support.mesh import (
    VOCAB_SIZE,
    Shard,
    fake_text,
    serve_mesh,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.stages import GatedStage, SlowStage
from tests.support.steps import ShardClient, shard_client
from tests.support.streams import eventually

pytestmark = pytest.mark.mesh

WHOLE = fake_facts(LayerSpan(0, 4), 4, VOCAB_SIZE)
SESSIONS = "abcdefgh"
LONG = [20, 21, 22]
"""The chunk that the thread is held in."""

Asked = asyncio.Task[httpx.Response]


def prompt_of(session: str) -> list[int]:
    """Two tokens, other ones for each session."""
    return [1, 2 + SESSIONS.index(session)]


def after(session: str, *ids: int) -> int:
    """What the fake model says after a session's prompt and these ids."""
    return next_token([*prompt_of(session), *ids], VOCAB_SIZE)


@dataclass
class Held:
    """A shard that holds the prompts of eight sessions, and whose thread is in a chunk."""

    stage: GatedStage
    shard: Shard
    hop: ShardClient
    chunk: Asked

    async def decode(self, session: str, token_id: int, past_len: int = 2) -> Asked:
        """Ask for a session's next token; the step waits when this returns."""
        return await self._ask(session, "decode", past_len, [token_id])

    async def prefill(self, session: str, ids: Sequence[int]) -> Asked:
        """Begin a session; its prompt waits when this returns."""
        return await self._ask(session, "prefill", 0, ids)

    async def let_go(self, *asked: Asked) -> list[httpx.Response]:
        """Let every chunk end; the answers to the steps that waited."""
        self.stage.lets.release(100)
        assert (await self.chunk).status_code == 200
        return await asyncio.gather(*asked)

    async def leases(self) -> int:
        """How many sessions have a step that runs or waits."""
        return (await self.hop.cache())["leases"]

    async def _ask(self, session: str, mode: str, past_len: int, ids: Sequence[int]) -> Asked:
        n_before = await self.leases()
        asked = asyncio.create_task(self.hop.step(session, mode, past_len, ids))

        async def waits() -> bool:
            return await self.leases() == n_before + 1

        await eventually(waits, within_s=10)
        return asked


@asynccontextmanager
async def hold(stage: GatedStage | None = None, **settings: object) -> AsyncGenerator[Held]:
    """A shard that is held until the test lets it go."""
    stage = stage or GatedStage(WHOLE)
    async with (
        serve_shard(stage, settings=shard_settings(**settings)) as shard,
        shard_client(shard.url) as hop,
    ):
        stage.lets.release(len(SESSIONS))
        for session in SESSIONS:
            assert (await hop.step(session, "prefill", 0, prompt_of(session))).status_code == 200
        stage.ran.clear()
        chunk = asyncio.create_task(hop.step("long", "prefill", 0, LONG))
        try:
            await _begun(stage, LONG)
            yield Held(stage, shard, hop, chunk)
        finally:
            stage.lets.release(100)


async def _begun(stage: GatedStage, ids: list[int]) -> None:
    """Wait until the stage is in this chunk."""

    async def is_in_it() -> bool:
        return stage.ran[-1:] == [ids]

    await eventually(is_in_it, within_s=10)


async def test_all_decodes_that_wait_run_as_one_batch() -> None:
    """Eight sessions that waited for a chunk share one forward, each with its own answer."""
    async with hold() as held:
        asked = [await held.decode(s, 30 + i) for i, s in enumerate(SESSIONS)]
        answers = await held.let_go(*asked)
        assert [after(s, 30 + i) for i, s in enumerate(SESSIONS)] == [
            answer.json()["token_id"] for answer in answers
        ]
        assert [LONG, list(range(30, 38))] == held.stage.ran


async def test_no_more_run_together_than_allowed() -> None:
    """Who finds no place in a batch is in the next one; each step counts the size of its own."""
    async with hold(max_batch_sessions=3) as held:
        asked = [await held.decode(s, 30 + i) for i, s in enumerate(SESSIONS)]
        await held.let_go(*asked)
        assert held.stage.ran == [LONG, [30, 31, 32], [33, 34, 35], [36, 37]]


async def test_a_chunk_runs_between_two_batches() -> None:
    """Of two prompts that wait, one goes after the decodes, and one after those that follow it."""
    async with hold() as held:
        prompts = [await held.prefill("p", [40, 41]), await held.prefill("q", [50, 51])]
        decodes = [await held.decode("a", 30), await held.decode("b", 31)]
        held.stage.lets.release()
        assert {(await decode).status_code for decode in decodes} == {200}
        await _begun(held.stage, [40, 41])
        await held.let_go(await held.decode("a", 32, past_len=3), *prompts)
        assert held.stage.ran == [LONG, [30, 31], [40, 41], [32], [50, 51]]


class FailingStage(GatedStage):
    """Fails in the token 33, which has then been written to the state."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        output = super().run(step, state)
        if 33 in step.frame.token_ids():
            raise StageError("not finite")
        return output


async def test_a_session_that_fails_in_a_batch_fails_alone() -> None:
    """One is 500 and its state is gone; the seven others are answered, and go on."""
    async with hold(FailingStage(WHOLE)) as held:
        asked = [await held.decode(s, 30 + i) for i, s in enumerate(SESSIONS)]
        answers = await held.let_go(*asked)
        assert held.stage.batch_sizes == [8]
        for i, session in enumerate(SESSIONS):
            again = await held.hop.step(session, "decode", 3, [40])
            if session == "d":
                assert (answers[i].status_code, answers[i].json()["code"]) == (500, "stage_failed")
                assert (again.status_code, again.json()["reason"]) == (409, "unknown")
            else:
                assert answers[i].json()["token_id"] == after(session, 30 + i)
                assert again.json()["token_id"] == after(session, 30 + i, 40)


async def test_a_cancelled_step_that_waits_leaves_the_queue() -> None:
    """It is not run and its lease is free, while the chunk before it runs on; the others run."""
    tasks: dict[str, asyncio.Task[object] | None] = {}

    async def note(step: SeenStep) -> None:
        tasks[step.session] = asyncio.current_task()

    async with hold() as held:
        held.shard.recorder.before_step = note
        asked = {session: await held.decode(session, 30) for session in "abc"}
        task = tasks["b"]
        assert task is not None
        task.cancel()  # as the server does when it is to stop at once

        async def is_free() -> bool:
            return await held.leases() == 3

        await eventually(is_free, within_s=10)
        assert not held.chunk.done()
        _, refused, _ = await held.let_go(*asked.values())
        assert refused.status_code == 500
        assert held.stage.ran == [LONG, [30, 30]]


async def test_texts_are_those_of_each_alone() -> None:
    """Eight at once that shared forwards, on both shards, say what each of them says alone."""
    facts = [fake_facts(LayerSpan(*span), 4, VOCAB_SIZE) for span in ((0, 2), (2, 4))]
    stages = [SlowStage(one, delay_s=0.005) for one in facts]
    prompts = [[number + 1] * (number + 2) for number in range(8)]
    async with serve_mesh(stages, prefill_chunk_tokens=3) as mesh:
        answers = await asyncio.gather(*(mesh.chat(spell(p), max_tokens=20) for p in prompts))
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert [fake_text(prompt, 20) for prompt in prompts] == texts
        assert min(max(stage.batch_sizes) for stage in stages) > 1
        assert await mesh.usage() == [(0, 0), (0, 0)]
