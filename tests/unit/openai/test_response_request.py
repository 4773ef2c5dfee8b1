"""`POST /v1/responses`: what it asks of the chat layer, what it repeats, and what it refuses."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from meshnet.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from meshnet.generation import Sampling, TokenEvent, TokenScore
from meshnet.grammar.compiler import GrammarCompiler
from meshnet.openai.answers import AnswerPlan, Serving
from meshnet.openai.chat_request import ChatRequest, parse_chat_request
from meshnet.openai.parameters import RESPONSES
from meshnet.openai.response_answer import Echo
from meshnet.openai.response_request import ResponseFields, parse_response_request, plan_response
from tests.support.mesh import number_tokenizer
from tests.unit.openai.making import HEADING

Json = dict[str, Any]

SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Json = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
LOGPROBS = ["message.output_text.logprobs"]


def raw(**body: object) -> bytes:
    return json.dumps({"model": "m", "input": "Hi"} | body).encode()


def parse(**body: object) -> tuple[ChatRequest, Echo]:
    return parse_response_request(raw(**body))


def chat_of(**body: object) -> ChatRequest:
    return parse(**body)[0]


def echo_of(**body: object) -> Echo:
    return parse(**body)[1]


def chat(**body: object) -> ChatRequest:
    """The chat request of a chat body."""
    given = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | body
    return parse_chat_request(json.dumps(given).encode())


def refusal(**body: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    return caught.value


# The table.


def test_every_parameter_of_openais_document_is_in_the_table() -> None:
    """No parameter that the official client can send is unknown here."""
    assert {*ResponseCreateParamsBase.__annotations__, "stream"} <= RESPONSES.keys()


def test_the_used_parameters_are_this_endpoints_own_or_a_chats() -> None:
    """What the table calls used is read here, or by the chat layer under the same name."""
    used = {name for name, parameter in RESPONSES.items() if parameter.handling == "used"}
    own = ResponseFields.model_fields.keys() - {"ignored_params"}

    assert own <= used
    assert used - own <= ChatRequest.model_fields.keys()


def test_the_documented_parameters_are_the_used_ones() -> None:
    """The JSON schema of a body has every parameter that is used, and no other."""
    used = {name for name, parameter in RESPONSES.items() if parameter.handling == "used"}
    schema = ResponseFields.model_json_schema()

    assert schema["properties"].keys() - {"ignored_params"} == used
    assert set(schema["required"]) == {"model", "input"}
    assert schema["properties"]["top_p"]["maximum"] == 1


# What a request asks for.


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({}, {}),
        (
            {"instructions": "Be brief."},
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                ]
            },
        ),
        ({"instructions": ""}, {}),
        ({"max_output_tokens": 9}, {"max_completion_tokens": 9}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
        ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
        ({"text": {"verbosity": "low", "format": None}}, {}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "s",
                        "schema": SCHEMA,
                        "strict": True,
                        "description": None,
                    }
                }
            },
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            {"text": {"format": {"type": "regex", "pattern": "a+"}}},
            {"response_format": {"type": "regex", "pattern": "a+"}},
        ),
        ({"include": LOGPROBS}, {"logprobs": True}),
        ({"include": LOGPROBS, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, {}),
        ({"tools": []}, {}),
        ({"tools": [], "tool_choice": "auto"}, {}),
        ({"tools": [], "tool_choice": "none"}, {"tool_choice": "none"}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
)
def test_a_request_asks_for_what_a_chat_request_does(body: Json, same: Json) -> None:
    """Each parameter that differs from the chat endpoint's becomes the one that means the same."""
    assert chat_of(**body) == chat(**same)


@pytest.mark.parametrize(
    ("choice", "chat_choice"),
    [
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_flat_tools_are_a_chats_tools(choice: object, chat_choice: object) -> None:
    """Tools and choice, flat here, are those that the chat endpoint nests; null is absent."""
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}

    assert chat_of(tools=[{**ADD, "strict": None}], tool_choice=choice) == chat(
        tools=[{"type": "function", "function": function}], tool_choice=chat_choice
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("top_p", 0.5),
        ("seed", 7),
        ("stop", ["a"]),
        ("top_k", 5),
        ("min_p", 0.1),
        ("frequency_penalty", 1),
        ("presence_penalty", 1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("min_tokens", 2),
        ("ignore_eos", True),
        ("stop_token_ids", [5]),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
    ],
)
def test_sampling_is_the_chat_endpoints(name: str, value: object) -> None:
    """How tokens are picked and where an answer ends is said as there, and checked there."""
    assert getattr(chat_of(**{name: value}), name) == getattr(chat(**{name: value}), name)
    assert getattr(chat_of(**{name: value}), name) != getattr(chat(), name)


def test_every_null_is_absent() -> None:
    """A body whose every optional field is null asks for what a body without them does."""
    nulls = dict.fromkeys(RESPONSES.keys() - {"model", "input"})

    assert parse(**nulls) == parse()


@pytest.mark.parametrize(
    "name", ["store", "user", "reasoning", "max_tool_calls", "service_tier", "prompt_cache_options"]
)
def test_what_changes_nothing_is_accepted(name: str) -> None:
    """A parameter that cannot change the answer may have any value, and is not reported."""
    assert chat_of(**{name: {"any": "thing"}}) == chat()


def test_unknown_parameters_are_named() -> None:
    """What nobody knows is accepted and listed for the answer's header; strict refuses it."""
    assert chat_of(invented=1).ignored_params == ("invented",)
    with pytest.raises(InvalidRequest, match="invented: there is no such parameter"):
        parse_response_request(raw(invented=1), strict=True)


# What a response repeats.


def test_a_response_repeats_what_counts() -> None:
    """Where the client is silent, the response tells the values that were used."""
    assert echo_of() == {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
    }


def test_no_limit_is_repeated_as_none() -> None:
    """-1, which fills the context, is told as OpenAI tells that there is no limit."""
    assert echo_of(max_output_tokens=-1) == echo_of()


def test_a_response_repeats_what_was_given() -> None:
    """Given values come back in this endpoint's shape, tools with every published key."""
    schema = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    given: Json = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "text": {"format": schema},
        "tool_choice": "none",
        "tools": [{"type": "function", "name": "f"}],
        "top_logprobs": 2,
        "top_p": 0.5,
    }
    tools = [{"type": "function", "name": "f", "parameters": None, "strict": None}]

    assert echo_of(**given, include=LOGPROBS) == {**given, "tools": tools}


# What is done.


def serving(max_positions: int = 64) -> Serving:
    tokenizer = number_tokenizer()
    return Serving(
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer),
        heading=HEADING,
        max_positions=max_positions,
        max_choices=1,
        seed=7,
    )


def plan(max_positions: int = 64, **body: object) -> AnswerPlan:
    chat, echo = parse(input="<5><6>", **body)
    return plan_response(chat, serving(max_positions), echo=echo, clock=lambda: 8.7)


def test_a_plan_is_one_generation_and_its_response() -> None:
    """There is one answer, generated as for a chat and written as a response."""
    planned = plan(max_output_tokens=9, temperature=0.5, instructions="<9>")
    [generation] = planned.generations
    list(planned.writer.take(0, TokenEvent("<7>", 7, "stop")))
    body = cast("Json", planned.writer.body())

    assert generation.prompt_ids == (9, 5, 6)
    assert generation.max_tokens == 9
    assert generation.sampling == Sampling(temperature=0.5, seed=7)
    assert (body["id"], body["model"], body["created_at"]) == ("id-1", "m", 5)
    assert (body["completed_at"], body["temperature"]) == (8, 0.5)
    assert body["usage"]["input_tokens"] == 3
    assert body["output"][0]["content"][0]["text"] == "<7>"


def test_scores_are_asked_of_the_tail_and_told() -> None:
    """As many alternatives as the client wants are asked for, and come in the response."""
    planned = plan(include=LOGPROBS, top_logprobs=1)
    score = TokenScore(token_id=7, logprob=-0.5, top=((7, -0.5),))
    list(planned.writer.take(0, TokenEvent("<7>", 7, "stop", score)))
    body = cast("Json", planned.writer.body())

    assert planned.generations[0].sampling.top_logprobs == 1
    assert [
        (entry["token"], len(entry["top_logprobs"]))
        for entry in body["output"][0]["content"][0]["logprobs"]
    ] == [("<7>", 1)]


def test_a_prompt_that_is_too_long_is_refused_as_input() -> None:
    """That prompt and answer do not fit is said of the input, with the code clients look for."""
    with pytest.raises(ContextLengthExceeded, match="maximum context length") as caught:
        plan(max_positions=4, max_output_tokens=3)

    assert caught.value.members["field"] == "input"


def test_a_bias_for_no_token_is_refused() -> None:
    """What only the model's vocabulary shows is refused in the plan."""
    with pytest.raises(InvalidRequest, match="logit_bias: token id 64") as caught:
        plan(logit_bias={"64": 1})

    assert caught.value.members["field"] == "logit_bias"


# What is refused.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("truncation", "auto"),
        ("prompt", {"id": "p"}),
        ("context_management", [{"type": "compaction"}]),
        ("moderation", {"model": "m"}),
        ("n", 2),
        ("messages", [{"role": "user", "content": "Hi"}]),
        ("max_tokens", 5),
        ("max_completion_tokens", 5),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("logprobs", True),
        ("return_token_ids", True),
        ("prompt_logprobs", 0),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, value: object) -> None:
    """What would change the answer and is not done here is 400, and says what is allowed."""
    error = refusal(**{name: value})

    assert isinstance(error, UnsupportedParameter)
    assert error.members["field"] == name
    assert "; allowed: only " in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", False),
        ("truncation", "disabled"),
        ("context_management", []),
        ("n", 1),
        ("logprobs", False),
        ("return_token_ids", False),
    ],
)
def test_what_asks_for_what_happens_anyway_is_accepted(name: str, value: object) -> None:
    """The values of refused parameters that mean off pass."""
    assert chat_of(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("body", "field", "problem"),
    [
        ({"model": 5}, "model", "is not a string"),
        ({"input": None}, "input", "is missing"),
        ({"input": []}, "input", "is empty"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [{"type": "image"}]}, "input[0]", "has the type 'image'"),
        ({"instructions": 5}, "instructions", "is not a string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "is 0"),
        ({"max_output_tokens": True}, "max_output_tokens", "is not a whole number"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"stop": ""}, "stop[0]", "is empty"),
        ({"text": "json"}, "text", "is not an object"),
        ({"text": {"fromat": {"type": "json_object"}}}, "text.fromat", "not permitted"),
        ({"text": {"format": "json"}}, "text.format", "is not an object"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            "text.format.name",
            "missing",
        ),
        ({"tools": 5}, "tools", "is not a list"),
        ({"tools": ["f"]}, "tools[0]", "is not an object"),
        (
            {"tools": [ADD, {"type": "web_search"}]},
            "tools[1].type",
            "'web_search' is not supported",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].type", "is missing"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tools": [ADD, ADD]}, "tools[1].name", "add is there already"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
        (
            {"tools": [ADD], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
            "allowed_tools",
        ),
        ({"tools": [ADD], "tool_choice": 5}, "tool_choice", "none of the choices"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"include": ["invented"]}, "include[0]", "should be"),
        ({"include": "all"}, "include", "is not a list"),
        ({"top_logprobs": 1}, "top_logprobs", "is only allowed with `include`"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "less than or equal to 20"),
        ({"metadata": {"a": 5}}, "metadata.a", "is not a string"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "be False"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "is not true or false"),
        ({"stream": 1}, "stream", "is not true or false"),
    ],
)
def test_what_is_wrong_is_named_as_it_is_called_here(body: Json, field: str, problem: str) -> None:
    """Whichever layer finds it, the refusal names this endpoint's parameter and what it may be."""
    error = refusal(**body)

    assert error.members["field"] == field
    assert error.message.startswith(f"{field}: ")
    assert problem in error.message
    assert error.message.endswith(f"; allowed: {error.members['allowed']}")


@pytest.mark.parametrize(
    "body",
    [
        {"text": {"format": {"type": "invented"}}},
        {"tools": [{"type": "function"}]},
        {"tools": [ADD], "tool_choice": 5},
        {"max_output_tokens": 0},
    ],
)
def test_what_is_allowed_is_said_in_this_endpoints_words(body: Json) -> None:
    """A refusal of the chat layer tells the shape that is allowed here, not there."""
    error = refusal(**body)
    name = str(error.members["field"]).split(".")[0].split("[")[0]

    assert error.members["allowed"] == RESPONSES[name].allowed


def test_a_body_that_is_no_object_is_refused() -> None:
    """What is not JSON, or no object, is refused before anything is looked for in it."""
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_response_request(b"{")
    with pytest.raises(InvalidRequest, match="not a JSON object"):
        parse_response_request(b"[]")
