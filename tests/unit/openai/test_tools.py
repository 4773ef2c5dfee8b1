from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter, ValidationError

from meshnet.errors import InvalidRequest
from meshnet.openai.tools import (
    MAX_CALLS,
    NamedChoice,
    Tool,
    ToolChoice,
    argument_schemas,
    call_schema,
    check_tools,
    shown_tools,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **function: object) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, **function}})


def choice_of(value: object) -> object:
    return TypeAdapter[object](ToolChoice).validate_python(value)


WEATHER, CLOCK = tool(description="The weather.", parameters=CITY), tool("clock")


def test_a_tool_reaches_the_template_as_models_know_it() -> None:
    """The template gets name, description and parameters in this order, and nothing else."""
    given = tool(description="d", parameters=CITY, strict=True, cache_control={})
    function = {"name": "weather", "description": "d", "parameters": CITY}

    assert json.dumps({"type": "function", "function": function}) == json.dumps(
        given.for_template()
    )


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters_takes_an_empty_object(parameters: dict[str, object]) -> None:
    """Absent, null and empty parameters are those of a function that takes none."""
    nothing = tool("weather", description=None, **parameters)

    assert nothing.for_template()["function"] == {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert dict(nothing.function.arguments()) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64])
def test_a_name_is_letters_digits_and_dashes(name: str) -> None:
    """Any name of OpenAI's is taken."""
    assert tool(name).function.name == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "ä", "a\n", 5, None])
def test_any_other_name_is_refused(name: object) -> None:
    """A name that could not be told from text is refused."""
    with pytest.raises(ValidationError, match=r"function\.name"):
        Tool.model_validate({"type": "function", "function": {"name": name}})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"type": "custom", "custom": {}}, "the type 'custom' is not supported; only 'function'"),
        ({"type": "x" * 1000, "function": {}}, "the type 'x{40}' is not supported"),
        ({"type": 5, "function": {"name": "f"}}, "Input should be 'function'"),
        ({"function": {"name": "f"}}, "Field required"),
        ({"type": "function"}, "Field required"),
        ({"type": "function", "function": {"name": "f", "parameters": 5}}, "parameters"),
        ({"type": "function", "function": {"name": "f", "strict": "yes"}}, "strict"),
    ],
)
def test_what_is_no_function_tool_is_refused(given: object, problem: str) -> None:
    """A tool of another type is refused by its type, a malformed one by its field."""
    with pytest.raises(ValidationError, match=problem) as caught:
        Tool.model_validate(given)

    assert caught.value.errors()[0]["msg"].count("x") <= 40


@pytest.mark.parametrize("kind", ["string", ["object", "null"], None])
def test_parameters_are_those_of_an_object(kind: object) -> None:
    """Arguments are an object; a schema of anything else is refused."""
    with pytest.raises(ValidationError, match="the schema's type is not 'object'"):
        tool(parameters={"type": kind})


@pytest.mark.parametrize("mode", ["none", "auto", "required"])
def test_a_choice_is_a_mode_or_a_function(mode: str) -> None:
    """The three modes are themselves; a function is named by an object."""
    assert choice_of(mode) == mode
    assert choice_of({"type": "function", "function": {"name": "f"}}) == NamedChoice("f")
    assert choice_of(NamedChoice("f")) == NamedChoice("f")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"type": "allowed_tools", "allowed_tools": {}}, "the type 'allowed_tools' is not"),
        ({"type": "custom", "custom": {"name": "f"}}, "the type 'custom' is not"),
        ({"type": "function", "name": "f"}, "is none of the choices"),
        ({"type": "function", "function": {"name": 5}}, "is none of the choices"),
        ("any", "is none of the choices"),
        (True, "is none of the choices"),
        ([], "is none of the choices"),
    ],
)
def test_any_other_choice_is_refused(given: object, problem: str) -> None:
    """Choices of OpenAI's that are not implemented are refused by name, others as such."""
    with pytest.raises(ValidationError, match=problem):
        choice_of(given)


def test_a_choice_has_a_schema_for_the_documentation() -> None:
    """The parameter can be described in an OpenAPI document."""
    described = TypeAdapter[object](ToolChoice).json_schema()

    assert {"enum": ["none", "auto", "required"], "type": "string"} in described["anyOf"]


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", NamedChoice("clock")])
def test_tools_and_a_choice_among_them_pass(choice: ToolChoice | None) -> None:
    """Every choice is fine where its tools are there."""
    check_tools([WEATHER, CLOCK], choice)


@pytest.mark.parametrize("choice", [None, "none"])
def test_without_tools_none_can_be_chosen(choice: ToolChoice | None) -> None:
    """To choose no tool asks for what happens anyway."""
    check_tools([], choice)


@pytest.mark.parametrize(
    ("tools", "choice", "field", "problem"),
    [
        ([], "auto", "tool_choice", "there are no tools to choose from"),
        ([], "required", "tool_choice", "there are no tools to choose from"),
        ([], NamedChoice("f"), "tool_choice", "there are no tools to choose from"),
        ([WEATHER], NamedChoice("f"), "tool_choice", "there is no tool 'f'; allowed: weather"),
        ([WEATHER, CLOCK, CLOCK], None, "tools[2].function.name", "clock is there already"),
        ([WEATHER] * 129, None, "tools", "are 129; allowed: at most 128"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tools: list[Tool], choice: ToolChoice | None, field: str, problem: str
) -> None:
    """A choice without its tool, a name twice, and too many tools are refused by field."""
    with pytest.raises(InvalidRequest) as caught:
        check_tools(tools, choice)

    assert caught.value.message.startswith(f"{field}: {problem}")
    assert caught.value.members["field"] == field
    assert "allowed" in caught.value.members


def test_a_refusal_does_not_copy_the_input() -> None:
    """Of a long name little is repeated."""
    with pytest.raises(InvalidRequest) as caught:
        check_tools([WEATHER], NamedChoice("q" * 1000))

    assert caught.value.message.count("q") == 64


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    """With `none` the model is told of no tools, otherwise of all."""
    assert shown_tools([WEATHER, CLOCK], "none") == []
    assert [WEATHER.for_template(), CLOCK.for_template()] == shown_tools([WEATHER, CLOCK], None)
    assert len(shown_tools([WEATHER, CLOCK], NamedChoice("clock"))) == 2


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_an_answer_that_need_not_call_has_no_schema(choice: ToolChoice | None) -> None:
    """Where the model may answer in words, nothing is enforced."""
    assert call_schema([WEATHER], choice) is None
    assert list(argument_schemas([WEATHER], choice)) == []


def call_of(name: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("parallel", [True, False])
def test_a_named_function_is_called_once(parallel: bool) -> None:
    """A named choice is one call of that function, as OpenAI has it, whatever else is there."""
    schema = call_schema([WEATHER, CLOCK], NamedChoice("weather"), parallel=parallel)

    assert json.dumps({**call_of("weather"), "$defs": {"weather": CITY}}) == json.dumps(schema)


def test_a_required_call_is_one_of_any_tool() -> None:
    """Without parallel calls the answer is one call, of one tool or another."""
    nothing = CLOCK.function.arguments()

    assert call_schema([WEATHER, CLOCK], "required", parallel=False) == {
        "anyOf": [call_of("weather"), call_of("clock")],
        "$defs": {"weather": CITY, "clock": nothing},
    }
    assert call_schema([CLOCK], "required", parallel=False) == {
        **call_of("clock"),
        "$defs": {"clock": nothing},
    }


def test_required_calls_are_a_list_where_several_are_wanted() -> None:
    """With parallel calls the answer is a list of 1 to 8 calls."""
    assert call_schema([WEATHER], "required") == {
        "type": "array",
        "items": call_of("weather"),
        "minItems": 1,
        "maxItems": MAX_CALLS,
        "$defs": {"weather": CITY},
    }


def moved(parameters: dict[str, Any]) -> dict[str, Any]:
    schema: Any = call_schema([tool("f", parameters=parameters)], NamedChoice("f"))
    return schema["$defs"]["f"]


def test_references_follow_their_definitions() -> None:
    """References of a tool's schema to itself, by any keyword, are right where it is moved to."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    parameters = {
        "$ref": "#/$defs/Node",
        "allOf": [{"$ref": "#"}],
        "properties": {"a": {"items": {"$ref": "#/definitions/x~1y"}}},
        "definitions": {"x/y": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": node},
    }

    assert moved(parameters) == {
        "type": "object",
        "$ref": "#/$defs/f/$defs/Node",
        "allOf": [{"$ref": "#/$defs/f"}],
        "properties": {"a": {"items": {"$ref": "#/$defs/f/definitions/x~1y"}}},
        "definitions": {"x/y": {"$ref": "#/$defs/f/$defs/Node"}},
        "$defs": {
            "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/f/$defs/Node"}}}
        },
    }


def test_what_only_looks_like_a_reference_stays() -> None:
    """Values, properties of that name, and references to elsewhere are left as they are."""
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            "$ref": {"type": "string"},
            "const": {"enum": [{"$ref": "#/a"}], "default": {"$ref": "#/a"}},
            "other": {"$ref": "https://example.org/schema#/a"},
            "broken": {"$ref": 5},
        },
        "patternProperties": {"examples": {"const": {"$ref": "#/a"}}},
    }

    assert moved(parameters) == parameters


def test_a_property_that_is_named_like_a_keyword_is_a_schema() -> None:
    """References in the schema of a property called `default` are references."""
    parameters: dict[str, Any] = {
        "properties": {"default": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {}},
    }

    assert moved(parameters)["properties"] == {"default": {"$ref": "#/$defs/f/$defs/a"}}


def test_a_schema_that_is_moved_has_no_address_of_its_own() -> None:
    """`$id` and `$schema` of the root go: references would be resolved against them."""
    assert moved({"$id": "https://x/y", "$schema": "https://z", **CITY}) == CITY


def test_a_malformed_schema_is_left_to_the_compiler() -> None:
    """What is no schema at all is passed on, to be refused by the compiler in its own words."""
    assert moved({"properties": [{"$ref": "#/a"}], "items": True}) == {
        "type": "object",
        "properties": [{"$ref": "#/$defs/f/a"}],
        "items": True,
    }


def test_each_tool_can_be_blamed_for_its_schema() -> None:
    """Argument schemas come with their places in the request, those that are not forced without."""
    assert list(argument_schemas([WEATHER, CLOCK], "required")) == [
        ("tools[0].function.parameters", CITY),
        ("tools[1].function.parameters", CLOCK.function.arguments()),
    ]
    assert [place for place, _ in argument_schemas([WEATHER, CLOCK], NamedChoice("clock"))] == [
        "tools[1].function.parameters"
    ]


NODE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}
WALK = '{"name":"walk","arguments":{"next":{"next":null}}}'


@pytest.mark.parametrize(
    ("text", "is_answer"),
    [
        (f"[{WALK}]", True),
        (f'[{WALK},{{"name":"clock","arguments":{{}}}}]', True),
        ("[" + ",".join([WALK] * 8) + "]", True),
        ("[" + ",".join([WALK] * 9) + "]", False),
        ("[]", False),
        (WALK, False),
        ('[{"name":"clock","arguments":{"a":1}}]', False),
        ('[{"name":"clock"}]', False),
        ('[{"arguments":{},"name":"clock"}]', False),
        ('[{"name":"walk","arguments":{"next":{}}}]', False),
        ('[{"name":"run","arguments":{}}]', False),
    ],
)
def test_the_schema_is_enforced_as_it_is_meant(text: str, is_answer: bool) -> None:
    """A grammar of the schema takes 1 to 8 right calls in a list, keys in order, and no more."""
    schema = call_schema([tool("walk", parameters=NODE), CLOCK], "required")
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_flexible": False}
    )
    matcher = LLMatcher(LLTokenizer("byte"), grammar)

    assert is_answer == (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())
