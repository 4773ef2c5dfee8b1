"""Tools for a chat template that knows none: told and called in Hermes' notation.

Many models were trained on it, Qwen's among them, and it asks nothing of the template but text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, cast

Message = Mapping[str, object]

_TOOL_CALLS: Final[Mapping[str, object]] = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "content": "json",
    "repeats": True,
    "transform": {"type": "function", "function": "{content}"},
}
_REASONING: Final[Mapping[str, object]] = {"open": "<think>", "close": "</think>"}
_START_ANCHOR: Final = r"\A(?:.*(?=<think>\s*\0?\Z)|.*)"
"""All of the prompt but an opening of the reasoning at its end; see ChatTokenizer.new_regions."""

_PREAMBLE: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_CALL_MEMBERS: Final = frozenset({"tool_calls", "tool_call_id"})


def response_template(own: Mapping[str, object] | None, *, thinks: bool) -> Mapping[str, object]:
    """How a model's answers are read, in transformers' words for it.

    Args:
        own: What the model's tokenizer says, if it does; it has the last word.
        thinks: Whether the model puts its reasoning between <think> and </think>.
    """
    if own is None:
        reasoning = {"reasoning_content": _REASONING} if thinks else {}
        fields = {"content": {}, **reasoning, "tool_calls": _TOOL_CALLS}
        return {"start_anchor_pattern": _START_ANCHOR, "fields": fields}
    return {**own, "fields": {"tool_calls": _TOOL_CALLS, **response_fields(own)}}


def response_fields(template: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    """The parts of an answer that a response template knows, by name."""
    return cast("Mapping[str, Mapping[str, object]]", template["fields"])


def can_read(prompt: str) -> bool:
    """Whether this prompt asks for calls in Hermes' notation: others use the tag with XML in it."""
    return "<tool_call>" in prompt and '"arguments"' in prompt


def in_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """The conversation with tools, calls and their results written into `content`.

    The tools go into the system message, which is added if there is none. Results are the user's,
    in one message with what the user says next: many templates want both sides to take turns.
    """
    told: list[dict[str, object]] = []
    after_result = False
    for message in messages:
        shown = _in_text(message)
        if after_result and shown["role"] == "user":
            told[-1]["content"] = f"{told[-1]['content']}\n{shown['content']}"
        else:
            told.append(shown)
        after_result = message["role"] == "tool"
    return _with_preamble(told, tools) if tools else told


def _in_text(message: Message) -> dict[str, object]:
    shown = {name: value for name, value in message.items() if name not in _CALL_MEMBERS}
    if message["role"] == "tool":
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result}
    calls = cast("Sequence[Mapping[str, object]]", message.get("tool_calls", ()))
    texts = [str(message["content"]), *(_call(call["function"]) for call in calls)]
    return {**shown, "content": "\n".join(filter(None, texts))}


def _call(function: object) -> str:
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _with_preamble(
    messages: list[dict[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    preamble = _PREAMBLE.format(tools=lines)
    first, *rest = messages
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": preamble}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{preamble}".lstrip("\n")}, *rest]
