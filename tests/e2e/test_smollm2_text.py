"""The real model's tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet.openai.messages import ChatMessage
from meshnet.text.response_parser import Content, ToolCall, new_parser
from meshnet.text.tokenizer import ChatTokenizer

pytestmark = pytest.mark.e2e

USER = {"role": "user", "content": "Weather in Rome?"}
TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> ChatTokenizer:
    return ChatTokenizer.load(str(smollm2))


def prompt_of(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!\n",
        "Größe: 5 µm, ça va?",
        "日本語のテキスト",
        "हिन्दी",
        "עברית",
        "🌶️👨‍👩‍👧\0\x7f",
    ],
)
def test_the_tokens_of_a_text_join_to_its_utf8(tokenizer: ChatTokenizer, text: str) -> None:
    """In any script the bytes of a text's tokens are the text's."""
    assert prompt_of(tokenizer, tokenizer.encode(text)) == text


def test_every_token_is_what_it_decodes_to(tokenizer: ChatTokenizer) -> None:
    """Each of the 49152 tokens is, as text, what the tokenizer makes of it alone."""
    ids = range(tokenizer.vocab_size)
    differ = [i for i in ids if tokenizer.token_text(i) != tokenizer.decode([i])]

    assert len(ids) == 49_152
    assert differ == []
    assert b"" not in map(tokenizer.token_bytes, ids)


def test_a_message_is_continued(tokenizer: ChatTokenizer) -> None:
    """The prompt ends with the assistant's words, the last blank included."""
    messages = [USER, {"role": "assistant", "content": "In Rome, "}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)

    assert prompt_of(tokenizer, ids).endswith("<|im_start|>assistant\nIn Rome, ")


def test_the_template_hears_of_tools(tokenizer: ChatTokenizer) -> None:
    """Tools, silent calls and results, which its own template drops or raises on, are told."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "And now?"},
    ]
    messages = [ChatMessage.model_validate(message).for_template() for message in history]
    prompt = prompt_of(tokenizer, tokenizer.encode_chat(messages, tools=[TOOL]))

    assert prompt.startswith("<|im_start|>system\n# Tools\n")
    assert prompt.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_answer_is_parsed_only_where_there_are_tools(tokenizer: ChatTokenizer) -> None:
    """The model does not reason: without tools its text is the content."""
    ids = tokenizer.encode_chat([USER])
    parser = new_parser(tokenizer, ids, tools=[TOOL])
    assert parser is not None
    said, call = parser.push('Yes.\n<tool_call>{"name": "weather", "arguments": {}}</tool_call>')

    assert new_parser(tokenizer, ids) is None
    assert not parser.reads_special_tokens
    assert said == Content("Yes.")
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("weather", "{}")
