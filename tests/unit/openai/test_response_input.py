"""Items of a response's input, and the chat messages that they become."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from meshnet.openai.response_input import Items, to_messages

ITEMS = TypeAdapter[Items](Items)


def messages_of(value: object) -> list[dict[str, Any]]:
    return to_messages(ITEMS.validate_python(value))


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def called(call_id: str, name: str = "add", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def call(call_id: str, name: str = "add", arguments: str = "{}") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def test_a_string_is_what_the_user_said() -> None:
    """The short form of an input is one message of the user."""
    assert messages_of("Hi") == [said("user", "Hi")]


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
@pytest.mark.parametrize("kind", [{}, {"type": "message"}])
def test_a_message_keeps_its_role(role: str, kind: dict[str, str]) -> None:
    """Each role is passed on; a message need not say that it is one."""
    assert messages_of([{**kind, "role": role, "content": "Hi"}]) == [said(role, "Hi")]


@pytest.mark.parametrize("kind", ["input_text", "output_text"])
def test_text_parts_are_joined(kind: str) -> None:
    """A list of text parts is their text, whoever wrote it, and what else they hold is ignored."""
    parts: list[dict[str, Any]] = [
        {"type": kind, "text": "a", "annotations": []},
        {"type": kind, "text": "b"},
    ]

    assert messages_of([{"role": "user", "content": parts}]) == [said("user", "ab")]


def test_an_output_is_a_tools_message() -> None:
    """What came of a call is said by the tool, as a string or as parts."""
    items: list[dict[str, Any]] = [
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "4"}],
        },
    ]

    assert messages_of(items) == [
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]


def test_an_answers_items_are_one_message_again() -> None:
    """Thoughts, text and calls that one response held come back as one message."""
    items: list[dict[str, Any]] = [
        said("user", "1 + 2?"),
        thought("hm"),
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        called("c1", arguments='{"a": 1}'),
        called("c2"),
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]

    assert messages_of(items) == [
        said("user", "1 + 2?"),
        {
            **said("assistant", "Let me see."),
            "reasoning_content": "hm",
            "tool_calls": [call("c1", arguments='{"a": 1}'), call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]


def test_calls_without_text_are_a_message_of_their_own() -> None:
    """Calls that follow no text of the assistant are a message without content."""
    assert messages_of([called("c1")]) == [{"role": "assistant", "tool_calls": [call("c1")]}]
    assert messages_of([said("user", "Hi"), called("c1"), called("c2")]) == [
        said("user", "Hi"),
        {"role": "assistant", "tool_calls": [call("c1"), call("c2")]},
    ]


def test_thoughts_begin_another_answer() -> None:
    """A call after new thoughts is not of the answer before them."""
    assert messages_of([said("assistant", "So."), thought("a"), thought("b"), called("c1")]) == [
        said("assistant", "So."),
        {"role": "assistant", "reasoning_content": "ab", "tool_calls": [call("c1")]},
    ]


def test_thoughts_that_led_to_nothing_are_left_out() -> None:
    """Reasoning that no answer follows, or whose text is not told, is in no message."""
    sealed: dict[str, Any] = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": "x",
    }

    assert messages_of([thought("hm"), said("user", "Hi"), said("assistant", "Yes")]) == [
        said("user", "Hi"),
        said("assistant", "Yes"),
    ]
    assert messages_of([sealed, said("assistant", "Yes")]) == [said("assistant", "Yes")]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("items", "where", "problem"),
    [
        ([], (), "at least 1 item"),
        (5, (), "valid list"),
        (["Hi"], (0,), "is not an object"),
        (
            [said("user", "Hi"), {"type": "web_search_call", "id": "ws_1"}],
            (1,),
            "has the type 'web_search_call'; only message, function_call, function_call_output,"
            " reasoning are supported",
        ),
        ([{"type": "x" * 1000}], (0,), f"has the type '{'x' * 40}'; only"),
        ([{"type": "item_reference", "id": "msg_1"}], (0,), "has the type 'item_reference'"),
        ([{"content": "Hi"}], (0, "role"), "Field required"),
        ([said("tool", "Hi")], (0, "role"), "Input should be 'user', 'assistant', 'system' or"),
        ([{"role": "user"}], (0, "content"), "Field required"),
        ([{"role": "user", "content": None}], (0, "content"), "valid string"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}],
            (0, "content"),
            "part 1 has the type 'input_image'; only text is supported",
        ),
        (
            [{"role": "user", "content": [{"type": "input_text"}]}],
            (0, "content"),
            'part 0 is not {"type": "input_text", "text": "..."}',
        ),
        ([{"role": "user", "content": [5]}], (0, "content"), "part 0 is not"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], (0, "arguments"), "required"),
        (
            [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}],
            (0, "output"),
            "part 0 has the type 'input_image'",
        ),
        ([{"type": "function_call_output", "output": "3"}], (0, "call_id"), "required"),
    ],
)
def test_what_is_no_input_is_refused(
    items: object, where: tuple[object, ...], problem: str
) -> None:
    """The first wrong item is named by its place, its member, and what is wrong with it."""
    with pytest.raises(ValidationError) as caught:
        ITEMS.validate_python(items)

    [error] = caught.value.errors()
    assert error["loc"] == where
    assert problem in error["msg"]
