from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from meshnet.errors import InvalidRequest
from meshnet.grammar.json_schema import to_engine_schema
from tests.support.schemas import byte_matcher, forms, is_valid, takes

FIELD = "response_format.json_schema.schema"
ANY: dict[str, object] = {}


def allows(schema: object, text: str) -> bool:
    matcher = byte_matcher(schema)
    assert not matcher.is_error(), matcher.get_error()
    return takes(matcher, text)


def refusal(schema: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        to_engine_schema(schema, field=FIELD)
    return caught.value


# What is enforced.


ALLOWED: list[tuple[object, str, bool]] = [
    (True, "[1]", True),
    (ANY, '"a"', True),
    ({"type": "object"}, '{"a":1}', True),
    ({"type": "object"}, "[]", False),
    ({"type": ["null", "string"]}, "null", True),
    ({"type": "integer", "multipleOf": 3}, "-6", True),
    ({"type": "integer", "multipleOf": 3}, "4", False),
    ({"minLength": 2.0, "type": "string"}, '"ab"', True),
    ({"minLength": 2.0, "type": "string"}, '"a"', False),
    ({"const": {"a": [1, None, "é"]}}, '{"a":[1,null,"é"]}', True),
    ({"enum": [False, 0.5]}, "0", False),
    ({"items": [{"type": "null"}], "additionalItems": False}, "[null]", True),
    ({"items": [{"type": "null"}], "additionalItems": False}, "[null,1]", False),
    ({"prefixItems": [{"type": "null"}], "additionalItems": False}, "[1]", False),
    ({"prefixItems": [{"type": "null"}], "additionalItems": False}, "[null,1]", True),
    ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab":null}', True),
    ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab":1}', False),
    ({"patternProperties": {"^.$": {"type": "null"}}}, '{"\\r":1}', True),
    ({"minProperties": 1, "additionalProperties": {}}, "{}", False),
    ({"minProperties": 2, "required": ["a"]}, '{"a":1,"b":2}', True),
    ({"exclusiveMinimum": 0, "maximum": 1, "type": "number"}, "0", False),
]


@pytest.mark.parametrize(("schema", "text", "is_allowed"), ALLOWED)
def test_a_schema_allows_what_it_says(schema: object, text: str, is_allowed: bool) -> None:
    """Keywords of all dialects hold, whole numbers may be written as 2.0."""
    assert allows(schema, text) == is_allowed


@pytest.mark.parametrize("text", ['{ "a":1}', '{"a": 1}', '{"a":1} ', ' {"a":1}', '{"a":1\n}'])
def test_there_are_no_blanks(text: str) -> None:
    """A model that likes blanks cannot write them for ever."""
    assert not allows({"type": "object"}, text)
    assert allows({"type": "object"}, '{"a":1}')


def test_a_key_has_one_spelling() -> None:
    """A key in escapes is another key's second spelling to a reader, and would take its place."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    assert allows(schema, '{"a":1,"b":"x"}')
    assert not allows(schema, '{"a":1,"a":"x"}')
    assert not allows(schema, r'{"a":1,"\u0061":"x"}')


def test_what_no_draft_knows_is_an_annotation() -> None:
    """Unknown keywords and annotations change nothing."""
    schema = {"title": "T", "deprecated": True, "discriminator": {"not": 1}, "nullable": True}

    assert to_engine_schema(schema, field=FIELD) == to_engine_schema(ANY, field=FIELD)


def test_a_property_may_be_named_as_a_keyword() -> None:
    """Names of properties, definitions and values are no keywords."""
    schema = {
        "$defs": {"not": {"type": "null"}},
        "properties": {"not": {"$ref": "#/$defs/not"}, "if": {"const": {"$ref": 1, "not": 2}}},
    }

    assert allows(schema, '{"not":null,"if":{"$ref":1,"not":2}}')
    assert not allows(schema, '{"not":1}')


def test_references_lead_to_schemas_by_their_place() -> None:
    """A reference may lead anywhere in the schema, also to itself, through escaped names."""
    schema = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "x": {"$ref": "#/$defs/a~1b%25~0"}},
        "additionalProperties": False,
        "$defs": {"a/b%~": {"type": "null"}},
    }

    assert allows(schema, '{"next":{"next":{}},"x":null}')
    assert not allows(schema, '{"next":{"x":1}}')


@pytest.mark.parametrize("key", ["kind", "a"])
def test_a_union_of_references_is_told_apart_by_a_constant(key: str) -> None:
    """`oneOf` as pydantic writes it for a discriminated union is enforced, recursive or not."""

    def option(kind: str, **more: object) -> dict[str, object]:
        properties = {key: {"const": kind}, **more}
        return {"type": "object", "properties": properties, "required": [key]}

    schema = {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "$defs": {"Cat": option("cat", child={"$ref": "#"}), "Dog": option("dog")},
        "discriminator": {"propertyName": key},
    }

    assert allows(schema, f'{{"{key}":"cat","child":{{"{key}":"dog"}}}}')
    assert not allows(schema, f'{{"{key}":"cow"}}')


def union(*options: object, **members: object) -> dict[str, object]:
    """A `oneOf` of objects with a property `k`, and of what is told besides."""
    kinds = [{"type": "object", "properties": {"k": k}, "required": ["k"]} for k in options]
    return {"oneOf": kinds, **members}


OVERLAPPING: list[object] = [
    union({"const": "a"}, {"const": "a"}),
    union({"const": "a"}, {"enum": ["b", "a"]}),
    union({"const": "a"}, {"enum": ["b", 1]}, {"const": 1}),
    union({"const": "a"}, {"type": "string"}),
    union({"const": "a"}, True),
    union({"const": "a"}, {"$ref": "#/$defs/x"}, **{"$defs": {"x": {"const": "a"}}}),
    {"oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}} for k in "ab"]},
    {"oneOf": [{"type": "object", "required": ["k"]}, {"type": "object", "required": ["k"]}]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
]


@pytest.mark.parametrize("schema", OVERLAPPING)
def test_options_that_may_both_fit_are_refused(schema: object) -> None:
    """`oneOf` is refused where it is not seen that one option fits: never weakened to `anyOf`."""
    with suppress(InvalidRequest):
        assert "oneOf constraints are not supported" in byte_matcher(schema).get_error()


APART: list[object] = [
    union({"const": "a"}, {"enum": ["b", "c"]}),
    union({"const": "a"}, {"const": "b"}, anyOf=[{"type": "object"}]),
    {"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "object", "required": ["k"]}]},
]


@pytest.mark.parametrize("schema", APART)
def test_options_that_exclude_each_other_are_enforced(schema: object) -> None:
    """Constants, or types, tell options apart without references too."""
    assert allows(schema, '{"k":"a"}')
    assert not allows(schema, "[]")


# Formats.


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31"], ["2023-02-29"]),
        ("date", ["0001-01-01"], ["1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01"]),
        ("time", ["23:59:59Z", "00:00:00.123+05:30"], ["23:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("ipv4", ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
        ("ipv6", ["::1", "fe80::1:2"], ["1::2::3", "12345::"]),
        ("email", ["a.b@example.org"], ["a@", "a b@c"]),
        ("hostname", ["a-b.example"], ["-a", "a..b"]),
        ("uri", ["https://example.org/?q#f"], ["example.org", "a b:c"]),
        ("duration", ["P1DT2H"], ["P", "PT1D"]),
    ],
)
def test_a_format_is_enforced(name: str, right: list[str], wrong: list[str]) -> None:
    """Strings have the format; with a 29th of February in leap years only."""
    matcher = byte_matcher({"type": "string", "format": name})

    assert [text for text in right if not takes(matcher, f'"{text}"')] == []
    assert [text for text in wrong if takes(matcher, f'"{text}"')] == []


def test_a_format_and_a_pattern_both_hold() -> None:
    """A pattern beside a format, or another schema's, narrows it."""
    schema = {
        "type": "string",
        "format": "date",
        "pattern": "^20",
        "allOf": [{"pattern": "-29$"}],
    }

    assert allows(schema, '"2024-02-29"')
    assert [t for t in ("2023-02-29", "1996-02-29", "2024-02-28") if allows(schema, f'"{t}"')] == []


def test_a_format_says_nothing_of_other_types() -> None:
    """OpenAPI's int32 on an integer is an annotation; a format holds for strings alone."""
    assert allows({"type": "integer", "format": "int32"}, "5")
    assert allows({"format": "date", "type": ["string", "null"]}, "null")
    assert not allows({"format": "date"}, '"x"')


# What is refused.

REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "dependencies"),
    *("dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef", "x-guidance"),
    *("contentEncoding", "contentMediaType", "contentSchema", "disallow", "divisibleBy", "extends"),
)


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_cannot_be_enforced_is_named(keyword: str) -> None:
    """The error names keyword, place and field, wherever in the schema the keyword is."""
    error = refusal({"properties": {"a/b": {"items": {keyword: {}}}}})

    assert error.message == f"{FIELD}: `{keyword}` cannot be enforced, at #/properties/a~1b/items"
    assert error.members["field"] == FIELD


BAD: dict[str, object] = {"not": True}


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        *((keyword, [BAD]) for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items")),
        *((keyword, {"a": BAD}) for keyword in ("properties", "patternProperties", "$defs")),
        ("definitions", {"a": BAD}),
        *((keyword, BAD) for keyword in ("items", "additionalProperties", "additionalItems")),
    ],
)
def test_every_schema_inside_is_checked(keyword: str, value: object) -> None:
    """Nothing that cannot be enforced hides behind a keyword that can."""
    assert "`not` cannot be enforced" in refusal({keyword: value}).message


WRONG: list[tuple[object, str]] = [
    (False, "the schema `false` allows no value, at #"),
    ([], "this is no schema: neither an object nor true or false, at #"),
    ({"properties": {"a": None}}, "this is no schema"),
    ({"properties": []}, "this is no object, at #/properties"),
    ({"allOf": {}}, "this is no list, at #/allOf"),
    ({"required": True}, "this is no list, at #/required"),
    ({"required": ["a", 1]}, "this is no string, at #/required/1"),
    ({"type": "any"}, "this is no type; allowed: null, boolean, integer, number, string"),
    ({"type": ["string", 5]}, "this is no string, at #/type/1"),
    ({"minLength": -1}, "this is no whole number from 0, at #/minLength"),
    ({"minItems": 1.5}, "this is no whole number from 0"),
    ({"maximum": "5"}, "this is no number, at #/maximum"),
    ({"exclusiveMinimum": True}, "this is no number"),
    ({"multipleOf": 0}, "this is no number above 0"),
    ({"maximum": 2**53}, "a number beyond 9007199254740991 cannot be enforced, at #/maximum"),
    ({"const": {"a": [2**63]}}, "cannot be enforced, at #/const/a/0"),
    ({"enum": [float("inf")]}, "cannot be enforced, at #/enum/0"),
    ({"const": "a\x01"}, "a control character cannot be enforced, at #/const"),
    ({"pattern": 5}, "this is no string, at #/pattern"),
    ({"pattern": "a++"}, "the `pattern` cannot be enforced: the possessive ++"),
    ({"patternProperties": {"[a&&b]": {}}}, "at #/patternProperties/[a&&b]"),
    ({"type": "string", "format": "x" * 200}, "cannot be enforced, only date, date-time"),
    ({"format": "unknown"}, "the `format` 'unknown' cannot be enforced"),
    ({"$ref": "#/$defs/a"}, "`$ref` leads to no schema in here; write #/... to one, at #/$ref"),
    ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "`$ref` leads to no schema"),
    ({"$ref": "http://example.org/a"}, "`$ref` leads to no schema"),
    ({"$ref": "#/default", "default": {}}, "`$ref` leads to no schema"),
    ({"items": {"$id": "a"}}, "`$id` cannot be enforced below the top, at #/items"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "`$schema` names no dialect"),
    ({"items": [{}], "prefixItems": [{}]}, "a list of `items` beside `prefixItems`, at #"),
    (
        {"items": [{}], "additionalItems": {}, "allOf": [{}]},
        "`additionalItems` beside other schemas cannot be enforced",
    ),
    ({"minProperties": 2}, "`minProperties` cannot be enforced beyond one more than"),
    ({"exclusiveMinimum": 0, "maximum": 0.5}, "`exclusiveMinimum` with a maximum less than 1"),
    ({"exclusiveMaximum": 0, "minimum": -0.5}, "`exclusiveMaximum` with a minimum less than 1"),
    (
        {"allOf": [{"exclusiveMinimum": 0}, {"exclusiveMaximum": 0.5}]},
        "`exclusiveMinimum` with a maximum less than 1 above it cannot be enforced",
    ),
    (
        {"allOf": [{"multipleOf": 99991}, {"multipleOf": 99989}]},
        "`multipleOf` cannot be enforced on merged schemas",
    ),
    (
        {"allOf": [{"multipleOf": 0.001}, {"multipleOf": 700}]},
        "`multipleOf` cannot be enforced on merged schemas",
    ),
]


@pytest.mark.parametrize(("schema", "problem"), WRONG)
def test_what_is_wrong_is_named_by_its_place(schema: object, problem: str) -> None:
    """A schema that is none, or goes beyond the engine, is refused with what and where."""
    error = refusal(schema)

    assert problem in error.message
    assert error.message.startswith(f"{FIELD}: ")
    assert len(error.message) < 300


def test_two_spellings_of_a_pattern_are_refused() -> None:
    """Patterns that become one for the engine would lose a schema."""
    twice = {"^[^\\n\\r\\u2028\\u2029]$": True, "^.$": False}

    assert "two patterns of one meaning" in refusal({"patternProperties": twice}).message


@pytest.mark.parametrize("keyword", ["items", "const"])
def test_depth_has_a_limit(keyword: str) -> None:
    """The engine's reader of JSON would give up, so the checker does, with a short error."""
    schema: Any = {}
    for _ in range(101):
        schema = {"items": schema} if keyword == "items" else [schema]

    assert "more than 100 levels deep" in refusal({keyword: schema}).message


def test_numbers_of_different_values_do_not_meet() -> None:
    """What is refused of one value's numbers is good for two values."""
    schema = {
        "properties": {
            "a": {"exclusiveMinimum": 0, "multipleOf": 99991},
            "b": {"maximum": 0.5, "multipleOf": 99989},
        }
    }

    assert json.loads(to_engine_schema(schema, field=FIELD))["properties"] == schema["properties"]


# Why: the engine lets these pass. Where one of these fails, a rule can go.


FLAWS: list[tuple[dict[str, object], str]] = [
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
    ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "-0"),
    ({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53)),
    ({"const": 2**53 + 1}, str(2**53)),
    ({"minProperties": 2, "type": "object"}, '{"a":1,"a":1}'),
    ({"prefixItems": [{"type": "null"}], "additionalItems": {}}, "[1]"),
    ({"items": [{}], "allOf": [{}], "additionalItems": False}, "[1,2]"),
    ({"minimum": 5, "allOf": [{}], "exclusiveMinimum": True}, "5"),
    ({"properties": {"a": {"type": "null"}}}, r'{"a":null,"\u0061":1}'),
    ({"type": "string", "pattern": "^.$"}, r'"\r"'),
    ({"type": "string", "pattern": "^[[:alpha:]]b$"}, '"ab"'),
    ({"type": "string", "pattern": "a\\"}, '"a"'),
    ({"type": "string", "format": "date"}, '"2023-02-29"'),
    ({"type": "string", "format": "time"}, '"12:00:60Z"'),
    ({"type": "string", "format": "unknown"}, '"x"'),
    ({"contentEncoding": "base64"}, '"?"'),
    ({"x-guidance": {"lenient": True}, "not": {}}, "1"),
    ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{}, {}]}, "1"),
    ({"x-guidance": {"whitespace_flexible": True}, "type": "array"}, "[ ]"),
]


@pytest.mark.parametrize(("schema", "text"), FLAWS)
def test_the_engine_alone_would_let_it_pass(schema: dict[str, object], text: str) -> None:
    """The engine takes a text that the schema does not allow, and this module does not let it."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema))

    assert takes(matcher, text)
    with suppress(InvalidRequest):
        assert not takes(byte_matcher(schema), text)


# Any schema.

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 0.5, -0.5, 1.5, -1.5, 0.25])
TEXTS = st.sampled_from(["", "a", "b", "ab", "aa", "ba", "é", "a\nb", " ", "\r"])
KEYS = st.sampled_from(["a", "b", "c", "ab"])
SMALL = st.integers(0, 3)
PATTERNS = st.sampled_from(
    ["^a", "b$", "^a*$", "^[ab]+$", "^.$", r"^\w+$", r"^\S*$", "a|b", "^[^a]*$", "^$", r"\d"]
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def lists(of: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(of, min_size=1, max_size=3)


def named(of: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(KEYS, of, min_size=1, max_size=3)


VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: lists(inner) | named(inner) | st.just([]) | st.just(ANY),
    max_leaves=5,
)


def with_keywords(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    values: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, min_size=2, max_size=2),
        **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], NUMBERS),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.25, 1.5, 0.1]),
        "pattern": PATTERNS,
        **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], SMALL),
        **dict.fromkeys(["minProperties", "maxProperties"], SMALL),
        **dict.fromkeys(["items", "additionalProperties"], inner),
        **dict.fromkeys(["prefixItems", "allOf", "anyOf", "oneOf"], lists(inner)),
        "properties": named(inner),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "^b", "b$"]), inner),
        "required": lists(KEYS),
        "enum": lists(VALUES),
        "const": VALUES,
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y", "#"]),
    }
    keyword = st.sampled_from(sorted(values))
    pairs = keyword.flatmap(lambda name: st.tuples(st.just(name), values[name]))
    return st.lists(pairs, min_size=1, max_size=5).map(dict)


SCHEMAS = st.recursive(st.booleans() | st.just(ANY), with_keywords, max_leaves=6)


@settings(max_examples=300)
@given(with_keywords(SCHEMAS), SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=5, max_size=10))
def test_nothing_invalid_can_be_written(
    schema: dict[str, object], x: object, y: object, values: list[object]
) -> None:
    """Of any schema that is taken, a value that follows the grammar is valid."""
    schema = {**schema, "$defs": {"x": x, "y": y}}
    try:
        matcher = byte_matcher(schema)
    except InvalidRequest:
        return
    written = [text for value in values for text in forms(value) if takes(matcher, text)]
    assert [text for text in written if not is_valid(schema, text)] == []
