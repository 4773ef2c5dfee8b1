from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from meshnet.openai.messages import ChatMessage, Messages

CALL = {"id": "call_1", "function": {"name": "f", "arguments": '{"a": 1}'}}


def for_template(message: dict[str, object]) -> dict[str, object]:
    return ChatMessage.model_validate(message).for_template()


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_every_known_role_passes(role: str) -> None:
    """The five roles are taken as they are."""
    assert for_template({"role": role, "content": "x"}) == {"role": role, "content": "x"}


@pytest.mark.parametrize("role", ["wizard", "System", "", None, 1, [], {}])
def test_any_other_role_is_refused(role: object) -> None:
    """An invented role is refused: templates would print it into the prompt."""
    with pytest.raises(ValidationError, match="role"):
        for_template({"role": role, "content": "x"})


def test_text_parts_are_joined() -> None:
    """A list of text parts is the same as their texts in one string."""
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world"}]

    assert for_template({"role": "user", "content": parts})["content"] == "Hello, world"


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "part 1 has the type 'image_url'"),
        ({"type": "input_audio"}, "part 1 has the type 'input_audio'"),
        ({"type": "x" * 1000}, "part 1 has the type 'x{40}'"),
        ({"type": "text"}, "part 1 is not"),
        ({"type": "text", "text": None}, "part 1 is not"),
        ({"type": "refusal", "text": "no"}, "part 1 is not"),
        ({"type": 5}, "part 1 is not"),
        ({}, "part 1 is not"),
        ("text", "part 1 is not"),
    ],
)
def test_any_other_part_is_refused_by_its_type(part: object, problem: str) -> None:
    """A part that is no text is refused, naming its place and type and little more."""
    with pytest.raises(ValidationError, match=problem):
        for_template({"role": "user", "content": [{"type": "text", "text": "a"}, part]})


@pytest.mark.parametrize("content", [5, True, {"type": "text", "text": "a"}])
def test_content_of_another_type_is_refused(content: object) -> None:
    """Content is a string or a list of parts, nothing that could be made one."""
    with pytest.raises(ValidationError, match="content"):
        for_template({"role": "user", "content": content})


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_an_assistant_may_be_silent(message: dict[str, object]) -> None:
    """An assistant's null or missing content is the empty string for the template."""
    assert for_template(message) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_nobody_else_may_be_silent(role: str) -> None:
    """Null and missing content is refused for every other role."""
    with pytest.raises(ValidationError, match=f"role {role} needs it"):
        for_template({"role": role})
    with pytest.raises(ValidationError, match=f"role {role} needs it"):
        for_template({"role": role, "content": None})


def test_a_tool_conversation_reaches_the_template() -> None:
    """Calls go to the template with their arguments as an object, results with their call's id."""
    assistant = for_template({"role": "assistant", "content": None, "tool_calls": [CALL]})
    tool = for_template({"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"})

    assert assistant["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "f"}


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "3", "[" * 10_000, '{"a": 1'])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    """Arguments cut short, nested without end or of another type are passed on as they came."""
    call = {"id": "call_1", "function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})

    assert message.tool_calls is not None
    assert message.tool_calls[0].for_template()["function"] == {
        "name": "f",
        "arguments": arguments,
    }


def test_null_members_are_absent() -> None:
    """A message whose optional members are all null is one without them."""
    optional = ["name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call"]
    nulls = dict.fromkeys([*optional, "reasoning_content", "reasoning"])

    assert for_template({"role": "user", "content": "x", **nulls}) == {
        "role": "user",
        "content": "x",
    }


def test_members_of_other_servers_answers_are_ignored() -> None:
    """An answer can be sent back as it came, with what other servers put in it."""
    answer = json.loads('{"role": "assistant", "content": "x", "refusal": null, "annotations": []}')

    assert for_template(answer) == {"role": "assistant", "content": "x"}


def test_only_the_first_wrong_message_is_reported() -> None:
    """A million wrong messages make one error, not a million."""
    with pytest.raises(ValidationError) as caught:
        TypeAdapter[list[ChatMessage]](Messages).validate_python([1] * 1_000_000)

    assert caught.value.error_count() == 1


def conversation(*messages: dict[str, object]) -> list[dict[str, object]]:
    checked = TypeAdapter[list[ChatMessage]](Messages).validate_python(list(messages))
    return [message.for_template() for message in checked]


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_calls_need_no_words(content: dict[str, object]) -> None:
    """An assistant's calls are taken with null, empty and missing content alike."""
    message = for_template({"role": "assistant", **content, "tool_calls": [CALL]})

    assert message["content"] == ""
    assert message["tool_calls"]


def test_a_refusal_is_what_the_assistant_said() -> None:
    """A refusal, as a part or as a member, is text for the template; content goes first."""
    part = {"type": "refusal", "refusal": "I will not."}

    assert for_template({"role": "assistant", "content": [part]})["content"] == "I will not."
    assert for_template({"role": "assistant", "refusal": "No."})["content"] == "No."
    assert for_template({"role": "assistant", "content": "Yes.", "refusal": "No."}) == {
        "role": "assistant",
        "content": "Yes.",
    }


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_reaches_the_template(name: str) -> None:
    """An answer's reasoning goes to the template under one name, whichever it came under."""
    assert for_template({"role": "assistant", "content": "x", name: "because"}) == {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "because",
    }


def test_an_answer_in_sound_is_refused() -> None:
    """A reference to sound that an earlier answer made is refused, not dropped."""
    with pytest.raises(ValidationError, match="audio"):
        for_template({"role": "assistant", "audio": {"id": "audio_1"}})


def test_a_legacy_call_is_a_tools() -> None:
    """`function_call` and the role `function` are a tool's call and result of the same id."""
    call = {"name": "f", "arguments": '{"a": 1}'}
    assistant, result, silent = conversation(
        {"role": "assistant", "content": None, "function_call": call, "tool_calls": None},
        {"role": "function", "name": "f", "content": "2"},
        {"role": "function", "name": "f", "content": None},
    )

    assert assistant == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    }
    assert result == {"role": "tool", "content": "2", "name": "f", "tool_call_id": "call_f"}
    assert silent == {**result, "content": ""}


def test_calls_win_over_their_legacy() -> None:
    """A message that has both has the same call twice: it is taken once."""
    legacy = {"name": "f", "arguments": "{}"}
    (message,) = conversation({"role": "assistant", "tool_calls": [CALL], "function_call": legacy})

    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "content": "2"},
        {"role": "assistant", "function_call": "auto"},
        {"role": "assistant", "function_call": {"arguments": "{}"}},
    ],
)
def test_a_legacy_call_without_a_name_is_refused(message: dict[str, object]) -> None:
    """What cannot be told by its name is refused, not dropped."""
    with pytest.raises(ValidationError, match="a function call and its result need a name"):
        for_template(message)


def test_a_call_of_another_type_is_refused() -> None:
    """A call of a tool that is no function is refused."""
    call = {"id": "call_1", "type": "custom", "custom": {"name": "f", "input": "x"}}
    with pytest.raises(ValidationError, match=r"tool_calls\.0\.type"):
        for_template({"role": "assistant", "tool_calls": [call]})


def test_a_result_is_told_with_its_functions_name() -> None:
    """A result has the name of the call before it, unless it has one or the call is unknown."""

    def called(name: str) -> dict[str, object]:
        function = {"name": name, "arguments": "{}"}
        return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}

    def result(**members: object) -> dict[str, object]:
        return {"role": "tool", "content": "x", **members}

    messages = conversation(
        called("f"),
        result(tool_call_id="1"),
        result(tool_call_id="1", name="own"),
        called("g"),
        result(tool_call_id="1"),
        result(tool_call_id="2"),
        result(),
    )

    names = [message.get("name") for message in messages if message["role"] == "tool"]
    assert names == ["f", "own", "g", None, None]
