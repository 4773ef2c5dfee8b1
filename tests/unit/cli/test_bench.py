from __future__ import annotations

import json
from functools import partial

import httpx
import pytest

from services.cli import bench as bench_module
from services.cli.chat_client import ChatClient
from tests.unit.cli.running import run

Json = dict[str, object]
TIMING = (
    'total;dur=100, hop-1;desc="http://a:1", hop-2;desc="http://b:2", '
    "prefill;dur=20;tokens=1, decode;dur=60;tokens=2, decode-head;dur=4, "
    "decode-1;dur=24;steps=2, decode-1-queue;dur=1, decode-1-compute;dur=20, "
    "decode-1-serialise;dur=1, decode-1-wire;dur=2, "
    "decode-2;dur=32;steps=2, decode-2-queue;dur=1, decode-2-compute;dur=28, "
    "decode-2-serialise;dur=1, decode-2-wire;dur=2"
)


class Endpoint:
    """Answers as a head does; keeps what it is asked."""

    def __init__(self) -> None:
        self.timing = f": server-timing {TIMING}"
        self.asked: list[Json] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "smollm2"}]})
        self.asked.append(json.loads(request.content))
        self.headers.append(request.headers)
        chunks: list[Json] = [
            {"choices": [{"delta": {"content": "Paris"}}]},
            {"choices": [{"delta": {"content": "."}, "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 3}},
        ]
        lines = [f"data: {json.dumps(chunk)}" for chunk in chunks]
        lines += ["data: [DONE]", self.timing]
        return httpx.Response(200, content="\n\n".join([": ping", *lines, ""]))


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """What every client of the test talks to."""
    endpoint = Endpoint()
    client = partial(ChatClient, transport=httpx.MockTransport(endpoint))
    monkeypatch.setattr(bench_module, "ChatClient", client)
    return endpoint


def test_what_is_asked(endpoint: Endpoint) -> None:
    """Greedy answers of full length, and where their time goes; first some that do not count."""
    run("bench", "--streams", "2", "--rounds", "3", "--max-tokens", "3")

    assert len(endpoint.asked) == 2 + 2 * 3
    for asked, headers in zip(endpoint.asked, endpoint.headers, strict=True):
        assert (asked["max_tokens"], asked["temperature"], asked["ignore_eos"]) == (3, 0, True)
        assert headers["x-meshnet-timing"] == "1"


def test_own_prompts_take_turns(endpoint: Endpoint) -> None:
    """They are asked as given, again and again."""
    run("bench", "One?", "Two?", "--rounds", "3")
    contents = [asked["messages"] for asked in endpoint.asked]

    assert contents == [
        [{"role": "user", "content": text}] for text in ("One?", "One?", "Two?", "One?")
    ]


def test_the_api_key_is_shown(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as of a chat."""
    monkeypatch.setenv("MESHNET_API_KEY", "mesh_x")
    run("bench", "--rounds", "1")

    assert {headers["authorization"] for headers in endpoint.headers} == {"Bearer mesh_x"}


def test_the_table(endpoint: Endpoint) -> None:
    """Milliseconds a token of each hop and part, the head's own, and all of them."""
    ended = run("bench", "--rounds", "2")
    rows = [line.split() for line in ended.out.splitlines() if line.strip()]

    assert (ended.code, ended.error_lines) == (0, [])
    assert "2 answers, 1 at a time, 6 tokens" in ended.out
    assert ["hop", "queue", "compute", "serialise", "wire", "all"] in rows
    assert ["a:1", "0.50", "10.00", "0.50", "1.00", "12.00"] in rows
    assert ["b:2", "0.50", "14.00", "0.50", "1.00", "16.00"] in rows
    assert ["head", "2.00"] in rows
    assert ["all", "1.00", "24.00", "1.00", "2.00", "30.00"] in rows
    assert "24.00 of 30.00 ms are compute (80%)" in ended.out
    del endpoint


def test_recovery_has_a_column_where_there_was_some(endpoint: Endpoint) -> None:
    """Most tables have none."""
    endpoint.timing += ", decode-2-recovery;dur=500"
    rows = [line.split() for line in run("bench", "--rounds", "1").out.splitlines()]

    assert ["hop", "queue", "compute", "serialise", "wire", "recovery", "all"] in rows
    assert ["b:2", "0.50", "14.00", "0.50", "1.00", "250.00", "266.00"] in rows


def test_another_server_has_rates_only(endpoint: Endpoint) -> None:
    """An endpoint that does not tell where the time went is no error."""
    endpoint.timing = ""
    ended = run("bench", "--rounds", "1")

    assert ended.code == 0
    assert "1 answers, 1 at a time, 3 tokens" in ended.out
    assert ended.out.endswith("The endpoint does not tell where the time went.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--streams", "0"), "--streams"),
        (("--streams", "65"), "--streams"),
        (("--rounds", "0"), "--rounds"),
        (("--max-tokens", "1"), "--max-tokens"),
        (("--url", "127.0.0.1"), "--url"),
    ],
)
def test_a_bad_option_is_refused(
    endpoint: Endpoint, arguments: tuple[str, str], words: str
) -> None:
    """One line names it; nothing is asked."""
    ended = run("bench", *arguments)

    assert (ended.code, len(ended.error_lines)) == (2, 1)
    assert words in ended.error_lines[0]
    assert endpoint.asked == []
