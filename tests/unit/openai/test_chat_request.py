from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from meshnet.errors import ContextLengthExceeded, InvalidRequest
from meshnet.generation import GenerationRequest, Sampling, TokenEvent
from meshnet.openai.answers import AnswerPlan, Serving
from meshnet.openai.chat_request import ChatRequest, parse_chat_request, plan_chat
from meshnet.openai.parameters import CHAT
from meshnet.openai.sampling_fields import choice_seed
from meshnet.text.tokenizer import ChatTokenizer
from tests.unit.openai.making import HEADING, FakeGrammars, score
from tests.unit.text.making import END_ID, save_model

HELLO: list[dict[str, object]] = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(str(save_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def serving(tokenizer: ChatTokenizer) -> Serving:
    return Serving(tokenizer, FakeGrammars(), HEADING, max_positions=2000, max_choices=8, seed=7)


def parse(messages: object = HELLO, **fields: object) -> ChatRequest:
    return parse_chat_request(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def refusal(messages: object = HELLO, **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(messages, **fields)
    return caught.value


def plan(serving: Serving, messages: object = HELLO, **fields: object) -> AnswerPlan:
    return plan_chat(parse(messages, **fields), serving)


def generation(serving: Serving, messages: object = HELLO, **fields: object) -> GenerationRequest:
    (one,) = plan(serving, messages, **fields).generations
    return one


# What is wrong by itself.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("max_tokens", 3.5),
        ("max_tokens", 2**31),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", [3]),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", True),
        ("messages", "hello"),
        ("messages", []),
        ("messages", {}),
        ("tools", []),
        ("tools", {}),
        ("tool_choice", "always"),
        ("parallel_tool_calls", 1),
        ("add_generation_prompt", "true"),
        ("continue_final_message", 0),
        ("chat_template_kwargs", []),
        ("response_format", "json_object"),
    ],
)
def test_a_wrong_value_names_field_problem_and_what_is_allowed(name: str, value: object) -> None:
    """A value of the wrong type or out of range is refused in one sentence of three parts."""
    error = refusal(**{name: value})

    assert error.members["field"] == name
    assert error.message.startswith(f"{name}: ")
    assert "; allowed: " in error.message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (1, "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content"),
        (
            {"role": "assistant", "tool_calls": [{"type": "function"}]},
            "messages[1].tool_calls[0].id",
        ),
    ],
)
def test_a_wrong_message_is_named_by_its_path(message: object, field: str) -> None:
    """The parameter of a fault inside a message says which message and which member."""
    error = refusal([*HELLO, message])

    assert error.members["field"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "x" * 10_000, "content": "y"}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 10_000}]}]},
        {"response_format": {"type": "x" * 10_000}},
        {"tools": [{"type": "x" * 10_000}]},
        {"tool_choice": {"type": "x" * 10_000}},
    ],
)
def test_an_error_never_copies_the_input(fields: dict[str, object]) -> None:
    """However long the wrong value, the error repeats at most 100 characters of it."""
    assert refusal(**fields).message.count("x") <= 110


# What does not go together.


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_logprobs": 0}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
    ],
)
def test_a_contradiction_is_refused(fields: dict[str, object], field: str) -> None:
    """What one parameter needs of another one is checked before any work."""
    assert refusal(**fields).members["field"] == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 9}, "n"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
    ],
)
def test_what_this_model_or_server_cannot_do_is_refused(
    serving: Serving, fields: dict[str, object], field: str
) -> None:
    """Ids that are no tokens, too many choices and ends that contradict are named."""
    with pytest.raises(InvalidRequest) as caught:
        plan(serving, **fields)

    assert caught.value.members["field"] == field


# What is generated.


def test_a_request_becomes_a_generation(serving: Serving, tokenizer: ChatTokenizer) -> None:
    """The prompt is the encoded chat; limit, sampling and stopping are the client's."""
    one = generation(
        serving, max_tokens=5, temperature=0, stop="x", logit_bias={"6": 1}, seed=11, min_tokens=1
    )

    assert list(one.prompt_ids) == tokenizer.encode_chat(HELLO)
    assert one.max_tokens == 5
    assert one.sampling == Sampling(temperature=0, seed=11)
    assert (one.stopping.strings, one.stopping.min_tokens) == (("x",), 1)
    assert one.logit_bias == {6: 1.0}
    assert (one.grammar, one.score_prompt, one.skip_special_tokens) == (None, False, True)


def test_a_silent_client_gets_openais_defaults(serving: Serving) -> None:
    """Without parameters sampling is at temperature 1 with the server's seed."""
    assert generation(serving).sampling == Sampling(temperature=1.0, seed=7)


def test_the_newer_limit_wins(serving: Serving) -> None:
    """`max_completion_tokens` is used where both limits are given, else the one there is."""
    assert generation(serving, max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert generation(serving, max_tokens=5).max_tokens == 5
    assert generation(serving, max_completion_tokens=3.0).max_tokens == 3


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens": -1}, {"max_completion_tokens": -1, "max_tokens": 3}]
)
def test_without_a_limit_the_answer_may_fill_the_context(
    serving: Serving, limits: dict[str, object]
) -> None:
    """Prompt and default limit together are the whole context; -1 is no limit."""
    one = generation(serving, **limits)

    assert len(one.prompt_ids) + one.max_tokens == serving.max_positions


def test_the_last_free_position_can_be_used(serving: Serving) -> None:
    """A limit that fits exactly is accepted; one more is not, and the error has all numbers."""
    n_prompt = len(generation(serving).prompt_ids)
    narrow = replace(serving, max_positions=100)

    assert generation(narrow, max_tokens=100 - n_prompt).max_tokens == 100 - n_prompt
    with pytest.raises(ContextLengthExceeded, match="you asked for 101 tokens") as caught:
        generation(narrow, max_tokens=101 - n_prompt)
    assert caught.value.members["field"] == "messages"


def test_a_prompt_that_fills_the_context_is_too_long(serving: Serving) -> None:
    """Without room for one token the conversation is too long."""
    n_prompt = len(generation(serving).prompt_ids)
    with pytest.raises(ContextLengthExceeded, match=f"your messages resulted in {n_prompt} tokens"):
        generation(replace(serving, max_positions=n_prompt))


def test_a_template_that_makes_no_prompt_is_refused(tmp_path: Path, serving: Serving) -> None:
    """A generation needs at least one prompt token."""
    tokenizer = ChatTokenizer.load(str(save_model(tmp_path, template="{# nothing #}")))
    with pytest.raises(InvalidRequest, match="messages: the model's chat template makes no prompt"):
        plan(replace(serving, tokenizer=tokenizer))


def test_a_conversation_with_a_tool_call_is_encoded(serving: Serving) -> None:
    """An assistant's null content beside a tool call, and the tool's answer, are a prompt."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "c"},
        {"role": "user", "content": [{"type": "text", "text": "d"}]},
    ]

    assert len(generation(serving, messages).prompt_ids) > len(generation(serving).prompt_ids)


def test_the_prompts_form_is_the_clients(serving: Serving, tokenizer: ChatTokenizer) -> None:
    """The answer's opening can be left out, and the last message can be gone on with."""
    closed = generation(serving, add_generation_prompt=False)
    messages = [*HELLO, {"role": "assistant", "content": "well"}]
    going_on = generation(
        serving, messages, continue_final_message=True, add_generation_prompt=False
    )

    assert list(closed.prompt_ids) == tokenizer.encode_chat(HELLO, add_generation_prompt=False)
    assert closed.prompt_ids != generation(serving).prompt_ids
    assert going_on.prompt_ids[-1] != END_ID


def test_a_template_gets_its_variables(tmp_path: Path, serving: Serving) -> None:
    """`chat_template_kwargs` are variables of the template."""
    template = "{{ messages[0].content }}{{ flavour }}"
    tokenizer = ChatTokenizer.load(str(save_model(tmp_path, template=template)))
    one = generation(
        replace(serving, tokenizer=tokenizer), chat_template_kwargs={"flavour": "sour"}
    )

    assert list(one.prompt_ids) == tokenizer.encode("hellosour")


@pytest.mark.parametrize(
    ("fields", "score_prompt", "top_logprobs"),
    [
        ({}, False, None),
        ({"logprobs": False}, False, None),
        ({"logprobs": True}, False, 0),
        ({"logprobs": True, "top_logprobs": 0}, False, 0),
        ({"logprobs": True, "top_logprobs": 3}, False, 3),
        ({"prompt_logprobs": 2}, True, 2),
        ({"logprobs": True, "top_logprobs": 1, "prompt_logprobs": 2}, True, 2),
    ],
)
def test_the_tail_scores_what_is_asked_for(
    serving: Serving, fields: dict[str, object], score_prompt: bool, top_logprobs: int | None
) -> None:
    """The answer, the prompt, or both are scored; the larger number counts."""
    one = generation(serving, **fields)

    assert one.score_prompt is score_prompt
    assert one.sampling.top_logprobs == top_logprobs


def test_each_choice_has_its_seed(serving: Serving) -> None:
    """Choices differ in their seeds alone, and the first has the client's."""
    generations = plan(serving, n=3, seed=42).generations

    assert [one.sampling.seed for one in generations] == [choice_seed(42, n) for n in range(3)]
    assert len({one.prompt_ids for one in generations}) == 1


# What the answer must look like.


def test_a_format_is_one_grammar_for_all_choices(serving: Serving) -> None:
    """The format is compiled once, and every choice follows it; plain text needs none."""
    generations = plan(serving, n=2, response_format={"type": "json_object"}).generations

    assert len({id(one.grammar) for one in generations}) == 1
    assert generations[0].grammar is not None
    assert generation(serving, response_format={"type": "text"}).grammar is None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_a_grammar(serving: Serving, choice: object) -> None:
    """An answer that must be a call follows the call's schema, and is read as one."""
    planned = plan(serving, tools=[TOOL], tool_choice=choice)
    text = '{"name":"f","arguments":{}}'
    text = f"[{text}]" if choice == "required" else text
    list(planned.writer.take(0, TokenEvent(text, 10, "stop")))
    (answer,) = cast("Any", planned.writer.body())["choices"]
    grammars = cast("FakeGrammars", serving.grammars)

    assert planned.generations[0].grammar is not None
    assert [kind for kind, _ in grammars.asked] == ["json_schema"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def _says_bad(schema: object) -> bool:
    return '"bad"' in json.dumps(schema)


def test_a_tool_that_cannot_be_enforced_is_named(serving: Serving) -> None:
    """Of several tools whose calls are one schema the one to blame is in the error."""
    cast("FakeGrammars", serving.grammars).refuses = _says_bad
    bad = {"type": "object", "properties": {"bad": True}}
    tools = [TOOL, {"type": "function", "function": {"name": "g", "parameters": bad}}]
    with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
        plan(serving, tools=tools, tool_choice="required")

    assert str(caught.value.members["field"]).startswith("tools[1].function")


def test_tools_that_cannot_be_enforced_together_are_refused(serving: Serving) -> None:
    """Where each tool is good by itself the error is of all of them."""
    cast("FakeGrammars", serving.grammars).refuses = lambda schema: "$defs" in json.dumps(schema)
    with pytest.raises(InvalidRequest, match=r"^tools: cannot be enforced"):
        plan(serving, tools=[TOOL], tool_choice="required")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_call_that_is_not_forced_is_no_grammar(serving: Serving, choice: object) -> None:
    """A model that may call is free to; one that may not is not told of the tools."""
    one = generation(serving, tools=[TOOL], tool_choice=choice)

    assert one.grammar is None
    told = one.prompt_ids != generation(serving).prompt_ids
    assert told is (choice != "none")


def test_the_answer_carries_what_was_asked_for(serving: Serving) -> None:
    """Scores, ids and counts are in the answer if the request has them."""
    planned = plan(serving, logprobs=True, top_logprobs=1, prompt_logprobs=0, return_token_ids=True)
    event = TokenEvent("x", 10, "length", score(10, -1.0, (11, -0.5)), (score(11, -0.5),))
    list(planned.writer.take(0, event))
    body = cast("Any", planned.writer.body())
    (choice,) = body["choices"]

    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_token_ids"] == list(planned.generations[0].prompt_ids)
    assert choice["token_ids"] == [10]
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = plan(serving, stream=True, stream_options=options)
    chunk, *_ = streamed.writer.take(0, TokenEvent("x", 10, "length"))
    assert cast("Any", chunk.data)["usage"]["completion_tokens"] == 1


def test_the_table_says_what_is_allowed() -> None:
    """An error's last part is the table's text."""
    assert refusal(max_tokens=0).members["allowed"] == CHAT["max_tokens"].allowed
