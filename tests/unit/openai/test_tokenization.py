from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from meshnet.errors import InvalidRequest
from meshnet.openai.tokenization import (
    Tokens,
    detokenize,
    parse_detokenize_request,
    parse_tokenize_request,
    tokenize,
    tokenizer_info,
)
from meshnet.text.tokenizer import ChatTokenizer
from tests.unit.text.making import BOS_ID, END_ID, TEMPLATE, save_model

USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config: dict[str, object] = {"max_position_embeddings": 512}
    return save_model(tmp_path_factory.mktemp("model"), config=config)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(str(folder))


def tokens_of(tokenizer: ChatTokenizer, **fields: object) -> Tokens:
    return tokenize(parse_tokenize_request(json.dumps(fields).encode()), tokenizer)


def text_of(tokenizer: ChatTokenizer, tokens: list[object]) -> str:
    fields = parse_detokenize_request(json.dumps({"tokens": tokens}).encode())
    return detokenize(fields, tokenizer)["prompt"]


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_tokenize_request(json.dumps(fields).encode())
    return caught.value


def test_a_texts_tokens_are_transformers_own(folder: Path, tokenizer: ChatTokenizer) -> None:
    """By default the ids are those of the tokenizer's plain call, BOS and all."""
    reference = AutoTokenizer.from_pretrained(folder)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  # loosely typed
    text = "hello world <|end|> 日本語 🌶️"
    expected = cast("list[int]", reference(text)["input_ids"])

    assert expected[0] == BOS_ID
    assert tokens_of(tokenizer, prompt=text) == {
        "count": len(expected),
        "max_model_len": 512,
        "tokens": expected,
        "token_strs": None,
    }


def test_special_tokens_can_be_left_out(tokenizer: ChatTokenizer) -> None:
    """Without them the ids are those of the text alone; one that is spelt in it stays."""
    answer = tokens_of(tokenizer, prompt="hello<|end|>", add_special_tokens=False)

    assert answer["tokens"] == [*tokenizer.encode("hello"), END_ID]


def test_an_empty_text_has_no_tokens_of_its_own(tokenizer: ChatTokenizer) -> None:
    """Of nothing there is at most what the tokenizer adds."""
    assert tokens_of(tokenizer, prompt="")["tokens"] == [BOS_ID]
    assert tokens_of(tokenizer, prompt="", add_special_tokens=False)["count"] == 0


def test_tokens_can_be_told_as_text(tokenizer: ChatTokenizer) -> None:
    """Asked for, there is a string for each token, special ones too."""
    answer = tokens_of(tokenizer, prompt="hello world<|end|>", return_token_strs=True)
    strings = answer["token_strs"] or []

    assert len(strings) == answer["count"]
    assert "".join(strings) == "<s>hello world<|end|>"


def test_a_conversations_tokens_are_those_of_a_chat(tokenizer: ChatTokenizer) -> None:
    """Messages are encoded as the chat endpoint does it, with the answer's opening or without."""
    opened = tokens_of(tokenizer, messages=USER)
    closed = tokens_of(tokenizer, messages=USER, add_generation_prompt=False)

    assert opened["tokens"] == tokenizer.encode_chat(USER)
    assert closed["tokens"] == tokenizer.encode_chat(USER, add_generation_prompt=False)
    assert closed["count"] < opened["count"]


def test_tools_are_a_part_of_the_conversation(tokenizer: ChatTokenizer) -> None:
    """With tools the prompt is longer."""
    with_tools = tokens_of(tokenizer, messages=USER, tools=[TOOL])

    assert with_tools["count"] > tokens_of(tokenizer, messages=USER)["count"]


def test_a_conversation_can_go_on(tokenizer: ChatTokenizer) -> None:
    """The last message is not closed if the answer is to continue it."""
    messages = [*USER, {"role": "assistant", "content": "well"}]
    answer = tokens_of(
        tokenizer, messages=messages, continue_final_message=True, add_generation_prompt=False
    )

    assert answer["tokens"][-1] != END_ID


def test_a_refused_conversation_is_the_clients_fault(tmp_path: Path) -> None:
    """A base model has no template, and says so."""
    base = ChatTokenizer.load(str(save_model(tmp_path, template=None)))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokens_of(base, messages=USER)


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({}, "prompt", "is missing, and so are `messages`"),
        ({"prompt": None}, "prompt", "is missing, and so are `messages`"),
        ({"prompt": "a", "messages": USER}, "prompt", "is not allowed beside `messages`"),
        ({"prompt": 5}, "prompt", "is not a string"),
        ({"prompt": ["a"]}, "prompt", "is not a string"),
        ({"prompt": "a", "tools": [TOOL]}, "tools", "is only allowed with `messages`"),
        (
            {"prompt": "a", "add_generation_prompt": True},
            "add_generation_prompt",
            "is only allowed with `messages`",
        ),
        (
            {"messages": USER, "add_special_tokens": True},
            "add_special_tokens",
            "is only allowed with `prompt`",
        ),
        ({"messages": []}, "messages", "is empty"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs", "is not true or false"),
    ],
)
def test_what_is_not_clear_is_refused(fields: dict[str, object], field: str, problem: str) -> None:
    """A text or a conversation, each with its own parameters; the error names the wrong one."""
    error = refusal(**fields)

    assert error.members["field"] == field
    assert error.message.startswith(f"{field}: {problem}; allowed: ")


def test_what_a_chat_adds_anyway_may_be_said(tokenizer: ChatTokenizer) -> None:
    """Not to add special tokens to a conversation is what happens."""
    answer = tokens_of(tokenizer, messages=USER, add_special_tokens=False)

    assert answer == tokens_of(tokenizer, messages=USER)


def test_two_tools_of_one_name_are_refused() -> None:
    """Tools are checked as those of a chat are."""
    assert refusal(messages=USER, tools=[TOOL, TOOL]).members["field"] == "tools[1].function.name"


@given(st.text(max_size=40))
def test_text_survives_the_round_trip(tokenizer: ChatTokenizer, text: str) -> None:
    """The text of a text's tokens is that text."""
    tokens = tokens_of(tokenizer, prompt=text, add_special_tokens=False)["tokens"]

    assert text_of(tokenizer, [*tokens]) == text


def test_control_tokens_are_text_too(tokenizer: ChatTokenizer) -> None:
    """Nothing is left out of the text of some tokens."""
    assert text_of(tokenizer, [BOS_ID, *tokenizer.encode("a"), END_ID]) == "<s>a<|end|>"


def test_no_tokens_are_no_text(tokenizer: ChatTokenizer) -> None:
    """An empty list is an empty text."""
    assert text_of(tokenizer, []) == ""


@pytest.mark.parametrize("tokens", ["a", 5, [-1], [1.5], ["1"], [True], [[1]], {}])
def test_what_is_no_list_of_ids_is_refused(tokens: object) -> None:
    """Ids are whole numbers from 0 in a list."""
    with pytest.raises(InvalidRequest, match=r"^tokens: is not a list of token ids; allowed: "):
        parse_detokenize_request(json.dumps({"tokens": tokens}).encode())


def test_missing_tokens_are_refused() -> None:
    """Null is absent, and without tokens there is nothing to do."""
    with pytest.raises(InvalidRequest, match=r"^tokens: is missing; allowed: "):
        parse_detokenize_request(b'{"tokens": null}')


def test_a_token_that_is_none_is_refused(tokenizer: ChatTokenizer) -> None:
    """An id beyond the vocabulary has no text."""
    with pytest.raises(InvalidRequest, match=r"^tokens: token id 99999999 is not in the voc") as e:
        text_of(tokenizer, [1, 99999999])

    assert e.value.members["field"] == "tokens"


def test_strict_refuses_strays() -> None:
    """With the strict switch an unknown field is an error, else it is listed."""
    body = b'{"prompt": "a", "stray": 1}'

    assert parse_tokenize_request(body).ignored_params == ("stray",)
    with pytest.raises(InvalidRequest, match=r"^stray: there is no such parameter"):
        parse_tokenize_request(body, strict=True)
    with pytest.raises(InvalidRequest, match=r"^stray: there is no such parameter"):
        parse_detokenize_request(b'{"tokens": [], "stray": 1}', strict=True)


def test_a_tokenizer_tells_what_a_client_must_know(tokenizer: ChatTokenizer) -> None:
    """The special tokens' texts, the template and the context; null is what there is not."""
    info = tokenizer_info(tokenizer)
    kind = info.pop("tokenizer_class")

    assert info == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": None,
        "unk_token": None,
        "chat_template": TEMPLATE,
        "model_max_length": 512,
    }
    assert isinstance(kind, str)


def test_a_model_that_does_not_say_its_length_has_none(tmp_path: Path) -> None:
    """Where config.json is silent the context is told as 0."""
    silent = ChatTokenizer.load(str(save_model(tmp_path)))

    assert tokenizer_info(silent)["model_max_length"] == 0
    assert tokens_of(silent, prompt="a")["max_model_len"] == 0
