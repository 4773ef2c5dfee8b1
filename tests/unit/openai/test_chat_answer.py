from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from meshnet.generation import TokenEvent
from meshnet.openai.bodies import usage
from meshnet.openai.chat_answer import ChatForm, ChatWriter
from meshnet.openai.errors import error_body
from meshnet.openai.stream import DONE, Chunk
from meshnet.text.response_parser import Content, Part, Reasoning, ResponseParser, ToolCall
from tests.unit.openai.making import HEADING, IDENTITY, score

HELLO = [
    TokenEvent("Hel", 10),
    TokenEvent("", 11),
    TokenEvent("lo 🌶\u2028", 12),
    TokenEvent("", 2, "stop"),
]


class Texts:
    """Token i is written `<i>`."""

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


FORM = ChatForm(HEADING, prompt_ids=(5, 6, 7), texts=Texts())


class Parser:
    """Makes of each text the parts that are written down for it, and of the end the last ones."""

    reads_special_tokens = False

    def __init__(self, parts: dict[str, list[Part]], *rest: Part) -> None:
        self._parts = parts
        self._rest = rest

    def push(self, text: str) -> list[Part]:
        return self._parts[text]

    def finish(self) -> list[Part]:
        return [*self._rest]


CALL_F = ToolCall("call_1", "f", '{"a": 1}')
CALL_G = ToolCall("call_2", "g", "{}")


def streamed(
    events: Sequence[TokenEvent], form: ChatForm = FORM, parser: ResponseParser | None = None
) -> list[Any]:
    """The bodies of all chunks of one choice."""
    return of_several([(0, event) for event in events], form, [parser])


def of_several(
    events: Sequence[tuple[int, TokenEvent]],
    form: ChatForm,
    parsers: Sequence[ResponseParser | None],
) -> list[Any]:
    writer = ChatWriter(form, parsers)
    chunks = list(writer.begin())
    for index, event in events:
        chunks += writer.take(index, event)
    *chunks, done = [*chunks, *writer.end()]
    assert done == DONE
    return [json.loads(json.dumps(chunk.data)) for chunk in chunks]


def whole(
    events: Sequence[TokenEvent], form: ChatForm = FORM, parser: ResponseParser | None = None
) -> Any:  # noqa: ANN401  # JSON
    """The answer in one piece."""
    writer = ChatWriter(form, [parser])
    for event in events:
        list(writer.take(0, event))
    return json.loads(json.dumps(writer.body()))


def deltas(chunks: Sequence[Any]) -> list[tuple[dict[str, Any], str | None]]:
    parts = [part for chunk in chunks for part in chunk["choices"]]
    return [(part["delta"], part["finish_reason"]) for part in parts]


def test_a_stream_is_role_text_reason() -> None:
    """The order is the role, each piece of text, and one closing chunk."""
    assert deltas(streamed(HELLO)) == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Hel"}, None),
        ({"content": "lo 🌶\u2028"}, None),
        ({}, "stop"),
    ]


def test_every_chunk_has_the_same_identity_and_all_keys() -> None:
    """Identity is the same in all chunks, usage's too, and each choice has its four keys."""
    *chunks, last = streamed(HELLO, replace(FORM, usage_at_end=True))

    for chunk in (*chunks, last):
        assert {name: chunk[name] for name in IDENTITY} == IDENTITY
        assert chunk["object"] == "chat.completion.chunk"
    for chunk in chunks:
        (part,) = chunk["choices"]
        assert part.keys() == {"index", "delta", "finish_reason", "logprobs"}
        assert (part["index"], part["logprobs"]) == (0, None)


def test_text_of_the_last_event_comes_before_the_reason() -> None:
    """Text that arrives with the finish reason has a chunk of its own."""
    chunks = streamed([TokenEvent("a", 10), TokenEvent("b", 11, "length")])

    assert deltas(chunks)[-2:] == [({"content": "b"}, None), ({}, "length")]


def test_one_body_is_the_same_answer() -> None:
    """The body holds the joined text, the reason and the counts, with all required keys."""
    body = whole(HELLO)

    assert body == {
        **IDENTITY,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello 🌶\u2028", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": usage(prompt_tokens=3, completion_tokens=4, cached_tokens=0),
    }


@pytest.mark.parametrize(
    "form", [FORM, replace(FORM, logprobs=1, usage_at_end=True, usage_always=True)]
)
def test_the_official_client_reads_body_and_chunks(form: ChatForm) -> None:
    """Each is valid for openai-python's own model of it."""
    scored = [replace(e, score=score(e.token_id or 0, -1.0, (1, -0.5))) for e in HELLO]
    ChatCompletion.model_validate(whole(scored, form), strict=True)
    for chunk in streamed(scored, form):
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_the_roles_come_first_and_in_order() -> None:
    """Each choice's role is sent before any text, ascending: openai-python fails otherwise."""
    events = [
        (2, TokenEvent("c", 10, "stop")),
        (0, TokenEvent("a", 10, "stop")),
        (1, TokenEvent("b", 10, "length")),
    ]
    parts = [part for chunk in of_several(events, FORM, [None] * 3) for part in chunk["choices"]]

    assert [part["index"] for part in parts] == [0, 1, 2, 2, 2, 0, 0, 1, 1]
    assert [part["delta"].get("role") for part in parts] == ["assistant"] * 3 + [None] * 6
    assert [part["finish_reason"] for part in parts[4::2]] == ["stop", "stop", "length"]


def test_several_choices_are_one_body() -> None:
    """Each choice has its own message; the prompt counts once, the answers all."""
    writer = ChatWriter(FORM, [None, None])
    for index, text in ((1, "b"), (0, "a")):
        list(writer.take(index, TokenEvent(text, 10, "stop")))
    body: Any = writer.body()

    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "b"]
    assert body["usage"] == usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)


# Counts.


def test_usage_is_one_last_chunk_when_asked_for() -> None:
    """Asked for, usage is null in all chunks but the last, which has no choices."""
    *chunks, last = streamed(HELLO, replace(FORM, usage_at_end=True))

    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert last["usage"] == usage(prompt_tokens=3, completion_tokens=4, cached_tokens=0)


def test_usage_is_not_sent_unasked() -> None:
    """Unasked, no chunk has usage and each has a choice."""
    chunks = streamed(HELLO)

    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_usage_can_be_in_every_chunk() -> None:
    """Asked for always, each chunk has the counts so far."""
    chunks = streamed(HELLO, replace(FORM, usage_at_end=True, usage_always=True))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 3, 4, 4]


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
def test_at_the_limit_the_count_is_the_limit(n_tokens: int) -> None:
    """Every generated token is counted, with and without text, in a body and in a stream."""
    events = [*(TokenEvent("", n) for n in range(n_tokens - 1)), TokenEvent("a", 9, "length")]
    *_, last = streamed(events, replace(FORM, usage_at_end=True))

    assert whole(events)["usage"]["completion_tokens"] == n_tokens
    assert last["usage"] == whole(events)["usage"]


def test_tokens_of_a_tail_that_knows_text_only_are_counted() -> None:
    """Events without ids are tokens like others, the one that ends the answer too."""
    events = [TokenEvent("a"), TokenEvent("b"), TokenEvent("", None, "stop")]

    assert whole(events)["usage"]["completion_tokens"] == 3
    assert whole(events, replace(FORM, token_ids=True))["choices"][0]["token_ids"] == []


def test_what_all_choices_did_not_compute_is_cached() -> None:
    """A prompt counts once: what one choice has of another one was computed for the request."""
    form = replace(FORM, usage_at_end=True, usage_always=True)
    writer = ChatWriter(form, [None, None])
    told: list[Any] = []
    for index, n_cached in ((1, 40), (0, 2)):
        told += writer.take(index, TokenEvent("a", 1, n_cached=n_cached))
    told += writer.take(0, TokenEvent("b", 2, "stop"))
    usages = [chunk.data["usage"]["prompt_tokens_details"] for chunk in told]

    assert [details["cached_tokens"] for details in usages] == [40, 2, 2, 2]


# Scores and ids.


SCORED = [
    TokenEvent("", 10, score=score(10, -1.0, (11, -0.5))),
    TokenEvent("ab", 11, score=score(11, -2.0, (11, -2.0))),
    TokenEvent("", 2, "stop", score=score(2, -3.0, (2, -3.0))),
]


def test_every_tokens_score_arrives() -> None:
    """Also of tokens whose text is held back, and of the end token, streamed or not."""
    form = replace(FORM, logprobs=1)
    content = whole(SCORED, form)["choices"][0]["logprobs"]["content"]
    parts = [chunk["choices"][0] for chunk in streamed(SCORED, form)]
    told = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]

    assert [entry["token"] for entry in content] == ["<10>", "<11>", "<2>"]
    assert told == content
    assert [part["delta"].get("content") for part in parts] == ["", "", "ab", "", None]


def test_no_score_is_told_unasked() -> None:
    """Scores that are there for the prompt's sake are not told of the answer."""
    body = whole(SCORED, replace(FORM, prompt_logprobs=0))

    assert body["choices"][0]["logprobs"] is None
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in streamed(SCORED))


def test_the_prompts_scores_are_beside_the_choices() -> None:
    """They are the first event's, by token id, the first token's null."""
    first = replace(SCORED[0], prompt_scores=(score(6, -0.5), score(7, -0.25)))
    body = whole([first, *SCORED[1:]], replace(FORM, prompt_logprobs=0))

    assert body["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -0.5, "decoded_token": "<6>"}},
        {"7": {"logprob": -0.25, "decoded_token": "<7>"}},
    ]
    assert "prompt_logprobs" not in whole(SCORED)


def test_token_ids_are_told_when_asked_for() -> None:
    """The prompt's and each choice's ids are there, in a stream with each token."""
    form = replace(FORM, token_ids=True)
    body = whole(HELLO, form)
    opening, *chunks = streamed(HELLO, form)

    assert body["prompt_token_ids"] == [5, 6, 7]
    assert body["choices"][0]["token_ids"] == [10, 11, 12, 2]
    assert opening["prompt_token_ids"] == [5, 6, 7]
    assert [c["choices"][0].get("token_ids") for c in chunks] == [[10], [11], [12], [2], None]


# Parts.


def test_a_parsers_parts_are_deltas() -> None:
    """Reasoning, text and calls have their own members, calls with an index of their own."""
    parser = Parser(
        {"x": [Reasoning("why")], "y": [Content("so"), CALL_F]},
        CALL_G,
    )
    events = [TokenEvent("x", 10), TokenEvent("y", 11), TokenEvent("", 2, "stop")]

    assert deltas(streamed(events, parser=parser))[1:] == [
        ({"reasoning_content": "why"}, None),
        ({"content": "so"}, None),
        ({"tool_calls": [{"index": 0, **call_of(CALL_F)}]}, None),
        ({"tool_calls": [{"index": 1, **call_of(CALL_G)}]}, None),
        ({}, "tool_calls"),
    ]


def call_of(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def test_a_parsers_parts_are_a_message() -> None:
    """The body has the same parts, and the same reason."""
    parser = Parser({"x": [Reasoning("why")], "y": [Content("so"), CALL_F]}, CALL_G)
    events = [TokenEvent("x", 10), TokenEvent("y", 11), TokenEvent("", 2, "stop")]
    (choice,) = whole(events, parser=parser)["choices"]

    assert choice["message"] == {
        "role": "assistant",
        "content": "so",
        "refusal": None,
        "reasoning_content": "why",
        "tool_calls": [call_of(CALL_F), call_of(CALL_G)],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_calls_alone_have_no_content() -> None:
    """Without text beside calls the content is null; without either it is empty."""
    events = [TokenEvent("x", 10), TokenEvent("", 2, "stop")]
    calls = whole(events, parser=Parser({"x": []}, CALL_F))["choices"][0]["message"]
    nothing = whole(events, parser=Parser({"x": []}))["choices"][0]["message"]

    assert calls["content"] is None
    assert (nothing["content"], "tool_calls" in nothing) == ("", False)


def test_a_call_that_was_cut_is_told_as_cut() -> None:
    """Where the limit ended the answer the reason is that, calls or not."""
    events = [TokenEvent("x", 10, "length")]

    assert whole(events, parser=Parser({"x": []}, CALL_F))["choices"][0]["finish_reason"] == (
        "length"
    )


def test_a_tokens_score_goes_with_its_first_part() -> None:
    """A token whose text makes two deltas has its score once."""
    parser = Parser({"ab": [Content("a"), CALL_F]})
    chunks = streamed(SCORED, replace(FORM, logprobs=0), parser)
    scored = [chunk["choices"][0]["logprobs"] is not None for chunk in chunks]

    assert scored == [False, True, True, False, True, False]


def test_an_error_takes_the_place_of_the_end() -> None:
    """The error is one chunk, and the end mark follows."""
    error = error_body("gone", "server_error", code="shard_unavailable")

    assert [*ChatWriter(FORM, [None]).fail(error)] == [Chunk(dict(error)), DONE]
