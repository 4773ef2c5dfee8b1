from __future__ import annotations

import asyncio

import httpx
import pytest

from meshnet.errors import CacheMiss, HopProtocolError, HopUnreachable
from meshnet.generation import Sampling
from meshnet.head.hop_client import HopClient
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, Trace
from meshnet.ids import is_token
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeLog, turn_the_loop
from tests.unit.head.making import FakeShard, hidden, hop_client, problem, route_over, token

A, B, C = "http://a", "http://b", "http://c"


class Mesh:
    """Three shards and a pipeline over them."""

    def __init__(self, trace: Trace | None = None, **changed: object) -> None:
        self.shards = [FakeShard(A, tail=False), FakeShard(B, tail=False), FakeShard(C, tail=True)]
        self.times = HopTimesBook()
        self.pipeline = Pipeline(
            route_over([A, B, C], **changed),
            {shard.endpoint: shard.client() for shard in self.shards},
            self.times,
            trace or Trace(),
        )

    @property
    def asked(self) -> list[list[str]]:
        return [shard.asked for shard in self.shards]

    def hold(self, nth: int, answer: httpx.Response | None = None) -> asyncio.Event:
        """Hold the nth shard's steps until the event is set."""
        gate = asyncio.Event()

        async def held(_: StepHeaders) -> httpx.Response | None:
            await gate.wait()
            self.shards[nth].asked.append("answered")
            return answer

        self.shards[nth].instead = held
        return gate

    def answer(self, nth: int, answer: httpx.Response) -> None:
        """Let the nth shard answer so."""

        async def answered(_: StepHeaders) -> httpx.Response:
            return answer

        self.shards[nth].instead = answered

    async def prefill(self) -> TailAnswer:
        return await self.pipeline.step("prefill", [5, 6], 0, Sampling())


# --- step() ---


async def test_a_step_goes_through_every_hop() -> None:
    """Ids go to the first hop, hidden states to the others, the tail's answer comes back."""
    mesh = Mesh()
    answer = await mesh.prefill()

    assert (answer, mesh.asked) == (TailAnswer(token_id=7), [["prefill"]] * 3)
    assert [(shard.steps[0].dtype, shard.steps[0].shape) for shard in mesh.shards] == [
        ("int32", (1, 2)),
        ("float32", (1, 2, 4)),
        ("float32", (1, 2, 4)),
    ]


async def test_only_the_tail_is_told_to_sample() -> None:
    """Sampling parameters are the tail's business."""
    mesh = Mesh()
    await mesh.prefill()

    assert [shard.steps[0].sampling for shard in mesh.shards] == [None, None, Sampling()]


async def test_a_chunk_samples_nothing() -> None:
    """Without parameters the tail answers an empty answer."""
    assert await Mesh().pipeline.step("prefill", [5, 6], 0, None) == TailAnswer()


async def test_every_hop_gets_its_own_layer_and_fingerprint() -> None:
    """A hop is told where to start, and which model the head believes in."""
    mesh = Mesh()
    await mesh.prefill()

    assert [(shard.steps[0].start_layer, shard.steps[0].fingerprint) for shard in mesh.shards] == [
        (0, "fake-1-0-1"),
        (1, "fake-1-1-2"),
        (2, "fake-1-2-3"),
    ]


async def test_one_session_and_one_trace_over_all_hops() -> None:
    """All steps of a pipeline carry the same session, request id and trace."""
    mesh = Mesh(Trace("r-1", "00-trace"))
    await mesh.prefill()
    await mesh.pipeline.step("decode", [7], 2, Sampling())
    steps = [step for shard in mesh.shards for step in shard.steps]

    assert {(s.session, s.request_id, s.traceparent) for s in steps} == {
        (mesh.pipeline.session, "r-1", "00-trace")
    }


async def test_every_hops_step_has_an_id_of_its_own() -> None:
    """Step ids are tokens and do not repeat, over hops and steps."""
    mesh = Mesh()
    await mesh.prefill()
    await mesh.pipeline.step("decode", [7], 2, Sampling())
    ids = [step.step or "" for shard in mesh.shards for step in shard.steps]

    assert (len(set(ids)), all(map(is_token, ids))) == (6, True)


async def test_two_pipelines_have_two_sessions() -> None:
    """A session is one generation's."""
    assert Mesh().pipeline.session != Mesh().pipeline.session


async def test_a_decode_carries_the_past() -> None:
    """The position and the mode are on every hop as given."""
    mesh = Mesh()
    await mesh.pipeline.step("decode", [7], 6, Sampling())

    assert [(s.steps[0].cache, s.steps[0].past_len) for s in mesh.shards] == [("decode", 6)] * 3


@pytest.mark.parametrize(("mode", "noted"), [("prefill", 0), ("decode", 1)])
async def test_decode_steps_are_timed(mode: str, noted: int) -> None:
    """The hops' times are those of decode steps: prefills are of any length."""
    mesh = Mesh()
    if mode == "decode":
        await mesh.pipeline.step("decode", [7], 6, Sampling())
    else:
        await mesh.prefill()

    assert [len([t]) if (t := mesh.times.of(at)) else 0 for at in (A, B, C)] == [noted] * 3


async def test_a_refusal_ends_the_step() -> None:
    """A hop's refusal is raised as it is, and hops behind it are not asked."""
    mesh = Mesh()
    mesh.answer(1, problem(CacheMiss("gone", reason="expired", held=0)))
    with pytest.raises(CacheMiss) as caught:
        await mesh.prefill()

    assert caught.value.members == {"reason": "expired", "held": 0, "endpoint": B}
    assert mesh.asked == [["prefill"], ["prefill"], []]


@pytest.mark.parametrize(
    ("nth", "answer", "fault"),
    [
        (0, token(7), "http://a answered as a tail"),
        (2, hidden(2), "http://c answered hidden states"),
        (0, hidden(1), "http://a answered 1 tokens to 2"),
        (1, hidden(3), "http://b answered 3 tokens to 2"),
    ],
)
async def test_a_hop_out_of_its_part_is_a_protocol_error(
    nth: int, answer: httpx.Response, fault: str
) -> None:
    """Hidden states of as many tokens come from every hop but the tail, and never from it."""
    mesh = Mesh()
    mesh.answer(nth, answer)
    with pytest.raises(HopProtocolError, match=fault) as caught:
        await mesh.prefill()

    assert caught.value.members == {"endpoint": [A, B, C][nth]}


async def test_a_cancelled_step_leaves_the_call_going() -> None:
    """The caller ends at once, the hop call goes on to its answer, and no other hop is asked."""
    mesh = Mesh()
    gate = mesh.hold(1)
    step = asyncio.create_task(mesh.prefill())
    await turn_the_loop()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    gate.set()
    await turn_the_loop()

    assert mesh.asked == [["prefill"], ["prefill", "answered"], []]


async def test_nobody_is_warned_of_a_call_that_failed_unheard() -> None:
    """A call that fails after its caller was cancelled is no unhandled error of the loop."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    mesh = Mesh()
    gate = mesh.hold(0, problem(HopUnreachable("gone")))
    step = asyncio.create_task(mesh.prefill())
    await turn_the_loop()
    step.cancel()
    await turn_the_loop()
    gate.set()
    await turn_the_loop()
    del step, mesh
    await turn_the_loop()

    assert complaints == []


async def test_a_call_cancelled_elsewhere_cancels_the_step() -> None:
    """Where the loop itself cancels a hop call, as at its end, the step is cancelled with it."""
    mesh = Mesh()

    async def cancelled(_: StepHeaders) -> httpx.Response:
        raise asyncio.CancelledError

    mesh.shards[0].instead = cancelled
    with pytest.raises(asyncio.CancelledError):
        await mesh.prefill()


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_a_pipeline_is_as_its_route(kv_cache: bool) -> None:
    """Whether steps are stateless and how long they may be is the route's to say."""
    pipeline = Mesh(kv_cache=kv_cache, max_step_tokens=9).pipeline

    assert (pipeline.stateless, pipeline.max_step_tokens) == (not kv_cache, 9)


# --- close() ---


async def test_close_frees_the_session_on_every_hop() -> None:
    """Each hop gets one DELETE of this session."""
    mesh = Mesh()
    await mesh.prefill()
    await mesh.pipeline.close()

    assert mesh.asked == [["prefill", f"DELETE {mesh.pipeline.session}"]] * 3


async def test_close_before_any_step_frees_too() -> None:
    """A session of which no hop has heard is closed in the same way: that is idempotent."""
    mesh = Mesh()
    await mesh.pipeline.close()

    assert mesh.asked == [[f"DELETE {mesh.pipeline.session}"]] * 3


async def test_close_waits_for_the_step_in_flight() -> None:
    """No hop is told to free the session before the step in flight was answered."""
    mesh = Mesh()
    gate = mesh.hold(1)
    step = asyncio.create_task(mesh.prefill())
    await turn_the_loop()
    step.cancel()
    close = asyncio.create_task(mesh.pipeline.close())
    await turn_the_loop()
    before = [list(asked) for asked in mesh.asked]
    gate.set()
    await close
    delete = f"DELETE {mesh.pipeline.session}"

    assert before == [["prefill"], ["prefill"], []]
    assert mesh.asked == [["prefill", delete], ["prefill", "answered", delete], [delete]]


async def test_close_after_a_step_that_failed_in_flight() -> None:
    """A step in flight that fails is over, and close goes on."""
    mesh = Mesh()
    gate = mesh.hold(0, problem(HopUnreachable("gone")))
    step = asyncio.create_task(mesh.prefill())
    await turn_the_loop()
    step.cancel()
    close = asyncio.create_task(mesh.pipeline.close())
    await turn_the_loop()
    gate.set()
    await close

    assert [asked[-1] for asked in mesh.asked] == [f"DELETE {mesh.pipeline.session}"] * 3


async def test_a_hop_that_cannot_be_closed_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unreachable hop gets a log line, and every other hop its DELETE."""
    log = FakeLog.instead_of("meshnet.head.pipeline._log", monkeypatch)
    mesh = Mesh()

    async def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    clients = {shard.endpoint: shard.client() for shard in mesh.shards}
    clients[B] = hop_client(B, refuse)
    pipeline = Pipeline(route_over([A, B, C]), clients, HopTimesBook(), Trace())
    await pipeline.close()

    assert [len(asked) for asked in mesh.asked] == [1, 0, 1]
    assert [(line["hop"], line["code"]) for line in log.lines] == [(B, "hop_unreachable")]


async def test_hops_are_closed_together() -> None:
    """A slow hop does not keep the others from being told."""
    gate = asyncio.Event()
    told: list[str] = []

    def at(endpoint: str) -> HopClient:
        async def handle(_: httpx.Request) -> httpx.Response:
            told.append(endpoint)
            await gate.wait()
            return httpx.Response(204)

        return hop_client(endpoint, handle)

    clients = {endpoint: at(endpoint) for endpoint in (A, B, C)}
    pipeline = Pipeline(route_over([A, B, C]), clients, HopTimesBook(), Trace())
    close = asyncio.create_task(pipeline.close())
    await turn_the_loop()
    at_once = sorted(told)
    gate.set()
    await close

    assert at_once == [A, B, C]
