"""What does not fit is refused with a problem that says why, and leaves everything as it was."""

from __future__ import annotations

import asyncio
import base64
import json
import tracemalloc
import zlib
from array import array
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from meshnet.ids import new_id
from meshnet.model.fake_stage import next_token
from tests.support.mesh import (
    VOCAB_SIZE,
    Mesh,
    body_of,
    fake_stages,
    fake_text,
    serve_mesh,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.steps import Body, ShardClient, shard_client
from tests.support.streams import eventually

# One loop and one set of servers for the whole file: that nothing is left behind is what it says.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
NEXT = 9
MAX_STEP_TOKENS = 32
TOO_LONG = "x" * 129

Headers = dict[str, str | bytes | None]


@dataclass(frozen=True)
class Hops:
    """A first hop, which takes token ids, and a tail, which takes hidden states."""

    first: ShardClient
    tail: ShardClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hops() -> AsyncGenerator[Hops]:
    settings = shard_settings(max_step_tokens=MAX_STEP_TOKENS)
    async with AsyncExitStack() as stack:
        callers: list[ShardClient] = []
        for stage in fake_stages((0, 2), (2, 4)):
            shard = await stack.enter_async_context(serve_shard(stage, settings=settings))
            start_layer = stage.facts.span.start
            callers.append(await stack.enter_async_context(shard_client(shard.url, start_layer)))
        yield Hops(*callers)


@dataclass(frozen=True)
class Held:
    """A session that holds PROMPT on one shard, and the shard's own numbers since then."""

    hop: ShardClient
    session: str
    cache: dict[str, int]

    async def check_untouched(self) -> None:
        """The numbers are the same, and the session takes its next step where it stood."""
        assert self.cache == await self.hop.cache()
        answer = await self.hop.step(self.session, "decode", len(PROMPT), [NEXT])
        assert answer.status_code == 200, answer.text
        if self.hop.start_layer:
            assert next_token([*PROMPT, NEXT], VOCAB_SIZE) == answer.json()["token_id"]
        else:
            assert array("f", [NEXT, 0, 0, 0]).tobytes() == answer.content


async def _hold(hop: ShardClient) -> Held:
    session = new_id()
    assert (await hop.step(session, "prefill", 0, PROMPT)).status_code == 200
    return Held(hop, session, await hop.cache())


@pytest_asyncio.fixture(loop_scope="module")
async def at_tail(hops: Hops) -> AsyncGenerator[Held]:
    held = await _hold(hops.tail)
    yield held
    await hops.tail.close(held.session)


@pytest_asyncio.fixture(loop_scope="module")
async def at_first(hops: Hops) -> AsyncGenerator[Held]:
    held = await _hold(hops.first)
    yield held
    await hops.first.close(held.session)


def _check_problem(response: httpx.Response, status: int, field: str) -> dict[str, Any]:
    """A problem document about `field`, much shorter than what it is about could be."""
    assert status == response.status_code, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert {"type", "title", "status", "detail", "code", "retryable"} <= problem.keys()
    assert (status, field, False) == (problem["status"], problem["field"], problem["retryable"])
    assert len(response.content) < 1500
    return problem


SESSION, CACHE, PAST_LEN = "X-Meshnet-Session", "X-Meshnet-Cache", "X-Meshnet-Past-Len"
SHAPE, DTYPE, START = "X-Meshnet-Shape", "X-Meshnet-Dtype", "X-Meshnet-Start-Layer"
SAMPLING, STEP, FINGERPRINT = "X-Meshnet-Sampling", "X-Meshnet-Step", "X-Meshnet-Fingerprint"
CONTEXT = "X-Meshnet-Context-Bytes"

MALFORMED = [
    (SESSION, ["", "a b", "../../etc", "a/b", TOO_LONG, b"caf\xe9"]),
    (CACHE, ["", "cached", "PREFILL", "prefill,decode"]),
    (PAST_LEN, ["", "x", "-1", "1.5", "2147483648", "9" * 5000]),
    (SHAPE, ["", "4", "a,b,c", "1,,4", "1,1,4,4", "1,-1,4", "1,0,4", "-1,-1,-4", "1,1.5,4"]),
    (SHAPE, ["1,1099511627776,4", "1,1,1099511627776", "1099511627776,1,4", "1,NaN,4"]),
    (DTYPE, ["", "object", "int8", "float64", "Float32", "float32,float32"]),
    (START, ["", "x", "-1", "2147483648"]),
    (FINGERPRINT, ["", "a b", TOO_LONG]),
    (STEP, ["", "a b", TOO_LONG]),
    (SAMPLING, ["", "{", "[]", "7", '"hot"', "nul", '{"temperature": "hot"}', '{"top_p": 1.1}']),
    (SAMPLING, ['{"temperature": NaN}', '{"temperature": Infinity}', '{"temperature": -0.1}']),
    (SAMPLING, ['{"top_k": -1}', '{"seed": 1e40}', '{"unknown": 1}', '{"logit_bias": {"1": 9}}']),
    (SAMPLING, ["[" * 4000, '{"%s": 1}' % ("x" * 4000), '{"repetition_penalty": 0}']),
    (SAMPLING, ['{"top_logprobs": 21}', '{"min_p": 2}', '{"frequency_penalty": 2.1}']),
    (CONTEXT, ["", "x", "-1", "1.5", "16777217", "9" * 5000]),
    ("X-Request-Id", ["a b", TOO_LONG]),
    ("traceparent", ["x" * 257]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in MALFORMED for value in values]
)
async def test_malformed_header_is_named_with_what_is_allowed(
    at_tail: Held, field: str, value: str | bytes
) -> None:
    """A malformed header is a 400 that names it, its value and what is allowed; nothing changes."""
    response = await _decode(at_tail, {field: value})
    problem = _check_problem(response, 400, field)
    sent = value.decode("latin-1") if isinstance(value, bytes) else value
    assert sent[:200] == problem["value"]
    assert problem["allowed"]
    await at_tail.check_untouched()


@pytest.mark.parametrize("field", [SHAPE, DTYPE, SESSION])
async def test_missing_header_is_named(at_tail: Held, field: str) -> None:
    """Without its shape, dtype or session a cached step is a 400 that names the missing header."""
    problem = _check_problem(await _decode(at_tail, {field: None}), 400, field)
    assert not problem["value"]
    assert problem["allowed"]
    await at_tail.check_untouched()


# What each header says is legal, but not for this shard, this session's step, or with the others.
UNFIT = [
    pytest.param({PAST_LEN: "0"}, 400, PAST_LEN, "0", id="decode-at-0"),
    pytest.param({CACHE: "stateless"}, 400, PAST_LEN, "4", id="stateless-with-a-past"),
    pytest.param({CACHE: None}, 400, PAST_LEN, "4", id="no-mode-with-a-past"),
    pytest.param({PAST_LEN: "512"}, 400, PAST_LEN, "512", id="past-the-last-position"),
    pytest.param({PAST_LEN: "2147483647"}, 400, PAST_LEN, "2147483647", id="past-far-too-long"),
    pytest.param({START: "1"}, 400, START, "1", id="start-layer-before-the-span"),
    pytest.param({START: "4"}, 400, START, "4", id="start-layer-behind-the-span"),
    pytest.param({SHAPE: "1,1,3"}, 400, SHAPE, "1,1,3", id="hidden-one-less"),
    pytest.param({SHAPE: "1,1,5"}, 400, SHAPE, "1,1,5", id="hidden-one-more"),
    pytest.param({SHAPE: "1,4"}, 400, SHAPE, "1,4", id="two-axes"),
    pytest.param({SHAPE: "2,1,4"}, 400, SHAPE, "2,1,4", id="a-batch-of-two"),
    pytest.param({SHAPE: "1,2147483647,4"}, 413, SHAPE, "2147483647", id="longest-shape-there-is"),
    pytest.param({SHAPE: "1,33,4"}, 413, SHAPE, "33", id="one-token-too-many"),
    pytest.param({DTYPE: "int32"}, 400, DTYPE, "int32", id="ids-for-a-later-hop"),
    pytest.param({DTYPE: "bfloat16"}, 400, DTYPE, "bfloat16", id="another-precision"),
    pytest.param({CONTEXT: "2", SAMPLING: None}, 400, CONTEXT, "2", id="context-without-sampling"),
    pytest.param({CONTEXT: "16777216"}, 413, CONTEXT, "16777216", id="context-no-model-needs"),
]


@pytest.mark.parametrize(("changed", "status", "field", "value"), UNFIT)
async def test_header_that_does_not_fit_is_named_with_what_is_allowed(
    at_tail: Held, changed: Headers, status: int, field: str, value: str
) -> None:
    """A legal header that does not fit here is refused by name, and nothing changes."""
    problem = _check_problem(await _decode(at_tail, changed), status, field)
    assert value == str(problem["value"])
    assert str(problem["allowed"])
    await at_tail.check_untouched()


@pytest.mark.parametrize(
    ("changed", "status", "field"),
    [
        ({DTYPE: "float32"}, 400, DTYPE),
        ({SHAPE: "1,1,4"}, 400, SHAPE),
        ({SHAPE: "1,1099511627776"}, 400, SHAPE),
        ({SHAPE: "1,33"}, 413, SHAPE),
        ({START: "2"}, 400, START),
    ],
)
async def test_first_hop_takes_token_ids_only(
    at_first: Held, changed: Headers, status: int, field: str
) -> None:
    """Where layer 0 is run, hidden states and shapes that are not `1,TOKENS` are refused."""
    _check_problem(await _decode(at_first, changed), status, field)
    await at_first.check_untouched()


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31 - 1, -(2**31)])
async def test_token_id_outside_the_vocabulary_is_named(at_first: Held, token_id: int) -> None:
    """A token id that the model does not know is a 400 with the id and the range; nothing runs."""
    response = await at_first.hop.step(at_first.session, "decode", len(PROMPT), [token_id])
    problem = _check_problem(response, 400, "body")
    assert (token_id, f"0 to {VOCAB_SIZE - 1}") == (problem["value"], problem["allowed"])
    await at_first.check_untouched()


def _mask(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


BAD_CONTEXTS = [
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"unknown": 1}',
    b'{"%s": 1}' % (b"x" * 50_000),
    b'{"prompt_ids": [-1]}',
    b'{"generated_ids": [64]}',
    b'{"generated_ids": [%s]}' % b",".join([b"-1"] * 20_000),
    b'{"banned_ids": [2147483647]}',
    b'{"banned_ids": %s}' % json.dumps(list(range(VOCAB_SIZE))).encode(),
    b'{"logit_bias": {"64": 1}}',
    b'{"logit_bias": {"1": NaN}}',
    b'{"logit_bias": {"1": 1e999}}',
    b'{"logit_bias": {"1": 100.1}}',
    b'{"next_ids": [1, 2]}',
    b'{"next_ids": [64]}',
    b'{"allowed": "no base64"}',
    b'{"allowed": "AAAA"}',
    json.dumps({"allowed": _mask(bytes(8))}).encode(),
    json.dumps({"allowed": _mask(bytes(8) + b"\xff")}).encode(),
    json.dumps({"allowed": _mask(b"\x01"), "banned_ids": [0]}).encode(),
    json.dumps({"allowed": _mask(bytes(2**25))}).encode(),
]


@pytest.mark.parametrize("context", BAD_CONTEXTS, ids=lambda context: repr(context[:40]))
async def test_bad_context_is_refused_and_changes_nothing(at_tail: Held, context: bytes) -> None:
    """A context that is none, or does not fit model or step, is a 400 about the body."""
    response = await at_tail.hop.step(
        at_tail.session, "decode", len(PROMPT), [NEXT], context=context
    )
    problem = _check_problem(response, 400, "body")
    assert problem["detail"].startswith("sampling context: ")
    assert problem["allowed"]
    await at_tail.check_untouched()


@pytest.mark.parametrize("claimed", [1, 3])
async def test_context_of_another_length_than_claimed_is_refused(
    at_tail: Held, claimed: int
) -> None:
    """The body is the tensor and as many bytes as the header says, no more and no fewer."""
    body = at_tail.hop.frame([NEXT]) + b"{}"
    problem = _check_problem(await _decode(at_tail, {CONTEXT: str(claimed)}, body), 400, "body")
    assert (problem["value"], problem["allowed"]) == ("18", 16 + claimed)
    await at_tail.check_untouched()


async def test_good_context_counts_for_its_step_only(at_tail: Held) -> None:
    """Bias and mask make this step's token, and leave nothing behind for the next one."""
    context = b'{"logit_bias": {"3": 100}}'
    answer = await at_tail.hop.step(at_tail.session, "decode", len(PROMPT), [NEXT], context=context)
    assert answer.json() == {"token_id": 3}
    answer = await at_tail.hop.step(at_tail.session, "decode", len(PROMPT) + 1, [NEXT])
    assert answer.json() == {"token_id": next_token([*PROMPT, NEXT, NEXT], VOCAB_SIZE)}


async def _in_pieces(data: bytes) -> AsyncGenerator[bytes]:
    for start in range(0, len(data), 5):
        yield data[start : start + 5]


@pytest.mark.parametrize("n_bytes", [0, 15, 17, 4096, 2**22])
@pytest.mark.parametrize("chunked", [False, True])
async def test_body_of_another_length_than_its_shape_is_refused(
    at_tail: Held, n_bytes: int, *, chunked: bool
) -> None:
    """A body must have the bytes its shape makes, whether or not its length was announced."""
    body: Body = _in_pieces(bytes(n_bytes)) if chunked else bytes(n_bytes)
    if chunked and n_bytes > 4096:
        body = _in_large_pieces(n_bytes)
    problem = _check_problem(await _decode(at_tail, {}, body), 400, "body")
    assert problem["allowed"] == 16
    expected = "more than 16" if chunked and n_bytes > 16 else str(n_bytes)
    assert expected == problem["value"]
    await at_tail.check_untouched()


async def _in_large_pieces(n_bytes: int) -> AsyncGenerator[bytes]:
    for _ in range(0, n_bytes, 65536):
        yield bytes(65536)


async def test_body_in_chunks_of_the_right_length_is_taken(at_tail: Held) -> None:
    """A body need not announce its length."""
    await at_tail.check_untouched()
    body = _in_pieces(at_tail.hop.frame([NEXT]))
    answer = await at_tail.hop.step(at_tail.session, "decode", 5, [NEXT], body=body)
    assert next_token([*PROMPT, NEXT, NEXT], VOCAB_SIZE) == answer.json()["token_id"]


async def test_shape_that_claims_terabytes_allocates_nothing(at_tail: Held) -> None:
    """Headers of up to 2^31 times 2^31 elements are refused within a megabyte of memory."""
    tracemalloc.start()
    try:
        for shape in ("1,2147483647,4", "1,2147483647,2147483647", "1,1099511627776,4"):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            response = await _decode(at_tail, {SHAPE: shape})
            _, peak = tracemalloc.get_traced_memory()
            assert response.status_code in {400, 413}
            assert peak - before < 2**20
    finally:
        tracemalloc.stop()
    await at_tail.check_untouched()


async def test_body_that_breaks_off_leaves_nothing(
    hops: Hops, at_tail: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller that goes in the middle of its body is no fault of the shard's, and changes none."""
    url = hops.tail.http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    headers = {
        SESSION: at_tail.session,
        CACHE: "decode",
        PAST_LEN: "4",
        SHAPE: "1,1,4",
        DTYPE: "float32",
        "Host": "shard",
        "Authorization": hops.tail.http.headers["authorization"],
        "Content-Length": "16",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"POST /v1/forward HTTP/1.1\r\n{lines}\r\n".encode() + bytes(7))
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)
    await at_tail.check_untouched()
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


async def test_another_models_fingerprint_is_a_conflict_that_names_both(at_tail: Held) -> None:
    """A step for another model is a 409 `model_mismatch` with both fingerprints."""
    response = await _decode(at_tail, {FINGERPRINT: "fake-2-2-4"})
    problem = _check_problem(response, 409, FINGERPRINT)
    assert problem["code"] == "model_mismatch"
    assert (problem["expected"], problem["actual"]) == ("fake-2-2-4", "fake-1-2-4")
    await at_tail.check_untouched()


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer", "test-cluster-key", b"\xff\xfe"])
async def test_without_the_cluster_key_nothing_is_told_or_done(
    at_tail: Held, key: str | bytes | None
) -> None:
    """Every call of the protocol without the key is a 401; steps and closings have no effect."""
    http = at_tail.hop.http
    auth = (
        [] if key is None else [(b"authorization", key.encode() if isinstance(key, str) else key)]
    )
    async with httpx.AsyncClient(base_url=http.base_url, headers=auth, trust_env=False) as stranger:
        foreign = ShardClient(stranger, at_tail.hop.start_layer)
        responses = [
            await foreign.step(at_tail.session, "decode", len(PROMPT), [NEXT]),
            await foreign.close(at_tail.session),
            await stranger.get("/v1/shard"),
        ]
        for response in responses:
            problem = _check_problem(response, 401, "Authorization")
            assert problem["code"] == "unauthorized"
    await at_tail.check_untouched()


@pytest.mark.parametrize("session", [TOO_LONG, "a%20b", "caf%C3%A9", "a%0A"])
async def test_closing_a_malformed_session_is_refused(at_tail: Held, session: str) -> None:
    """A session id that cannot be one is a 400 when it is to be closed."""
    problem = _check_problem(await at_tail.hop.close(session), 400, "session")
    assert problem["allowed"]
    await at_tail.check_untouched()


async def test_closing_a_session_that_is_not_held_is_no_error(at_tail: Held) -> None:
    """DELETE is idempotent and touches its own session only."""
    assert [(await at_tail.hop.close("never-seen")).status_code for _ in range(2)] == [204, 204]
    await at_tail.check_untouched()


async def test_shard_without_a_cache_takes_stateless_steps_only() -> None:
    """With `kv_cache` false a cached step is a 400 that says so, and a stateless one is run."""
    (stage,) = fake_stages((2, 4))
    settings = shard_settings(kv_cache=False)
    async with (
        serve_shard(stage, settings=settings) as shard,
        shard_client(shard.url, start_layer=2) as hop,
    ):
        response = await hop.step("a", "prefill", 0, PROMPT)
        problem = _check_problem(response, 400, CACHE)
        assert (problem["value"], problem["allowed"]) == ("prefill", "stateless")
        answer = await hop.step("a", "stateless", 0, PROMPT)
        assert next_token(PROMPT, VOCAB_SIZE) == answer.json()["token_id"]
        assert (await hop.cache())["sessions"] == 0


async def _decode(held: Held, changed: Headers, body: Body | None = None) -> httpx.Response:
    """The session's next step, with a fault."""
    return await held.hop.step(
        held.session, "decode", len(PROMPT), [NEXT], changed=changed, body=body
    )


# The head: every refusal is in OpenAI's shape, and no hop hears of the request.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncGenerator[Mesh]:
    async with serve_mesh(fake_stages((0, 2), (2, 4)), max_body_bytes=4096) as served:
        yield served


def _check_openai_error(response: httpx.Response, status: int, code: str | None) -> dict[str, Any]:
    assert status == response.status_code, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert {"message", "type", "param", "code"} == body["error"].keys()
    assert ("invalid_request_error", code) == (body["error"]["type"], body["error"]["code"])
    return body["error"]


async def _check_untouched(mesh: Mesh) -> None:
    """No hop was asked for a step, and the next good request is served."""
    assert [shard.recorder.steps for shard in mesh.shards] == [[], []]
    good = await mesh.chat(spell(PROMPT), max_tokens=2)
    assert fake_text(PROMPT, 2) == good.json()["choices"][0]["message"]["content"]
    assert await mesh.usage() == [(0, 0), (0, 0)]
    for shard in mesh.shards:
        shard.recorder.steps.clear()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b"[" * 999,
    ],
)
async def test_body_that_is_no_json_object_is_refused(mesh: Mesh, body: bytes) -> None:
    """A body that is no JSON object is a 400 in OpenAI's shape."""
    response = await mesh.client.post("/v1/chat/completions", content=body)
    _check_openai_error(response, 400, None)
    await _check_untouched(mesh)


BAD_FIELDS: list[tuple[dict[str, object], int, str | None, str]] = [
    ({"model": 7}, 400, None, "model"),
    ({"model": None}, 400, None, "model"),
    ({"model": "another"}, 404, "model_not_found", "model"),
    ({"messages": []}, 400, None, "messages"),
    ({"messages": "hi"}, 400, None, "messages"),
    ({"messages": [{"role": "king", "content": "hi"}]}, 400, None, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, None, "messages[0].content"),
    ({"max_tokens": 0}, 400, None, "max_tokens"),
    ({"max_tokens": 2**40}, 400, None, "max_tokens"),
    ({"max_tokens": 513}, 400, "context_length_exceeded", "messages"),
    ({"temperature": 2.1}, 400, None, "temperature"),
    ({"temperature": "hot"}, 400, None, "temperature"),
    ({"seed": 2**63}, 400, None, "seed"),
    ({"n": 0}, 400, None, "n"),
    ({"n": 17}, 400, None, "n"),
    ({"logprobs": 1}, 400, None, "logprobs"),
    ({"top_logprobs": 2}, 400, None, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, None, "top_logprobs"),
    ({"stop": ""}, 400, None, "stop[0]"),
    ({"stop": ["a"] * 17}, 400, None, "stop"),
    ({"min_p": 1.1}, 400, None, "min_p"),
    ({"top_k": -2}, 400, None, "top_k"),
    ({"frequency_penalty": -2.1}, 400, None, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, None, "repetition_penalty"),
    ({"response_format": {"type": "xml"}}, 400, None, "response_format.type"),
    ({"tools": []}, 400, None, "tools"),
    ({"tool_choice": "required"}, 400, None, "tool_choice"),
    ({"audio": {"voice": "alloy"}}, 400, "unsupported_parameter", "audio"),
    ({"functions": [{"name": "f"}]}, 400, "unsupported_parameter", "functions"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD_FIELDS)
async def test_bad_parameter_is_named_before_any_hop_hears_of_it(
    mesh: Mesh,
    fields: dict[str, object],
    status: int,
    code: str | None,
    param: str,
    *,
    stream: bool,
) -> None:
    """A bad parameter is refused by name, as a stream and in one piece alike."""
    response = await mesh.chat("<1>", stream=stream, **fields)
    assert param == _check_openai_error(response, status, code)["param"]
    await _check_untouched(mesh)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_stream_parameter_is_named(
    mesh: Mesh, fields: dict[str, object], param: str
) -> None:
    """`stream` is true or false, and without it there are no `stream_options`."""
    response = await mesh.chat("<1>", **fields)
    assert param == _check_openai_error(response, 400, None)["param"]
    await _check_untouched(mesh)


async def test_prompt_longer_than_the_context_is_refused(mesh: Mesh) -> None:
    """A prompt without room for an answer is a 400 that says how long the context is."""
    response = await mesh.client.post(
        "/v1/chat/completions", json=body_of("<1>" * 512, max_tokens=1)
    )
    error = _check_openai_error(response, 400, "context_length_exceeded")
    assert "maximum context length is 512 tokens" in error["message"]
    await _check_untouched(mesh)


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_limit_is_refused(mesh: Mesh, *, chunked: bool) -> None:
    """A body over `max_body_bytes` is a 413, whether or not its length was announced."""
    body = _in_large_pieces(65536) if chunked else bytes(65536)
    response = await mesh.client.post("/v1/chat/completions", content=body)
    _check_openai_error(response, 413, "payload_too_large")
    await _check_untouched(mesh)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("PUT", "/readyz", 405)],
)
async def test_no_such_path_or_method_is_in_openais_shape(
    mesh: Mesh, method: str, path: str, status: int
) -> None:
    """Also what the router itself refuses is in OpenAI's shape."""
    _check_openai_error(await mesh.client.request(method, path), status, None)


async def test_client_that_goes_in_its_body_is_no_fault_of_the_heads(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that breaks off in its body is not logged as an error of the head."""
    url = mesh.client.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: head\r\nContent-Length: 100\r\n\r\n"
    writer.write(head.encode() + b'{"model"')
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []
    await _check_untouched(mesh)


async def test_ids_of_another_byte_order_or_width_do_not_pass(at_first: Held) -> None:
    """Token ids as big-endian or 64-bit numbers are refused: by their values, by their length."""
    swapped = array("i", [NEXT])
    swapped.byteswap()
    for body in (swapped.tobytes(), array("q", [NEXT]).tobytes()):
        response = await at_first.hop.step(
            at_first.session, "decode", len(PROMPT), [NEXT], body=body
        )
        _check_problem(response, 400, "body")
    await at_first.check_untouched()


async def test_all_refusals_together_left_no_session(hops: Hops) -> None:
    """After everything above neither shard holds a session, a lease or a byte."""

    async def is_empty() -> bool:
        caches = [await hop.cache() for hop in (hops.first, hops.tail)]
        return all(
            cache == {"sessions": 0, "leases": 0, "cached_bytes": 0, "kept": 0} for cache in caches
        )

    await eventually(is_empty, within_s=5)
