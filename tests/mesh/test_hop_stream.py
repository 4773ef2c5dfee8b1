"""Steps over a kept-open stream: what a shard answers, and what a head makes of a broken one.

What becomes of single steps that are lost, late or doubled on a stream is in
test_idempotent_steps.py, beside the same over POST.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from meshnet.model.fake_stage import FakeStage, fake_facts, next_token
from meshnet.model.interface import CacheState, StageModel, StageOutput, StageStep
from meshnet.topology import LayerSpan
from meshnet.wire import stream_messages
from meshnet.wire.stream_messages import PATH, SUBPROTOCOL, StreamMessage, decode, encode
from services.shard.app import create_app as create_shard
from tests.support.flaky import CountingStage, counting_stage
from tests.support.mesh import (
    CLUSTER_KEY,
    VOCAB_SIZE,
    fake_text,
    serve_head,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.serving import Served, serve
from tests.support.stages import GatedStage
from tests.support.steps import ShardClient, shard_client
from tests.support.streams import eventually, read_stream, text_of

pytestmark = pytest.mark.mesh

WHOLE = fake_facts(LayerSpan(0, 4), 4, VOCAB_SIZE)
PROMPT = [5, 6, 7]
AFTER_PROMPT = next_token(PROMPT, VOCAB_SIZE)
KEY = {"Authorization": f"Bearer {CLUSTER_KEY}"}


# --- what a shard answers ---


@dataclass
class Caller:
    """A caller of one shard, over a stream and over POST."""

    stream: ClientConnection
    hop: ShardClient
    _numbers: count[int] = field(default_factory=lambda: count(1))

    async def send(self, headers: dict[str, str], body: bytes) -> int:
        """Send a step without waiting; its number."""
        number = next(self._numbers)
        await self.stream.send(encode(StreamMessage(number, headers, body)))
        return number

    async def receive(self) -> StreamMessage:
        """The next answer."""
        return decode(await self.stream.recv(decode=False))

    async def step(self, headers: dict[str, str], body: bytes) -> StreamMessage:
        """A step and its answer."""
        number = await self.send(headers, body)
        answer = await self.receive()
        assert answer.number == number
        return answer

    async def post(self, headers: dict[str, str], body: bytes) -> httpx.Response:
        """The same over POST."""
        return await self.hop.http.post("/v1/forward", content=body, headers=headers)


def step_headers(ids: Sequence[int], session: str = "s", **changed: str) -> dict[str, str]:
    """Of a session's first step; `changed` is by the ends of the headers' names."""
    named = {
        "Session": session,
        "Cache": "prefill",
        "Past-Len": "0",
        "Shape": f"1,{len(ids)}",
        "Dtype": "int32",
        "Sampling": "{}",
        "Step": "1",
    }
    named |= {name.replace("_", "-"): value for name, value in changed.items()}
    return {f"X-Meshnet-{name}": value for name, value in named.items()}


def body_of(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def connected(
    url: str, headers: dict[str, str] = KEY, subprotocols: Sequence[str] = (SUBPROTOCOL,)
) -> connect:
    return connect(
        url.replace("http", "ws") + PATH,
        additional_headers=headers,
        subprotocols=[Subprotocol(name) for name in subprotocols] or None,
        proxy=None,
    )


@asynccontextmanager
async def caller_of(stage: StageModel) -> AsyncGenerator[Caller]:
    async with (
        serve_shard(stage) as shard,
        connected(shard.url) as stream,
        shard_client(shard.url) as hop,
    ):
        yield Caller(stream, hop)


@pytest.fixture
def stage() -> CountingStage:
    return counting_stage(0, 4)


async def test_a_step_over_a_stream_is_a_step(stage: CountingStage) -> None:
    """Headers and body are those of a POST, and so are the answer's."""
    async with caller_of(stage) as caller:
        answer = await caller.step(step_headers(PROMPT), body_of(PROMPT))
        posted = await caller.post(step_headers(PROMPT), body_of(PROMPT))  # a repeat

    assert (answer.status, answer.body) == (200, posted.content)
    assert posted.json() == {"token_id": AFTER_PROMPT}
    assert answer.headers["content-type"] == "application/json"
    assert {"x-meshnet-queue-ms", "x-meshnet-compute-ms"} <= answer.headers.keys()
    assert stage.runs == [(0, 3)]


@pytest.mark.parametrize(
    ("changed", "body"),
    [
        pytest.param({"Shape": "1,x"}, body_of(PROMPT), id="malformed"),
        pytest.param({"Cache": "decode"}, body_of(PROMPT), id="contradiction"),
        pytest.param({"Cache": "decode", "Past-Len": "7"}, body_of(PROMPT), id="miss"),
        pytest.param({"Fingerprint": "other"}, body_of(PROMPT), id="model"),
        pytest.param({"Boot": "other"}, body_of(PROMPT), id="boot"),
        pytest.param({"Dtype": "float32"}, body_of(PROMPT), id="dtype"),
        pytest.param({"Shape": "1,2049"}, body_of([1] * 2049), id="too-many-tokens"),
        pytest.param({}, body_of([5, 6, VOCAB_SIZE]), id="token"),
        pytest.param({"Sampling": '{"x": 1}'}, body_of(PROMPT), id="sampling"),
        pytest.param({"Context-Bytes": "2"}, body_of(PROMPT) + b"[]", id="context"),
    ],
)
async def test_a_step_is_refused_as_over_post(
    stage: CountingStage, changed: dict[str, str], body: bytes
) -> None:
    """With the same status and document, and nothing is changed."""
    async with caller_of(stage) as caller:
        answer = await caller.step(step_headers(PROMPT, **changed), body)
        posted = await caller.post(step_headers(PROMPT, **changed), body)
        held = await caller.hop.cache()

    assert answer.status == posted.status_code >= 400
    assert answer.body == posted.content
    assert answer.headers["content-type"] == posted.headers["content-type"]
    assert (held["sessions"], stage.runs) == (0, [])


@pytest.mark.parametrize("body", [b"", body_of(PROMPT)[:-1], body_of([*PROMPT, 8])])
async def test_a_body_of_another_length_is_refused(stage: CountingStage, body: bytes) -> None:
    """It is compared with what the headers make of it, and the stream goes on."""
    async with caller_of(stage) as caller:
        refused = await caller.step(step_headers(PROMPT), body)
        posted = await caller.post(step_headers(PROMPT), body)
        answer = await caller.step(step_headers(PROMPT), body_of(PROMPT))

    assert refused.status == posted.status_code == 400
    assert refused.body == posted.content
    assert (answer.status, stage.runs) == (200, [(0, 3)])


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("text", id="text"),
        pytest.param(b"", id="empty"),
        pytest.param(bytes(12) + b"\xff\xff\xff\xff", id="claims-too-much"),
        pytest.param(bytes(12) + b"\2\0\0\0[]", id="no-headers"),
        pytest.param(bytes(stream_messages.MAX_MESSAGE_BYTES + 1), id="too-long"),
        pytest.param(bytes(17 * 2**20), id="far-too-long"),
    ],
)
async def test_what_is_no_message_ends_the_stream(
    stage: CountingStage, message: str | bytes
) -> None:
    """Nothing is changed, and what was held is held."""
    async with caller_of(stage) as caller:
        await caller.step(step_headers(PROMPT), body_of(PROMPT))
        with suppress(ConnectionClosed):  # it may end before all is sent
            await caller.stream.send(message)
        with pytest.raises(ConnectionClosed):
            await caller.stream.recv()

        following = await caller.hop.step("s", "decode", 3, [9])
        assert following.json() == {"token_id": next_token([*PROMPT, 9], VOCAB_SIZE)}


@pytest.mark.parametrize(
    ("headers", "subprotocols", "status", "told"),
    [
        ({}, [SUBPROTOCOL], 401, b"unauthorized"),
        ({"Authorization": "Bearer other"}, [SUBPROTOCOL], 401, b"unauthorized"),
        (KEY, [], 400, b"Sec-WebSocket-Protocol"),
        (KEY, ["meshnet-0"], 400, b"Sec-WebSocket-Protocol"),
        (KEY | {"Origin": "https://page.example"}, [SUBPROTOCOL], 400, b"Origin"),
    ],
)
async def test_a_stream_is_refused_with_a_problem(
    stage: CountingStage,
    headers: dict[str, str],
    subprotocols: list[str],
    status: int,
    told: bytes,
) -> None:
    """Without the key, to web pages, and if its messages would be of another form."""
    async with serve_shard(stage) as shard:
        with pytest.raises(InvalidStatus) as caught:
            await connected(shard.url, headers, subprotocols)

    response = caught.value.response
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert told in (response.body or b"")


async def test_steps_that_came_together_run_together() -> None:
    """Sessions on one stream share a forward, and each gets its own answer."""
    stage = GatedStage(WHOLE)
    async with caller_of(stage) as caller:
        stage.lets.release(5)
        for i in range(4):
            await caller.step(step_headers([1, i], f"s{i}"), body_of([1, i]))
        stage.lets.acquire()
        await caller.send(step_headers(PROMPT, "long"), body_of(PROMPT))  # it keeps the thread
        decode_step = {"Cache": "decode", "Past-Len": "2", "Step": "2"}
        sent = {
            await caller.send(step_headers([9], f"s{i}", **decode_step), body_of([9])): i
            for i in range(4)
        }

        async def all_wait() -> bool:
            return (await caller.hop.cache())["leases"] == 5

        await eventually(all_wait, within_s=10)
        stage.lets.release()
        answers = [await caller.receive() for _ in range(5)]

    assert stage.batch_sizes == [4]
    tokens = {sent[a.number]: a.body for a in answers if a.number in sent}
    assert tokens == {i: b'{"token_id":%d}' % next_token([1, i, 9], VOCAB_SIZE) for i in range(4)}


async def test_a_shard_reads_no_more_than_it_may_have_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes then waits on the line, and with its sender in the end."""
    monkeypatch.setattr(stream_messages, "MAX_IN_FLIGHT", 2)
    stage = GatedStage(WHOLE)
    async with caller_of(stage) as caller:
        for i in range(5):
            await caller.send(step_headers(PROMPT, f"s{i}"), body_of(PROMPT))

        async def two_are_there() -> bool:
            return (await caller.hop.cache())["leases"] == 2

        await eventually(two_are_there, within_s=10)
        await asyncio.sleep(0.05)
        assert await two_are_there()

        stage.lets.release(5)
        answers = [await caller.receive() for _ in range(5)]

    assert [answer.status for answer in answers] == [200] * 5


async def test_a_step_is_ended_when_its_caller_has_left() -> None:
    """Its answer is there for who asks again, and it is not run twice."""
    stage = GatedStage(WHOLE)
    async with caller_of(stage) as caller:
        await caller.send(step_headers(PROMPT), body_of(PROMPT))

        async def has_begun() -> bool:
            return bool(stage.ran)

        await eventually(has_begun, within_s=10)
        caller.stream.transport.abort()
        stage.lets.release()

        async def is_done() -> bool:
            return (await caller.hop.cache())["leases"] == 0

        await eventually(is_done, within_s=10)
        again = await caller.post(step_headers(PROMPT), body_of(PROMPT))

    assert again.json() == {"token_id": AFTER_PROMPT}
    assert stage.ran == [PROMPT]


class FaultyStage(FakeStage):
    """Has a fault that nobody foresaw where a prompt is of one token."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        if step.frame.n_tokens == 1:
            raise KeyError("nobody foresaw this")
        return super().run(step, state)


async def test_a_fault_that_nobody_foresaw_is_that_steps_alone() -> None:
    """It is 500 without a problem document, as over POST, and the stream goes on."""
    async with caller_of(FaultyStage(WHOLE)) as caller:
        faulty = await caller.step(step_headers([5], Cache="stateless"), body_of([5]))
        answer = await caller.step(step_headers(PROMPT), body_of(PROMPT))

    assert (faulty.status, faulty.body) == (500, b"Internal Server Error")
    assert answer.status == 200


async def test_a_shard_that_stops_does_not_wait_for_idle_streams(stage: CountingStage) -> None:
    """It closes them, and its callers know."""
    async with serve_shard(stage) as shard, connected(shard.url) as stream:
        await shard.served.stop()

        with pytest.raises(ConnectionClosed) as caught:
            await stream.recv()
    assert caught.value.rcvd is not None


# --- what a head makes of it ---

SPANS = ((0, 2), (2, 4))
N_TOKENS = 6
PROMPTS = [[5, 6, 7 + i] for i in range(6)]


NoStreams = Callable[[Receive, Send], Awaitable[None]]


@dataclass
class Tap:
    """Pure ASGI before a shard: counts how steps come, and breaks streams.

    Attributes:
        cut_before: Messages with which a stream is cut, before the shard has them, from 1.
        cut_after: Answers with which it is cut, before the head has them.
        no_streams: What becomes of who asks for a stream.
    """

    app: ASGIApp
    cut_before: set[int] = field(default_factory=set[int])
    cut_after: set[int] = field(default_factory=set[int])
    no_streams: NoStreams | None = None
    posts: int = 0
    messages: int = 0
    answers: int = 0
    streams: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/forward":
            self.posts += 1
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        self.streams += 1
        if self.no_streams is not None:
            await self.no_streams(receive, send)
            return

        async def take() -> Message:
            event = await receive()
            if event["type"] == "websocket.receive":
                self.messages += 1
                if self.messages in self.cut_before:
                    cut(send)
                    return await receive()
            return event

        async def give(message: Message) -> None:
            if message["type"] == "websocket.send":
                self.answers += 1
                if self.answers in self.cut_after:
                    cut(send)
                    return
            await send(message)

        await self.app(scope, take, give)


def cut(send: Send) -> None:
    cast("Any", send).__self__.transport.abort()  # uvicorn's own; ASGI has no word for it


@dataclass
class Tapped:
    """A served shard behind a tap, and what it ran."""

    tap: Tap
    stage: CountingStage
    served: Served


@asynccontextmanager
async def serve_tapped(
    stage: CountingStage, tap: Tap | None = None, port: int = 0
) -> AsyncGenerator[Tapped]:
    app = create_shard(shard_settings(), stage=stage)
    tap = tap or Tap(app)
    tap.app = app
    async with serve(tap, port) as served:
        yield Tapped(tap, stage, served)


@asynccontextmanager
async def mesh(
    transport: str, *, route_poll_s: float = 0.2, recovery_timeout_s: float = 5.0
) -> AsyncGenerator[tuple[list[Tapped], httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(serve_tapped(counting_stage(*span))) for span in SPANS
        ]
        urls = [shard.served.url for shard in shards]
        head = serve_head(
            urls,
            hop_transport=transport,
            route_poll_s=route_poll_s,
            recovery_timeout_s=recovery_timeout_s,
        )
        _, client = await stack.enter_async_context(head)
        await eventually(lambda: is_ready(client), within_s=10)
        yield shards, client


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def texts(client: httpx.AsyncClient, n_tokens: int = N_TOKENS) -> list[str]:
    """The answers to all prompts at once."""
    answers = (read_stream(client, spell(prompt), max_tokens=n_tokens) for prompt in PROMPTS)
    return [text_of(events) for events in await asyncio.gather(*answers)]


TEXTS = [fake_text(prompt, N_TOKENS) for prompt in PROMPTS]
RUNS = sorted([(0, 3), *((3 + i, 1) for i in range(N_TOKENS - 1))] * len(PROMPTS))


@pytest.mark.parametrize("transport", ["post", "auto", "stream"])
async def test_the_text_is_the_same_over_every_transport(transport: str) -> None:
    """Several sessions at once, over as few streams as there are hops, or over none."""
    async with mesh(transport) as (shards, client):
        await eventually(lambda: has_streams(shards, transport), within_s=10)
        posts = [shard.tap.posts for shard in shards]

        assert await texts(client) == TEXTS
        for shard, before in zip(shards, posts, strict=True):
            assert sorted(shard.stage.runs) == RUNS
            assert shard.tap.streams == (transport != "post")
            assert shard.tap.posts - before == (len(RUNS) if transport == "post" else 0)


async def has_streams(shards: Sequence[Tapped], transport: str) -> bool:
    """The probe of a head wants streams, and does not wait for them unless they are required."""
    return transport == "post" or all(shard.tap.streams for shard in shards)


CUTS = (3, 9, 16)


@pytest.mark.parametrize("transport", ["auto", "stream"])
@pytest.mark.parametrize("hop", [0, 1], ids=["first", "tail"])
@pytest.mark.parametrize("applied", [False, True], ids=["before-the-step", "after-it"])
async def test_streams_that_are_cut_cost_no_text(
    transport: str, hop: int, *, applied: bool
) -> None:
    """Every step is run once, whether or not it was applied when its stream was cut."""
    async with mesh(transport) as (shards, client):
        await eventually(lambda: has_streams(shards, transport), within_s=10)
        tap = shards[hop].tap
        tap.messages = tap.answers = 0
        (tap.cut_after if applied else tap.cut_before).update(CUTS)

        assert await texts(client) == TEXTS
        assert [sorted(shard.stage.runs) for shard in shards] == [RUNS, RUNS]
        assert tap.streams > 1 or tap.posts > 0


async def test_a_head_goes_on_by_post_and_comes_back_to_streams() -> None:
    """A cut stream is followed by requests, and those after a pause by another stream."""
    async with mesh("auto") as (shards, client):
        await eventually(lambda: has_streams(shards, "auto"), within_s=10)
        tap = shards[0].tap
        tap.cut_before.add(tap.messages + 2)
        posts = tap.posts
        assert await texts(client) == TEXTS
        assert tap.posts > posts

        async def is_back() -> bool:
            await texts(client, 1)
            return tap.streams == 2

        await eventually(is_back, within_s=10)
        posts = tap.posts
        assert await texts(client) == TEXTS
        assert tap.posts == posts


async def refuse(receive: Receive, send: Send) -> None:
    """As a shard that knows no streams."""
    await receive()
    await send({"type": "websocket.close"})


async def say_nothing(receive: Receive, send: Send) -> None:
    """As a proxy that does not pass them on."""
    del send
    while (await receive())["type"] != "websocket.disconnect":
        pass


async def break_off(receive: Receive, send: Send) -> None:
    """As a proxy that lets them open, and passes nothing on."""
    await receive()
    await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL})
    await receive()
    cut(send)


@pytest.mark.parametrize("no_streams", [refuse, say_nothing, break_off])
async def test_a_shard_without_streams_is_served_by_post(no_streams: NoStreams) -> None:
    """And is not asked for one with every step."""
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(
                serve_tapped(counting_stage(*span), Tap(_nothing, no_streams=no_streams))
            )
            for span in SPANS
        ]
        urls = [shard.served.url for shard in shards]
        _, client = await stack.enter_async_context(serve_head(urls, hop_transport="auto"))
        await eventually(lambda: is_ready(client), within_s=10)

        assert await texts(client) == TEXTS
        for shard in shards:
            assert sorted(shard.stage.runs) == RUNS
            assert 1 <= shard.tap.streams < len(RUNS) / 2


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError


async def test_a_stream_follows_a_shard_that_is_started_again() -> None:
    """The new process is found, fed again, and has a stream of its own."""
    async with mesh("stream", route_poll_s=0.05, recovery_timeout_s=30.0) as (shards, client):
        gone = shards[1].served
        asked = asyncio.create_task(texts(client, 40))

        async def is_under_way() -> bool:
            return len(shards[1].stage.runs) > 2 * len(PROMPTS)

        await eventually(is_under_way, within_s=10)
        await gone.kill()
        async with serve_tapped(counting_stage(*SPANS[1]), port=gone.port) as again:
            assert await asked == [fake_text(prompt, 40) for prompt in PROMPTS]
            assert (again.tap.posts, again.tap.streams) == (0, 1)
