"""Which routes are served: of hops that tile the model exactly, are there, and may be named."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest
import pytest_asyncio

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.topology import LayerSpan
from services.head.settings import HopSetting
from tests.support.mesh import (
    CLUSTER_KEY,
    VOCAB_SIZE,
    Shard,
    body_of,
    fake_stages,
    fake_text,
    number_tokenizer,
    serve_head,
    serve_shard,
    spell,
)
from tests.support.streams import eventually, read_stream, text_of

# One loop and one set of shards for the whole file; every test has a head of its own.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
TEXT = fake_text(PROMPT, 8)
KEY = {"authorization": f"Bearer {CLUSTER_KEY}"}

SPANS = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 3), (2, 4)]


@dataclass
class Shards:
    """Shards of one model by their span, and two of other models by their name."""

    by_name: dict[str, Shard] = field(default_factory=dict[str, Shard])

    def hops(self, *names: str) -> tuple[HopSetting, ...]:
        """`0-2` is the shard of that span, `0-3@1` the one of span 0-3 entered at layer 1."""
        hops: list[HopSetting] = []
        for name in names:
            shard, _, start = name.partition("@")
            start_layer = int(start) if start else None
            hops.append(HopSetting(endpoint=self.by_name[shard].url, start_layer=start_layer))
        return tuple(hops)

    def asked(self) -> set[str]:
        """Which shards were asked for a step."""
        return {name for name, shard in self.by_name.items() if shard.recorder.steps}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def all_shards() -> AsyncGenerator[Shards]:
    facts = fake_facts(LayerSpan(2, 4), 4, VOCAB_SIZE)
    stages = dict(zip([f"{a}-{b}" for a, b in SPANS], fake_stages(*SPANS), strict=True))
    stages["revision"] = FakeStage(replace(facts, revision="fake-2"))
    stages["dtype"] = FakeStage(replace(facts, dtype="bfloat16"))
    stages["layers"] = FakeStage(replace(facts, n_layers=6))
    stages["hidden"] = FakeStage(replace(facts, hidden_size=8))
    async with AsyncExitStack() as stack:
        shards = Shards()
        for name, stage in stages.items():
            shards.by_name[name] = await stack.enter_async_context(serve_shard(stage))
        yield shards
        for shard in shards.by_name.values():
            shard.served.server.should_exit = True


@pytest.fixture
def shards(all_shards: Shards) -> Shards:
    for shard in all_shards.by_name.values():
        shard.recorder.steps.clear()
    return all_shards


@asynccontextmanager
async def _head(
    route: Sequence[HopSetting], **overrides: object
) -> AsyncGenerator[httpx.AsyncClient]:
    async with serve_head([], number_tokenizer(), route=tuple(route), **overrides) as (_, client):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def any_head(all_shards: Shards) -> AsyncGenerator[httpx.AsyncClient]:
    async with _head(all_shards.hops("0-2", "2-4")) as client:
        yield client


async def _chat(
    client: httpx.AsyncClient, headers: dict[str, str] | None = None, *, stream: bool = False
) -> httpx.Response:
    body = body_of(spell(PROMPT), stream=stream)
    return await client.post("/v1/chat/completions", json=body, headers=headers)


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def _check_error(response: httpx.Response, status: int, kind: str, code: str | None) -> str:
    assert status == response.status_code, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (kind, code) == (error["type"], error["code"])
    return error["message"]


def _check_unavailable(response: httpx.Response) -> str:
    """A 503 that says when to come again; the sentence in it."""
    assert int(response.headers["retry-after"]) > 0
    return _check_error(response, 503, "server_error", "shard_unavailable")


BAD_ROUTES = [
    pytest.param(["0-3", "2-4"], "runs layers twice: layer 3 comes next", id="overlap"),
    pytest.param(["0-3", "1-4@2"], "runs layers twice: layer 3 comes next", id="overlap-by-start"),
    pytest.param(["0-1", "2-4"], "leaves a gap: layer 1 comes next", id="gap"),
    pytest.param(["1-4"], "leaves a gap: layer 0 comes next", id="no-first-layer"),
    pytest.param(["0-2", "2-3"], "layers 3 to 3 are missing", id="no-last-layer"),
    pytest.param(["0-3@3"], "start layer 3 is outside the span 0-3", id="start-behind-the-span"),
    pytest.param(["0-2", "revision"], "revision fake-2", id="another-model"),
    pytest.param(["0-2", "dtype"], "dtype bfloat16", id="another-dtype"),
    pytest.param(["0-2", "layers"], "n_layers 6", id="more-layers"),
    pytest.param(["0-2", "hidden"], "hidden_size 8", id="wider"),
]


@pytest.mark.parametrize(("names", "why"), BAD_ROUTES)
async def test_hops_that_make_no_route_are_a_503_that_says_why(
    shards: Shards, names: list[str], why: str
) -> None:
    """A route that is none is a plain 503 before any 200, `/readyz` says why, no hop is asked."""
    async with _head(shards.hops(*names)) as client:
        for stream in (False, True):
            assert why in _check_unavailable(await _chat(client, stream=stream))
        readiness = await client.get("/readyz")
        assert readiness.status_code == 503
        assert why in readiness.json()["reason"]
        assert (await client.get("/livez")).status_code == 200
    assert shards.asked() == set()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["0-4"], id="one-hop"),
        pytest.param(["0-2", "2-4"], id="side-by-side"),
        pytest.param(["2-4", "0-2"], id="in-any-order"),
        pytest.param(["0-3", "1-4@3"], id="overlap"),
        pytest.param(["0-1", "0-3@1", "1-4@3"], id="three-overlapping"),
        pytest.param(["0-2", "0-4@2"], id="one-within-the-other"),
        pytest.param(["0-1", "0-2@1", "0-3@2", "0-4@3"], id="a-layer-each"),
    ],
)
async def test_hops_that_tile_the_model_give_the_same_text(
    shards: Shards, names: list[str]
) -> None:
    """Spans may overlap: with start layers that tile exactly the text is the unsplit model's."""
    async with _head(shards.hops(*names)) as client:
        await eventually(lambda: _is_ready(client), within_s=5)
        assert _text(await _chat(client)) == TEXT
        assert text_of(await read_stream(client, spell(PROMPT))) == TEXT
    assert {name.partition("@")[0] for name in names} == shards.asked()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


# A route that the caller pins.


def _pin(hops: Sequence[HopSetting]) -> dict[str, str]:
    pinned = [hop.model_dump(exclude_none=True) for hop in hops]
    return {"X-Meshnet-Route": json.dumps(pinned)}


async def test_pinned_route_over_configured_hops_is_followed(shards: Shards) -> None:
    """With the cluster key a caller picks other hops, and other start layers, of the same text."""
    async with _head(shards.hops("0-3", "0-4@3")) as client:
        pinned = await _chat(client, KEY | _pin(shards.hops("0-4@0")))
        assert _text(pinned) == TEXT
        assert shards.asked() == {"0-4"}
        assert _text(await _chat(client)) == TEXT
        assert shards.asked() == {"0-3", "0-4"}


async def test_pinned_route_that_is_none_is_refused_before_any_hop_is_asked(
    shards: Shards,
) -> None:
    """A pinned route must tile the model too."""
    async with _head(shards.hops("0-3", "0-4@3")) as client:
        refused = await _chat(client, KEY | _pin(shards.hops("0-3")))
        message = _check_error(refused, 400, "invalid_request_error", None)
        assert "layers 3 to 3 are missing" in message
    assert shards.asked() == set()


@pytest.mark.parametrize(
    "auth", [{}, {"authorization": "Bearer wrong"}, {"authorization": CLUSTER_KEY}]
)
async def test_pinning_a_route_needs_the_cluster_key(shards: Shards, auth: dict[str, str]) -> None:
    """Without the key a pinned route is a 403, whatever it says."""
    async with _head(shards.hops("0-2", "2-4")) as client:
        for pinned in (_pin(shards.hops("0-2", "2-4")), {"X-Meshnet-Route": "nonsense"}):
            _check_error(await _chat(client, auth | pinned), 403, "permission_error", None)
        assert _text(await _chat(client, auth)) == TEXT


async def test_head_without_a_cluster_key_lets_nobody_pin(shards: Shards) -> None:
    """No key is not a key that everybody has."""
    async with _head(shards.hops("0-2", "2-4"), cluster_key=None) as client:
        for auth in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer None"}):
            pinned = await _chat(client, auth | _pin(shards.hops("0-4")))
            _check_error(pinned, 403, "permission_error", None)


@pytest.mark.parametrize("place", [0, 1])
async def test_foreign_endpoint_is_refused_and_never_called(shards: Shards, place: int) -> None:
    """An endpoint that is not configured is a 403, and no connection to it is made."""
    connections: list[str] = []

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append("made")
        writer.close()

    foreign = await asyncio.start_server(note, "127.0.0.1", 0)
    async with foreign, _head(shards.hops("0-2", "2-4")) as client:
        port = foreign.sockets[0].getsockname()[1]
        hops = list(shards.hops("0-2", "2-4"))
        hops[place] = HopSetting(endpoint=f"http://127.0.0.1:{port}")
        for route in (hops, [hops[place]], [*hops, hops[place]]):
            message = _check_error(
                await _chat(client, KEY | _pin(route)), 403, "permission_error", None
            )
            assert hops[place].endpoint in message
    assert (connections, shards.asked()) == ([], set())


async def test_configured_endpoint_in_another_spelling_is_foreign(shards: Shards) -> None:
    """The list is compared as it is written: no name, user or port is read into an endpoint."""
    async with _head(shards.hops("0-4")) as client:
        port = shards.by_name["0-4"].served.port
        for endpoint in (
            f"http://localhost:{port}",
            f"http://user@127.0.0.1:{port}",
            f"HTTP://127.0.0.1:{port}",
            f"http://127.0.0.1:{port}@elsewhere",
        ):
            pinned = {"X-Meshnet-Route": json.dumps([{"endpoint": endpoint}])}
            response = await _chat(client, KEY | pinned)
            assert response.status_code in {400, 403}, endpoint


@pytest.mark.parametrize(
    "pinned",
    [
        "",
        "{",
        "{}",
        "null",
        "[]",
        "[1]",
        "[{}]",
        '[{"endpoint": 7}]',
        '[{"endpoint": ""}]',
        '[{"endpoint": "file:///etc/passwd"}]',
        '[{"endpoint": "http://h:1/path"}]',
        '[{"endpoint": "http://h:1", "start_layer": -1}]',
        '[{"endpoint": "http://h:1", "start_layer": "x"}]',
        '[{"endpoint": "http://h:1", "weight": 1}]',
        "[" * 2000,
    ],
)
async def test_malformed_pinned_route_is_a_400(
    shards: Shards, any_head: httpx.AsyncClient, pinned: str
) -> None:
    """What is no list of hops is a 400 that names the header and shows the right form."""
    response = await _chat(any_head, KEY | {"X-Meshnet-Route": pinned})
    _check_error(response, 400, "invalid_request_error", None)
    assert response.json()["error"]["param"] == "X-Meshnet-Route"
    assert len(response.content) < 1500
    assert shards.asked() == set()


# Hops that come and go.


async def test_shard_that_is_not_up_yet_is_a_503_until_it_is(shards: Shards) -> None:
    """Before a shard is up: 503 with Retry-After naming it; from then on requests are served."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    late = HopSetting(endpoint=f"http://127.0.0.1:{port}")
    async with _head([*shards.hops("0-2"), late]) as client:
        for stream in (False, True):
            assert late.endpoint in _check_unavailable(await _chat(client, stream=stream))
        assert late.endpoint in (await client.get("/readyz")).json()["reason"]
        (stage,) = fake_stages((2, 4))
        async with serve_shard(stage, port=port):
            await eventually(lambda: _is_ready(client), within_s=10)
            assert _text(await _chat(client)) == TEXT


async def test_shard_with_another_key_is_not_ready_and_the_head_says_so(shards: Shards) -> None:
    """A head with a wrong cluster key is not ready, and its callers are not blamed for it."""
    async with _head(shards.hops("0-4"), cluster_key="another") as client:
        assert "cluster key" in _check_unavailable(await _chat(client))
        assert "cluster key" in (await client.get("/readyz")).json()["reason"]


async def test_cluster_view_names_every_hop_and_why_one_is_missing(shards: Shards) -> None:
    """`/v1/cluster` tells each hop's layers and state, and the reason of one that is not there."""
    gone = HopSetting(endpoint="http://127.0.0.1:9")
    async with _head([*shards.hops("0-4"), gone]) as client:
        await eventually(lambda: _is_ready(client), within_s=5)
        readiness = (await client.get("/readyz")).json()
        assert readiness["state"] == "degraded"
        assert gone.endpoint in readiness["reason"]
        ready, missing = (await client.get("/v1/cluster")).json()["hops"]
        assert (ready["layers"], ready["state"], ready["reason"]) == ("0-4", "ready", None)
        assert (missing["endpoint"], missing["state"]) == (gone.endpoint, "unavailable")
        assert "not reachable" in missing["reason"]
