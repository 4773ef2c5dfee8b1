from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshnet.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from meshnet.generation import Sampling
from meshnet.openai.parameters import PARAMETERS
from meshnet.openai.schema import ChatRequest, parse_chat_request, to_generation_request
from meshnet.text.tokenizer import ChatTokenizer
from tests.unit.text.making import save_model

BASE: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def parse(**fields: object) -> ChatRequest:
    return parse_chat_request(json.dumps({**BASE, **fields}).encode())


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(str(save_model(tmp_path_factory.mktemp("model"))))


def test_a_silent_client_gets_openais_defaults() -> None:
    """Without parameters sampling is at temperature 1 over all tokens, and nothing is streamed."""
    chat = parse()

    assert chat.sampling(seed=7) == Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=7)
    assert (chat.token_limit, chat.stream, chat.include_usage) == (None, False, False)
    assert chat.ignored_params == ()


def test_null_is_absent_for_every_optional_parameter() -> None:
    """A request whose optional fields are all null is the request without them."""
    nulls = dict.fromkeys(PARAMETERS.keys() - BASE.keys())

    assert parse(**nulls) == parse()


def test_parameters_reach_the_sampling() -> None:
    """What the client says about sampling is what the tail is told."""
    chat = parse(temperature=0.5, top_p=0.9, top_k=40, seed=-5)

    assert chat.sampling(seed=7) == Sampling(temperature=0.5, top_p=0.9, top_k=40, seed=-5)


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0, "top_p": 0}, Sampling(temperature=0, top_p=0, seed=7)),
        ({"temperature": 2, "top_p": 1}, Sampling(temperature=2, top_p=1, seed=7)),
        ({"top_k": -1}, Sampling(temperature=1, top_k=0, seed=7)),
        ({"seed": 0}, Sampling(temperature=1, seed=0)),
        ({"seed": 2**63 - 1}, Sampling(temperature=1, seed=2**63 - 1)),
        ({"seed": -(2**63)}, Sampling(temperature=1, seed=-(2**63))),
    ],
)
def test_the_ends_of_each_range_are_in_it(fields: dict[str, object], sampling: Sampling) -> None:
    """The smallest and the largest value of each sampling parameter work."""
    assert parse(**fields).sampling(seed=7) == sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("max_tokens", 3.5),
        ("max_tokens", 2**31),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", [3]),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "7"),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", []),
        ("stream_options", {"include_usage": True}),
        ("model", ""),
        ("model", 5),
        ("messages", "hello"),
        ("messages", []),
        ("messages", {}),
    ],
)
def test_a_wrong_value_names_field_problem_and_what_is_allowed(name: str, value: object) -> None:
    """A value of the wrong type or out of range is refused in one sentence of three parts."""
    error = refusal(**{name: value})

    assert error.members["field"] == name
    assert error.members["allowed"] == PARAMETERS[name].allowed
    assert error.message.startswith(f"{name}: ")
    assert error.message.endswith(f"; allowed: {PARAMETERS[name].allowed}")
    assert len(error.message) > len(f"{name}: ; allowed: {PARAMETERS[name].allowed}")


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_field_is_named(name: str) -> None:
    """Without model or messages the request is refused by that name."""
    fields = {key: value for key, value in BASE.items() if key != name}
    with pytest.raises(InvalidRequest, match=f"{name}: is missing") as caught:
        parse_chat_request(json.dumps(fields).encode())

    assert caught.value.members["field"] == name


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (1, "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content"),
        (
            {"role": "assistant", "tool_calls": [{"type": "function"}]},
            "messages[1].tool_calls[0].id",
        ),
    ],
)
def test_a_wrong_message_is_named_by_its_path(message: object, field: str) -> None:
    """The parameter of a fault inside a message says which message and which member."""
    error = refusal(messages=[{"role": "user", "content": "x"}, message])

    assert error.members["field"] == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"metadata": -Infinity}',
        b'{"user": "\\ud800"}',
        b"[" * 100_000,
        b'{"seed": ' + b"1" * 10_000 + b"}",
        b"[]",
        b"null",
        b'"x"',
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    """Cut, non-standard, hostile and non-object JSON is the client's fault, told in one line."""
    with pytest.raises(InvalidRequest, match=r"the body is not (valid JSON|a JSON object)") as e:
        parse_chat_request(body)

    assert len(e.value.message) < 200


def test_a_number_too_large_for_a_float_is_refused() -> None:
    """1e400 is JSON, but no temperature."""
    body = json.dumps({**BASE, "temperature": 0}).replace(
        '"temperature": 0', '"temperature": 1e400'
    )
    with pytest.raises(InvalidRequest, match="temperature: "):
        parse_chat_request(body.encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "x" * 10_000, "content": "y"}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 10_000}]}]},
        {"model": {"x" * 10_000: 1}},
        {"response_format": {"type": "x" * 10_000}},
        {"max_tokens": "x" * 10_000},
    ],
)
def test_an_error_never_copies_the_input(fields: dict[str, object]) -> None:
    """However long the wrong value, the error repeats fewer than 200 characters of it."""
    assert refusal(**fields).message.count("x") < 200


def test_three_point_zero_is_three() -> None:
    """JSON has one kind of number: 3.0 is a count."""
    chat = parse(max_tokens=3.0, top_k=5.0, seed=6.0)

    assert (chat.max_tokens, chat.top_k, chat.seed) == (3, 5, 6)


def test_the_newer_limit_wins() -> None:
    """`max_completion_tokens` is used where both limits are given, else the one there is."""
    assert parse(max_tokens=5, max_completion_tokens=3).token_limit == 3
    assert parse(max_tokens=5).token_limit == 5
    assert parse(max_completion_tokens=3).token_limit == 3


@pytest.mark.parametrize(
    ("options", "include_usage"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": None}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        ({"include_usage": True, "include_obfuscation": False}, True),
    ],
)
def test_usage_is_streamed_only_when_asked_for(options: object, include_usage: bool) -> None:
    """A stream carries usage only if its options say so."""
    assert parse(stream=True, stream_options=options).include_usage is include_usage


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["a"]),
        ("n", 2),
        ("guided_json", {"type": "object"}),
        ("tools", [{"type": "function"}]),
    ],
)
def test_what_is_not_implemented_is_refused(name: str, value: object) -> None:
    """A known parameter that would change the answer is never ignored in silence."""
    error = refusal(**{name: value})

    assert isinstance(error, UnsupportedParameter)
    assert error.members["field"] == name


def test_no_ops_are_accepted() -> None:
    """Identity and telemetry fields change nothing and are not called ignored."""
    no_ops = {name: "x" for name, p in PARAMETERS.items() if p.handling == "no_op"}

    assert parse(**no_ops) == parse()


def test_unknown_fields_are_listed() -> None:
    """Strays are accepted and listed, those inside the stream options too."""
    chat = parse(max_token=3, temperatur=1, stream=True, stream_options={"chunky": True})

    assert chat.ignored_params == ("max_token", "temperatur", "stream_options.chunky")


def test_a_client_cannot_write_the_list_itself() -> None:
    """A field named like our own list is a stray as any other."""
    assert parse(ignored_params=["a"]).ignored_params == ("ignored_params",)


def test_listed_names_are_safe_in_a_header() -> None:
    """Listed names are short, few, and without commas, line ends or non-ASCII letters."""
    strays = {f"a{n}": 1 for n in range(50)}
    chat = parse(**{"x\r\nset-cookie: a,é": 1, "y" * 1000: 1}, **strays)

    assert chat.ignored_params[:3] == ("x??set-cookie??a??", "y" * 64, "a0")
    assert len(chat.ignored_params) == 20


def test_a_request_becomes_a_generation(tokenizer: ChatTokenizer) -> None:
    """The prompt is the encoded chat; limit and sampling are the client's."""
    chat = parse(max_tokens=5, temperature=0)
    request = to_generation_request(chat, tokenizer, max_positions=100, seed=7)

    assert list(request.prompt_ids) == tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert request.max_tokens == 5
    assert request.sampling == Sampling(temperature=0, seed=7)


def test_without_a_limit_the_answer_may_fill_the_context(tokenizer: ChatTokenizer) -> None:
    """Prompt and default limit together are the whole context."""
    request = to_generation_request(parse(), tokenizer, max_positions=100, seed=7)

    assert len(request.prompt_ids) + request.max_tokens == 100


def test_the_last_free_position_can_be_used(tokenizer: ChatTokenizer) -> None:
    """A limit that fits exactly is accepted; one more is not."""
    n_prompt = len(to_generation_request(parse(), tokenizer, max_positions=100, seed=7).prompt_ids)
    exact = parse(max_tokens=100 - n_prompt)
    over = parse(max_tokens=101 - n_prompt)

    assert to_generation_request(exact, tokenizer, max_positions=100, seed=7).max_tokens > 0
    with pytest.raises(ContextLengthExceeded) as caught:
        to_generation_request(over, tokenizer, max_positions=100, seed=7)
    assert "This model's maximum context length is 100 tokens" in caught.value.message
    assert "you asked for 101 tokens" in caught.value.message
    assert f"{n_prompt} in the messages and {101 - n_prompt} in the answer" in caught.value.message


def test_a_prompt_that_fills_the_context_is_too_long(tokenizer: ChatTokenizer) -> None:
    """Without room for one token the error has both numbers and the words clients look for."""
    n_prompt = len(to_generation_request(parse(), tokenizer, max_positions=100, seed=7).prompt_ids)
    with pytest.raises(ContextLengthExceeded) as caught:
        to_generation_request(parse(), tokenizer, max_positions=n_prompt, seed=7)

    assert f"This model's maximum context length is {n_prompt} tokens" in caught.value.message
    assert f"your messages are {n_prompt} tokens long" in caught.value.message
    assert "context_length_exceeded" in caught.value.message
    assert caught.value.members["field"] == "messages"


def test_a_template_that_makes_no_prompt_is_refused(tmp_path: Path) -> None:
    """A generation needs at least one prompt token."""
    tokenizer = ChatTokenizer.load(str(save_model(tmp_path, template="{# nothing #}")))
    with pytest.raises(InvalidRequest, match="messages: the model's chat template makes no prompt"):
        to_generation_request(parse(), tokenizer, max_positions=100, seed=7)


def test_a_conversation_with_a_tool_call_is_encoded(tokenizer: ChatTokenizer) -> None:
    """An assistant's null content beside a tool call, and the tool's answer, are a prompt."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "c"},
        {"role": "user", "content": [{"type": "text", "text": "d"}]},
    ]

    assert to_generation_request(parse(messages=messages), tokenizer, max_positions=500, seed=7)
