from __future__ import annotations

import json

import pytest

from meshnet.text.hermes import can_read, in_text, response_template

TOOL = {"type": "function", "function": {"name": "weather", "description": "Wie wird's, größer?"}}
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Rome?"}
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rőm"}}},
    {"id": "2", "type": "function", "function": {"name": "weather", "arguments": '{"cut'}},
]
CALLED = {"role": "assistant", "content": "", "tool_calls": CALLS}
CALL_TEXT = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rőm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": "{\\"cut"}\n</tool_call>'
)


def result(content: str) -> dict[str, object]:
    return {"role": "tool", "content": content, "tool_call_id": "1", "name": "weather"}


def test_a_conversation_without_tools_is_left_alone() -> None:
    """Messages that have nothing to do with tools are as they were."""
    messages = [SYSTEM, USER, {"role": "assistant", "content": "", "reasoning_content": "x"}]

    assert messages == in_text(messages, [])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_are_told_in_the_system_message(role: str) -> None:
    """The tools' JSON and how to call them follow what the system message says."""
    first, user = in_text([{**SYSTEM, "role": role}, USER], [TOOL, TOOL])
    content = str(first["content"])
    told = content.partition("<tools>\n")[2].partition("\n</tools>")[0]

    assert (first["role"], user) == (role, USER)
    assert content.startswith("Be kind.\n\n# Tools\n")
    assert [json.loads(line) for line in told.splitlines()] == [TOOL, TOOL]
    assert "größer" in told
    assert can_read(content)


@pytest.mark.parametrize("messages", [[USER], [{"role": "system", "content": ""}, USER]])
def test_a_system_message_is_made_where_none_is(messages: list[dict[str, str]]) -> None:
    """Without a system message, or with an empty one, it is the tools alone."""
    first, user = in_text(messages, [TOOL])

    assert first["role"] == "system"
    assert str(first["content"]).startswith("# Tools\n")
    assert user == USER


def test_calls_are_written_as_the_model_is_to_write_them() -> None:
    """An assistant's calls follow its text, each in its tag; broken arguments stay text."""
    silent, talking = in_text([CALLED, {**CALLED, "content": "Well."}], [])

    assert silent == {"role": "assistant", "content": CALL_TEXT}
    assert talking == {"role": "assistant", "content": f"Well.\n{CALL_TEXT}"}


def test_results_are_the_users_in_one_message() -> None:
    """Results that follow each other, and what the user says then, are one turn of the user's."""
    conversation = [USER, CALLED, result("5"), result("6"), USER, USER]
    told = in_text(conversation, [])

    assert [message["role"] for message in told] == ["user", "assistant", "user", "user"]
    assert told[2]["content"] == (
        "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>\nRome?"
    )
    assert told[3] == USER


def test_the_conversation_itself_is_not_changed() -> None:
    """The messages that are given are the same afterwards."""
    conversation = [dict(SYSTEM), dict(USER), dict(CALLED), result("5"), dict(USER)]
    before = json.dumps(conversation)
    in_text(conversation, [TOOL])

    assert before == json.dumps(conversation)


@pytest.mark.parametrize(
    ("prompt", "readable"),
    [
        ('<tool_call>{"name": ..., "arguments": ...}</tool_call>', True),
        ("<tool_call><function=f><parameter=a>", False),
        ('{"name": ..., "arguments": ...}', False),
    ],
)
def test_only_our_own_notation_can_be_read(prompt: str, readable: bool) -> None:
    """A prompt asks for calls that we can read if it has both the tag and the JSON's keys."""
    assert readable == can_read(prompt)


def test_a_models_own_response_template_has_the_last_word() -> None:
    """Ours is taken where there is none, with reasoning if the model reasons; a gap is filled."""
    plain, thinking = (response_template(None, thinks=thinks) for thinks in (False, True))
    own = {"start_anchor": "x", "fields": {"content": {}, "tool_calls": {"open": "y"}}}
    partial = response_template({"start_anchor": "x", "fields": {"content": {}}}, thinks=True)

    assert list(plain["fields"]) == ["content", "tool_calls"]  # type: ignore[call-overload]
    assert "reasoning_content" in thinking["fields"]  # type: ignore[operator]
    assert own == response_template(own, thinks=True)
    assert partial["start_anchor"] == "x"
    assert set(partial["fields"]) == {"content", "tool_calls"}  # type: ignore[call-overload]
