"""What is lost in the middle of an answer costs time, never text; and the waiting has an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet.errors import CacheMiss, MeshError, QueueFull
from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import StageModel
from meshnet.model.loading import plan_stage
from meshnet.topology import LayerSpan
from meshnet.wire import problems
from services.head.probe import PROBE_PREFIX
from services.shard.app import create_app as create_shard
from tests.support.http import plain_client
from tests.support.mesh import (
    VOCAB_SIZE,
    Shard,
    fake_stages,
    fake_text,
    get_shard,
    serve_head,
    serve_mesh,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.serving import serve
from tests.support.steps import shard_client
from tests.support.streams import DONE, eventually, open_stream, read_stream, text_of
from tests.support.tiny import save_tiny

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]
N_TOKENS = 40
TEXT = fake_text(PROMPT, N_TOKENS)
SPANS = ((0, 2), (2, 4))


def _finish(events: list[str]) -> str | None:
    assert events[-1] == DONE
    return json.loads(events[-2])["choices"][0]["finish_reason"]


def _error(event: str) -> dict[str, Any]:
    return json.loads(event)["error"]


# A shard that goes and comes back.


@pytest.mark.parametrize("lost", [0, 1])
async def test_shard_killed_and_started_again_costs_no_text(*, lost: int) -> None:
    """A shard that dies after the third token and is started again: same text, same session."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(serve_mesh(fake_stages(*SPANS)))
        served = list(mesh.shards)
        events: list[str] = []
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 4:  # the role and three tokens
                    await served[lost].served.kill()
                    (stage,) = fake_stages(SPANS[lost])
                    again = serve_shard(stage, port=served[lost].served.port)
                    served.append(await stack.enter_async_context(again))
        assert (text_of(events), _finish(events)) == (TEXT, "length")
        first = served[2].recorder.steps[0]
        assert (first.mode, first.past_len) == ("prefill", 0)
        assert len({step.session for shard in served for step in shard.recorder.steps}) == 1
        for shard in (served[1 - lost], served[2]):
            assert (await get_shard(shard.url))["cache"]["sessions"] == 0
        # And the next request finds nothing amiss.
        following = await read_stream(mesh.client, spell(PROMPT), max_tokens=3)
        assert text_of(following) == fake_text(PROMPT, 3)


async def test_shard_that_comes_back_as_another_model_ends_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A shard restarted with another model is never asked for text: the stream ends in an error."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(serve_mesh(fake_stages(*SPANS), route_poll_s=60))
        old = mesh.shards[1]
        events: list[str] = []
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 4:
                    await old.served.kill()
                    facts = fake_facts(LayerSpan(2, 4), 4, VOCAB_SIZE)
                    other = FakeStage(replace(facts, fingerprint="fake-2-2-4"))
                    await stack.enter_async_context(serve_shard(other, port=old.served.port))
        assert TEXT.startswith(text_of(events[:-2]))
        assert _error(events[-2])["type"] == "server_error"
        assert events[-1] == DONE
        assert "Traceback" not in caplog.text


# A state that is lost while the shard lives.


def _at_step(
    shard: Shard, nth: int, disturb: Callable[[], Awaitable[None]]
) -> Callable[[SeenStep], Awaitable[None]]:
    """Disturbs before the shard sees its nth step, once."""
    done: list[int] = []

    async def before(step: SeenStep) -> None:
        del step
        if len(shard.recorder.steps) >= nth and not done:
            done.append(nth)
            await disturb()

    return before


async def _misses(shard: Shard, reason: str) -> float:
    async with plain_client() as client:
        lines = (await client.get(f"{shard.url}/metrics")).text.splitlines()
    name = f'meshnet_shard_refusals_total{{code="cache_miss",reason="{reason}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def _check_rebuilt_once(shards: Sequence[Shard], lost: int, nth: int) -> None:
    """The nth step of one shard missed; it alone was fed again, call by call, and then asked again.

    The calls have the lengths of the original ones, so that the state has the same bits.
    """
    steps = shards[lost].recorder.steps
    assert len({step.session for step in steps}) == 1
    before, missed, again = steps[: nth - 1], steps[nth - 1], steps[nth : 2 * nth - 1]
    assert [(s.past_len, s.shape) for s in again] == [(s.past_len, s.shape) for s in before]
    repeated = steps[2 * nth - 1]
    assert (missed.mode, missed.past_len) == (repeated.mode, repeated.past_len)
    assert missed.step == repeated.step
    for shard in (s for i, s in enumerate(shards) if i != lost):
        positions = [step.past_len for step in shard.recorder.steps]
        assert positions == sorted(set(positions))


@pytest.mark.parametrize("lost", [0, 1])
async def test_eviction_in_mid_stream_costs_no_text(*, lost: int) -> None:
    """Another session takes the only slot between two tokens: same text, one session id."""
    settings = shard_settings(cache_max_sessions=1)
    async with serve_mesh(fake_stages(*SPANS), settings=settings) as mesh:
        shard = mesh.shards[lost]

        async def intrude() -> None:
            async with shard_client(shard.url, SPANS[lost][0]) as hop:
                assert (await hop.step("intruder", "prefill", 0, [1, 2])).status_code == 200
            shard.recorder.steps.pop()

        shard.recorder.before_step = _at_step(shard, 5, intrude)
        events = await read_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS)
        assert (text_of(events), _finish(events)) == (TEXT, "length")
        assert await _misses(shard, "evicted") == 1
        _check_rebuilt_once(mesh.shards, lost, 5)


@pytest.mark.parametrize("lost", [0, 1])
async def test_expiry_in_mid_stream_costs_no_text(*, lost: int) -> None:
    """A session that passes its TTL between two tokens: same text, one session id."""
    now = [0.0]
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(
                serve_shard(stage, clock=(lambda: now[0]) if hop == lost else monotonic)
            )
            for hop, stage in enumerate(fake_stages(*SPANS))
        ]
        head = serve_head([shard.url for shard in shards])
        _, client = await stack.enter_async_context(head)
        shard = shards[lost]

        async def wait_long() -> None:
            now[0] += 601

        shard.recorder.before_step = _at_step(shard, 5, wait_long)
        events = await read_stream(client, spell(PROMPT), max_tokens=N_TOKENS)
        assert (text_of(events), _finish(events)) == (TEXT, "length")
        assert await _misses(shard, "expired") == 1
        _check_rebuilt_once(shards, lost, 5)


# A shard that does not come back.


async def test_shard_that_stays_away_ends_the_answer_with_an_error_in_time() -> None:
    """Within the recovery's time the stream ends by one error event and [DONE]; then 503."""
    async with serve_mesh(fake_stages(*SPANS), recovery_timeout_s=1.0) as mesh:
        events: list[str] = []
        killed_at = 0.0
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=500) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 4:
                    await mesh.shards[1].served.kill()
                    killed_at = perf_counter()
        waited_s = perf_counter() - killed_at
        assert waited_s < 1 + 5
        *chunks, error, done = events
        assert fake_text(PROMPT, 500).startswith(text_of(chunks))
        assert all(json.loads(c)["choices"][0]["finish_reason"] is None for c in chunks)
        assert (_error(error)["type"], _error(error)["code"]) == (
            "server_error",
            "shard_unavailable",
        )
        assert mesh.shards[1].url in _error(error)["message"]
        assert done == DONE
        assert (await get_shard(mesh.shards[0].url))["cache"]["sessions"] == 0
        _check_unavailable(await mesh.chat(spell(PROMPT)))


def _check_unavailable(response: httpx.Response) -> None:
    assert response.status_code == 503, response.text
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    assert (error["type"], error["code"]) == ("server_error", "shard_unavailable")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
async def test_shard_dead_before_the_first_token_is_a_plain_503(*, lost: int, stream: bool) -> None:
    """A shard that died since the head last looked: 503 in OpenAI's shape, not a stream."""
    async with serve_mesh(fake_stages(*SPANS), recovery_timeout_s=0.3, route_poll_s=60) as mesh:
        await mesh.chat(spell(PROMPT), max_tokens=1)
        await mesh.shards[lost].served.kill()
        _check_unavailable(await mesh.chat(spell(PROMPT), stream=stream))
        assert (await get_shard(mesh.shards[1 - lost].url))["cache"]["sessions"] == 0


@dataclass
class Refusing:
    """Stands before a shard's app and answers steps itself once `is_on`.

    Attributes:
        answer: What a step gets: the error as a problem, or silence where it is None.
        only: The modes it answers; None all.
        n_answered: How many steps it answered.
    """

    app: ASGIApp
    answer: MeshError | None
    only: frozenset[str] | None = None
    is_on: bool = True
    n_answered: int = 0
    sessions: set[str] = field(default_factory=set[str])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/forward" or not self._answers(scope):
            await self.app(scope, receive, send)
            return
        self.n_answered += 1
        while (await receive()).get("more_body", False):
            pass
        if self.answer is None:
            await receive()  # until the head gives up
            return
        problem = JSONResponse(
            problems.to_problem(self.answer),
            status_code=self.answer.status,
            media_type=problems.MEDIA_TYPE,
        )
        await problem(scope, receive, send)

    def _answers(self, scope: Scope) -> bool:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        session = headers[b"x-meshnet-session"].decode()
        if session.startswith(PROBE_PREFIX):
            return False
        self.sessions.add(session)
        mode = headers[b"x-meshnet-cache"].decode()
        return self.is_on and (self.only is None or mode in self.only)


ALWAYS_MISSES = CacheMiss("never heard of it", reason="unknown", held=0)
ALWAYS_FULL = QueueFull("too many steps are waiting")


async def _with_refusing_tail(
    stack: AsyncExitStack, answer: MeshError | None, **head: object
) -> tuple[Refusing, Shard, httpx.AsyncClient]:
    """A mesh whose tail refuses; the tail, the first hop, and a client of the head."""
    first_stage, tail_stage = fake_stages(*SPANS)
    first = await stack.enter_async_context(serve_shard(first_stage))
    refusing = Refusing(create_shard(shard_settings(), stage=tail_stage), answer)
    tail = await stack.enter_async_context(serve(refusing))
    _, client = await stack.enter_async_context(serve_head([first.url, tail.url], None, **head))
    return refusing, first, client


async def test_shard_that_always_misses_is_asked_a_bounded_number_of_times() -> None:
    """One token costs 1 + `max_rebuilds_per_token` attempts; then a plain 503, and no session."""
    async with AsyncExitStack() as stack:
        refusing, first, client = await _with_refusing_tail(
            stack, ALWAYS_MISSES, max_rebuilds_per_token=3
        )
        _check_unavailable(await client.post("/v1/chat/completions", json=_body(stream=True)))
        assert (refusing.n_answered, len(refusing.sessions)) == (4, 1)
        assert len(first.recorder.steps) == 1  # it lost nothing, and is not fed again
        assert (await get_shard(first.url))["cache"]["sessions"] == 0


async def test_shard_that_is_always_full_is_asked_for_a_bounded_time_ever_more_rarely() -> None:
    """Waiting for one's turn is bounded by time, with growing pauses; then a plain 503."""
    async with AsyncExitStack() as stack:
        refusing, first, client = await _with_refusing_tail(
            stack, ALWAYS_FULL, recovery_timeout_s=1.0
        )
        _check_unavailable(await client.post("/v1/chat/completions", json=_body(stream=True)))
        # Pauses of 0.05 s, doubled each time, and half as long at the least: 6 make 1.6 s.
        assert 3 <= refusing.n_answered <= 8
        assert len(first.recorder.steps) == 1
        assert (await get_shard(first.url))["cache"]["sessions"] == 0


async def test_shard_that_begins_to_refuse_ends_the_answer_with_an_error() -> None:
    """The same bound holds in mid-stream, where it ends by an error event and [DONE]."""
    async with AsyncExitStack() as stack:
        refusing, first, client = await _with_refusing_tail(
            stack, ALWAYS_MISSES, max_rebuilds_per_token=3
        )
        refusing.is_on = False
        events: list[str] = []
        async with open_stream(client, spell(PROMPT), max_tokens=500) as stream:
            async for event in stream:
                events.append(event)
                refusing.is_on = refusing.is_on or len(events) == 4
        assert refusing.n_answered == 4
        assert fake_text(PROMPT, 500).startswith(text_of(events[:-2]))
        assert _error(events[-2])["code"] == "shard_unavailable"
        assert events[-1] == DONE
        assert (await get_shard(first.url))["cache"]["sessions"] == 0


async def test_shard_that_forgets_before_every_token_costs_time_and_no_text() -> None:
    """A tail that loses the session before each new decode: fed again each time, same text."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        tail, lost = mesh.shards[1], set[int]()

        async def forget(step: SeenStep) -> None:
            if step.mode == "decode" and step.past_len not in lost:
                lost.add(step.past_len)
                async with shard_client(tail.url, SPANS[1][0]) as hop:
                    await hop.close(step.session)

        tail.recorder.before_step = forget
        text = text_of(await read_stream(mesh.client, spell(PROMPT), max_tokens=9))
        assert text == fake_text(PROMPT, 9)
        assert len(lost) == 8
        assert len(mesh.shards[0].recorder.steps) == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_shard_that_never_answers_is_given_up_in_time(*, stream: bool) -> None:
    """A silent shard costs a step's time-out beyond the recovery's time at most, then 503."""
    async with AsyncExitStack() as stack:
        refusing, first, client = await _with_refusing_tail(
            stack,
            None,
            step_timeout_s=0.4,
            recovery_timeout_s=0.5,
            max_rebuilds_per_token=100,
        )
        started_at = perf_counter()
        response = await client.post("/v1/chat/completions", json=_body(stream=stream))
        waited_s = perf_counter() - started_at
        _check_unavailable(response)
        assert waited_s < 0.4 + 0.5 + 0.4 + 5
        assert 1 <= refusing.n_answered <= 4
        assert (await get_shard(first.url))["cache"]["sessions"] == 0


async def test_client_that_leaves_during_recovery_ends_it() -> None:
    """Nobody waits for a lost shard on behalf of a client that has gone."""
    async with serve_mesh(fake_stages(*SPANS), recovery_timeout_s=60) as mesh:
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=500) as stream:
            n_events = 0
            async for _ in stream:
                n_events += 1
                if n_events == 4:
                    await mesh.shards[1].served.kill()
                    break
            await asyncio.sleep(0.3)  # into the waiting

        async def is_over() -> bool:
            metrics = (await mesh.client.get("/metrics")).text
            return 'meshnet_head_active{model="fake"} 0.0' in metrics and bool(
                mesh.shards[0].recorder.closed
            )

        await eventually(is_over, within_s=10)
        assert (await get_shard(mesh.shards[0].url))["cache"]["sessions"] == 0


def _body(*, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": spell(PROMPT)}]
    return {"model": "fake", "messages": messages, "max_tokens": 8, "stream": stream}


# Draws.


@pytest.fixture
def tiny_stages(tmp_path: Path) -> list[StageModel]:
    tiny = save_tiny(tmp_path, "llama", 4, tied=True)
    return [
        plan_stage(str(tiny.folder), LayerSpan(*span), "float32", n_threads=1).load()
        for span in SPANS
    ]


async def _drawn(stages: list[StageModel], *, seed: int, lost: int | None) -> str:
    """A text at temperature 1, with the state of hop number `lost` lost in the middle."""
    async with serve_mesh(stages) as mesh:
        if lost is not None:
            shard, start_layer = mesh.shards[lost], SPANS[lost][0]

            async def forget() -> None:
                async with shard_client(shard.url, start_layer) as hop:
                    await hop.close(shard.recorder.steps[0].session)
                shard.recorder.closed.clear()

            shard.recorder.before_step = _at_step(shard, 5, forget)
        events = await read_stream(
            mesh.client, spell(PROMPT), max_tokens=16, temperature=1, seed=seed
        )
        if lost is not None:
            _check_rebuilt_once(mesh.shards, lost, 5)
    assert _finish(events) == "length"
    return text_of(events)


async def test_seeded_draws_survive_a_lost_state(tiny_stages: list[StageModel]) -> None:
    """At temperature 1 a seed gives the same text with and without a state lost on either hop."""
    texts = [await _drawn(tiny_stages, seed=7, lost=lost) for lost in (None, 0, 1)]
    assert texts == [texts[0]] * 3
    assert await _drawn(tiny_stages, seed=8, lost=None) != texts[0]
