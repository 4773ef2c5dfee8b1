"""The input of `POST /v1/responses`: items, which become the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StrictStr

_MAX_ECHO_CHARS: Final = 40
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "reasoning_text"})


def _flatten(content: object) -> object:
    """Join the text parts of a list, as the chat endpoint does."""
    if not isinstance(content, list):
        return content
    parts = cast("list[object]", content)
    return "".join(_part_text(index, part) for index, part in enumerate(parts))


def _part_text(index: int, part: object) -> str:
    match part:
        case {"type": str(kind)} if kind not in _TEXT_PARTS:
            kind = kind[:_MAX_ECHO_CHARS]
            raise ValueError(f"part {index} has the type {kind!r}; only text is supported")
        case {"type": str(), "text": str(text)}:
            return text
        case _:
            raise ValueError(f'part {index} is not {{"type": "input_text", "text": "..."}}')


Text = Annotated[StrictStr, BeforeValidator(_flatten)]


class _Item(BaseModel):
    """What answers hold besides, such as ids and statuses, is ignored where it comes back."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class InputMessage(_Item):
    """What somebody said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def to_message(self) -> dict[str, Any]:
        """As a chat has it."""
        return {"role": self.role, "content": self.content}


class FunctionCall(_Item):
    """A call that an earlier answer made; `arguments` is JSON in a string."""

    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr

    def to_call(self) -> dict[str, Any]:
        """As an assistant's message of a chat has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallOutput(_Item):
    """What came of such a call."""

    call_id: StrictStr
    output: Text

    def to_message(self) -> dict[str, Any]:
        """As a chat has it."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class Reasoning(_Item):
    """Thoughts before an earlier answer; those of other servers may hold no text that is theirs."""

    content: Text | None = None


_KINDS: Final[dict[str, type[InputMessage | FunctionCall | FunctionCallOutput | Reasoning]]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}


def _read_item(value: object) -> object:
    match value:
        case {"type": str(kind)} if kind not in _KINDS:
            kind = kind[:_MAX_ECHO_CHARS]
            raise ValueError(f"has the type {kind!r}; only {', '.join(_KINDS)} are supported")
        case {"type": str(kind)}:
            return _KINDS[kind].model_validate(value)
        case dict():  # messages may leave it out
            return InputMessage.model_validate(value)
        case _:
            raise ValueError("is not an object")


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Item = Annotated[
    InputMessage | FunctionCall | FunctionCallOutput | Reasoning,
    PlainValidator(_read_item, json_schema_input_type=dict[str, Any]),
]
Items = Annotated[
    list[Item],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_as_items, json_schema_input_type=str | list[dict[str, Any]]),
]
"""An input. The first wrong item is reported: an error is never longer than the input."""


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The chat: thoughts, text and calls of one answer are one message again.

    Thoughts that no message of the assistant follows are left out.
    """
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for item in items:
        if isinstance(item, Reasoning):
            thoughts += item.content or ""
            continue
        if isinstance(item, FunctionCall):
            if thoughts or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(item.to_call())
        else:
            messages.append(item.to_message())
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return messages
