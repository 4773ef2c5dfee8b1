"""An answer's text to its parts: content, reasoning and tool calls, as the text comes in.

The joined parts are the same however the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, TypeAlias, cast

from pydantic_core import from_json

from meshnet.ids import new_id
from meshnet.text.hermes import response_fields
from meshnet.text.tokenizer import ChatTokenizer, Regions


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thinking before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call, or of the last one as much as was generated; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


Part: TypeAlias = Content | Reasoning | ToolCall


class ResponseParser(Protocol):
    """One answer's text on its way to parts."""

    reads_special_tokens: bool
    """Whether the text must have the special tokens in it, by which the model marks the parts."""

    def push(self, text: str) -> list[Part]:
        """The parts that are there now that `text` has come."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, now that nothing more comes. Once."""
        ...


def new_parser(
    tokenizer: ChatTokenizer,
    prompt_ids: Sequence[int],
    *,
    tools: Sequence[Mapping[str, object]] = (),
    forced: bool = False,
    parallel: bool = True,
) -> ResponseParser | None:
    """The parser of one answer; None where all text is content.

    Args:
        tokenizer: The model's.
        prompt_ids: What the answer follows; it may hold the beginning of the reasoning.
        tools: What the prompt tells of. Without any, what looks like a call is content.
        forced: The answer follows `meshnet.openai.tools.call_schema`.
        parallel: Whether calls after the first one are told.
    """
    if forced:
        return ForcedCalls()
    template = dict(tokenizer.response_template)
    fields = response_fields(template)
    template["fields"] = {
        # A field that must be there would raise at the end of an answer without it.
        name: {**field, "optional": True}
        for name, field in fields.items()
        if tools or name != "tool_calls"
    }
    if not any(_is_marked(field) for field in response_fields(template).values()):
        return None
    return RegionParser(
        partial(tokenizer.new_regions, template, tools=tools),
        response_fields(template),
        prompt_ids,
        parallel=parallel,
        reads_special_tokens=tokenizer.mentions_special_token(template),
    )


_HEADER: Final = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"(\s*,\s*"arguments"\s*:\s*)?')


class ForcedCalls:
    """The text is one object `{"name": ..., "arguments": {...}}`, or a list of them.

    A call is told when its object is closed. Of one that is cut short by the end, so much of the
    arguments is told as there is; what does not even name its function is content.
    """

    reads_special_tokens = False

    def __init__(self) -> None:
        self._call = ""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> list[Part]:
        """The calls that are closed now."""
        calls: list[Part] = []
        for char in text:
            if not self._depth and char != "{":  # between calls
                continue
            self._call += char
            self._track(char)
            if not self._depth:
                calls.append(_read_call(self._call, end=-1))
                self._call = ""
        return calls

    def finish(self) -> list[Part]:
        """The call that is cut short, if one is."""
        return [_read_call(self._call, end=None)] if self._call else []

    def _track(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string and char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        elif not self._in_string:
            self._depth += (char in "{[") - (char in "}]")


def _read_call(text: str, *, end: int | None) -> Part:
    """The call that `text` is or begins; its arguments are what stands up to `end`."""
    header = _HEADER.match(text)
    if header is None:
        return Content(text)
    arguments = text[header.end() : end].rstrip() if header[2] else ""
    return ToolCall(f"call_{new_id()}", header[1], arguments)


_REASONING: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
_PLAIN: Final = frozenset({"text", "int", "float", "bool"})
_SELF_CLOSING: Final = frozenset({"json", "python-call-list"})
# What transformers' content parsers and casts raise on text that is not what it should be, and
# what is raised here for values that are no calls.
_MALFORMED: Final = (ValueError, LookupError, TypeError, RecursionError)
_BLANK: Final = " \t\r\n\0"
"""What may stand around a tag without being text; for the NUL see ChatTokenizer.new_regions."""


class RegionParser:
    """Finds the regions of a response template by transformers' ResponseParser.

    A call is told when its region closes. What is malformed, or cut short by the end, is content,
    tags and all. Blanks beside tags belong to them.

    Args:
        open_regions: A fresh parse of an answer that follows a prompt.
        fields: Of the response template.
        prompt_ids: What the answer follows.
        parallel: Whether calls after the first one are told.
        reads_special_tokens: See ResponseParser.
    """

    def __init__(
        self,
        open_regions: Callable[[Sequence[int]], Regions],
        fields: Mapping[str, Mapping[str, object]],
        prompt_ids: Sequence[int],
        *,
        parallel: bool,
        reads_special_tokens: bool,
    ) -> None:
        self.reads_special_tokens = reads_special_tokens
        self._open_regions = open_regions
        self._fields = fields
        self._parallel = parallel
        self._n_calls = 0
        self._content = _Stream(Content)
        self._reasoning = _Stream(Reasoning)
        self._held = ""
        """What came and is not told: a beginning of a tag, or a region that is told as a whole."""
        self._inside: str | None = None
        """The region that is open, if it is one that is told as a whole."""
        self._regions = self._begin(prompt_ids)
        self._tell(lambda: self._regions.initial_events)
        self._content.forget()
        self._reasoning.forget()

    def push(self, text: str) -> list[Part]:
        """What is certain to be text, and the calls that are closed now."""
        # One character after the other: so an error is one of the region that just closed, and how
        # the text was cut cannot matter.
        return _joined(part for char in text for part in self._step(char))

    def finish(self) -> list[Part]:
        """What was held back."""
        if self._inside is None or _ends_anywhere(self._fields[self._inside]):
            parts = self._tell(lambda: self._regions.finalize()[1])
        else:
            # The closing tag may be there, and wait for what follows it: a NUL, which is no text.
            parts = self._tell(lambda: self._regions.feed("\0"))
            parts += self._give_up()
        return _joined([*parts, *self._content.finish()])

    def _begin(self, prompt_ids: Sequence[int]) -> Regions:
        """Begin where the prompt leaves the answer, if that can be read."""
        try:
            return self._open_regions(prompt_ids)
        except _MALFORMED:
            return self._open_regions(())

    def _step(self, char: str) -> list[Part]:
        self._held += char
        return self._tell(lambda: self._regions.feed(char))

    def _tell(self, read: Callable[[], list[dict[str, object]]]) -> list[Part]:
        try:
            return [part for event in read() for part in self._on(event)]
        except _MALFORMED:
            return self._give_up()

    def _give_up(self) -> list[Part]:
        """Tell what is held as the text it is, and begin anew behind it."""
        held, self._held, self._inside = self._held, "", None
        self._regions = self._open_regions(())
        return self._content.add(held)

    def _on(self, event: Mapping[str, object]) -> list[Part]:
        name = str(event["field"])
        field = self._fields[name]
        if name == "tool_calls" or field.get("content", "text") not in _PLAIN:
            return self._on_whole(name, event)
        if event["type"] == "region_chunk":
            text = str(event["text"])
            self._held = self._held[len(text) :]
            return (self._reasoning if name in _REASONING else self._content).add(text)
        if _is_marked(field):
            self._held = ""
            self._content.is_beside_tag = self._reasoning.is_beside_tag = True
        return []

    def _on_whole(self, name: str, event: Mapping[str, object]) -> list[Part]:
        """A region that is told when it closes."""
        if event["type"] == "region_open":
            self._inside = name
        if event["type"] != "region_close":
            return []
        calls = _read_calls(event["value"])
        self._held, self._inside = "", None
        self._content.is_beside_tag = True
        told = calls if self._parallel else calls[: max(1 - self._n_calls, 0)]
        self._n_calls += len(calls)
        return told


class _Stream:
    """Text of one kind, without the blanks that belong to the tags around it.

    `is_beside_tag` says that there is a tag at all: blanks of an answer without any are its own.
    """

    def __init__(self, kind: type[Content] | type[Reasoning]) -> None:
        self.is_beside_tag = False
        self._kind = kind
        self._has_begun = False
        self._blank = ""

    def add(self, text: str) -> list[Part]:
        """What can be told; blanks wait until text follows."""
        said = text.rstrip(_BLANK)
        if not said:
            self._blank += text
            return []
        told, self._blank = self._blank + said, text[len(said) :]
        if self.is_beside_tag and not self._has_begun:
            told = told.lstrip(_BLANK)
        self._has_begun = True
        return [self._kind(told)]

    def finish(self) -> list[Part]:
        """The blanks at the end."""
        return [] if self.is_beside_tag or not self._blank else [self._kind(self._blank)]

    def forget(self) -> None:
        """Drop the blanks so far."""
        self._blank = ""


def _is_marked(field: Mapping[str, object]) -> bool:
    """Whether a tag opens the region."""
    return "open" in field or "open_pattern" in field


def _ends_anywhere(field: Mapping[str, object]) -> bool:
    """Whether the region can do without a closing tag, as nothing can be missing in what parses."""
    has_close = "close" in field or "close_pattern" in field
    return not has_close or field.get("content") in _SELF_CLOSING


def _read_calls(value: object) -> list[Part]:
    """The calls that a region holds.

    Raises:
        ValueError: One of them is none.
    """
    calls = cast("list[object]", value) if isinstance(value, list) else [value]
    return [_to_call(call) for call in calls]


def _to_call(value: object) -> ToolCall:
    function = _member(value, "function")
    match _member(function, "name"):
        case str(name) if name:
            return ToolCall(f"call_{new_id()}", name, _to_json(_member(function, "arguments")))
        case _:
            raise ValueError("no call")


def _member(value: object, name: str) -> object:
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None


def _to_json(arguments: object) -> str:
    """An object as JSON that can be sent: no infinite numbers and no lone surrogates."""
    if isinstance(arguments, str):  # some models write it twice
        arguments = from_json(arguments)
    match arguments:
        case None | {}:
            text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
            text.encode()
            return text
        case _:
            raise ValueError("no object")


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind in one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match last, part:
            case (Content(text), Content(more)) | (Reasoning(text), Reasoning(more)):
                joined[-1] = replace(last, text=text + more)
            case _:
                joined.append(part)
    return joined
