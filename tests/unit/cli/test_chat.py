from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest

from services.cli import chat as chat_module
from services.cli.chat_client import ChatClient
from services.cli.errors import CliError
from tests.unit.cli.running import run

Json = dict[str, object]


def _piece(text: str | None = None, finish: str | None = None) -> Json:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


GOOD: list[Json | str] = [
    _piece(""),
    _piece("Par"),
    _piece("is."),
    _piece(finish="stop"),
    {"choices": [], "usage": {"completion_tokens": 3}},
    "[DONE]",
]
CLUSTER: Json = {
    "hops": [
        {"endpoint": "http://a:1", "layers": "0-15", "step_ms": 12.34, "compute_ms": 10.0},
        {"endpoint": "http://b:2", "layers": None, "step_ms": None, "queue_ms": None, "more": 1},
    ]
}


class Endpoint:
    """Answers as a head does; keeps what it is asked."""

    def __init__(self) -> None:
        self.events = GOOD
        self.refusal: httpx.Response | None = None
        self.models = httpx.Response(200, json={"data": [{"id": "smollm2"}]})
        self.cluster = httpx.Response(200, json=CLUSTER)
        self.error: Exception | None = None
        self.asked: list[Json] = []
        self.shown: set[str | None] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.shown.add(request.headers.get("authorization"))
        if self.error:
            raise self.error
        match request.url.path:
            case "/v1/models":
                return self.models
            case "/v1/cluster":
                return self.cluster
            case "/v1/chat/completions":
                self.asked.append(json.loads(request.content))
                return self.refusal or httpx.Response(200, content=self._stream())
            case _:
                return httpx.Response(404, text="not found")

    def _stream(self) -> bytes:
        datas = (e if isinstance(e, str) else json.dumps(e) for e in self.events)
        return b": ping\n\n" + b"".join(f"data: {data}\n\n".encode() for data in datas)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """What every chat client of the test talks to."""
    endpoint = Endpoint()
    client = partial(ChatClient, transport=httpx.MockTransport(endpoint))
    monkeypatch.setattr(chat_module, "ChatClient", client)
    return endpoint


def _client(endpoint: Endpoint) -> ChatClient:
    transport = httpx.MockTransport(endpoint)
    return ChatClient("http://head:8000/v1/", max_tokens=5, transport=transport)


def test_the_answer_is_shown_as_it_comes(endpoint: Endpoint) -> None:
    """Every piece is shown once, and the answer is all of them."""
    shown: list[str] = []
    with _client(endpoint) as client:
        answer = client.ask([{"role": "user", "content": "?"}], shown.append)
    assert shown == ["Par", "is."]
    assert (answer.text, answer.n_tokens, answer.finish_reason) == ("Paris.", 3, "stop")
    assert answer.tokens_per_s is not None


def test_what_is_asked(endpoint: Endpoint) -> None:
    """The model is the one that the endpoint serves; what was not given is the server's choice."""
    run("chat", "Why?", "--max-tokens", "7")
    run("chat", "Why?", "--temperature", "0")
    messages = [{"role": "user", "content": "Why?"}]
    common = {"model": "smollm2", "stream": True, "stream_options": {"include_usage": True}}
    assert common | {"messages": messages, "max_tokens": 7} == endpoint.asked[0]
    assert endpoint.asked[1]["temperature"] == 0


def test_another_model_is_asked_by_its_name(endpoint: Endpoint) -> None:
    """With `--model` the endpoint is not asked which one it has."""
    endpoint.models = httpx.Response(500)
    assert run("chat", "Why?", "--model", "other").out == "Paris.\n"
    assert endpoint.asked[0]["model"] == "other"


def test_the_api_key_is_shown(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in the environment goes with every request; without one there is none."""
    run("chat", "Why?", "--stats")
    assert endpoint.shown == {None}
    endpoint.shown.clear()
    monkeypatch.setenv("MESHNET_API_KEY", "mesh_x")
    run("chat", "Why?", "--stats")
    assert endpoint.shown == {"Bearer mesh_x"}


def test_one_question(endpoint: Endpoint) -> None:
    """A question on the command line is answered on stdout, and nothing else."""
    ended = run("chat", "Why?")
    assert (ended.code, ended.out, ended.error_lines) == (0, "Paris.\n", [])
    assert len(endpoint.asked) == 1


def test_a_piped_question(endpoint: Endpoint) -> None:
    """What is piped in is one question."""
    assert run("chat", stdin="Why\nso?").out == "Paris.\n"
    assert endpoint.asked[0]["messages"] == [{"role": "user", "content": "Why\nso?"}]


def test_stats(endpoint: Endpoint) -> None:
    """Tokens, times and every hop are told on stderr; an unknown time is a dash."""
    ended = run("chat", "Why?", "--stats")
    text = "\n".join(ended.error_lines)
    assert "3 tokens, the first after " in text
    assert "finish reason: stop" in text
    assert ended.error_lines[-2].split() == ["http://a:1", "0-15", "12.3", "10.0", "-"]
    assert ended.error_lines[-1].split() == ["http://b:2", "-", "-", "-", "-"]
    assert ended.out == "Paris.\n"
    del endpoint


def test_stats_of_another_server(endpoint: Endpoint) -> None:
    """An endpoint that knows no hops is no error."""
    endpoint.cluster = httpx.Response(404, text="no such page")
    ended = run("chat", "Why?", "--stats")
    assert (ended.code, len(ended.error_lines)) == (0, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"events": [*GOOD[:2], {"error": {"message": "all\nlost"}}, "[DONE]"]}, "all lost"),
        ({"events": GOOD[:2]}, "the answer broke off"),
        ({"events": ["{"]}, "no JSON"),
        (
            {"refusal": httpx.Response(503, json={"error": {"message": "not ready"}})},
            "answered 503: not ready",
        ),
        ({"refusal": httpx.Response(502, text="<html>")}, "answered 502: <html>"),
        ({"refusal": httpx.Response(500, json=[1])}, "answered 500: [1]"),
        ({"models": httpx.Response(503, json={"error": {"message": "later"}})}, "later"),
        ({"models": httpx.Response(200, json={"data": []})}, "no OpenAI endpoint"),
        ({"error": httpx.ConnectError("refused")}, "cannot be reached (refused)"),
        ({"error": httpx.ReadTimeout("slow")}, "did not answer in time"),
        ({"error": httpx.RemoteProtocolError("cut")}, "broke off: cut"),
    ],
)
def test_an_error_is_one_line(endpoint: Endpoint, change: Json, words: str) -> None:
    """A refusal, an error event, a cut stream or no connection: one line, exit code 1."""
    for name, value in change.items():
        setattr(endpoint, name, value)
    ended = run("chat", "Why?")
    assert (ended.code, len(ended.error_lines)) == (1, 1)
    assert words in ended.error_lines[0]


def test_the_first_text_may_be_the_last(endpoint: Endpoint) -> None:
    """An answer without text has no rate, and no time that is less than nothing."""
    endpoint.events = [_piece(finish="length"), "[DONE]"]
    with _client(endpoint) as client:
        answer = client.ask([], lambda _: None)
    assert (answer.text, answer.n_tokens, answer.tokens_per_s) == ("", 0, None)
    assert (answer.rest_s, answer.finish_reason) == (0.0, "length")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://", "http://a:port", "ftp://a/v1"])
def test_a_bad_url_is_refused(url: str) -> None:
    """What is no http URL is refused before anything is sent."""
    with pytest.raises(CliError, match=r"^--url: "):
        ChatClient(url, max_tokens=1)


def _typing(monkeypatch: pytest.MonkeyPatch, lines: list[str | Callable[[], str]]) -> None:
    """Somebody at a terminal, who types Ctrl-D in the end."""
    waiting: Iterator[str | Callable[[], str]] = iter(lines)

    def read(_: str) -> str:
        for line in waiting:
            return line if isinstance(line, str) else line()
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat_module.sys, "stdin", Terminal())


class Terminal:
    """A stdin that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_conversation_has_a_memory(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each question is asked with what was said before; an empty line asks nothing."""
    _typing(monkeypatch, ["One?", "  ", "Two?"])
    chat_module.chat()
    roles = [message["role"] for message in _messages(endpoint.asked[1])]
    assert (len(endpoint.asked), roles) == (2, ["user", "assistant", "user"])
    assert capsys.readouterr().out == "Paris.\nParis.\n\n"


def test_a_failed_question_is_forgotten(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an error the conversation goes on, without the question that was not answered."""

    def mend() -> str:
        endpoint.refusal = None
        return "Two?"

    endpoint.refusal = httpx.Response(503, json={"error": {"message": "busy"}})
    _typing(monkeypatch, ["One?", mend])
    chat_module.chat()
    assert [message["content"] for message in _messages(endpoint.asked[1])] == ["Two?"]
    assert capsys.readouterr().err == "Error: the endpoint answered 503: busy\n"


def test_an_answer_can_be_broken_off(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends an answer and not the conversation; at the prompt it ends that."""

    def mend() -> str:
        endpoint.error = None
        return "Two?"

    def leave() -> str:
        raise KeyboardInterrupt

    _typing(monkeypatch, ["One?", mend, leave])
    monkeypatch.setattr(endpoint, "error", KeyboardInterrupt())
    chat_module.chat()
    assert len(endpoint.asked) == 1
    assert capsys.readouterr().out == "\nParis.\n\n"


def _messages(asked: Json) -> list[dict[str, str]]:
    messages = asked["messages"]
    assert isinstance(messages, list)
    return messages  # pyright: ignore[reportUnknownVariableType]  # JSON
