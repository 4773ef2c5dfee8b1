"""The messages of a chat request, in the shape a chat template takes."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationInfo,
    field_validator,
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
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            kind = kind[:_MAX_ECHO_CHARS]
            raise ValueError(f"part {index} has the type {kind!r}; only 'text' is supported")
        case _:
            raise ValueError(f'part {index} is not {{"type": "text", "text": "..."}}')


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
    """One message. Fields of the answers of other servers (`refusal`, `audio`...) are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(default=None, validate_default=True)
    name: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: StrictStr | None = None

    @field_validator("content")
    @classmethod
    def _only_assistants_are_silent(cls, content: str | None, info: ValidationInfo) -> str | None:
        role = info.data.get("role", "assistant")  # absent if it is wrong, which is said anyway
        if content is None and role != "assistant":
            raise ValueError(f"a message of the role {role} needs it")
        return content

    def for_template(self) -> dict[str, object]:
        """The message with `content` always a string, and without what is not there."""
        message: dict[str, object] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
"""A conversation. The first wrong message is reported: an error is never longer than the input."""
