"""Direct return over real servers: hidden states go from shard to shard, and the tail answers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from meshnet.model.fake_stage import HIDDEN_SIZE, next_token
from meshnet.topology import even_spans
from meshnet.wire.stream_messages import PATH, SUBPROTOCOL, StreamMessage, decode, encode
from services.head.probe import PROBE_PREFIX
from services.shard.app import create_app as create_shard
from services.shard.settings import ShardSettings
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
from tests.support.steps import ShardClient, shard_client
from tests.support.streams import eventually, read_stream, text_of

pytestmark = pytest.mark.mesh

KEY = {"Authorization": f"Bearer {CLUSTER_KEY}"}
N_TOKENS = 8
PROMPTS = [[5, 6, 7 + i] for i in range(4)]
TEXTS = [fake_text(prompt, N_TOKENS) for prompt in PROMPTS]
RUNS = sorted([(0, 3), *((3 + i, 1) for i in range(N_TOKENS - 1))] * len(PROMPTS))


@dataclass
class Tap:
    """Pure ASGI before a shard: sees what comes and goes on streams, and can hold it.

    Attributes:
        direct: The steps that took part in direct return.
        pushed: How many tensors were pushed to this shard.
        hold_step: Each of these steps waits for it.
        hold_answer: The answer to each of them waits for it.
        refuses_pushers: Whether a shard that would push gets no stream.
        came: Such a step came.
        answered: One was answered, held or not.
    """

    app: ASGIApp
    direct: list[StreamMessage] = field(default_factory=list[StreamMessage])
    pushed: int = 0
    hold_step: asyncio.Event | None = None
    hold_answer: asyncio.Event | None = None
    refuses_pushers: bool = False
    came: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_pusher = any(name == b"x-meshnet-boot" for name, _ in scope.get("headers", []))
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
        elif self.refuses_pushers and is_pusher:
            await receive()
            await send({"type": "websocket.close"})
        else:
            await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        numbers: set[int] = set()

        async def take() -> Message:
            event = await receive()
            if event["type"] == "websocket.receive" and event.get("bytes"):
                message = decode(event["bytes"])
                self.pushed += message.number == 0
                if is_direct(message):
                    self.direct.append(message)
                    numbers.add(message.number)
                    self.came.set()
                    if self.hold_step is not None:
                        await self.hold_step.wait()
            return event

        async def give(message: Message) -> None:
            if message["type"] == "websocket.send" and decode(message["bytes"]).number in numbers:
                self.answered.set()
                if self.hold_answer is not None:
                    await self.hold_answer.wait()
            await send(message)

        await self.app(scope, take, give)


def is_direct(message: StreamMessage) -> bool:
    """Whether a message is a step of direct return, and of no probe."""
    headers = message.headers
    is_probe = headers.get("x-meshnet-session", PROBE_PREFIX).startswith(PROBE_PREFIX)
    return not is_probe and bool({"x-meshnet-input-id", "x-meshnet-push-to"} & headers.keys())


@dataclass
class Tapped:
    """A served shard behind a tap, and what it ran."""

    tap: Tap
    stage: CountingStage
    served: Served


@asynccontextmanager
async def serve_tapped(
    stage: CountingStage, settings: ShardSettings | None = None, port: int = 0
) -> AsyncGenerator[Tapped]:
    tap = Tap(create_shard(settings or shard_settings(), stage=stage))
    async with serve(tap, port) as served:
        yield Tapped(tap, stage, served)


@dataclass
class Mesh:
    shards: list[Tapped]
    client: httpx.AsyncClient

    async def texts(self, n_tokens: int = N_TOKENS) -> list[str]:
        """The answers to all prompts at once."""
        return await asyncio.gather(*(self.text(n_tokens, prompt) for prompt in PROMPTS))

    async def text(self, n_tokens: int = N_TOKENS, prompt: Sequence[int] = PROMPTS[0]) -> str:
        """The answer to one prompt."""
        return text_of(await read_stream(self.client, spell(prompt), max_tokens=n_tokens))

    async def is_direct(self) -> bool:
        """Whether every pair of shards has found to each other; asks for an answer."""
        before = self.n_direct()
        await self.text()
        return [b - a for a, b in zip(before, self.n_direct(), strict=True)] == [
            N_TOKENS - 1
        ] * len(self.shards)

    def n_direct(self) -> list[int]:
        return [len(shard.tap.direct) for shard in self.shards]

    def forget(self) -> None:
        """Count anew."""
        for shard in self.shards:
            shard.stage.runs.clear()
            shard.tap.direct.clear()
            shard.tap.pushed = 0

    @property
    def runs(self) -> list[list[tuple[int, int]]]:
        return [sorted(shard.stage.runs) for shard in self.shards]


@asynccontextmanager
async def mesh(
    n_shards: int,
    settings: Sequence[ShardSettings | None] = (),
    *,
    hop_return: str = "direct",
    hop_transport: str = "auto",
    route_poll_s: float = 0.2,
    recovery_timeout_s: float = 5.0,
) -> AsyncGenerator[Mesh]:
    async with AsyncExitStack() as stack:
        served = [
            serve_tapped(counting_stage(span.start, span.end), each)
            for span, each in zip_longest(even_spans(4, n_shards), settings)
        ]
        shards = [await stack.enter_async_context(shard) for shard in served]
        head = serve_head(
            [shard.served.url for shard in shards],
            hop_return=hop_return,
            hop_transport=hop_transport,
            route_poll_s=route_poll_s,
            recovery_timeout_s=recovery_timeout_s,
        )
        _, client = await stack.enter_async_context(head)
        opened = Mesh(shards, client)
        await eventually(lambda: is_ready(client), within_s=10)
        yield opened
        for shard in shards:
            shard.served.server.should_exit = True


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


# --- the text ---


@pytest.mark.parametrize("n_shards", [1, 2, 3, 4])
async def test_the_text_is_that_of_a_star(n_shards: int) -> None:
    """Every step is run once on every shard, and each tensor pushed once to each but the first."""
    async with mesh(n_shards) as opened:
        if n_shards > 1:
            await eventually(opened.is_direct, within_s=10)
        opened.forget()

        assert await opened.texts() == TEXTS
        assert opened.runs == [RUNS] * n_shards
        n_decodes = len(PROMPTS) * (N_TOKENS - 1)
        n_direct = opened.n_direct()
        # Where this machine was too busy for a shard to answer a ping, a step went by the head.
        assert n_direct[0] > n_decodes / 2 if n_shards > 1 else n_direct == [0]
        assert n_direct == [n_direct[0]] * n_shards
        assert [shard.tap.pushed for shard in opened.shards] == [0, *n_direct[1:]]


async def test_no_answer_but_the_tails_is_waited_for() -> None:
    """Every hop has its step before any is run, and the tail answers before others do.

    So a token costs a leg to the first hop, one from hop to hop each, and one back.
    """
    async with mesh(4) as opened:
        await eventually(opened.is_direct, within_s=10)
        first, *_, tail = [shard.tap for shard in opened.shards]
        all_came, tail_answered = asyncio.Event(), asyncio.Event()
        for shard in opened.shards:
            shard.tap.came.clear()
            shard.tap.answered.clear()
        first.hold_step = all_came
        for shard in opened.shards[:-1]:
            shard.tap.hold_answer = tail_answered
        asked = asyncio.create_task(opened.text(2))
        for shard in opened.shards:
            async with asyncio.timeout(10):
                await shard.tap.came.wait()
        all_came.set()
        async with asyncio.timeout(10):
            await tail.answered.wait()
        tail_answered.set()

        assert await asked == fake_text(PROMPTS[0], 2)


@pytest.mark.parametrize(
    ("hop_return", "hop_transport"), [("star", "auto"), ("direct", "post")], ids=["star", "post"]
)
async def test_a_head_may_have_everything_go_by_itself(hop_return: str, hop_transport: str) -> None:
    """As before there was direct return, and where there are no streams."""
    async with mesh(2, hop_return=hop_return, hop_transport=hop_transport) as opened:
        assert await opened.texts() == TEXTS
        assert await opened.texts() == TEXTS
        assert opened.n_direct() == [0, 0]


async def test_shards_next_door_go_by_the_head() -> None:
    """Unless a head is told otherwise: on one machine there is nothing to gain."""
    async with mesh(2, hop_return="auto") as opened:
        assert await opened.texts() == TEXTS


# --- what is lost ---


@pytest.mark.parametrize("hop", [0, 1, 2], ids=["first", "middle", "tail"])
async def test_a_session_that_is_lost_costs_no_text(hop: int) -> None:
    """The hop that lost it is fed again, and no other one runs anything twice."""
    async with mesh(3) as opened:
        await eventually(opened.is_direct, within_s=10)
        opened.forget()
        lost = opened.shards[hop]
        asked = asyncio.create_task(opened.text(24))

        async def is_under_way() -> bool:
            return len(lost.tap.direct) > 8

        await eventually(is_under_way, within_s=10)
        session = lost.tap.direct[-1].headers["x-meshnet-session"]
        async with shard_client(lost.served.url) as client:
            await client.close(session)

        assert await asked == fake_text(PROMPTS[0], 24)
        once = [(0, 3), *((3 + i, 1) for i in range(23))]
        others = [runs for n, runs in enumerate(opened.runs) if n != hop]
        assert others == [once] * 2
        assert set(opened.runs[hop]) == set(once)


@pytest.mark.parametrize("hop", [0, 1, 2], ids=["first", "middle", "tail"])
async def test_a_shard_that_is_killed_and_started_again_costs_no_text(hop: int) -> None:
    """Its neighbours find the new process, and go on directly."""
    async with mesh(3, route_poll_s=0.05, recovery_timeout_s=30.0) as opened:
        await eventually(opened.is_direct, within_s=10)
        gone = opened.shards[hop]
        gone.tap.direct.clear()
        asked = asyncio.create_task(opened.texts(30))

        async def is_under_way() -> bool:
            return len(gone.tap.direct) > 8

        await eventually(is_under_way, within_s=10)
        await gone.served.kill()
        span = gone.stage.facts.span
        again = serve_tapped(counting_stage(span.start, span.end), port=gone.served.port)
        async with again as opened.shards[hop]:
            assert await asked == [fake_text(prompt, 30) for prompt in PROMPTS]
            await eventually(opened.is_direct, within_s=20)


async def test_a_shard_that_stays_away_is_named() -> None:
    """The client is told within the head's bounds, and the log which one it was."""
    async with mesh(3, recovery_timeout_s=0.5) as opened:
        await eventually(opened.is_direct, within_s=10)
        gone = opened.shards[1]
        gone.tap.direct.clear()
        asked = asyncio.create_task(read_stream(opened.client, spell(PROMPTS[0]), max_tokens=200))

        async def is_under_way() -> bool:
            return len(gone.tap.direct) > 8

        await eventually(is_under_way, within_s=10)
        await gone.served.kill()

        assert "shard_unavailable" in (await asked)[-2]
        reason = (await opened.client.get("/readyz")).json()["reason"]
        assert gone.served.url in reason


# --- shards that do not push ---


async def test_a_shard_that_cannot_reach_its_neighbour_costs_no_text() -> None:
    """It says so, and the head hands on what it answered; once it can, it does."""
    async with mesh(3) as opened:
        opened.shards[2].tap.refuses_pushers = True
        opened.forget()

        assert await opened.texts() == TEXTS
        assert opened.runs == [RUNS] * 3
        assert opened.shards[2].tap.pushed == 0

        opened.shards[2].tap.refuses_pushers = False
        await eventually(opened.is_direct, within_s=20)


async def test_a_shard_that_is_told_not_to_push_is_not_asked_to() -> None:
    """The whole route goes by the head."""
    async with mesh(3, [None, shard_settings(push=False)]) as opened:
        for _ in range(3):
            assert await opened.texts() == TEXTS
        assert opened.n_direct() == [0, 0, 0]


# --- what a shard takes ---

PAST = [5, 6, 7]


def hidden_of(ids: Sequence[int]) -> bytes:
    """The fake model's hidden states of ids."""
    return array("f", [float(value) for i in ids for value in (i, 0, 0, 0)]).tobytes()


def step_headers(**changed: str | None) -> dict[str, str]:
    """Of a decode after `PAST` whose input is pushed; `changed` by the ends of names."""
    named: dict[str, str | None] = {
        "Session": "s",
        "Cache": "decode",
        "Past-Len": "3",
        "Shape": f"1,1,{HIDDEN_SIZE}",
        "Dtype": "float32",
        "Start-Layer": "2",
        "Sampling": "{}",
        "Step": "1",
        "Epoch": "1",
        "Input-Id": "i",
    }
    named |= {name.replace("_", "-"): value for name, value in changed.items()}
    return {f"X-Meshnet-{name}": value for name, value in named.items() if value is not None}


def push_of(token_id: int, push_id: str = "i", **changed: str) -> StreamMessage:
    """What another shard sends for a step."""
    named = {
        "X-Meshnet-Push-Id": push_id,
        "X-Meshnet-Shape": f"1,1,{HIDDEN_SIZE}",
        "X-Meshnet-Dtype": "float32",
    }
    return StreamMessage(0, named | changed, hidden_of([token_id]))


def connected(url: str, **headers: str) -> connect:
    return connect(
        url.replace("http", "ws") + PATH,
        additional_headers=KEY | {name.replace("_", "-"): value for name, value in headers.items()},
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        proxy=None,
    )


@dataclass
class Tail:
    """A shard of the upper half, a head's stream to it, another shard's, and requests."""

    stage: CountingStage
    url: str
    head: ClientConnection
    neighbour: ClientConnection
    posts: ShardClient

    async def send(self, number: int, body: bytes = b"", **changed: str | None) -> None:
        await self.head.send(encode(StreamMessage(number, step_headers(**changed), body)))

    async def push(self, message: StreamMessage) -> None:
        await self.neighbour.send(encode(message))

    async def answer(self) -> tuple[int, int, bytes]:
        """Number, status and body of the next one."""
        async with asyncio.timeout(10):
            answer = decode(await self.head.recv(decode=False))
        return answer.number, answer.status, answer.body


@asynccontextmanager
async def open_tail(settings: ShardSettings | None = None) -> AsyncGenerator[Tail]:
    """It holds `PAST` of session s."""
    stage = counting_stage(2, 4)
    async with (
        serve_shard(stage, settings=settings) as shard,
        connected(shard.url) as head,
        connected(shard.url) as neighbour,
        shard_client(shard.url, start_layer=2) as posts,
    ):
        epoch = {"X-Meshnet-Epoch": "1", "X-Meshnet-Step": "0"}
        (await posts.step("s", "prefill", 0, PAST, changed={**epoch})).raise_for_status()
        stage.runs.clear()
        yield Tail(stage, shard.url, head, neighbour, posts)


RIGHT = b'{"token_id":%d}' % next_token([*PAST, 9], VOCAB_SIZE)


@pytest.mark.parametrize("push_first", [True, False])
async def test_a_step_and_its_input_meet(*, push_first: bool) -> None:
    """Whichever comes first."""
    async with open_tail() as tail:
        if push_first:
            await tail.push(push_of(9))
            await (await tail.neighbour.ping())
        await tail.send(1)
        if not push_first:
            await (await tail.head.ping())
            assert (await tail.posts.cache())["leases"] == 0
            await tail.push(push_of(9))

        assert await tail.answer() == (1, 200, RIGHT)


async def test_a_step_that_goes_on_by_the_head_ends_the_wait() -> None:
    """The one that waits is answered at once, and its input changes nothing when it comes."""
    async with open_tail() as tail:
        await tail.send(1)
        await tail.send(2, hidden_of([9]), Input_Id=None)
        answers = sorted([await tail.answer(), await tail.answer()])
        await tail.push(push_of(9))
        await tail.send(3, hidden_of([9]), Input_Id=None)

        assert [answers[0][:2], answers[1]] == [(1, 409), (2, 200, RIGHT)]
        assert b"input_missing" in answers[0][2]
        assert await tail.answer() == (3, 200, RIGHT)
        assert tail.stage.runs == [(3, 1)]


async def test_a_step_whose_input_came_is_replayed() -> None:
    """A head that did not hear of its answer sends the tensor under the same id."""
    async with open_tail() as tail:
        await tail.push(push_of(9))
        await tail.send(1)
        assert await tail.answer() == (1, 200, RIGHT)
        await tail.send(2, hidden_of([9]), Input_Id=None)

        assert await tail.answer() == (2, 200, RIGHT)
        assert tail.stage.runs == [(3, 1)]


async def test_a_copy_of_a_step_waits_for_no_input() -> None:
    """It has the answer of the step itself, and the step that waits by then is not given up."""
    async with open_tail() as tail:
        await tail.push(push_of(9))
        await tail.send(1)
        assert await tail.answer() == (1, 200, RIGHT)
        await tail.send(2, Step="2", Past_Len="4", Input_Id="j")
        await (await tail.head.ping())
        await tail.send(3)
        assert await tail.answer() == (3, 200, RIGHT)

        await tail.push(push_of(8, "j"))
        assert (await tail.answer())[:2] == (2, 200)
        assert tail.stage.runs == [(3, 1), (4, 1)]


async def test_a_step_that_its_session_has_passed_waits_for_no_input() -> None:
    """A copy that comes later still is told that it is late, one after the end that it is over."""
    async with open_tail() as tail:
        await tail.send(1, hidden_of([9]), Input_Id=None)
        assert (await tail.answer())[:2] == (1, 200)
        await tail.send(2, hidden_of([8]), Input_Id=None, Step="2", Past_Len="4")
        assert (await tail.answer())[:2] == (2, 200)
        await tail.send(3)
        number, status, body = await tail.answer()
        assert (number, status) == (3, 409)
        assert b"length_mismatch" in body

        await tail.posts.http.delete("/v1/sessions/s", headers={"X-Meshnet-Epoch": "1"})
        await tail.send(4, Step="3", Past_Len="5")
        number, status, body = await tail.answer()
        assert (number, status) == (4, 409)
        assert b"stale_epoch" in body


async def test_closing_a_session_ends_the_wait() -> None:
    """Its step is not run."""
    async with open_tail() as tail:
        await tail.send(1)
        await (await tail.head.ping())
        await tail.posts.close("s")

        number, status, _ = await tail.answer()
        assert (number, status, tail.stage.runs) == (1, 409, [])


async def test_another_sessions_step_ends_no_wait() -> None:
    """Only one of the same session does, also in a POST."""
    async with open_tail() as tail:
        await tail.send(1)
        await (await tail.head.ping())
        await tail.posts.step("t", "prefill", 0, PAST)
        await tail.push(push_of(9))
        assert await tail.answer() == (1, 200, RIGHT)

        await tail.send(2, Step="2", Past_Len="4", Input_Id="j")
        await (await tail.head.ping())
        await tail.posts.step("s", "prefill", 0, PAST)
        assert (await tail.answer())[:2] == (2, 409)


async def test_a_step_of_an_old_epoch_waits_for_no_input() -> None:
    """It is refused as any, at once."""
    async with open_tail() as tail:
        newer = {"X-Meshnet-Epoch": "2", "X-Meshnet-Step": "n"}
        await tail.posts.step("s", "decode", 3, [9], changed={**newer})
        await tail.send(1, Past_Len="4")
        number, status, body = await tail.answer()

        assert (number, status) == (1, 409)
        assert b"stale_epoch" in body


@pytest.mark.parametrize(
    ("pushed", "field"),
    [
        (push_of(9, **{"X-Meshnet-Shape": f"1,{HIDDEN_SIZE}"}), b"X-Meshnet-Shape"),
        (push_of(9, **{"X-Meshnet-Dtype": "int32"}), b"X-Meshnet-Dtype"),
    ],
)
async def test_an_input_of_another_kind_is_refused(pushed: StreamMessage, field: bytes) -> None:
    """With the header's name; nothing is changed."""
    async with open_tail() as tail:
        await tail.send(1)
        await tail.push(pushed)
        number, status, body = await tail.answer()

        assert (number, status) == (1, 400)
        assert field in body
        assert tail.stage.runs == []


async def test_a_push_that_is_none_is_passed_over() -> None:
    """Nobody is answered, and the stream goes on."""
    async with open_tail() as tail:
        await tail.send(1)
        await tail.push(push_of(9, "not an id"))
        await tail.push(StreamMessage(0, {}, b"x"))
        await tail.push(push_of(9))

        assert await tail.answer() == (1, 200, RIGHT)


async def test_a_caller_that_leaves_takes_its_waiting_steps_along() -> None:
    """They were not begun; a shard that stops does not wait for them either."""
    async with open_tail() as tail:
        await tail.send(1)
        await (await tail.head.ping())
        await tail.head.close()
        await tail.push(push_of(9))
        await (await tail.neighbour.ping())

        assert tail.stage.runs == []


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"Input_Id": "a b"}, b"X-Meshnet-Input-Id"),
        ({"Push_Id": "p"}, b"X-Meshnet-Push-To"),
        ({"Push_Id": "p", "Push_To": "http://a:1/x", "Push_Boot": "b"}, b"X-Meshnet-Push-To"),
        ({"Push_Id": "p", "Push_To": "http://a:1", "Push_Boot": "b"}, b"X-Meshnet-Push-To"),
    ],
)
async def test_a_wrong_header_is_named(changed: dict[str, str], field: bytes) -> None:
    """Before anything is waited for; the last one would have a tail push."""
    async with open_tail() as tail:
        await tail.head.send(encode(StreamMessage(1, step_headers(**changed), b"")))
        number, status, body = await tail.answer()

        assert (number, status) == (1, 400)
        assert field in body


async def test_direct_return_is_for_streams() -> None:
    """A POST is refused by the header's name."""
    async with open_tail() as tail:
        answer = await tail.posts.http.post("/v1/forward", headers=step_headers())

    assert answer.status_code == 400
    assert answer.json()["field"] == "X-Meshnet-Input-Id"


async def test_a_shard_without_direct_return_takes_nothing_of_it() -> None:
    """It says so of itself, refuses such steps, and keeps nothing that is pushed."""
    async with open_tail(shard_settings(push=False)) as tail:
        told = (await tail.posts.http.get("/v1/shard")).json()
        await tail.push(push_of(9))
        await tail.send(1)
        number, status, body = await tail.answer()

    assert told["push"] is False
    assert (number, status) == (1, 400)
    assert b"X-Meshnet-Input-Id" in body


async def test_a_stream_for_another_life_is_refused() -> None:
    """A shard that pushes finds out that its neighbour is not who the head means."""
    async with open_tail() as tail:
        boot_id = (await tail.posts.http.get("/v1/shard")).json()["boot_id"]
        async with connected(tail.url, X_Meshnet_Boot=boot_id):
            pass
        with pytest.raises(InvalidStatus) as caught:
            await connected(tail.url, X_Meshnet_Boot="other")

    assert caught.value.response.status_code == 400
    assert b"X-Meshnet-Boot" in (caught.value.response.body or b"")
