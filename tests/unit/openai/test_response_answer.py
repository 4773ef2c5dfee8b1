"""The writer of responses: its events and bodies, which openai's own models must take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from meshnet.generation import FinishReason, TokenEvent, TokenScore
from meshnet.openai.bodies import Heading
from meshnet.openai.errors import ErrorType, error_body
from meshnet.openai.response_answer import ResponseForm, ResponseWriter
from meshnet.openai.stream import Chunk
from meshnet.text.response_parser import Content, Part, Reasoning, ToolCall

Event = dict[str, Any]

OFFICIAL: Final = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
HELLO: Final = [TokenEvent("Hel", 10), TokenEvent("", 11), TokenEvent("lo", 12)]
END: Final = TokenEvent("", 2, "stop")
CALL: Final = ToolCall("call_1", "add", '{"a": 1}')
ECHO: Final[Mapping[str, object]] = {
    "instructions": "Be brief.",
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [{"type": "function", "name": "add", "parameters": None, "strict": None}],
    "top_logprobs": 0,
    "top_p": 1.0,
}


class Texts:
    """Token i is written `<i>`."""

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return f"<{token_id}>".encode()


class Script:
    """A parser that finds given parts: some with each text, and the last ones at the end."""

    reads_special_tokens = False

    def __init__(self, parts: Sequence[Sequence[Part]], rest: Sequence[Part] = ()) -> None:
        self._parts = iter(parts)
        self._rest = rest

    def push(self, text: str) -> list[Part]:
        del text
        return list(next(self._parts))

    def finish(self) -> list[Part]:
        return list(self._rest)


def new_writer(script: Script | None = None, logprobs: int | None = None) -> ResponseWriter:
    heading = Heading(id="resp-1", created=5, model="m", system_fingerprint="fp_1")
    form = ResponseForm(
        heading, n_prompt=7, texts=Texts(), logprobs=logprobs, echo=ECHO, clock=lambda: 8.7
    )
    return ResponseWriter(form, script)


def data_of(chunk: Chunk) -> Event:
    return cast("Event", chunk.data)


def stream(
    tokens: Sequence[TokenEvent], script: Script | None = None, logprobs: int | None = None
) -> list[Event]:
    """The events of a whole stream."""
    writer = new_writer(script, logprobs)
    chunks = [
        *writer.begin(),
        *(chunk for token in tokens for chunk in writer.take(0, token)),
        *writer.end(),
    ]
    assert [chunk.event for chunk in chunks] == [data_of(chunk)["type"] for chunk in chunks]
    return [data_of(chunk) for chunk in chunks]


def plain(tokens: Sequence[TokenEvent], script: Script | None = None) -> Event:
    """The answer in one piece."""
    writer = new_writer(script)
    for token in tokens:
        list(writer.take(0, token))
    return cast("Event", dict(writer.body()))


def told(parts: Sequence[Part], reason: FinishReason = "stop") -> list[Event]:
    """The events of an answer in which each token but the last makes one part."""
    tokens = [TokenEvent("x", 10) for _ in parts]
    return stream([*tokens, TokenEvent("", 2, reason)], Script([[part] for part in parts]))


def of_type(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == f"response.{kind}"]


def scored(text: str, token_id: int, reason: FinishReason | None = None) -> TokenEvent:
    """A token with its score and one alternative."""
    score = TokenScore(token_id=token_id, logprob=-0.5, top=((token_id, -0.5), (9, -2.0)))
    return TokenEvent(text, token_id, reason, score)


def test_a_stream_of_text_has_the_published_order() -> None:
    """Created, in progress, one message with one part and its deltas, all done, completed."""
    assert [event["type"] for event in stream([*HELLO, END])] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_message_grows_from_nothing_to_its_text() -> None:
    """The item is announced empty, each delta is a piece of text, what is done is whole."""
    events = stream([*HELLO, END])
    place = {"item_id": "msg_resp-1_0", "output_index": 0, "content_index": 0}
    part: Event = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    item = {"id": "msg_resp-1_0", "type": "message", "role": "assistant"}
    expected: list[Event] = [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "content": [], "status": "in_progress"},
        },
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": "Hel", "logprobs": []},
        {"type": "response.output_text.delta", **place, "delta": "lo", "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "Hello", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {**item, "content": [part], "status": "completed"},
        },
    ]

    assert [
        {name: value for name, value in event.items() if name != "sequence_number"}
        for event in events[2:-1]
    ] == expected


def test_the_response_has_every_key_that_is_published() -> None:
    """A completed response says what it is, what it repeats, and what it cost."""
    part: Event = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}

    assert plain([*HELLO, END]) == {
        **ECHO,
        "id": "resp-1",
        "object": "response",
        "created_at": 5,
        "completed_at": 8,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "m",
        "output": [
            {
                "id": "msg_resp-1_0",
                "type": "message",
                "role": "assistant",
                "content": [part],
                "status": "completed",
            }
        ],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 11,
        },
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
    }


def test_a_response_begins_without_output_and_counts() -> None:
    """The first two events hold the response as it is then, and stay so."""
    created, in_progress, *_ = stream([*HELLO, END])

    for event in (created, in_progress):
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
        assert event["response"]["usage"] is None
        assert event["response"]["completed_at"] is None


def test_an_answer_at_its_limit_is_incomplete() -> None:
    """Cut by max_output_tokens, the response, its last event and its message say so."""
    *_, item, last = stream([*HELLO, TokenEvent("!", 13, "length")])

    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None
    assert last["response"]["usage"]["output_tokens"] == 4
    assert item["item"]["status"] == "incomplete"
    assert item["item"]["content"][0]["text"] == "Hello!"


def test_a_call_is_told_as_published() -> None:
    """A call is announced without arguments, which come in one delta, and is then done."""
    events = told([CALL])
    place = {"item_id": "fc_resp-1_0", "output_index": 0}
    item = {
        "id": "fc_resp-1_0",
        "type": "function_call",
        "call_id": "call_1",
        "name": "add",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    added, delta, done, item_done = events[2:-1]

    assert added["item"] == {**item, "arguments": "", "status": "in_progress"}
    assert delta == {
        "type": "response.function_call_arguments.delta",
        "sequence_number": 3,
        "delta": '{"a": 1}',
        **place,
    }
    assert done == {
        "type": "response.function_call_arguments.done",
        "sequence_number": 4,
        "name": "add",
        "arguments": '{"a": 1}',
        **place,
    }
    assert item_done["item"] == item
    assert events[-1]["response"]["output"] == [item]


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_a_call_that_the_limit_cuts_is_incomplete(reason: FinishReason, status: str) -> None:
    """What the parser still holds at the limit is no whole call; calls before it are."""
    tokens = [TokenEvent("x", 10), TokenEvent("", 11, reason)]
    cut = ToolCall("call_2", "add", '{"a"')
    last = stream(tokens, Script([[CALL]], [cut]))[-1]

    assert [(item["arguments"], item["status"]) for item in last["response"]["output"]] == [
        ('{"a": 1}', "completed"),
        ('{"a"', status),
    ]


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    """Each part of an answer is an item, whose text is in its own kind of events."""
    events = told([Reasoning("hm"), Reasoning("."), Content("Yes"), CALL])
    output = events[-1]["response"]["output"]

    assert [(item["type"], item["id"]) for item in output] == [
        ("reasoning", "rs_resp-1_0"),
        ("message", "msg_resp-1_1"),
        ("function_call", "fc_resp-1_2"),
    ]
    assert output[0] == {
        "id": "rs_resp-1_0",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm."}],
        "status": "completed",
    }
    assert [event["delta"] for event in of_type(events, "reasoning_text.delta")] == ["hm", "."]
    assert [event["text"] for event in of_type(events, "reasoning_text.done")] == ["hm."]
    assert "logprobs" not in of_type(events, "reasoning_text.done")[0]
    assert [event["delta"] for event in of_type(events, "output_text.delta")] == ["Yes"]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    """A model that ends at once has answered: with a message without text."""
    body = plain([END])

    assert [item["content"][0]["text"] for item in body["output"]] == [""]
    assert body["output"][0]["status"] == "completed"
    assert body["usage"]["output_tokens"] == 1


def test_reasoning_alone_needs_no_message() -> None:
    """Thoughts that are cut short are the whole output, and incomplete."""
    last = told([Reasoning("hm")], "length")[-1]["response"]

    assert [(item["type"], item["status"]) for item in last["output"]] == [
        ("reasoning", "incomplete")
    ]


def test_cached_tokens_are_told() -> None:
    """What the first token says of the prompt is in the usage at the end."""
    first, *others = HELLO
    last = stream([replace(first, n_cached=5), *others, END])[-1]

    assert last["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 5


def test_tokens_of_reasoning_are_counted() -> None:
    """Tokens whose text is thought, also one whose text came out late, count as reasoning."""
    tokens = [TokenEvent("", 1), TokenEvent("x", 2), TokenEvent("x", 3), END]
    script = Script([[Reasoning("hm")], [Content("Yes")]])
    usage = stream(tokens, script)[-1]["response"]["usage"]

    assert usage["output_tokens"] == 4
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}


def test_every_token_of_a_message_has_its_score() -> None:
    """Scores come with the text of their tokens; only the finished content has their bytes."""
    events = stream([scored("", 4), scored("ab", 5), scored("", 2, "stop")], logprobs=1)
    deltas = of_type(events, "output_text.delta")

    assert [(d["delta"], [p["token"] for p in d["logprobs"]]) for d in deltas] == [
        ("ab", ["<4>", "<5>"]),
        ("", ["<2>"]),
    ]
    assert deltas[0]["logprobs"][1] == {
        "token": "<5>",
        "logprob": -0.5,
        "top_logprobs": [{"token": "<5>", "logprob": -0.5}],
    }
    joined = [entry for delta in deltas for entry in delta["logprobs"]]
    assert of_type(events, "output_text.done")[0]["logprobs"] == joined
    content = events[-1]["response"]["output"][0]["content"]
    assert [entry["token"] for entry in content[0]["logprobs"]] == ["<4>", "<5>", "<2>"]
    assert content[0]["logprobs"][1] == {
        "token": "<5>",
        "logprob": -0.5,
        "bytes": list(b"<5>"),
        "top_logprobs": [{"token": "<5>", "logprob": -0.5, "bytes": list(b"<5>")}],
    }


def test_scores_are_of_the_message_alone() -> None:
    """What was thought or called has no scores in the response."""
    script = Script([[Reasoning("hm")], [Content("Yes")], [CALL]])
    tokens = [scored("x", 4), scored("x", 5), scored("x", 6), scored("", 2, "stop")]
    events = stream(tokens, script, logprobs=0)

    assert [
        [p["token"] for p in event["logprobs"]] for event in of_type(events, "output_text.delta")
    ] == [["<5>"]]


def test_scores_are_not_told_unasked() -> None:
    """Where only the tail knows scores, the message holds none."""
    events = stream([scored("ab", 5), scored("", 2, "stop")])

    assert [e["logprobs"] for e in of_type(events, "output_text.delta")] == [[]]


@pytest.mark.parametrize(
    ("kind", "code", "flat", "within"),
    [
        ("server_error", "shard_unavailable", "shard_unavailable", "server_error"),
        ("server_error", None, "server_error", "server_error"),
        ("invalid_request_error", None, "invalid_request_error", "invalid_prompt"),
    ],
)
def test_a_failure_is_an_error_and_a_failed_response(
    kind: ErrorType, code: str | None, flat: str, within: str
) -> None:
    """The error is told flat as documented, nested as the SDK reads it, and in the response."""
    writer = new_writer()
    list(writer.begin())
    list(writer.take(0, TokenEvent("Hel", 10)))
    error, failed = map(data_of, writer.fail(error_body("It broke", kind, code=code)))

    assert error == {
        "type": "error",
        "sequence_number": 5,
        "code": flat,
        "message": "It broke",
        "param": None,
        "error": {"message": "It broke", "type": kind, "param": None, "code": flat},
    }
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": within, "message": "It broke"}
    assert failed["response"]["usage"] is None
    [message] = failed["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Hel")
    for event in (error, failed):
        OFFICIAL.validate_python(event)


def test_a_failure_before_the_first_token_begins_the_stream() -> None:
    """Also a stream that only fails opens as every stream does."""
    writer = new_writer()
    events = [data_of(chunk) for chunk in writer.fail(error_body("It broke", "server_error"))]

    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert events[-1]["response"]["output"] == []


# Any answer.

Texts_ = st.text("ab", min_size=1, max_size=3)
Parts = st.lists(
    st.one_of(
        st.builds(Content, Texts_),
        st.builds(Reasoning, Texts_),
        st.builds(ToolCall, Texts_, Texts_, Texts_),
    ),
    max_size=3,
)
Reasons = st.sampled_from(["stop", "length"])


def items_of(events: Sequence[Event]) -> list[Event]:
    return [event["item"] for event in of_type(events, "output_item.done")]


def text_of(item: Event) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


@given(st.lists(Parts, max_size=5), Parts, Reasons)
def test_any_answer_is_told_in_order(
    parts: list[list[Part]], rest: list[Part], reason: FinishReason
) -> None:
    """Events are numbered, every item is done before the next begins, deltas join to the text."""
    tokens = [*(TokenEvent("x", 10) for _ in parts), TokenEvent("", 2, reason)]
    events = stream(tokens, Script(parts, rest))

    for event in events:
        OFFICIAL.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = items_of(events)
    ends = [(e["type"], e["output_index"]) for e in events if ".output_item." in e["type"]]
    assert ends == [
        (f"response.output_item.{what}", index)
        for index in range(len(items))
        for what in ("added", "done")
    ]
    for index, item in enumerate(items):
        deltas = [
            event["delta"]
            for event in events
            if event["type"].endswith(".delta") and event["output_index"] == index
        ]
        assert "".join(deltas) == text_of(item)
    assert events[-1]["response"]["output"] == items


@given(st.lists(Parts, max_size=5), Parts, Reasons)
def test_nothing_of_an_answer_is_lost(
    parts: list[list[Part]], rest: list[Part], reason: FinishReason
) -> None:
    """The output's texts by kind are the parts', neighbours of one kind in one item."""
    tokens = [*(TokenEvent("x", 10) for _ in parts), TokenEvent("", 2, reason)]
    body = plain(tokens, Script(parts, rest))

    Response.model_validate(body)
    flat = [part for some in [*parts, rest] for part in some]
    for kind, of_kind in (("message", Content), ("reasoning", Reasoning)):
        texts = [text_of(item) for item in body["output"] if item["type"] == kind]
        assert "".join(texts) == "".join(p.text for p in flat if isinstance(p, of_kind))
    calls = [(c.id, c.name, c.arguments) for c in flat if isinstance(c, ToolCall)]
    assert calls == [
        (item["call_id"], item["name"], item["arguments"])
        for item in body["output"]
        if item["type"] == "function_call"
    ]
    for item, following in pairwise(body["output"]):
        assert item["type"] != following["type"] or item["type"] == "function_call"


@given(st.lists(Parts, max_size=5), Parts, Reasons)
def test_the_last_event_holds_the_plain_answer(
    parts: list[list[Part]], rest: list[Part], reason: FinishReason
) -> None:
    """Streamed or in one piece, the response is the same."""
    tokens = [*(TokenEvent("x", 10) for _ in parts), TokenEvent("", 2, reason)]

    last = stream(tokens, Script(parts, rest))[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"] == plain(tokens, Script(parts, rest))
