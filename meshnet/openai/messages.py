"""The messages of a chat request, in the shape a chat template takes."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

_MAX_ECHO_CHARS = 40


def _flatten(content: object) -> object:
    """Join the text parts of a list; templates take a string, and raise on anything else."""
    if not isinstance(content, list):
        return content
    parts = cast("list[object]", content)
    return "".join(_part_text(index, part) for index, part in enumerate(parts))


def _part_text(index: int, part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind not in ("text", "refusal"):
            kind = kind[:_MAX_ECHO_CHARS]
            raise ValueError(f"part {index} has the type {kind!r}; only 'text' is supported")
        case _:
            raise ValueError(f'part {index} is not {{"type": "text", "text": "..."}}')


def _modern(message: object) -> object:
    """The legacy role `function` and `function_call` as a tool's; the name serves as the id."""
    if not isinstance(message, dict):
        return message
    members = cast("dict[str, object]", message)
    if members.get("role") == "function":
        content = members.get("content") or ""  # null was allowed there
        call_id = _legacy_id(members)
        return {**members, "role": "tool", "content": content, "tool_call_id": call_id}
    call = members.get("function_call")
    if call is None or members.get("tool_calls"):
        return members
    return {**members, "tool_calls": [{"id": _legacy_id(call), "function": call}]}


def _legacy_id(call: object) -> str:
    match call:
        case {"name": str(name)}:
            return f"call_{name}"
        case _:
            raise ValueError("a function call and its result need a name")


Content = Annotated[StrictStr | None, BeforeValidator(_flatten)]


class FunctionCall(BaseModel):
    """The call an earlier answer made; `arguments` is JSON in a string."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: StrictStr
    arguments: StrictStr


class ToolCall(BaseModel):
    """One tool call in the conversation so far."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: StrictStr
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, object]:
        """Arguments as an object, if they are one: templates write them as JSON themselves."""
        function = {"name": self.function.name, "arguments": _object_or_text(self.function)}
        return {"id": self.id, "type": self.type, "function": function}


def _object_or_text(call: FunctionCall) -> object:
    try:
        arguments: object = from_json(call.arguments)  # has a depth limit, json.loads has none
    except ValueError:
        return call.arguments
    return cast("object", arguments) if isinstance(arguments, dict) else call.arguments


class ChatMessage(BaseModel):
    """One message. Fields of the answers of other servers (`annotations`...) are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(default=None, validate_default=True)
    name: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: StrictStr | None = None
    refusal: StrictStr | None = None
    """What an assistant said instead of an answer."""
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    """Another name for `reasoning_content`."""
    audio: None = None
    """Only null: an earlier answer's sound is not kept here."""

    @model_validator(mode="before")
    @classmethod
    def _modernise(cls, message: object) -> object:
        return _modern(message)

    @field_validator("content")
    @classmethod
    def _only_assistants_are_silent(cls, content: str | None, info: ValidationInfo) -> str | None:
        role = info.data.get("role", "assistant")  # absent if it is wrong, which is said anyway
        if content is None and role != "assistant":
            raise ValueError(f"a message of the role {role} needs it")
        return content

    def for_template(self) -> dict[str, object]:
        """The message with `content` always a string, and without what is not there."""
        message: dict[str, object] = {
            "role": self.role,
            "content": self.content or self.refusal or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        return message


def _name_results(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Give a tool's result its function's name: some templates want it, few clients send it."""
    names: dict[str | None, str] = {}
    named: list[ChatMessage] = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        if message.role == "tool" and message.name is None:
            message = message.model_copy(update={"name": names.get(message.tool_call_id)})
        named.append(message)
    return named


Messages = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1), AfterValidator(_name_results)
]
"""A conversation. The first wrong message is reported: an error is never longer than the input."""
