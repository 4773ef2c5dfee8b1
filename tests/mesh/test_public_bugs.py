"""Other servers' public bugs, as small requests of ours: those that fake models can show.

Where each row of the contract's table of bugs is shown; a file without a folder is in tests/mesh.
What other files show exactly is not shown again. Some numbers are not in the table.

    1   tests/e2e/test_public_bugs; in small test_completions::test_stop_string_spans_tokens
    2   tests/e2e/test_public_bugs
    4   tests/e2e/test_public_bugs; in small test_completions::test_echo_with_scores_covers_...
    5   tests/e2e/test_public_bugs
    6   here; of completions test_completions::test_what_is_wrong_is_refused_by_name
    7   tests/e2e/test_public_bugs
    9   here; of completions test_completions::test_every_field_may_be_null
    10  tests/e2e/test_public_bugs
    11  tests/e2e/test_public_bugs
    12  here, of all tokens; the chunks test_completions::test_usage_is_streamed_as_asked
    13  tests/e2e/test_public_bugs
    15  here; at 200 random moments test_disconnect
    17  here; the AI SDK's side tests/clients/test_node
    19  here
    20  test_many_models::test_an_unknown_model_is_not_found
    21  test_completions::test_count_equals_the_limit, both endpoints
    23  test_access::test_a_preflight_needs_no_key and test_a_page_may_read_why_it_was_refused
    24  here
    25  here
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import StageModel
from meshnet.openai.bodies import usage
from meshnet.topology import LayerSpan
from tests.support.answers import (
    CHAT,
    COMPLETIONS,
    answer,
    finishes_of,
    raw_stream,
    refusal,
    stream,
    texts_of,
)
from tests.support.fake_mesh import byte_tokenizer
from tests.support.mesh import Mesh, fake_stages, fake_text, serve_mesh, spell
from tests.support.recorder import SeenStep
from tests.support.streams import DONE, eventually

# One loop and one mesh for the tests that leave it as it was.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

RESPONSES = "/v1/responses"
PROMPT = [5, 6, 7, 8]
N_TOKENS = 8
TEXT = fake_text(PROMPT, N_TOKENS)
MESSAGES = [{"role": "user", "content": spell(PROMPT)}]
COMMON: dict[str, Any] = {"model": "fake", "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: COMMON | {"messages": MESSAGES, "max_tokens": N_TOKENS},
    COMPLETIONS: COMMON | {"prompt": PROMPT, "max_tokens": N_TOKENS},
    RESPONSES: COMMON | {"input": spell(PROMPT), "max_output_tokens": N_TOKENS},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{40}$"},
        "age": {"type": "integer"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}

endpoints = pytest.mark.parametrize("path", BODIES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncGenerator[Mesh]:
    async with serve_mesh(fake_stages((0, 2), (2, 4))) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncGenerator[AsyncOpenAI]:
    """With the retries that it makes unless told otherwise."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{mesh.head.url}/v1", api_key="any", http_client=http) as made:
        yield made


def steps_of(mesh: Mesh) -> list[int]:
    """How many steps each shard was asked for."""
    return [len(shard.recorder.steps) for shard in mesh.shards]


# Row 6: ids beyond the vocabulary.

BEYOND = [
    ({"logit_bias": {"99999999": 5}}, "logit_bias"),
    ({"logit_bias": {"64": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids"),
    ({"stop_token_ids": [64]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": ["abc"]}, "stop_token_ids[0]"),
]


@endpoints
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("fields", "param"), BEYOND)
async def test_ids_beyond_the_vocabulary(
    mesh: Mesh, path: str, fields: dict[str, object], param: str, *, streamed: bool
) -> None:
    """Row 6: an id that is no token's is a 400 that names the field, and no shard hears of it."""
    before = steps_of(mesh)
    status, error = await refusal(mesh.client, path, **BODIES[path], **fields, stream=streamed)

    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert steps_of(mesh) == before


async def test_the_last_id_of_the_vocabulary(mesh: Mesh) -> None:
    """Row 6: the largest id there is can be favoured, and stops an answer."""
    body = await answer(mesh.client, CHAT, **BODIES[CHAT], logit_bias={"63": 100})
    stopped = await answer(
        mesh.client, CHAT, **BODIES[CHAT], logit_bias={"63": 100}, stop_token_ids=[63]
    )

    assert body["choices"][0]["message"]["content"] == "<63>" * N_TOKENS
    assert (stopped["choices"][0]["message"]["content"], stopped["usage"]["completion_tokens"]) == (
        "",
        1,
    )


# Row 9: nulls.

REQUIRED = {"model", "messages", "prompt", "input"}


@endpoints
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_field_null_at_once(mesh: Mesh, path: str, *, streamed: bool) -> None:
    """Row 9: null in every optional field of the endpoint's document is as if it were absent."""
    document = (await mesh.client.get("/openapi.json")).json()
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
    refused = ("functions", "audio", "suffix", "best_of", "guided_json", "previous_response_id")
    nulls = dict.fromkeys([*fields, *refused])
    assert {"n", "seed", "stop", "tools", "stream_options"} & nulls.keys()
    body = nulls | BODIES[path] | {"stream": streamed or None}
    response = await mesh.client.post(path, json=body)

    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    assert text_in(response) == TEXT


def text_in(response: httpx.Response) -> str:
    """The text of an answer of any endpoint, streamed or not."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return whole_text(response.json())
    lines = response.text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    if "choices" in chunks[0]:
        return "".join(texts_of(chunks))
    return whole_text(chunks[-1]["response"])


def whole_text(body: Any) -> str:  # noqa: ANN401  # JSON
    if "output" in body:
        return body["output"][0]["content"][0]["text"]
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# Row 12: the counts. One chunk a token is told of, or more; the last is of all of them.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_counts_of_several_choices(mesh: Mesh, path: str) -> None:
    """Row 12: the one chunk with counts has no choices, comes last, and counts all choices."""
    options = {"include_usage": True}
    chunks = await stream(mesh.client, path, **BODIES[path], n=2, stream_options=options)

    assert [chunk["choices"] for chunk in chunks].count([]) == 1
    assert chunks[-1]["choices"] == []
    counts = usage(prompt_tokens=4, completion_tokens=16, cached_tokens=0)
    assert chunks[-1]["usage"] == counts
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


# Row 15: whoever leaves takes the work along.


def byte_stages(*spans: tuple[int, int]) -> list[StageModel]:
    """Fake stages with a vocabulary that can spell JSON."""
    vocab_size = byte_tokenizer(512).vocab_size
    return [FakeStage(fake_facts(LayerSpan(*span), 4, vocab_size)) for span in spans]


@dataclass
class Gate:
    """Holds every step that comes to a shard once `n_open` have passed, until it is opened."""

    n_open: int
    n_held: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, step: SeenStep) -> None:
        del step
        if self.n_open > 0:
            self.n_open -= 1
            return
        self.n_held += 1
        await self.opened.wait()


WORK = {
    "three": {"n": 3, "max_tokens": 200},
    "schema": {"response_format": FORMAT, "max_tokens": 200},
    "three-schemas": {"response_format": FORMAT, "n": 3, "max_tokens": 200},
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize(
    ("streamed", "n_steps"),
    [(True, 0), (True, 7), (False, 0), (False, 7)],
    ids=["before-the-stream", "in-mid-stream", "plain-at-once", "plain-later"],
)
async def test_who_leaves_frees_all_shards_within_a_step(
    work: str, hop: int, n_steps: int, *, streamed: bool
) -> None:
    """Row 15: once the client has gone no shard is asked for another step, and all are empty."""
    fields: dict[str, Any] = WORK[work]
    n = fields.get("n", 1)
    async with serve_mesh(byte_stages((0, 2), (2, 4)), byte_tokenizer(512)) as busy:
        gate = busy.shards[hop].recorder.before_step = Gate(n * n_steps)
        content = COMMON | {"messages": [{"role": "user", "content": "Who?"}]}
        asking = asyncio.create_task(ask_until_cancelled(busy, content | fields, stream=streamed))

        async def all_wait() -> bool:
            return gate.n_held == n

        await eventually(all_wait, within_s=20)
        asked = steps_of(busy)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        async def is_given_up() -> bool:
            metrics = (await busy.client.get("/metrics")).text
            return 'meshnet_head_active{model="fake"} 0.0' in metrics

        await eventually(is_given_up, within_s=5)  # while the step still lasts
        gate.opened.set()

        async def is_empty() -> bool:
            return await busy.usage() == [(0, 0), (0, 0)]

        await eventually(is_empty, within_s=5)
        # What was under way when the client left passes on to no other hop, and nothing follows.
        assert steps_of(busy) == asked
        assert [len(shard.recorder.closed) for shard in busy.shards] == [n, n]
        # A straggler would be through by the time that another request is.
        assert (await busy.chat("Who?", max_tokens=2)).status_code == 200
        await eventually(is_empty, within_s=5)


async def ask_until_cancelled(mesh: Mesh, body: dict[str, Any], *, stream: bool) -> None:
    """Read an answer that does not come to its end: the connection is closed when cancelled."""
    async with (
        httpx.AsyncClient(base_url=mesh.head.url, trust_env=False, timeout=60) as own,
        own.stream("POST", CHAT, json=body | {"stream": stream}) as response,
    ):
        await response.aread()


# Row 17: a failure is no success.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_lost_shard_is_no_end(path: str, n: int) -> None:
    """Row 17: a middle shard lost for good is an error event without a reason, then [DONE]."""
    stages = fake_stages((0, 1), (1, 3), (3, 4))
    body = BODIES[path] | {"max_tokens": 400, "n": n}
    async with serve_mesh(stages, recovery_timeout_s=0.3) as broken:
        middle = broken.shards[1]
        killing: list[asyncio.Task[None]] = []

        async def kill_later(step: SeenStep) -> None:
            if step.past_len == 9 and not killing:
                killing.append(asyncio.create_task(middle.served.kill()))

        middle.recorder.before_step = kill_later
        *events, error, done = await raw_stream(broken.client, path, **body)
        await asyncio.gather(*killing)
    chunks = [json.loads(event) for event in events]

    assert done == DONE
    members = json.loads(error)["error"]
    assert members.keys() == {"message", "type", "param", "code"}
    assert (members["type"], members["code"]) == ("server_error", "shard_unavailable")
    assert "choices" not in json.loads(error)
    assert finishes_of(chunks) == []
    texts = texts_of(chunks)
    assert len(texts) == n
    assert all(text and fake_text(PROMPT, 400).startswith(text) for text in texts)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_official_client_raises(path: str) -> None:
    """Row 17: openai-python raises the error's text and code, and returns no short answer."""
    async with serve_mesh(fake_stages((0, 1), (1, 3), (3, 4)), recovery_timeout_s=0.3) as broken:
        http = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(
            base_url=f"{broken.head.url}/v1", api_key="any", max_retries=0, http_client=http
        ) as made:
            create: Any = made.chat.completions.create if path == CHAT else made.completions.create
            chunks = await create(**(BODIES[path] | {"max_tokens": 400}), stream=True)
            await anext(chunks)
            await broken.shards[1].served.kill()
            with pytest.raises(openai.APIError, match="not reachable") as caught:
                _ = [chunk async for chunk in chunks]
    assert caught.value.code == "shard_unavailable"


# Row 19: strays, and constraints by names that are gone.

REMOVED: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "start: 'a'",
    "grammar": "start: 'a'",
    "json_schema": {"type": "object"},
    "regex": "a+",
    "structured_outputs": {"json": {}},
}


@endpoints
@pytest.mark.parametrize("name", REMOVED)
async def test_a_constraint_by_another_name(mesh: Mesh, path: str, name: str) -> None:
    """Row 19: a constraint that would be missed is refused by name, saying what takes its place."""
    before = steps_of(mesh)
    status, error = await refusal(mesh.client, path, **BODIES[path], **{name: REMOVED[name]})

    assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    place = "text.format" if path == RESPONSES else "response_format"
    assert f"`{place}`" in str(error["message"])
    assert steps_of(mesh) == before


@endpoints
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_misspelt_parameter(mesh: Mesh, path: str, *, streamed: bool) -> None:
    """Row 19: what nobody knows is passed over, and the answer's header names it."""
    body = BODIES[path] | {"max_token": 1, "temperatur": 2, "stream": streamed}
    response = await mesh.client.post(path, json=body)

    assert response.headers["x-ignored-params"] == "max_token,temperatur"
    assert text_in(response) == TEXT


async def test_a_misspelt_parameter_of_a_strict_head() -> None:
    """Row 19: told to be strict, a head refuses the first one by name, and serves all others."""
    async with serve_mesh(fake_stages((0, 4)), strict_parameters=True) as strict:
        for path, body in BODIES.items():
            status, error = await refusal(strict.client, path, **body, max_token=1, temperatur=2)
            assert (status, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == "max_token"
            assert steps_of(strict) == [0]
        for path, body in BODIES.items():
            assert text_in(await strict.client.post(path, json=body)) == TEXT


# Row 24: what is malformed is the client's fault.

MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "schema-as-text": (
        {"response_format": {"type": "json_schema", "json_schema": "str"}},
        "response_format.json_schema",
    ),
    "format-as-text": ({"response_format": "json"}, "response_format"),
    "numbers-as-messages": ({"messages": [1]}, "messages[0]"),
    "list-in-messages": ({"messages": [[]]}, "messages[0]"),
    "a-message": ({"messages": {"role": "user", "content": "a"}}, "messages"),
    "number-as-content": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    "true-as-number": ({"max_tokens": True}, "max_tokens"),
    "text-as-number": ({"n": "3"}, "n"),
    "text-as-list": ({"tools": "hammer"}, "tools"),
    "number-as-tool": ({"tools": [1]}, "tools[0]"),
    "list-as-object": ({"stream_options": [], "stream": True}, "stream_options"),
    "list-as-bias": ({"logit_bias": [1]}, "logit_bias"),
    "number-as-stop": ({"stop": 7}, "stop"),
    "object-as-seed": ({"seed": {}}, "seed"),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_field(mesh: Mesh, case: str) -> None:
    """Row 24: a value of the wrong kind is a 400 that names its place, and short."""
    fields, param = MALFORMED[case]
    response = await mesh.client.post(CHAT, json=BODIES[CHAT] | fields)
    error = response.json()["error"]

    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert len(response.content) < 1500


@endpoints
@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b'{"model": "fake", "temperature": NaN}', "application/json", 400),
        (b'{"model": "fake", "temperature": -Infinity}', "application/json", 400),
        (b'{"model": "fake", "temperature": 1e999}', "application/json", 400),
        (b"[]", "application/json", 400),
        (b'[{"model": "fake"}]', "application/json", 400),
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"model=fake", "application/x-www-form-urlencoded", 415),
        (b'{"model": "fake"}', "text/plain", 415),
    ],
)
async def test_a_malformed_body(
    mesh: Mesh, path: str, content: bytes, media_type: str, status: int
) -> None:
    """Row 24: no JSON object, or none by its own word, is the client's fault in OpenAI's shape."""
    response = await mesh.client.post(path, content=content, headers={"content-type": media_type})
    error = response.json()["error"]

    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert error.keys() == {"message", "type", "param", "code"}


async def test_the_official_client_asks_once(mesh: Mesh, client: AsyncOpenAI) -> None:
    """Row 24: the client, which repeats what is a server's fault, does not repeat these."""
    before = await refusals_of(mesh)
    create: Any = client.chat.completions.create
    for fields, _ in MALFORMED.values():
        with pytest.raises(openai.BadRequestError):
            await create(**(BODIES[CHAT] | fields))

    assert await refusals_of(mesh) == before + len(MALFORMED)


async def refusals_of(mesh: Mesh) -> float:
    """Requests that the head has refused."""
    lines = (await mesh.client.get("/metrics")).text.splitlines()
    counts = [line for line in lines if line.startswith("meshnet_head_refusals_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


# Row 25: embeddings, which are not made here.


@pytest.mark.parametrize("form", [None, "float", "base64", "int8"])
async def test_embeddings_are_refused(mesh: Mesh, form: str | None) -> None:
    """Row 25: whatever their form, embeddings are a 400 that says why, never 200 or 500."""
    before = steps_of(mesh)
    body = {"model": "fake", "input": "a", "encoding_format": form}
    status, error = await refusal(mesh.client, "/v1/embeddings", **body)

    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["code"] == "unsupported_parameter"
    assert "makes no embeddings" in str(error["message"])
    assert steps_of(mesh) == before


async def test_the_official_client_is_told_of_embeddings(client: AsyncOpenAI) -> None:
    """Row 25: the SDK, which asks for base64 unless told otherwise, raises with the reason."""
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        await client.embeddings.create(model="fake", input="a")
