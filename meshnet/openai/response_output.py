"""Output items of a response: what each of them is, and the events that build it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from meshnet.openai.logprobs import TokenLogprob
from meshnet.openai.stream import Body
from meshnet.text.response_parser import ToolCall

Event = Mapping[str, object]
"""An event of a stream that has its type but not yet its number."""

ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class TextKind:
    """What tells one item that holds a text from another.

    Attributes:
        prefix: How ids begin.
        event: What its events are called.
        item: Members of the item, besides those that change.
        part: The same of its content.
        has_logprobs: Whether the scores of the text's tokens have a place in it.
    """

    prefix: str
    event: str
    item: Body
    part: Body
    has_logprobs: bool


MESSAGE: Final = TextKind(
    prefix="msg",
    event="response.output_text",
    item={"type": "message", "role": "assistant"},
    part={"type": "output_text", "annotations": []},
    has_logprobs=True,
)
REASONING: Final = TextKind(
    prefix="rs",
    event="response.reasoning_text",
    item={"type": "reasoning", "summary": []},
    part={"type": "reasoning_text"},
    has_logprobs=False,
)


class TextItem:
    """A message, or the reasoning before it, as it grows.

    Args:
        kind: Which of them.
        response_id: Of the response that it is in; its own id is made of that.
        index: Its place in the response's output.
    """

    def __init__(self, kind: TextKind, response_id: str, index: int) -> None:
        self.kind = kind
        self._id = f"{kind.prefix}_{response_id}_{index}"
        self._index = index
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        """What tells of it before there is any text."""
        item = self._item("in_progress", [])
        return [_item_event("added", self._index, item), self._part_event("added")]

    def write(self, text: str, logprobs: Sequence[TokenLogprob]) -> Event:
        """Grow by `text`, and what tells of that."""
        self._pieces.append(text)
        self._logprobs += logprobs
        scored = self._scored(_without_bytes(logprobs))
        return self._event(f"{self.kind.event}.delta", {"delta": text, **scored})

    def end(self, status: ItemStatus) -> list[Event]:
        """What tells that no more text comes."""
        item = _item_event("done", self._index, self.whole(status))
        return [
            self._event(f"{self.kind.event}.done", self._text(_without_bytes(self._logprobs))),
            self._part_event("done"),
            item,
        ]

    def whole(self, status: ItemStatus) -> Body:
        """The item with its text so far."""
        return self._item(status, [self._part()])

    def _item(self, status: ItemStatus, content: Sequence[Body]) -> Body:
        return {"id": self._id, **self.kind.item, "content": content, "status": status}

    def _part(self) -> Body:
        return {**self.kind.part, **self._text(list(self._logprobs))}

    def _text(self, logprobs: Sequence[object]) -> Body:
        return {"text": "".join(self._pieces), **self._scored(logprobs)}

    def _scored(self, logprobs: Sequence[object]) -> Body:
        return {"logprobs": logprobs} if self.kind.has_logprobs else {}

    def _part_event(self, what: Literal["added", "done"]) -> Event:
        return self._event(f"response.content_part.{what}", {"part": self._part()})

    def _event(self, kind: str, members: Body) -> Event:
        place = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        return {"type": kind, **place, **members}


def _without_bytes(logprobs: Sequence[TokenLogprob]) -> list[Body]:
    """As events have them: only the finished content tells a token's bytes."""
    return [
        {
            "token": one["token"],
            "logprob": one["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in one["top_logprobs"]
            ],
        }
        for one in logprobs
    ]


def call_item(call: ToolCall, response_id: str, index: int, status: ItemStatus) -> Body:
    """A function call, whole."""
    return {
        "id": f"fc_{response_id}_{index}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def call_events(item: Body, index: int) -> list[Event]:
    """What tells of a function call, from its beginning to its end."""
    place = {"item_id": item["id"], "output_index": index}
    event = "response.function_call_arguments"
    name, arguments = item["name"], item["arguments"]
    return [
        _item_event("added", index, {**item, "arguments": "", "status": "in_progress"}),
        {"type": f"{event}.delta", **place, "delta": arguments},
        {"type": f"{event}.done", **place, "name": name, "arguments": arguments},
        _item_event("done", index, item),
    ]


def _item_event(what: Literal["added", "done"], index: int, item: Body) -> Event:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}
