"""Who may ask, and how often: keys, limits, and web pages, over real connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from services.head.api_keys import digest_of
from services.head.settings import ApiKeySetting
from tests.support.mesh import CLUSTER_KEY, Mesh, body_of, fake_stages, fake_text, serve_mesh, spell
from tests.support.streams import read_stream, text_of

# One loop and one mesh for the whole file; the tests of limits have their own.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
TEXT = fake_text(PROMPT, 8)
KEY = "mesh_alice"
ORIGIN = {"Origin": "https://page.example"}
ASKED = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,x-request-id",
}
ASK: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": spell(PROMPT)}],
    "max_tokens": 8,
}


def key_of(secret: str, rate_limit: str | None = None) -> ApiKeySetting:
    """A key, named as it is."""
    return ApiKeySetting(name=secret, sha256=digest_of(secret), rate_limit=rate_limit)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def error_of(response: httpx.Response) -> Mapping[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def client_of(mesh: Mesh, key: str) -> AsyncOpenAI:
    # Plain: a proxy of the machine's environment is none of the test's.
    http = DefaultAsyncHttpxClient(trust_env=False)
    base_url = f"{mesh.head.url}/v1"
    return AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncGenerator[Mesh]:
    """A head that asks for a key."""
    async with serve_mesh(fake_stages((0, 2), (2, 4)), api_keys=(key_of(KEY),)) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_mesh() -> AsyncGenerator[Mesh]:
    """A head that asks for none, as every head does unless told."""
    async with serve_mesh(fake_stages((0, 4))) as served:
        yield served


# Keys.


@pytest.mark.parametrize("key", [KEY, CLUSTER_KEY])
async def test_a_key_opens_everything(mesh: Mesh, key: str) -> None:
    """With a key, or the cluster's, a head answers as one without keys does."""
    auth = bearer(key)
    for path in ("/v1/models", "/v1/cluster", "/metrics", "/version", "/openapi.json"):
        assert (await mesh.client.get(path, headers=auth)).status_code == 200
    answer = await mesh.client.post(
        "/v1/chat/completions", json=body_of(spell(PROMPT)), headers=auth
    )
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("auth", [{}, bearer("mesh_bob"), {"Authorization": f"Basic {KEY}"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("HEAD", "/v1/models"),
        ("GET", "/v1/cluster"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
        ("DELETE", "/v1/models"),
    ],
)
async def test_without_one_nothing_is_told(
    mesh: Mesh, method: str, path: str, auth: dict[str, str]
) -> None:
    """401, also for what does not exist; in OpenAI's shape, with an id and how to ask."""
    response = await mesh.client.request(method, path, headers=auth)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.headers["x-request-id"].startswith("req_")
    if method != "HEAD":
        error = error_of(response)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert "mesh_" not in response.text


async def test_a_refused_request_touches_no_shard(mesh: Mesh) -> None:
    """Nothing is computed for whoever has no key, and its body is not looked at."""
    for shard in mesh.shards:
        shard.recorder.steps.clear()
    assert (await mesh.chat(spell(PROMPT))).status_code == 401
    nonsense = await mesh.client.post("/v1/chat/completions", content=b"{")
    assert nonsense.status_code == 401
    assert [shard.recorder.steps for shard in mesh.shards] == [[], []]


@pytest.mark.parametrize("path", ["/livez", "/health", "/readyz"])
async def test_health_is_public(mesh: Mesh, path: str) -> None:
    """Orchestrators ask without a key."""
    assert (await mesh.client.get(path)).status_code == 200
    assert (await mesh.client.head(path)).status_code == 200


async def test_the_official_client_says_what_is_wrong(mesh: Mesh) -> None:
    """A wrong key is openai's AuthenticationError, with the code and an id; a right one serves."""
    async with client_of(mesh, "mesh_bob") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(**ASK)
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.type == "authentication_error"
    assert str(caught.value.request_id).startswith("req_")
    async with client_of(mesh, KEY) as client:
        assert (await client.models.retrieve("fake")).id == "fake"


async def test_keys_are_not_logged(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is logged, and the key that was shown is not."""
    await mesh.client.get("/v1/models", headers=bearer("mesh_secret"))
    assert "'status': 401" in caplog.text
    assert "mesh_secret" not in caplog.text


async def test_a_head_without_keys_asks_for_none(open_mesh: Mesh) -> None:
    """A cluster key alone closes nothing, and any key is as good as none."""
    for auth in ({}, bearer("any"), {"Authorization": "nonsense"}):
        assert (await open_mesh.client.get("/v1/models", headers=auth)).status_code == 200


async def test_the_cluster_key_still_pins_routes(mesh: Mesh) -> None:
    """An API key opens the endpoint and no more: to choose shards takes the cluster's."""
    route = "[" + ",".join(f'{{"endpoint": "{shard.url}"}}' for shard in mesh.shards) + "]"
    for key, status in ((KEY, 403), (CLUSTER_KEY, 200)):
        response = await mesh.client.post(
            "/v1/chat/completions",
            json=body_of(spell(PROMPT)),
            headers={**bearer(key), "X-Meshnet-Route": route},
        )
        assert response.status_code == status


# Limits.


async def test_a_key_that_is_used_too_often_is_told_when_to_come_back() -> None:
    """429 with Retry-After, for generations alone; another key is served meanwhile."""
    keys = (key_of("mesh_slow", "2/hour"), key_of("mesh_fast"))
    async with serve_mesh(fake_stages((0, 4)), api_keys=keys) as mesh:
        slow, body = bearer("mesh_slow"), body_of(spell(PROMPT), max_tokens=1)
        for _ in range(5):
            assert (await mesh.client.get("/v1/models", headers=slow)).status_code == 200
        answers = [
            await mesh.client.post("/v1/chat/completions", json=body, headers=slow)
            for _ in range(3)
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        error = error_of(answers[-1])
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 3500 <= int(answers[-1].headers["retry-after"]) <= 3600
        for path in ("/v1/models", "/metrics"):
            assert (await mesh.client.get(path, headers=slow)).status_code == 200
        fast = bearer("mesh_fast")
        for _ in range(5):
            answer = await mesh.client.post("/v1/chat/completions", json=body, headers=fast)
            assert answer.status_code == 200


async def test_the_official_client_raises_its_rate_limit_error() -> None:
    """Plain and streamed, with the code, and the header it would wait by."""
    keys = (key_of("mesh_slow", "1/hour"),)
    async with (
        serve_mesh(fake_stages((0, 4)), api_keys=keys) as mesh,
        client_of(mesh, "mesh_slow") as client,
    ):
        await client.chat.completions.create(**ASK)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**ASK, stream=stream)
            assert caught.value.code == "rate_limit_exceeded"
            assert int(caught.value.response.headers["retry-after"]) >= 1


# Web pages.


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nothing"])
async def test_a_preflight_needs_no_key(mesh: Mesh, path: str) -> None:
    """A browser that asks for permission gets it, with every header that it asked for."""
    response = await mesh.client.options(path, headers=ASKED)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].split(",")
    assert {"authorization", "content-type", "x-stainless-lang", "x-request-id"} <= set(allowed)
    assert "access-control-allow-credentials" not in response.headers


async def test_a_page_may_read_why_it_was_refused(mesh: Mesh) -> None:
    """401s, 404s and bad requests carry CORS headers and an id that scripts may read."""
    nothing = await mesh.client.get("/nothing", headers=ORIGIN | bearer(KEY))
    bad = await mesh.client.post("/v1/chat/completions", content=b"{", headers=ORIGIN | bearer(KEY))
    refused = await mesh.client.post("/v1/chat/completions", json={}, headers=ORIGIN)
    for response, status in ((nothing, 404), (bad, 400), (refused, 401)):
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "*"
        exposed = response.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "retry-after", "x-ignored-params"} <= set(exposed)
        assert response.headers["x-request-id"].startswith("req_")


async def test_a_page_reads_a_stream(mesh: Mesh) -> None:
    """A streamed answer carries the headers too."""
    mesh.client.headers.update(ORIGIN | bearer(KEY))
    try:
        events = await read_stream(mesh.client, spell(PROMPT))
    finally:
        del mesh.client.headers["origin"], mesh.client.headers["authorization"]
    assert text_of(events) == TEXT


async def test_only_the_pages_told_may_call() -> None:
    """With a list of origins another page is told no, and gets no permission to read."""
    origins = ("https://page.example",)
    async with serve_mesh(fake_stages((0, 4)), cors_origins=origins) as mesh:
        other = {"Origin": "https://other.example"}
        allowed = await mesh.client.options("/v1/models", headers=ASKED)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        refused = await mesh.client.options("/v1/models", headers=ASKED | other)
        assert refused.status_code == 400
        read = await mesh.client.get("/v1/models", headers=other)
        for response in (refused, read):
            assert "access-control-allow-origin" not in response.headers


# What every answer has.


@pytest.mark.parametrize(
    "path",
    ["/health", "/livez", "/readyz", "/version", "/metrics", "/v1/cluster", "/v1/models"],
)
async def test_head_is_answered_wherever_get_is(open_mesh: Mesh, path: str) -> None:
    """HEAD has GET's status and no body."""
    response = await open_mesh.client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert (await open_mesh.client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("OPTIONS", "/v1/models", 405),
    ],
)
async def test_no_such_path_or_method(open_mesh: Mesh, method: str, path: str, status: int) -> None:
    """OpenAI's shape, an id, and what was asked for, whatever it was."""
    response = await open_mesh.client.request(method, path)
    error = error_of(response)
    assert (response.status_code, error["type"]) == (status, "invalid_request_error")
    assert response.headers["x-request-id"].startswith("req_")
    assert ("allow" in response.headers) == (status == 405)


async def test_the_version_is_told(open_mesh: Mesh) -> None:
    """What runs here has a version."""
    body = (await open_mesh.client.get("/version")).json()
    assert body.keys() == {"version"}
    assert body["version"][0].isdecimal()


async def test_answers_tell_their_time_and_streams_do_not(open_mesh: Mesh) -> None:
    """`openai-processing-ms` is whole milliseconds."""
    answer = await open_mesh.chat(spell(PROMPT))
    assert answer.headers["openai-processing-ms"].isdecimal()
    streamed = await open_mesh.chat(spell(PROMPT), stream=True)
    assert streamed.status_code == 200
    assert "openai-processing-ms" not in streamed.headers


async def test_a_fault_of_ours_has_an_id_too(
    open_mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 500 has the request's id, in its header and its text, and headers for web pages."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("services.head.routes.operations.cluster_view", fail)
    headers = ORIGIN | {"X-Request-Id": "mine-1"}
    response = await open_mesh.client.get("/v1/cluster", headers=headers)
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine-1")
    assert response.headers["access-control-allow-origin"] == "*"
    error = error_of(response)
    assert error["type"] == "server_error"
    assert "mine-1" in error["message"]
    assert "ZeroDivision" not in response.text
