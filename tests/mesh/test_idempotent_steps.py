"""A step is applied once, however often it, or its answer, goes over the line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import httpx
import pytest
import pytest_asyncio

from meshnet.model.fake_stage import fake_facts, next_token
from meshnet.topology import LayerSpan
from tests.support.flaky import Delivery, LinedShard, OnRequest, Reply, counting_stage, serve_lined
from tests.support.mesh import (
    VOCAB_SIZE,
    Shard,
    fake_text,
    get_shard,
    serve_head,
    serve_shard,
    spell,
)
from tests.support.stages import SlowStage
from tests.support.steps import ShardClient, shard_client
from tests.support.streams import eventually, read_stream, text_of

# One loop and one mesh for the whole file.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

SPANS = ((0, 1), (1, 3), (3, 4))
PROMPT = [5, 6, 7, 8, 9]
CHUNK = 3
N_TOKENS = 6
TEXT = fake_text(PROMPT, N_TOKENS)
RUNS = [(0, 3), (3, 2), (5, 1), (6, 1), (7, 1), (8, 1), (9, 1)]
"""Position and length of each step of one answer: a prompt in two chunks, then token by token."""

HOPS = pytest.mark.parametrize("hop", [0, 1, 2], ids=["first", "middle", "last"])
STEPS = pytest.mark.parametrize("nth", [1, 2, 4], ids=["prefill", "next-chunk", "decode"])
PHASES = pytest.mark.parametrize("nth", [2, 4], ids=["prefill", "decode"])


@dataclass
class Net:
    """A mesh of three shards behind lines."""

    shards: list[LinedShard]
    client: httpx.AsyncClient

    async def text(self) -> str:
        """A streamed answer's text."""
        return text_of(await read_stream(self.client, spell(PROMPT), max_tokens=N_TOKENS))

    async def sessions(self) -> list[int]:
        """What every hop holds."""
        return [(await get_shard(shard.url))["cache"]["sessions"] for shard in self.shards]

    async def check_once(self) -> None:
        """Every hop ran every step of the answer once and in order, and holds nothing."""
        assert [shard.stage.runs for shard in self.shards] == [RUNS] * len(SPANS)
        assert await self.sessions() == [0, 0, 0]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["post", "stream"])
async def served(request: pytest.FixtureRequest) -> AsyncGenerator[Net]:
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(serve_lined(counting_stage(*span))) for span in SPANS
        ]
        head = serve_head(
            [shard.url for shard in shards],
            hop_transport=request.param,
            prefill_chunk_tokens=CHUNK,
            min_step_timeout_s=0.2,
            recovery_timeout_s=20.0,
        )
        _, client = await stack.enter_async_context(head)
        net = Net(shards, client)
        await eventually(lambda: _is_ready(client), within_s=10)
        yield net
        for shard in shards:
            shard.shard.served.server.should_exit = True


async def _is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


@pytest.fixture
def net(served: Net) -> Net:
    for shard in served.shards:
        shard.reset()
    return served


@dataclass
class Once:
    """Does something else with the nth step, and delivers all others as they are."""

    nth: int
    fault: OnRequest
    hits: list[Delivery] = field(default_factory=list[Delivery])

    async def __call__(self, step: Delivery) -> Reply | None:
        if step.n != self.nth:
            return await step.deliver()
        self.hits.append(step)
        return await self.fault(step)


async def _lose_answer(step: Delivery) -> None:
    await step.deliver()


async def _lose_step(step: Delivery) -> None:
    del step


async def _silent_before(step: Delivery) -> None:
    await step.until_caller_leaves()


async def _silent_after(step: Delivery) -> None:
    await step.deliver()
    await step.until_caller_leaves()


async def _twice_in_turn(step: Delivery) -> Reply:
    await step.deliver()
    return await step.deliver()


async def _twice_at_once(step: Delivery) -> Reply:
    first, second = await asyncio.gather(step.deliver(), step.deliver())
    assert 200 in {first.status, second.status}  # the other one was busy, or the same again
    return second


async def _byte_by_byte(step: Delivery) -> Reply:
    return replace(await step.deliver(), slowly=True)


FAULTS = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(_lose_answer, id="answer-lost"),
        pytest.param(_lose_step, id="step-lost"),
        pytest.param(_twice_in_turn, id="twice-in-turn"),
        pytest.param(_twice_at_once, id="twice-at-once"),
        pytest.param(_silent_before, id="half-open-before"),
        pytest.param(_silent_after, id="half-open-after"),
        pytest.param(_byte_by_byte, id="byte-by-byte"),
    ],
)


@FAULTS
@HOPS
@PHASES
async def test_disturbed_step_is_applied_once(
    net: Net, fault: OnRequest, hop: int, nth: int
) -> None:
    """Whatever happens to one step on its way: same text, each step run once, nothing held."""
    once = net.shards[hop].line.on_step = Once(nth, fault)
    assert await net.text() == TEXT
    assert len(once.hits) == 1
    await net.check_once()


async def test_lost_answers_of_all_steps_on_all_hops_cost_no_text(net: Net) -> None:
    """Every answer lost once: each step is asked for twice, and run once."""

    async def every_other(step: Delivery) -> Reply | None:
        reply = await step.deliver()
        return reply if step.n % 2 == 0 else None

    for shard in net.shards:
        shard.line.on_step = every_other
    assert await net.text() == TEXT
    assert [shard.line.n_steps for shard in net.shards] == [2 * len(RUNS)] * 3
    await net.check_once()


async def test_half_open_connection_is_left_after_the_step_limit(net: Net) -> None:
    """A connection that says nothing costs the step's limit, and not the longest one."""
    net.shards[1].line.on_step = Once(4, _silent_before)
    started_at = perf_counter()
    assert await net.text() == TEXT
    assert perf_counter() - started_at < 5  # the limit is 0.2 s here, the longest one 120 s


async def test_other_sessions_go_on_while_one_connection_is_silent(net: Net) -> None:
    """A half-open connection of one session delays no other one."""
    silent = Once(4, _silent_before)
    net.shards[1].line.on_step = silent
    held = asyncio.create_task(net.text())

    async def is_silent() -> bool:
        return bool(silent.hits)

    await eventually(is_silent, within_s=10)
    assert await net.text() == TEXT
    assert not held.done()
    assert await held == TEXT


@HOPS
async def test_answer_lost_while_a_hop_is_fed_again_costs_no_text(net: Net, hop: int) -> None:
    """A hop that lost the session, and then an answer while it is fed again: same text."""
    shard = net.shards[hop]

    async def forget(step: Delivery) -> Reply | None:
        if step.n == 4:
            await _forget_all(shard.shard)
        reply = await step.deliver()
        return None if step.n == 6 else reply  # 4 misses, 5 and 6 feed the prompt again

    shard.line.on_step = forget
    assert await net.text() == TEXT
    assert await net.sessions() == [0, 0, 0]
    again = [*RUNS[:3], *RUNS[:3], *RUNS[3:]]
    expected = [again if n == hop else RUNS for n in range(3)]
    assert [shard.stage.runs for shard in net.shards] == expected


async def _forget_all(shard: Shard) -> None:
    """Free the session of the last step, as a shard that needs room does."""
    async with shard_client(shard.url) as hop:
        await hop.close(shard.recorder.steps[-1].session)
    shard.recorder.closed.clear()


# Late copies.


@HOPS
@STEPS
async def test_late_copy_of_a_step_changes_nothing(net: Net, hop: int, nth: int) -> None:
    """A copy that comes after the next step is refused, and the session goes on as it was."""
    old: list[Delivery] = []
    late: list[Reply] = []

    async def delay_a_copy(step: Delivery) -> Reply:
        if step.n == nth:
            old.append(step)
        reply = await step.deliver()
        if step.n == nth + 1:
            late.append(await old[0].deliver())
        return reply

    net.shards[hop].line.on_step = delay_a_copy
    assert await net.text() == TEXT
    assert [reply.status for reply in late] == [409]
    await net.check_once()


@HOPS
@STEPS
async def test_late_copy_after_the_end_is_refused(net: Net, hop: int, nth: int) -> None:
    """A copy that comes after the session was closed begins no session, at any position."""
    once = net.shards[hop].line.on_step = Once(nth, lambda step: step.deliver())
    assert await net.text() == TEXT
    (old,) = once.hits
    late = await old.deliver()
    assert late.status == 409
    assert b"stale_epoch" in late.body
    await net.check_once()


@HOPS
@STEPS
async def test_late_copy_from_before_a_loss_is_refused(net: Net, hop: int, nth: int) -> None:
    """A copy from before the hop was fed again is of an old epoch, and changes nothing."""
    shard = net.shards[hop]
    old: list[Delivery] = []
    late: list[Reply] = []

    async def lose_then_delay(step: Delivery) -> Reply:
        if step.n == nth:
            old.append(step)
        if step.n == 5:
            await _forget_all(shard.shard)
        reply = await step.deliver()
        if step.n == 8:  # 5 misses, 6 to 8 feed the session again
            late.append(await old[0].deliver())
        return reply

    shard.line.on_step = lose_then_delay
    assert await net.text() == TEXT
    (reply,) = late
    assert reply.status == 409
    assert b"stale_epoch" in reply.body
    assert len(shard.stage.runs) == len(RUNS) + 4
    assert await net.sessions() == [0, 0, 0]


# Steps sent by hand, to one shard that runs the whole model.


@dataclass
class Direct:
    """A caller of one shard, and what that ran."""

    hop: ShardClient
    shard: LinedShard

    async def step(
        self, name: str | None, epoch: int | None, past_len: int, ids: list[int], session: str = "s"
    ) -> httpx.Response:
        """A step with this id and epoch, or without."""
        changed = {
            "X-Meshnet-Step": name,
            "X-Meshnet-Epoch": None if epoch is None else str(epoch),
        }
        mode = "decode" if past_len else "prefill"
        return await self.hop.step(session, mode, past_len, ids, changed={**changed})

    async def close(self, epoch: int | None, session: str = "s") -> httpx.Response:
        """Free the session in an epoch, or in none."""
        headers = {} if epoch is None else {"X-Meshnet-Epoch": str(epoch)}
        return await self.hop.http.delete(f"/v1/sessions/{session}", headers=headers)

    async def held(self) -> int:
        """How many sessions there are."""
        return (await self.hop.cache())["sessions"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def direct_shard() -> AsyncGenerator[Direct]:
    async with serve_lined(counting_stage(0, 4)) as shard, shard_client(shard.url) as hop:
        yield Direct(hop, shard)


@pytest_asyncio.fixture(loop_scope="module")
async def direct(direct_shard: Direct) -> Direct:
    await direct_shard.close(None)
    direct_shard.shard.reset()
    return direct_shard


EPOCHS = iter(range(10, 10**6, 10))
"""A closed session remembers its epochs: each test's is newer than those of the one before."""


async def _begin(direct: Direct) -> int:
    """Begin session `s` with [5, 6, 7] by step `a`, in an epoch newer than any before; which."""
    epoch = next(EPOCHS)
    begun = await direct.step("a", epoch, 0, [5, 6, 7])
    assert _token(begun) == next_token([5, 6, 7], VOCAB_SIZE)
    return epoch


def _token(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["token_id"]


def _problem(response: httpx.Response, status: int, code: str, **members: object) -> dict[str, Any]:
    problem = response.json()
    expected = {"code": code, **members}
    assert response.status_code == status, response.text
    assert {key: problem.get(key) for key in expected} == expected
    return problem


async def test_repeat_is_answered_from_what_is_stored(direct: Direct) -> None:
    """The last step again: the same answer, with no time taken, and the stage runs once."""
    epoch = await _begin(direct)
    for _ in range(3):
        again = await direct.step("a", epoch, 0, [5, 6, 7])
        assert _token(again) == next_token([5, 6, 7], VOCAB_SIZE)
        assert again.headers["X-Meshnet-Compute-Ms"] == "0.000"
    assert direct.shard.stage.runs == [(0, 3)]
    following = await direct.step("b", epoch, 3, [1])
    assert _token(following) == next_token([5, 6, 7, 1], VOCAB_SIZE)


@pytest.mark.parametrize(
    ("past_len", "ids"),
    [
        pytest.param(0, [5, 6, 7], id="begins-again"),
        pytest.param(2, [1], id="behind"),
        pytest.param(4, [1], id="ahead"),
    ],
)
async def test_guarded_step_that_does_not_fit_is_told_what_is_held(
    direct: Direct, past_len: int, ids: list[int]
) -> None:
    """In its own epoch a guarded step at another position changes nothing, and hears the length."""
    epoch = await _begin(direct)
    missed = await direct.step("other", epoch, past_len, ids)
    _problem(missed, 409, "cache_miss", reason="length_mismatch", held=3)
    following = await direct.step("b", epoch, 3, [1])
    assert _token(following) == next_token([5, 6, 7, 1], VOCAB_SIZE)


@pytest.mark.parametrize(("name", "guarded"), [(None, True), ("x", False), (None, False)])
async def test_unguarded_step_that_does_not_fit_drops_the_state(
    direct: Direct, name: str | None, *, guarded: bool
) -> None:
    """Without an id or an epoch a step at another position drops the state, as it always did."""
    epoch = await _begin(direct) if guarded else None
    if not guarded:
        await direct.step("a", None, 0, [5, 6, 7], session="plain")
    session = "s" if guarded else "plain"
    missed = await direct.step(name, epoch, 2, [1], session=session)
    _problem(missed, 409, "cache_miss", reason="length_mismatch", held=0)
    following = await direct.step("b", epoch, 3, [1], session=session)
    _problem(following, 409, "cache_miss", reason="length_mismatch", held=0)
    assert await direct.held() == 0


async def test_unguarded_step_at_position_0_begins_anew(direct: Direct) -> None:
    """Without an epoch a step at position 0 replaces what is held, as it always did."""
    assert _token(await direct.step("a", None, 0, [5, 6, 7], session="plain"))
    replaced = await direct.step("b", None, 0, [1, 2], session="plain")
    assert _token(replaced) == next_token([1, 2], VOCAB_SIZE)
    await direct.close(None, session="plain")


async def test_newer_epoch_begins_anew_at_position_0(direct: Direct) -> None:
    """In a newer epoch a step at position 0 replaces what the older one held."""
    epoch = await _begin(direct)
    replaced = await direct.step("b", epoch + 1, 0, [1, 2])
    assert _token(replaced) == next_token([1, 2], VOCAB_SIZE)


async def test_newer_epoch_may_go_on_where_the_older_one_ended(direct: Direct) -> None:
    """A fitting step of a newer epoch continues the state, and the older epoch is over."""
    epoch = await _begin(direct)
    going_on = await direct.step("b", epoch + 1, 3, [1])
    assert _token(going_on) == next_token([5, 6, 7, 1], VOCAB_SIZE)
    _problem(await direct.step("c", epoch, 4, [2]), 409, "stale_epoch", held=4)


@pytest.mark.parametrize(("name", "past_len", "ids"), [("a", 0, [5, 6, 7]), ("b", 3, [1])])
async def test_older_epoch_is_stale(
    direct: Direct, name: str, past_len: int, ids: list[int]
) -> None:
    """A step of an older epoch, whatever it is, hears which is the lowest; nothing changes."""
    epoch = await _begin(direct)
    stale = await direct.step(name, epoch - 1, past_len, ids)
    _problem(stale, 409, "stale_epoch", expected=epoch, actual=epoch - 1, held=3)
    assert _token(await direct.step("b", epoch, 3, [1]))


@pytest.mark.parametrize(("name", "past_len", "ids"), [("a", 0, [5, 6, 7]), ("b", 3, [1])])
async def test_closing_in_an_epoch_refuses_late_steps(
    direct: Direct, name: str, past_len: int, ids: list[int]
) -> None:
    """After a DELETE with an epoch no step of that epoch begins or continues anything."""
    epoch = await _begin(direct)
    assert (await direct.close(epoch)).status_code == 204
    late = await direct.step(name, epoch, past_len, ids)
    _problem(late, 409, "stale_epoch", expected=epoch + 1, actual=epoch, held=0)
    assert await direct.held() == 0


async def test_closing_before_the_first_step_came_refuses_it(direct: Direct) -> None:
    """A first step that was overtaken by its own DELETE begins nothing."""
    epoch = next(EPOCHS)
    assert (await direct.close(epoch)).status_code == 204
    _problem(await direct.step("a", epoch, 0, [5, 6]), 409, "stale_epoch", actual=epoch)
    assert (await direct.held(), direct.shard.stage.runs) == (0, [])


async def test_closing_without_an_epoch_refuses_nothing(direct: Direct) -> None:
    """A DELETE without an epoch frees the state; the session may begin again in its epoch."""
    epoch = await _begin(direct)
    assert (await direct.close(None)).status_code == 204
    _problem(await direct.step("b", epoch, 3, [1]), 409, "cache_miss", reason="unknown", held=0)
    again = await direct.step("a", epoch, 0, [5, 6, 7])
    assert _token(again) == next_token([5, 6, 7], VOCAB_SIZE)
    assert direct.shard.stage.runs == [(0, 3), (0, 3)]


async def test_closing_in_an_older_epoch_is_stale(direct: Direct) -> None:
    """Who no longer steers a session cannot close it either."""
    epoch = await _begin(direct)
    stale = await direct.close(epoch - 1)
    _problem(stale, 409, "stale_epoch", expected=epoch, actual=epoch - 1, held=3)
    assert _token(await direct.step("b", epoch, 3, [1]))


@pytest.mark.parametrize("epoch", ["-1", "1.0", "x", "2147483648", "9" * 500])
async def test_malformed_epoch_is_refused(direct: Direct, epoch: str) -> None:
    """What is no epoch is a 400 that names the header, on a step and on a DELETE."""
    headers = {"X-Meshnet-Epoch": epoch}
    refused = [
        await direct.hop.step("s", "prefill", 0, [1, 2], changed={**headers}),
        await direct.hop.http.delete("/v1/sessions/s", headers=headers),
    ]
    for response in refused:
        _problem(response, 400, "invalid_request", field="X-Meshnet-Epoch", value=epoch[:200])


async def test_repeat_in_another_session_is_a_step_of_its_own(direct: Direct) -> None:
    """An id names a step within its session only."""
    epoch = await _begin(direct)
    other = await direct.step("a", epoch, 0, [1, 2], session="t")
    assert _token(other) == next_token([1, 2], VOCAB_SIZE)
    await direct.close(None, session="t")


async def test_second_step_of_a_session_at_once_is_busy(direct: Direct) -> None:
    """While a step runs, its copy and any other one of the session hear `session_busy`."""
    slow = SlowStage(fake_facts(LayerSpan(0, 4), 4, VOCAB_SIZE), delay_s=0.4)
    async with serve_shard(slow) as served, shard_client(served.url) as hop:
        caller = Direct(hop, direct.shard)
        running = asyncio.create_task(caller.step("a", 1, 0, [5, 6, 7]))

        async def runs() -> bool:
            return (await hop.cache())["leases"] == 1

        await eventually(runs, within_s=10)
        for name, past_len in (("a", 0), ("b", 3)):
            busy = await caller.step(name, 1, past_len, [5, 6, 7])
            _problem(busy, 409, "session_busy", retryable=True, held=0)
        assert _token(await running) == next_token([5, 6, 7], VOCAB_SIZE)
        assert _token(await caller.step("b", 1, 3, [1])) == next_token([5, 6, 7, 1], VOCAB_SIZE)


async def test_closing_during_a_step_lets_it_end_and_refuses_its_copy(direct: Direct) -> None:
    """A DELETE during a step: the step is answered, nothing is held, and its copy is stale."""
    slow = SlowStage(fake_facts(LayerSpan(0, 4), 4, VOCAB_SIZE), delay_s=0.4)
    async with serve_shard(slow) as served, shard_client(served.url) as hop:
        caller = Direct(hop, direct.shard)
        running = asyncio.create_task(caller.step("a", 1, 0, [5, 6, 7]))

        async def runs() -> bool:
            return (await hop.cache())["leases"] == 1

        await eventually(runs, within_s=10)
        assert (await caller.close(1)).status_code == 204
        assert _token(await running) == next_token([5, 6, 7], VOCAB_SIZE)
        _problem(await caller.step("a", 1, 0, [5, 6, 7]), 409, "stale_epoch", expected=2, actual=1)
        assert await caller.held() == 0
