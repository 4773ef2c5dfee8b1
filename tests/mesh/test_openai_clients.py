"""The official client against a served mesh, and the bytes that every other client reads."""
# pyright: reportPrivateUsage=false
# `_request_id` is public, in openai's own words.

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx
import openai
import pytest
import pytest_asyncio
from openai import (
    AsyncOpenAI,
    AsyncStream,
    DefaultAsyncHttpxClient,
    DefaultHttpxClient,
    OpenAI,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet.openai.bodies import usage
from services.head.app import create_app
from services.head.settings import HeadSettings, HopSetting
from tests.support.mesh import (
    CLUSTER_KEY,
    Mesh,
    body_of,
    fake_stages,
    fake_text,
    number_tokenizer,
    serve_head,
    serve_mesh,
    spell,
)
from tests.support.serving import Served, serve
from tests.support.streams import DONE, text_of

# One loop and one mesh for the whole file.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
N_TOKENS = 8
TEXT = fake_text(PROMPT, N_TOKENS)
TWO = fake_text(PROMPT, 2)
THIRD = int(fake_text(PROMPT, 3).split("<")[-1][:-1])

ResultT = TypeVar("ResultT")

# The parameters of every request. Any: the client's overloads want each by its own type.
ASK: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": spell(PROMPT)}],
    "temperature": 0,
    "max_tokens": N_TOKENS,
}


async def _answer(client: AsyncOpenAI, **parameters: object) -> ChatCompletion:
    completions = cast("Any", client.chat.completions)
    return await completions.create(**(ASK | parameters))


async def _stream(client: AsyncOpenAI, **parameters: object) -> AsyncStream[ChatCompletionChunk]:
    completions = cast("Any", client.chat.completions)
    return await completions.create(**(ASK | parameters), stream=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncGenerator[Mesh]:
    async with serve_mesh(fake_stages((0, 2), (2, 4))) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncGenerator[AsyncOpenAI]:
    async with _client_of(mesh.head) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ending() -> AsyncGenerator[Mesh]:
    """A mesh whose answer ends by itself after two tokens."""
    tokenizer = number_tokenizer(end_token_ids=frozenset({THIRD}))
    async with serve_mesh(fake_stages((0, 4)), tokenizer) as served:
        yield served


def _client_of(head: Served, *, max_retries: int = 0) -> AsyncOpenAI:
    # Plain: a proxy of the machine's environment is none of the test's.
    http = DefaultAsyncHttpxClient(trust_env=False)
    return AsyncOpenAI(
        base_url=f"{head.url}/v1", api_key="any", max_retries=max_retries, http_client=http
    )


async def _in_thread(mesh: Mesh, work: Callable[[OpenAI], ResultT]) -> ResultT:
    """Work of the synchronous client, beside the servers' loop."""

    def run() -> ResultT:
        http = DefaultHttpxClient(trust_env=False)
        with OpenAI(
            base_url=f"{mesh.head.url}/v1", api_key="any", max_retries=0, http_client=http
        ) as made:
            return work(made)

    return await asyncio.to_thread(run)


# The answer in one piece, and streamed.


async def test_sync_client_gets_an_answer(mesh: Mesh) -> None:
    """`create` gives the text, the finish reason and true counts."""

    def work(made: OpenAI) -> ChatCompletion:
        return cast("Any", made.chat.completions).create(**ASK)

    completion = await _in_thread(mesh, work)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.index, choice.finish_reason, choice.message.refusal) == (0, "length", None)
    assert completion.usage is not None
    counts = completion.usage
    assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens) == (4, 8, 12)
    assert (completion.object, completion.model) == ("chat.completion", "fake")
    assert completion.id.startswith("chatcmpl-")


async def test_async_client_gets_the_same_answer(client: AsyncOpenAI) -> None:
    """The asynchronous client gets the same text under another id."""
    completions = [await _answer(client) for _ in range(2)]
    assert [c.choices[0].message.content for c in completions] == [TEXT, TEXT]
    assert completions[0].id != completions[1].id


async def test_sync_client_streams(mesh: Mesh) -> None:
    """The textbook loop over a stream, which takes `choices[0]` of each chunk, gives the text."""

    def work(made: OpenAI) -> tuple[str, list[str | None]]:
        chunks = list(made.chat.completions.create(**ASK, stream=True))
        assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        text = "".join(delta.content or "" for delta in deltas)
        return text, [chunk.choices[0].finish_reason for chunk in chunks]

    text, reasons = await _in_thread(mesh, work)
    assert text == TEXT
    assert [None] * (len(reasons) - 1) + ["length"] == reasons


async def test_async_client_streams_the_usage_last(client: AsyncOpenAI) -> None:
    """With `include_usage` the last chunk has no choice and the counts, the others no counts."""
    stream = await _stream(client, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    *others, last = chunks
    assert (last.choices, all(chunk.usage is None for chunk in others)) == ([], True)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 8)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in others) == TEXT


async def test_stream_helper_puts_the_answer_together(ending: Mesh) -> None:
    """Both clients' stream helpers give the deltas, and the whole completion at the end."""
    async with (
        _client_of(ending.head) as client,
        client.chat.completions.stream(**ASK) as stream,
    ):
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (TWO, "stop")
    assert "".join(deltas) == TWO

    def work(made: OpenAI) -> str | None:
        with made.chat.completions.stream(**ASK) as helper:
            return helper.get_final_completion().choices[0].message.content

    assert await _in_thread(ending, work) == TWO


async def test_stream_helper_takes_several_answers(ending: Mesh) -> None:
    """With `n` the helper puts each choice together; it dies if the second one's role is first."""
    async with (
        _client_of(ending.head) as client,
        client.chat.completions.stream(**ASK, n=3) as stream,
    ):
        final = await stream.get_final_completion()
    told = [(c.index, c.message.content, c.finish_reason) for c in final.choices]
    assert told == [(index, TWO, "stop") for index in range(3)]


async def test_scores_are_told_token_by_token(client: AsyncOpenAI) -> None:
    """Asked for, each token has its score and its alternatives, streamed or not."""
    whole = (await _answer(client, logprobs=True, top_logprobs=2)).choices[0].logprobs
    stream = await _stream(client, logprobs=True, top_logprobs=2)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert whole is not None
    assert whole.content is not None
    assert "".join(token.token for token in whole.content) == TEXT
    assert [len(token.top_logprobs) for token in whole.content] == [2] * N_TOKENS
    told = [token for part in parts if part is not None for token in part.content or ()]
    assert told == whole.content


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer(client: AsyncOpenAI, *, stream: bool) -> None:
    """The text ends before the string, which is over two tokens, and the reason is `stop`."""
    stop = TEXT[TEXT.index("<", 1) - 2 :][:4]
    expected = (TEXT[: TEXT.index(stop)], "stop")
    if stream:
        choices = [chunk.choices[0] async for chunk in await _stream(client, stop=[stop])]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert (text, choices[-1].finish_reason) == expected
    else:
        choice = (await _answer(client, stop=[stop])).choices[0]
        assert (choice.message.content, choice.finish_reason) == expected


async def test_stream_helper_tells_an_answer_that_was_cut(client: AsyncOpenAI) -> None:
    """Where `max_tokens` ended the answer, the helper's last call says so as openai's does."""
    async with client.chat.completions.stream(**ASK) as stream:
        with pytest.raises(openai.LengthFinishReasonError):
            await stream.get_final_completion()


async def test_client_that_breaks_out_of_a_stream_leaves_no_session(
    mesh: Mesh, client: AsyncOpenAI
) -> None:
    """Closing the client's stream ends the generation on every hop."""
    stream = await _stream(client, max_tokens=400)
    async for _ in stream:
        break
    await stream.close()
    for _ in range(500):
        if await mesh.usage() == [(0, 0), (0, 0)]:
            break
        await asyncio.sleep(0.01)
    assert await mesh.usage() == [(0, 0), (0, 0)]


async def test_end_token_is_a_stop_and_no_text(ending: Mesh) -> None:
    """An answer that ends by itself has `stop`, and nothing of the end token in its text."""
    async with _client_of(ending.head) as client:
        completion = await _answer(client)
        assert completion.choices[0].finish_reason == "stop"
        assert completion.choices[0].message.content == TWO
        stream = await _stream(client)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == TWO
        assert chunks[-1].choices[0].finish_reason == "stop"


async def test_explicit_nulls_are_the_defaults(client: AsyncOpenAI) -> None:
    """A parameter that is null is as if it were absent, also one that is not implemented."""
    nulls: dict[str, Any] = dict.fromkeys(
        (
            "frequency_penalty",
            "function_call",
            "functions",
            "logit_bias",
            "logprobs",
            "max_completion_tokens",
            "metadata",
            "n",
            "parallel_tool_calls",
            "presence_penalty",
            "response_format",
            "seed",
            "stop",
            "store",
            "stream",
            "stream_options",
            "tool_choice",
            "tools",
            "top_logprobs",
            "top_p",
            "user",
        )
    )
    completion = await _answer(client, extra_body=nulls)
    assert completion.choices[0].message.content == TEXT


async def test_text_parts_and_the_newer_limit_are_understood(client: AsyncOpenAI) -> None:
    """Content as a list of text parts, and `max_completion_tokens`, mean what they say."""
    parts = [{"type": "text", "text": spell([i])} for i in PROMPT]
    messages = [{"role": "user", "content": parts}]
    completion = await _answer(client, messages=messages, max_completion_tokens=3)
    assert completion.choices[0].message.content == fake_text(PROMPT, 3)


# Models, ids and errors.


async def test_models_are_listed_and_retrieved(mesh: Mesh, client: AsyncOpenAI) -> None:
    """The one model is listed, can be asked for, and says how long its context is."""
    models = await client.models.list()
    assert [model.id for model in models.data] == ["fake"]
    model = await _in_thread(mesh, lambda c: c.models.retrieve("fake"))
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "meshnet")
    assert model.to_dict()["max_model_len"] == 512


async def test_request_id_is_the_answers(client: AsyncOpenAI) -> None:
    """Every answer has an id of its own, or the caller's; the client shows it."""
    own = await _answer(client)
    assert str(own._request_id).startswith("req_")
    given = await _answer(client, extra_headers={"X-Request-Id": "mine-1"})
    assert given._request_id == "mine-1"
    insane = await _answer(client, extra_headers={"X-Request-Id": "a b"})
    assert str(insane._request_id).startswith("req_")


async def test_bad_parameter_is_a_bad_request_that_names_it(client: AsyncOpenAI) -> None:
    """A wrong value is openai's BadRequestError with the parameter, and a request id."""
    with pytest.raises(openai.BadRequestError) as caught:
        await _answer(client, temperature=3)
    error = caught.value
    assert (error.status_code, error.param, error.code) == (400, "temperature", None)
    assert error.type == "invalid_request_error"
    assert str(error.request_id).startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
async def test_unsupported_parameter_is_a_bad_request_with_its_code(
    client: AsyncOpenAI, *, stream: bool
) -> None:
    """What is not implemented is refused by name and never passed over in silence."""
    with pytest.raises(openai.BadRequestError) as caught:
        await _answer(client, modalities=["text", "audio"], stream=stream)
    assert (caught.value.param, caught.value.code) == ("modalities", "unsupported_parameter")


async def test_too_long_a_request_says_so_in_its_text(client: AsyncOpenAI) -> None:
    """The exception's text has what LiteLLM and LangChain look for."""
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
        await _answer(client, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    assert "context_length_exceeded" in str(caught.value)


async def test_unknown_model_is_not_found(mesh: Mesh, client: AsyncOpenAI) -> None:
    """A model that is not served is openai's NotFoundError, wherever it is named."""
    with pytest.raises(openai.NotFoundError) as caught:
        await _answer(client, model="gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="allowed: fake"):
        await _in_thread(mesh, lambda c: c.models.retrieve("org/gpt-4"))


async def test_missing_shard_is_an_internal_server_error() -> None:
    """A 503 is openai's InternalServerError, which it would try again; the code says which."""
    async with (
        serve_head(["http://127.0.0.1:9"]) as (head, _),
        _client_of(head) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await _stream(client)
        assert (caught.value.status_code, caught.value.code) == (503, "shard_unavailable")


async def test_error_in_mid_stream_is_raised() -> None:
    """A stream that breaks is an exception with the error's text, never a short answer."""
    async with (
        serve_mesh(fake_stages((0, 2), (2, 4)), recovery_timeout_s=0.2) as mesh,
        _client_of(mesh.head) as client,
    ):
        stream = await _stream(client, max_tokens=400)
        await anext(stream)
        await mesh.shards[1].served.kill()
        with pytest.raises(openai.APIError, match="not reachable") as caught:
            _ = [chunk async for chunk in stream]
        assert caught.value.code == "shard_unavailable"


@dataclass
class Busy:
    """Answers the first `n_left` chat requests 503, as the head does when it is full."""

    app: ASGIApp
    n_left: int
    n_asked: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            await self.app(scope, receive, send)
            return
        self.n_asked += 1
        if self.n_asked > self.n_left:
            await self.app(scope, receive, send)
            return
        error = {"message": "busy", "type": "server_error", "param": None, "code": None}
        busy = JSONResponse({"error": error}, status_code=503, headers={"Retry-After": "0.01"})
        await busy(scope, receive, send)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_comes_again_after_a_503(mesh: Mesh, *, stream: bool) -> None:
    """The client obeys Retry-After: with two retries the third attempt is answered."""
    settings = HeadSettings.model_validate(
        {
            "model": "fake",
            "route": tuple(HopSetting(endpoint=shard.url) for shard in mesh.shards),
            "cluster_key": CLUSTER_KEY,
        }
    )
    busy = Busy(create_app(settings, tokenizer=number_tokenizer()), n_left=2)
    async with serve(busy) as head, _client_of(head, max_retries=2) as client:
        if stream:
            chunks = await _stream(client)
            text = "".join([c.choices[0].delta.content or "" async for c in chunks])
        else:
            text = (await _answer(client)).choices[0].message.content or ""
    assert (text, busy.n_asked) == (TEXT, 3)


# The bytes.


async def _raw_stream(mesh: Mesh, **parameters: object) -> httpx.Response:
    body = body_of(spell(PROMPT), stream=True, **parameters)
    return await mesh.client.post("/v1/chat/completions", json=body)


def _events(response: httpx.Response) -> list[str]:
    """The data of each event; every byte belongs to one."""
    assert response.content.endswith(b"\n\n")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


async def test_stream_is_framed_by_line_feeds(mesh: Mesh) -> None:
    """`data: `, JSON, two line feeds; no carriage return, no other field, not to be cached."""
    response = await _raw_stream(mesh)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "charset=utf-8" in response.headers["content-type"]
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req_")
    assert b"\r" not in response.content
    assert len(_events(response)) == 1 + N_TOKENS + 1 + 1


@pytest.mark.parametrize("include_usage", [None, False, True])
async def test_stream_is_role_then_text_then_one_end(
    mesh: Mesh, *, include_usage: bool | None
) -> None:
    """The role, the text, one closing chunk, the counts only if asked for, and [DONE]."""
    options = {} if include_usage is None else {"include_usage": include_usage}
    *chunks, done = _events(await _raw_stream(mesh, stream_options=options))
    assert done == DONE
    bodies = [cast("dict[str, Any]", json.loads(chunk)) for chunk in chunks]
    constant = ("id", "object", "created", "model", "system_fingerprint")
    assert len({tuple(body[key] for key in constant) for body in bodies}) == 1
    assert bodies[0]["object"] == "chat.completion.chunk"
    if include_usage:
        last = bodies.pop()
        assert last["choices"] == []
        counts = usage(prompt_tokens=4, completion_tokens=8, cached_tokens=0)
        assert counts == last["usage"]
        assert all(body["usage"] is None for body in bodies)
    else:
        assert all("usage" not in body for body in bodies)
    choices = [body["choices"] for body in bodies]
    assert all(len(choice) == 1 and choice[0]["index"] == 0 for choice in choices)
    deltas = [choice[0]["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(list(delta) == ["content"] and delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    reasons = [choice[0]["finish_reason"] for choice in choices]
    assert [None] * (len(reasons) - 1) + ["length"] == reasons


async def test_deltas_join_to_the_answer_in_one_piece(mesh: Mesh) -> None:
    """Streamed or not, greedy or drawn with a seed, the text is the same."""
    for parameters in ({}, {"temperature": 1, "seed": 7}, {"max_tokens": 1}):
        streamed = text_of(_events(await _raw_stream(mesh, **parameters)))
        whole = await mesh.chat(spell(PROMPT), **parameters)
        assert whole.json()["choices"][0]["message"]["content"] == streamed


async def test_answer_in_one_piece_has_every_required_key(mesh: Mesh) -> None:
    """Keys that OpenAI's document requires are there, null where there is nothing to say."""
    body = (await mesh.chat(spell(PROMPT))).json()
    assert {"id", "object", "created", "model", "choices", "usage"} <= body.keys()
    (choice,) = body["choices"]
    assert {"index", "message", "finish_reason", "logprobs"} == choice.keys()
    assert {"role", "content", "refusal"} == choice["message"].keys()


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/v1/models", "/v1/models/fake"])
async def test_head_requests_are_answered_without_a_body(mesh: Mesh, path: str) -> None:
    """HEAD on what is probed gives GET's status and no body."""
    response = await mesh.client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert (await mesh.client.get(path)).status_code == 200


async def test_unknown_parameters_are_accepted_and_named(mesh: Mesh) -> None:
    """A field nobody has heard of does not fail a request; a header says that it was ignored."""
    response = await mesh.chat(spell(PROMPT), frobnicate=True)
    assert response.json()["choices"][0]["message"]["content"] == TEXT
    assert response.headers["x-ignored-params"] == "frobnicate"
    streamed = await _raw_stream(mesh, frobnicate=True)
    assert streamed.headers["x-ignored-params"] == "frobnicate"


async def test_description_of_the_api_can_be_read(mesh: Mesh) -> None:
    """`/openapi.json` is there, and making it warns of nothing."""
    response = await mesh.client.get("/openapi.json")
    assert response.status_code == 200
    assert "/v1/chat/completions" in response.json()["paths"]
