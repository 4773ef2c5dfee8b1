from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import (
    CacheMiss,
    HopProtocolError,
    HopTimeout,
    HopUnreachable,
    InvalidRequest,
    MeshError,
    QueueFull,
)
from meshnet.generation import Sampling
from meshnet.head.hop_client import HopAnswer, HopClient, HopTimeouts, HopTransport, open_hop
from meshnet.ids import SessionId
from meshnet.model.fake_stage import fake_facts
from meshnet.topology import LayerSpan
from meshnet.transport.hop_stream import HopStream, HopStreams, StreamLimits
from meshnet.wire import headers
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import TailAnswer
from meshnet.wire.stream_messages import MAX_BODY_BYTES, StreamMessage
from tests.unit.fakes import shard_info
from tests.unit.head.making import hidden, hop_client, problem, token

A = "http://a:1"
INFO = shard_info(fake_facts(LayerSpan(0, 2)))
STEP = StepHeaders(
    session="s",
    cache="prefill",
    shape=(1, 2),
    dtype="int32",
    start_layer=0,
    fingerprint="f",
    step="id",
    sampling=Sampling(temperature=0.5, seed=3),
    request_id="r",
)
BODY = Frame.of_token_ids([5, 6]).data


class Ticks:
    """A clock that says these seconds one after the other, and then the last of them."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


class Parts(httpx.AsyncByteStream):
    """A body that comes in parts; keeps how many were read."""

    def __init__(self, n_parts: int, size: int) -> None:
        self.read = 0
        self._n_parts = n_parts
        self._size = size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._n_parts):
            self.read += 1
            yield bytes(self._size)


class Shard:
    """Answers the same to every request, and keeps the last one."""

    def __init__(self, answer: httpx.Response | Exception) -> None:
        self._answer = answer
        self.request = httpx.Request("GET", A)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.request = request
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def client(self, timeouts: HopTimeouts | None = None) -> HopClient:
        return hop_client(A, self, timeouts)


async def step_at(client: HopClient, *, limit_s: float = 20, max_bytes: int = 32) -> HopAnswer:
    """Send the step; two tokens' hidden states are 32 bytes."""
    return await client.step(STEP, BODY, limit_s=limit_s, max_answer_bytes=max_bytes)


async def step_answered(answer: httpx.Response | Exception) -> HopAnswer:
    return await step_at(Shard(answer).client())


# --- what is sent ---


async def test_a_step_is_one_post() -> None:
    """A step goes to /v1/forward with its headers, its bytes and their media type."""
    shard = Shard(token(7))
    await step_at(shard.client())
    request = shard.request

    assert (request.method, str(request.url)) == ("POST", f"{A}/v1/forward")
    assert (request.content, headers.parse(request.headers)) == (BODY, STEP)
    assert request.headers["content-type"] == "application/octet-stream"


async def test_closing_is_a_delete() -> None:
    """A session is freed by its id, under its epoch, and nothing need be answered."""
    shard = Shard(httpx.Response(204))
    await shard.client().close_session(SessionId("s-1"), 3)

    assert (shard.request.method, shard.request.url.path) == ("DELETE", "/v1/sessions/s-1")
    assert shard.request.headers[headers.EPOCH] == "3"


TIMEOUTS = HopTimeouts(connect_s=1, probe_s=3)


async def test_a_step_has_the_time_it_is_given() -> None:
    """A step may take its own limit, connecting and getting a place in the pool connect_s."""
    shard = Shard(token(7))
    await step_at(shard.client(TIMEOUTS), limit_s=20)

    assert shard.request.extensions["timeout"] == {
        "connect": 1,
        "pool": 1,
        "read": 20,
        "write": 20,
    }


async def test_a_probe_has_little_time() -> None:
    """What computes nothing may take probe_s."""
    shard = Shard(httpx.Response(204))
    await shard.client(TIMEOUTS).close_session(SessionId("s"), 1)

    assert shard.request.extensions["timeout"]["read"] == 3


# --- what is answered ---


async def test_a_tails_answer_is_read() -> None:
    """JSON is a tail's answer."""
    assert (await step_answered(token(7))).result == TailAnswer(token_id=7)


@pytest.mark.parametrize(
    "answer", [TailAnswer(), TailAnswer(text="hi"), TailAnswer(token_id=3, text="hi")], ids=str
)
async def test_a_tail_may_answer_text_or_nothing(answer: TailAnswer) -> None:
    """A tail that samples nothing answers {}, one of a mixed fleet text."""
    body = answer.model_dump(exclude_none=True)

    assert (await step_answered(httpx.Response(200, json=body))).result == answer


async def test_hidden_states_are_read() -> None:
    """Bytes are hidden states of the dtype and shape in the headers."""
    result = (await step_answered(hidden(2))).result

    assert result == Frame("float32", (1, 2, 4), bytes(32))


async def test_the_hops_times_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue and compute time are the hop's, the whole is the head's own measure.

    Serialising is the hop's time for it, and the head's own before the step is sent and after its
    answer came.
    """
    # At first, when it is sent, when the body begins, after its part, at its end, and when read.
    ticks = Ticks([1.0, 1.0625, 1.0625, 1.1875, 1.1875, 1.25])
    monkeypatch.setattr("meshnet.head.hop_client.perf_counter", ticks)
    told = {headers.QUEUE_MS: "1.5", headers.COMPUTE_MS: "20", headers.SERIALISE_MS: "0.25"}
    answer = await step_answered(hidden(2, **told))

    assert (answer.step_ms, answer.queue_ms, answer.compute_ms) == (250.0, 1.5, 20.0)
    assert answer.serialise_ms == 62.5 + 62.5 + 0.25


@pytest.mark.parametrize("times", [{}, {headers.QUEUE_MS: "soon", headers.COMPUTE_MS: ""}])
async def test_missing_times_are_zero(times: dict[str, str]) -> None:
    """A hop that does not tell its times, or nonsense, is used all the same."""
    answer = await step_answered(hidden(2, **times))

    assert (answer.queue_ms, answer.compute_ms) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (httpx.ConnectError("refused"), HopUnreachable),
        (httpx.ConnectTimeout(""), HopUnreachable),
        (httpx.PoolTimeout(""), HopUnreachable),
        (httpx.ReadError(""), HopUnreachable),
        (httpx.WriteError("broken pipe"), HopUnreachable),
        (httpx.RemoteProtocolError("cut"), HopUnreachable),
        (httpx.ReadTimeout(""), HopTimeout),
        (httpx.WriteTimeout(""), HopTimeout),
        (httpx.DecodingError("no gzip"), HopProtocolError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
async def test_httpxs_errors_become_ours(raised: Exception, kind: type[MeshError]) -> None:
    """Refused and cut are unreachable, slow is a time-out; each names the hop, and its cause."""
    with pytest.raises(MeshError) as caught:
        await step_answered(raised)

    assert (type(caught.value), caught.value.members) == (kind, {"endpoint": A})
    assert caught.value.__cause__ is raised


async def test_an_error_without_words_is_named() -> None:
    """An error of httpx that says nothing is told by its class."""
    with pytest.raises(HopUnreachable, match="ReadError"):
        await step_answered(httpx.ReadError(""))


async def test_a_compressed_answer_that_is_damaged_is_a_protocol_error() -> None:
    """What the hop claims to be gzip and is not, is no answer of our protocol."""

    async def shard(_: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, stream=httpx.ByteStream(b"no gzip"), headers={"content-encoding": "gzip"}
        )

    with pytest.raises(HopProtocolError, match="cannot be decoded"):
        await step_at(hop_client(A, shard))


@pytest.mark.parametrize(
    "refusal",
    [
        CacheMiss("gone", reason="evicted", held=0),
        QueueFull("busy", value=4),
        InvalidRequest("wrong", field="X-Meshnet-Shape", allowed="1,TOKENS"),
    ],
    ids=lambda error: error.code,
)
async def test_a_refusal_comes_out_as_it_was_raised(refusal: MeshError) -> None:
    """A problem document becomes the shard's own error, and names the shard."""
    with pytest.raises(MeshError) as caught:
        await step_answered(problem(refusal))

    assert (type(caught.value), caught.value.message) == (type(refusal), refusal.message)
    assert caught.value.members == {**refusal.members, "endpoint": A}


@pytest.mark.parametrize("status", [301, 404, 500, 502])
async def test_a_foreign_error_page_is_a_protocol_error(status: int) -> None:
    """A proxy's HTML names hop and status."""
    page = httpx.Response(status, html="<html>Bad Gateway</html>", headers={"location": "/x"})
    with pytest.raises(HopProtocolError, match=f"answered {status}") as caught:
        await step_answered(page)

    assert caught.value.members == {"endpoint": A, "status": status}


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, html="<html>hello</html>"),
        httpx.Response(204),
        hidden(2, **{headers.DTYPE: "object"}),
        hidden(2, **{headers.SHAPE: "1,3,4"}),
        hidden(2, **{headers.SHAPE: "8"}),
        hidden(2, **{headers.SHAPE: "1,-2,-4"}),
        hidden(2, **{headers.SHAPE: "1,2,x"}),
        hidden(2, **{headers.SHAPE: "1,1099511627776,4"}),
        hidden(2, **{headers.SHAPE: "9" * 5000}),
    ],
    ids=["html", "nothing", "dtype", "lie", "rank", "negative", "word", "huge", "digits"],
)
async def test_a_wrong_frame_is_a_protocol_error(response: httpx.Response) -> None:
    """An answer whose bytes are not what its headers say is not taken."""
    with pytest.raises(HopProtocolError, match="answered no frame") as caught:
        await step_answered(response)

    assert caught.value.members == {"endpoint": A}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"7"', b'{"token_id": "x"}', b'{"token_id": -1}', b"[" * 10_000]
)
async def test_malformed_json_is_a_protocol_error(body: bytes) -> None:
    """A tail's JSON that is none, or not a tail's, is not taken."""
    response = httpx.Response(200, content=body, headers={"content-type": "application/json"})
    with pytest.raises(HopProtocolError, match="answered no TailAnswer"):
        await step_answered(response)


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
BODIES = st.binary(max_size=64) | st.just(BODY)
NAMED = st.dictionaries(
    st.sampled_from([headers.SHAPE, headers.DTYPE, headers.QUEUE_MS, "content-type"]),
    ASCII | st.sampled_from(["1,2,4", "1,2", "int32", "float32", "application/json", "inf"]),
)
STATUSES = st.sampled_from([200, 200, 201, 204, 400, 409, 500, 503])


@given(STATUSES, BODIES, NAMED)
async def test_any_answer_is_a_result_or_an_error_of_ours(
    status: int, body: bytes, named: dict[str, str]
) -> None:
    """Whatever a hop answers, nothing but a MeshError is raised."""
    try:
        result = (await step_answered(httpx.Response(status, content=body, headers=named))).result
    except MeshError as error:
        result = error

    assert isinstance(result, Frame | TailAnswer | MeshError)


# --- answers that do not end ---


async def test_an_answer_in_parts_is_read_to_its_end() -> None:
    """A frame may come in as many parts as it likes."""
    named = {headers.SHAPE: "1,2,4", headers.DTYPE: "float32"}
    answer = await step_answered(httpx.Response(200, stream=Parts(8, 4), headers=named))

    assert answer.result == Frame("float32", (1, 2, 4), bytes(32))


async def test_an_answer_that_is_too_long_is_left() -> None:
    """What is longer than JSON can be, and than the step's answer, is not read to its end."""
    parts = Parts(1000, 2**18)
    with pytest.raises(HopProtocolError, match=f"more than {2**20} bytes") as caught:
        await step_answered(httpx.Response(200, stream=parts))

    assert (caught.value.members, parts.read) == ({"endpoint": A}, 5)


async def test_a_long_step_has_a_long_answer() -> None:
    """An answer may be as long as the step's hidden states, however long those are."""
    n_tokens = 2**17
    client = Shard(hidden(n_tokens)).client()
    answer = await step_at(client, max_bytes=16 * n_tokens)

    assert answer.result == Frame("float32", (1, n_tokens, 4), bytes(16 * n_tokens))


async def test_an_answer_that_drips_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a part comes, the answer as a whole has its limit."""
    monkeypatch.setattr("meshnet.head.hop_client.perf_counter", Ticks([0, 0, 10, 20, 21, 1e9]))
    parts = Parts(1000, 1)
    with pytest.raises(HopTimeout) as caught:
        await step_answered(httpx.Response(200, stream=parts))

    assert (caught.value.members, parts.read) == ({"endpoint": A}, 3)


async def test_a_description_has_a_limit_too() -> None:
    """What is no step may be no longer than JSON can be."""
    with pytest.raises(HopProtocolError, match="more than"):
        await Shard(httpx.Response(200, stream=Parts(1000, 2**18))).client().describe()


# --- descriptions ---


async def test_a_description_is_read() -> None:
    """What the shard says of itself comes out as it went in."""
    shard = Shard(httpx.Response(200, content=INFO.model_dump_json()))
    found = await shard.client().describe()

    assert (found, shard.request.url.path) == (INFO, "/v1/shard")


@pytest.mark.parametrize("body", [b"{}", b"<html>", b'{"boot_id": 1}'])
async def test_a_malformed_description_is_a_protocol_error(body: bytes) -> None:
    """A description that is none names the hop."""
    with pytest.raises(HopProtocolError, match="answered no ShardInfo") as caught:
        await Shard(httpx.Response(200, content=body)).client().describe()

    assert caught.value.members == {"endpoint": A}


async def test_an_impossible_span_is_a_protocol_error() -> None:
    """A shard that claims no layer at all does not describe a shard."""
    lie = INFO.model_dump() | {"start_layer": 2}
    with pytest.raises(HopProtocolError):
        await Shard(httpx.Response(200, content=json.dumps(lie))).client().describe()


# --- over a stream ---


class Stream(HopStream):
    """Answers every step as a shard would answer a POST, and keeps what was asked."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self.asked: list[tuple[Mapping[str, str], bytes, float | None]] = []

    async def exchange(
        self, headers: Mapping[str, str], body: bytes, limit_s: float | None
    ) -> StreamMessage:
        self.asked.append((headers, body, limit_s))
        named = dict(self._answer.headers)
        return StreamMessage(1, named, self._answer.content, self._answer.status_code)


class Streams(HopStreams):
    """There is this stream, or none."""

    def __init__(self, stream: Stream | None) -> None:
        self._only = stream

    async def get(self) -> HopStream | None:
        return self._only

    def now(self) -> HopStream | None:
        return self._only


def streaming(answer: httpx.Response | None, posted: Shard) -> tuple[HopClient, Stream | None]:
    """A client with a stream, if there is to be an answer over it, and its stream."""
    stream = answer and Stream(answer)
    http = httpx.AsyncClient(base_url=A, transport=httpx.MockTransport(posted))
    return HopClient(A, http, HopTimeouts(), Streams(stream)), stream


async def test_a_step_goes_over_the_stream_that_is_there() -> None:
    """With the headers and the bytes of a POST, and the same limit."""
    client, stream = streaming(token(7), Shard(RuntimeError("nothing is to be posted")))
    answer = await step_at(client, limit_s=20)

    assert stream is not None
    ((named, body, limit_s),) = stream.asked
    assert (headers.parse(named), body, limit_s) == (STEP, BODY, 20)
    assert answer.result == TailAnswer(token_id=7)


async def test_a_step_is_posted_where_there_is_no_stream() -> None:
    """POST is the reference, and always works."""
    client, _ = streaming(None, Shard(token(7)))

    assert (await step_at(client)).result == TailAnswer(token_id=7)


@pytest.mark.parametrize(
    ("body", "max_answer_bytes"), [(bytes(MAX_BODY_BYTES + 1), 32), (BODY, MAX_BODY_BYTES + 1)]
)
async def test_what_is_too_long_for_a_message_is_posted(body: bytes, max_answer_bytes: int) -> None:
    """A step or its answer; what others send meanwhile goes past it."""
    client, stream = streaming(token(7), Shard(token(8)))
    answer = await client.step(STEP, body, limit_s=20, max_answer_bytes=max_answer_bytes)

    assert stream is not None
    assert (stream.asked, answer.result) == ([], TailAnswer(token_id=8))


async def test_the_longest_message_goes_over_the_stream() -> None:
    """Up to its limit nothing is posted."""
    client, _ = streaming(token(7), Shard(token(8)))
    longest = bytes(MAX_BODY_BYTES)
    answer = await client.step(STEP, longest, limit_s=20, max_answer_bytes=MAX_BODY_BYTES)

    assert answer.result == TailAnswer(token_id=7)


async def test_hidden_states_and_times_are_read_from_a_stream() -> None:
    """An answer is read like one to a POST."""
    response = hidden(2, **{headers.QUEUE_MS: "1.5", headers.COMPUTE_MS: "20"})
    client, _ = streaming(response, Shard(token(8)))
    answer = await step_at(client)

    assert answer.result == Frame("float32", (1, 2, 4), bytes(32))
    assert (answer.queue_ms, answer.compute_ms) == (1.5, 20.0)


async def test_a_refusal_over_a_stream_comes_out_as_it_was_raised() -> None:
    """It is the same document."""
    refusal = CacheMiss("gone", reason="evicted", held=0)
    client, _ = streaming(problem(refusal), Shard(token(8)))
    with pytest.raises(CacheMiss, match="gone") as caught:
        await step_at(client)

    assert caught.value.members == {"reason": "evicted", "held": 0, "endpoint": A}


@given(STATUSES, BODIES, NAMED)
async def test_any_answer_over_a_stream_is_a_result_or_an_error_of_ours(
    status: int, body: bytes, named: dict[str, str]
) -> None:
    """As over POST."""
    response = httpx.Response(status, content=body, headers=named)
    try:
        result: object = (await step_at(streaming(response, Shard(token(8)))[0])).result
    except MeshError as error:
        result = error

    assert isinstance(result, Frame | TailAnswer | MeshError)


async def test_only_steps_go_over_a_stream() -> None:
    """Descriptions and closing are requests always."""
    client, stream = streaming(token(7), Shard(httpx.Response(204)))
    await client.close_session(SessionId("s"), 1)

    assert stream is not None
    assert stream.asked == []


@pytest.mark.parametrize("answer", [token(7), None])
async def test_the_stream_that_is_open_is_told(answer: httpx.Response | None) -> None:
    """Or that there is none."""
    client, stream = streaming(answer, Shard(token(8)))

    assert client.stream is stream


async def test_a_client_that_posts_has_no_stream() -> None:
    """And wants none."""
    assert hop_client(A, Shard(token(8))).stream is None


@pytest.mark.parametrize(("told", "expected"), [("1", True), ("0", False), (None, False)])
async def test_an_answer_tells_whether_it_was_pushed(told: str | None, *, expected: bool) -> None:
    """A shard that does not say so has not."""
    named = {} if told is None else {"X-Meshnet-Pushed": told}
    client, stream = streaming(hidden(2, **named), Shard(token(8)))
    assert stream is not None
    answer = await client.step_on(stream, STEP, BODY, None)

    assert answer.pushed == expected
    assert [limit_s for *_, limit_s in stream.asked] == [None]


# --- open_hop ---


@pytest.mark.parametrize(
    ("transport", "limits"),
    [
        ("post", []),
        ("auto", [StreamLimits(is_required=False, connect_s=7)]),
        ("stream", [StreamLimits(is_required=True, connect_s=7)]),
    ],
)
async def test_a_transport_is_whether_there_are_streams(
    transport: HopTransport, limits: list[StreamLimits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None for `post`; such as there are for `auto`; and `stream` waits for one."""
    opened: list[StreamLimits] = []

    class Noted(HopStreams):
        def __init__(self, endpoint: str, named: Mapping[str, str], limits: StreamLimits) -> None:
            assert (endpoint, named) == (A, {"authorization": "Bearer k"})
            opened.append(limits)
            super().__init__(endpoint, named, limits)

    monkeypatch.setattr("meshnet.transport.hop_stream.HopStreams", Noted)
    async with open_hop(A, HopTimeouts(connect_s=7), "k", transport):
        pass

    assert opened == limits


@pytest.mark.parametrize(("key", "sent"), [(None, None), ("k", "Bearer k")])
async def test_the_cluster_key_is_carried(
    key: str | None, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call carries the key where there is one."""
    seen: list[httpx.Request] = []

    async def handle(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(204)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    async with open_hop(A, HopTimeouts(), key) as hop:
        await hop.close_session(SessionId("s"), epoch=1)

    assert [request.headers.get("authorization") for request in seen] == [sent]


async def test_the_client_is_closed_with_the_block() -> None:
    """After the block no call can be made."""
    async with open_hop(A, HopTimeouts()) as hop:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        await hop.close_session(SessionId("s"), epoch=1)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy meant for the internet never sees the mesh's traffic."""
    opened: list[bool] = []
    real = httpx.AsyncClient

    def client(**arguments: object) -> httpx.AsyncClient:
        opened.append(bool(arguments.get("trust_env", True)))
        return real(base_url=A)

    monkeypatch.setattr(httpx, "AsyncClient", client)
    async with open_hop(A, HopTimeouts()):
        pass

    assert opened == [False]
