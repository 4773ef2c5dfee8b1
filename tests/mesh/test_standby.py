"""Several shards of the same layers: one takes over from another, and the text is the same."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import httpx
import pytest

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import StageModel
from meshnet.topology import LayerSpan, ShardFacts
from services.head.settings import HopSetting
from tests.support.flaky import Delivery, LinedShard, Reply, counting_stage, serve_lined
from tests.support.mesh import (
    CLUSTER_KEY,
    VOCAB_SIZE,
    Mesh,
    Shard,
    body_of,
    fake_stages,
    fake_text,
    get_shard,
    number_tokenizer,
    serve_head,
    serve_mesh,
    serve_shard,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.stages import slow_stages
from tests.support.steps import shard_client
from tests.support.streams import DONE, eventually, open_stream, read_stream, text_of

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8, 9]
CHUNK = 3
N_TOKENS = 8
N_CHUNKS = 2
TEXT = fake_text(PROMPT, N_TOKENS)
THREE = ((0, 1), (1, 3), (3, 4))
TWO = ((0, 2), (2, 4))
NEVER_S = 3600.0
"""Between the head's looks at the shards: a test in which it must find out by itself."""


async def _is_ready(client: httpx.AsyncClient) -> bool:
    """Every configured shard is proven."""
    return (await client.get("/readyz")).json()["state"] == "ready"


async def _serves(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def _answer(client: httpx.AsyncClient, *, stream: bool, n_tokens: int = N_TOKENS) -> str:
    if stream:
        return text_of(await read_stream(client, spell(PROMPT), max_tokens=n_tokens))
    body = body_of(spell(PROMPT), max_tokens=n_tokens)
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def _check_unavailable(response: httpx.Response) -> str:
    """A 503 that says when to come again; the sentence in it."""
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "shard_unavailable")
    return error["message"]


async def _sessions(shard: Shard) -> int:
    return (await get_shard(shard.url))["cache"]["sessions"]


async def _hop_views(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    return (await client.get("/v1/cluster")).json()["hops"]


async def _serving(client: httpx.AsyncClient) -> list[int | None]:
    return [hop["serving"] for hop in await _hop_views(client)]


def _kill_before(victim: Shard, by: Shard, nth: int) -> None:
    """Kill `victim` when `by` is asked for its nth step."""

    async def kill(step: SeenStep) -> None:
        del step
        if len(by.recorder.steps) == nth:
            await victim.served.kill()

    by.recorder.before_step = kill


def _check_in_order(shard: Shard) -> None:
    """The shard was fed nothing twice."""
    positions = [step.past_len for step in shard.recorder.steps]
    assert positions == sorted(set(positions))


def _check_not_fed_again(shard: Shard) -> None:
    """The shard went only on; a step may have come twice, where the limit is short."""
    positions = [step.past_len for step in shard.recorder.steps]
    assert positions == sorted(positions)


# A shard that is killed.


@pytest.mark.parametrize(
    ("nth", "stream"),
    [
        pytest.param(2, True, id="prefill-stream"),
        pytest.param(5, True, id="decode-stream"),
        pytest.param(5, False, id="decode-plain"),
    ],
)
@pytest.mark.parametrize("lost", [0, 1, 2], ids=["first", "middle", "last"])
async def test_standby_takes_over_from_a_killed_shard(*, lost: int, nth: int, stream: bool) -> None:
    """Killed before its nth step, at any place: the standby is fed alone, and the text is the same.

    Nobody waits for the dead one: the head is told to be patient, and is quick.
    """
    async with serve_mesh(
        fake_stages(*THREE, THREE[lost]),
        prefill_chunk_tokens=CHUNK,
        route_poll_s=NEVER_S,
        recovery_timeout_s=60,
    ) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        victim, standby = mesh.shards[lost], mesh.shards[3]
        others = [shard for shard in mesh.shards[:3] if shard is not victim]
        _kill_before(victim, others[0], nth if lost else nth - 1)
        started_at = perf_counter()
        assert await _answer(mesh.client, stream=stream) == TEXT
        assert perf_counter() - started_at < 10
        taken_over = standby.recorder.steps[0]
        assert (taken_over.mode, taken_over.past_len) == ("prefill", 0)
        for shard in (*others, standby):
            _check_in_order(shard)
            assert await _sessions(shard) == 0
        assert len({s.session for shard in mesh.shards for s in shard.recorder.steps}) == 1
        n_asked = len(victim.recorder.steps)
        # The chunks of a prompt are on their way together.
        assert n_asked == nth - 1 if nth > N_CHUNKS else n_asked <= N_CHUNKS


async def test_new_requests_go_to_the_standby_at_once() -> None:
    """With the primary dead before a request comes, the request is served, and none waits."""
    async with serve_mesh(fake_stages(*TWO, TWO[0]), route_poll_s=NEVER_S) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        await mesh.shards[0].served.kill()
        for _ in range(3):
            assert await _answer(mesh.client, stream=False) == TEXT
        assert {step.past_len for step in mesh.shards[2].recorder.steps} == {0, *range(5, 12)}


async def test_killed_primary_that_comes_back_is_used_again() -> None:
    """A primary set aside, and started again on its port, is proven and takes requests again."""
    async with serve_mesh(fake_stages(*TWO, TWO[0])) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        primary, _, standby = mesh.shards
        await primary.served.kill()
        assert await _answer(mesh.client, stream=True) == TEXT
        assert not await _is_ready(mesh.client)
        (stage,) = fake_stages(TWO[0])
        async with serve_shard(stage, port=primary.served.port) as again:
            await eventually(lambda: _is_ready(mesh.client), within_s=20)
            n_before = len(standby.recorder.steps)
            assert await _answer(mesh.client, stream=True) == TEXT
            assert len(again.recorder.steps) == N_TOKENS
            assert len(standby.recorder.steps) == n_before


async def test_second_standby_takes_over_from_the_first() -> None:
    """Two shards of a place die one after the other: the third goes on, with the same text."""
    async with serve_mesh(
        fake_stages(*TWO, TWO[1], TWO[1]), route_poll_s=NEVER_S, recovery_timeout_s=60
    ) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        first, tail, standby, last = mesh.shards

        async def kill(step: SeenStep) -> None:
            if step.past_len in {6, 9}:
                served_by = {6: tail, 9: standby if standby.recorder.steps else last}
                await served_by[step.past_len].served.kill()

        first.recorder.before_step = kill
        assert await _answer(mesh.client, stream=True) == TEXT
        _check_in_order(first)
        assert standby.recorder.steps != []
        assert last.recorder.steps != []


async def test_standby_that_dies_too_ends_the_answer_in_time_and_then_503() -> None:
    """Nobody left at a place: one error event and [DONE] within the bound; then 503."""
    async with serve_mesh(
        fake_stages(*TWO, TWO[1]), route_poll_s=NEVER_S, recovery_timeout_s=1.0
    ) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        first, tail, standby = mesh.shards
        killed_at = 0.0
        events: list[str] = []
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=400) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 3:
                    await tail.served.kill()
                if len(events) == 6:
                    await standby.served.kill()
                    killed_at = perf_counter()
        assert perf_counter() - killed_at < 1 + 5
        *chunks, error, done = events
        assert fake_text(PROMPT, 400).startswith(text_of(chunks))
        assert json.loads(error)["error"]["code"] == "shard_unavailable"
        assert done == DONE
        assert len(standby.recorder.steps) > 1
        assert await _sessions(first) == 0
        for stream_ in (False, True):
            body = body_of(spell(PROMPT), stream=stream_)
            _check_unavailable(await mesh.client.post("/v1/chat/completions", json=body))
        assert await _serving(mesh.client) == [0, None, None]


# A shard that is stuck.


@dataclass
class Stuck:
    """The primary behind a line, and who else there is."""

    primary: LinedShard
    other: Shard
    standby: Shard
    client: httpx.AsyncClient

    def get_stuck(self, *, wholly: bool, nth: int = 4) -> list[Delivery]:
        """From the nth step on the primary takes steps and says nothing; what it was sent then.

        `wholly`: it says nothing to anything else any more either.
        """
        unanswered: list[Delivery] = []

        async def silence(request: Delivery) -> None:
            await request.until_caller_leaves()

        async def stick(step: Delivery) -> Reply | None:
            if step.n < nth:
                return await step.deliver()
            unanswered.append(step)
            if wholly:
                self.primary.line.on_other = silence
            return await silence(step)

        self.primary.line.on_step = stick
        return unanswered


@asynccontextmanager
async def _stuck() -> AsyncGenerator[Stuck]:
    async with (
        serve_lined(counting_stage(0, 2)) as primary,
        serve_mesh(fake_stages(TWO[1], TWO[0])) as rest,
        serve_head(
            [primary.url, rest.shards[0].url, rest.shards[1].url],
            route_poll_s=0.2,
            min_step_timeout_s=0.2,
            step_timeout_s=1.0,
            probe_timeout_s=0.2,
            recovery_timeout_s=60,
        ) as (_, client),
    ):
        await eventually(lambda: _is_ready(client), within_s=10)
        yield Stuck(primary, rest.shards[0], rest.shards[1], client)


@pytest.mark.parametrize(
    ("nth", "stream"),
    [pytest.param(1, False, id="prefill-plain"), pytest.param(4, True, id="decode-stream")],
)
async def test_standby_takes_over_from_a_shard_that_says_nothing_at_all(
    *, nth: int, stream: bool
) -> None:
    """A shard that takes a step and falls silent is left after one step limit."""
    async with _stuck() as mesh:
        unanswered = mesh.get_stuck(wholly=True, nth=nth)
        started_at = perf_counter()
        assert await _answer(mesh.client, stream=stream) == TEXT
        assert perf_counter() - started_at < 1 + 5
        assert len(unanswered) == 1
        for shard in (mesh.other, mesh.standby):
            _check_not_fed_again(shard)
            assert await _sessions(shard) == 0


@pytest.mark.parametrize("nth", [1, 4], ids=["prefill", "decode"])
async def test_standby_takes_over_from_a_shard_that_computes_nothing_any_more(*, nth: int) -> None:
    """A shard that answers no step, but says that it is well, is left all the same."""
    async with _stuck() as mesh:
        unanswered = mesh.get_stuck(wholly=False, nth=nth)
        started_at = perf_counter()
        assert await _answer(mesh.client, stream=True) == TEXT
        assert perf_counter() - started_at < 10
        assert len(unanswered) <= 2
        _check_not_fed_again(mesh.other)


async def test_shard_that_was_left_is_proven_anew_before_it_is_used() -> None:
    """What was left for answering no step gets no new request until a token went through it."""
    async with _stuck() as mesh:
        unanswered = mesh.get_stuck(wholly=False)

        async def silent_probe(request: Delivery) -> Reply | None:
            if request.is_probe:
                await request.until_caller_leaves()
                return None
            return await request.deliver()

        mesh.primary.line.on_other = silent_probe
        assert await _answer(mesh.client, stream=True) == TEXT
        n_before = len(unanswered)
        assert await _answer(mesh.client, stream=True) == TEXT
        assert len(unanswered) == n_before


async def test_session_is_closed_at_the_shard_that_was_left() -> None:
    """A shard that is left holds the session no longer, and late steps of it begin nothing."""
    async with _stuck() as mesh:
        unanswered = mesh.get_stuck(wholly=False)
        assert await _answer(mesh.client, stream=True) == TEXT
        primary = mesh.primary.shard

        async def is_closed() -> bool:
            return await _sessions(primary) == 0

        await eventually(is_closed, within_s=5)
        for step in unanswered:
            late = await step.deliver()
            assert late.status == 409
            assert b"stale_epoch" in late.body
        assert await _sessions(primary) == 0
        assert not any(await _serving(mesh.client))


async def test_faults_at_one_hop_do_not_count_against_another() -> None:
    """A shard that drops one connection keeps its session, whatever another hop lost before."""
    async with (
        serve_lined(counting_stage(*TWO[0])) as first,
        serve_lined(counting_stage(*TWO[1])) as tail,
        serve_lined(counting_stage(*TWO[1])) as standby,
        serve_head([first.url, tail.url, standby.url]) as (_, client),
    ):

        async def forget(step: Delivery) -> Reply | None:
            if step.n == 4:
                async with shard_client(first.url) as hop:
                    await hop.close(first.shard.recorder.steps[-1].session)
            return await step.deliver()

        async def drop(step: Delivery) -> Reply | None:
            reply = await step.deliver()
            return None if step.n == 4 else reply

        await eventually(lambda: _is_ready(client), within_s=10)
        first.line.on_step, tail.line.on_step = forget, drop
        assert await _answer(client, stream=True) == TEXT
        assert tail.line.n_steps == N_TOKENS + 1
        assert standby.line.n_steps == 0


# A standby that is none.


BASE = fake_facts(LayerSpan(*TWO[0]), 4, VOCAB_SIZE)
STRANGERS = [
    pytest.param(BASE, replace(BASE, revision="fake-2"), ("fake-1", "fake-2"), id="revision"),
    pytest.param(
        BASE,
        replace(BASE, fingerprint="other", layer_digests=("fake-0", "strange")),
        ("fake-1", "strange"),
        id="layer-digests",
    ),
    # Where layers cannot be compared, the fingerprint of the whole span can.
    pytest.param(
        replace(BASE, layer_digests=()),
        replace(BASE, fingerprint="other", layer_digests=()),
        (BASE.fingerprint, "other"),
        id="fingerprint",
    ),
    pytest.param(
        BASE,
        replace(BASE, fingerprint="other", layer_digests=()),
        (BASE.fingerprint, "other"),
        id="fingerprint-only-one-digests",
    ),
]


@dataclass
class Fleet:
    """Two shards that make a route, and one of the first layers of another model."""

    primary: Shard
    stranger: Shard
    client: httpx.AsyncClient


@asynccontextmanager
async def _fleet(
    ours: ShardFacts, theirs: ShardFacts, *, stranger_at: int = 2
) -> AsyncGenerator[Fleet]:
    stages: list[StageModel] = [FakeStage(ours), *fake_stages(TWO[1])]
    stages.insert(stranger_at, FakeStage(theirs))
    async with serve_mesh(stages, recovery_timeout_s=0.5, route_poll_s=0.1) as mesh:
        await eventually(lambda: _serves(mesh.client), within_s=10)
        yield Fleet(mesh.shards[0], mesh.shards[stranger_at], mesh.client)


@pytest.mark.parametrize("stranger_at", [1, 2])
@pytest.mark.parametrize(("ours", "theirs", "values"), STRANGERS)
async def test_standby_of_another_model_is_refused_naming_both_values(
    ours: ShardFacts, theirs: ShardFacts, values: tuple[str, str], *, stranger_at: int
) -> None:
    """The head is degraded, and says whom it refuses, and over which two values."""
    async with _fleet(ours, theirs, stranger_at=stranger_at) as fleet:

        async def is_told() -> bool:
            readiness = (await fleet.client.get("/readyz")).json()
            view = (await _hop_views(fleet.client))[stranger_at]
            told = [readiness["reason"] or "", view["reason"] or ""]
            return (
                (readiness["state"], view["state"]) == ("degraded", "refused")
                and fleet.stranger.url in readiness["reason"]
                and all(value in reason for value in values for reason in told)
            )

        await eventually(is_told, within_s=10)


async def test_refusal_is_told_also_while_the_shards_are_being_asked() -> None:
    """A poll that waits for a slow shard leaves another one's refusal as it was told before."""
    stranger = FakeStage(replace(BASE, revision="fake-2"))

    async def slowly(request: Delivery) -> Reply:
        if request.path == "/v1/shard":
            await asyncio.sleep(0.3)
        return await request.deliver()

    async with (
        serve_mesh([*fake_stages(TWO[0]), stranger]) as rest,
        serve_lined(counting_stage(*TWO[1])) as tail,
        serve_head([rest.shards[0].url, rest.shards[1].url, tail.url], route_poll_s=0.1) as (
            _,
            client,
        ),
    ):

        async def is_refused() -> bool:
            return (await _hop_views(client))[1]["state"] == "refused"

        await eventually(lambda: _serves(client), within_s=10)
        await eventually(is_refused, within_s=10)
        tail.line.on_other = slowly
        for _ in range(25):
            assert await is_refused()
            assert "fake-2" in (await client.get("/readyz")).json()["reason"]
            await asyncio.sleep(0.03)


@pytest.mark.parametrize(("ours", "theirs", "values"), STRANGERS)
async def test_standby_of_another_model_takes_nothing_over(
    ours: ShardFacts, theirs: ShardFacts, values: tuple[str, str]
) -> None:
    """The primary's death ends the answer in an error; the other model adds no token to it."""
    del values
    async with _fleet(ours, theirs) as fleet:
        events: list[str] = []
        async with open_stream(fleet.client, spell(PROMPT), max_tokens=100) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 4:
                    await fleet.primary.served.kill()
        assert '"shard_unavailable"' in events[-2]
        assert fleet.stranger.recorder.steps == []


@pytest.mark.parametrize(("ours", "theirs", "values"), STRANGERS)
async def test_standby_of_another_model_gets_no_new_request_either(
    ours: ShardFacts, theirs: ShardFacts, values: tuple[str, str]
) -> None:
    """With the primary dead there is no route: what was refused beside it is still refused.

    Also where it stands before the tail, and could say what the model is.
    """
    del values
    async with _fleet(ours, theirs, stranger_at=1) as fleet:
        await fleet.primary.served.kill()

        async def is_noticed() -> bool:
            return (await _hop_views(fleet.client))[0]["state"] == "unavailable"

        await eventually(is_noticed, within_s=10)
        await asyncio.sleep(0.3)  # some polls, in which it could be proven
        body = body_of(spell(PROMPT))
        _check_unavailable(await fleet.client.post("/v1/chat/completions", json=body))
        assert fleet.stranger.recorder.steps == []


async def test_one_shard_under_two_urls_is_refused() -> None:
    """A shard is not its own standby: the second URL of one process is refused by its boot id."""
    async with serve_mesh(fake_stages(*TWO)) as mesh:
        first, tail = mesh.shards
        again = f"http://localhost:{first.served.port}"
        async with serve_head([first.url, tail.url, again]) as (_, client):

            async def is_refused() -> bool:
                return (await _hop_views(client))[2]["state"] == "refused"

            await eventually(is_refused, within_s=10)
            await eventually(lambda: _serves(client), within_s=10)
            view = (await _hop_views(client))[2]
            assert f"{again} is the same process as {first.url}" in view["reason"]
            assert (await client.get("/readyz")).json()["state"] == "degraded"
            assert await _answer(client, stream=False) == TEXT


# Who serves what.


async def _spread(shards: Sequence[Shard]) -> list[int]:
    return [len({step.session for step in shard.recorder.steps}) for shard in shards]


async def test_streams_that_begin_one_after_the_other_are_spread() -> None:
    """Of two shards of the same layers each new session goes to the one that serves fewer."""
    stages = slow_stages(*TWO, TWO[0], delay_s=0.01)
    async with serve_mesh(stages, route_poll_s=NEVER_S) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        running: list[asyncio.Task[str]] = []
        for n in range(6):
            running.append(asyncio.create_task(_answer(mesh.client, stream=True, n_tokens=20)))

            async def has_begun(n: int = n) -> bool:
                return len({s.session for s in mesh.shards[1].recorder.steps}) == n + 1

            await eventually(has_begun, within_s=10)
        assert await asyncio.gather(*running) == [fake_text(PROMPT, 20)] * 6
        assert await _spread([mesh.shards[0], mesh.shards[2]]) == [3, 3]


async def test_streams_that_begin_at_once_are_spread() -> None:
    """Requests that are tokenised in the same moment do not all go to the same shard."""
    tokenizer = number_tokenizer()
    encode, all_wait = tokenizer.encode_chat, threading.Barrier(4)

    def encode_together(messages: Sequence[Mapping[str, object]], **_: object) -> list[int]:
        all_wait.wait(timeout=10)
        return encode(messages)

    tokenizer.encode_chat = encode_together
    stages = slow_stages(*TWO, TWO[0], delay_s=0.01)
    async with serve_mesh(stages, tokenizer, route_poll_s=NEVER_S) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        texts = await asyncio.gather(*(_answer(mesh.client, stream=True) for _ in range(4)))
        assert texts == [TEXT] * 4
        assert await _spread([mesh.shards[0], mesh.shards[2]]) == [2, 2]


async def _is_idle(client: httpx.AsyncClient) -> bool:
    return 'meshnet_head_active{model="fake"} 0.0' in (await client.get("/metrics")).text


async def test_request_that_was_refused_counts_for_no_shard() -> None:
    """A 503 for want of a place leaves no shard looking busy."""
    stages = slow_stages(*TWO, delay_s=0.01)
    async with serve_mesh(stages, max_concurrent_requests=1, max_queued_requests=0) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=100) as stream:
            await anext(stream)
            for streamed in (False, True):
                assert (await mesh.chat(spell(PROMPT), stream=streamed)).status_code == 503
        await eventually(lambda: _is_idle(mesh.client), within_s=10)
        assert await _serving(mesh.client) == [0, 0]


async def test_client_that_left_counts_for_no_shard() -> None:
    """Clients that leave before, at and after their first token leave no shard looking busy."""
    async with serve_mesh(slow_stages(*TWO, delay_s=0.01)) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        for wait_s in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1):
            asked = asyncio.create_task(mesh.chat(spell(PROMPT), max_tokens=400))
            await asyncio.sleep(wait_s)
            asked.cancel()
            await asyncio.wait({asked})
        await asyncio.sleep(0.1)
        await eventually(lambda: _is_idle(mesh.client), within_s=10)
        assert await _serving(mesh.client) == [0, 0]


def _pin(mesh: Mesh, *hops: int) -> dict[str, str]:
    pinned = [HopSetting(endpoint=mesh.shards[i].url).model_dump(exclude_none=True) for i in hops]
    return {
        "authorization": f"Bearer {CLUSTER_KEY}",
        "X-Meshnet-Route": json.dumps(pinned),
    }


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_pinned_route_moves_to_no_other_shard(*, stream: bool) -> None:
    """A caller who names the shards gets those or an error, however many others there are."""
    async with serve_mesh(
        fake_stages(*TWO, TWO[0]), recovery_timeout_s=0.5, route_poll_s=NEVER_S
    ) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        first, tail, standby = mesh.shards
        _kill_before(first, tail, 3)
        body = body_of(spell(PROMPT), stream=stream)
        headers = _pin(mesh, 0, 1)
        response = await mesh.client.post("/v1/chat/completions", json=body, headers=headers)
        if stream:
            assert '"code":"shard_unavailable"' in response.text
        else:
            _check_unavailable(response)
        assert standby.recorder.steps == []


async def test_pinned_route_over_the_standby_uses_the_standby() -> None:
    """A standby can be named as well as a primary."""
    async with serve_mesh(fake_stages(*TWO, TWO[0])) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        response = await mesh.client.post(
            "/v1/chat/completions",
            json=body_of(spell(PROMPT), max_tokens=N_TOKENS),
            headers=_pin(mesh, 2, 1),
        )
        assert response.json()["choices"][0]["message"]["content"] == TEXT
        assert mesh.shards[0].recorder.steps == []
