from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from meshnet.openai.formats import JsonSchema, ResponseFormat, compile_schema, to_grammar
from tests.unit.openai.making import FakeGrammars

SCHEMA = {"type": "object"}


class Body(BaseModel):
    """A request body with a format."""

    response_format: ResponseFormat | None = None


def parse(**members: object) -> ResponseFormat:
    form = Body.model_validate({"response_format": members}).response_format
    assert form is not None
    return form


FORMATS: list[tuple[dict[str, object], tuple[str, object]]] = [
    ({"type": "json_object"}, ("json_schema", {"type": "object"})),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        ("json_schema", SCHEMA),
    ),
    (
        {
            "type": "json_schema",
            "json_schema": {
                "name": "a-B_9" * 12,
                "description": "d",
                "schema": SCHEMA,
                "strict": False,
            },
        },
        ("json_schema", SCHEMA),
    ),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, ("json_schema", {})),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": None}},
        ("json_schema", {}),
    ),
    ({"type": "regex", "pattern": "a+"}, ("regex", "a+")),
    ({"type": "regex", "pattern": ""}, ("regex", "")),
    ({"type": "grammar", "grammar": 'start: "a"'}, ("lark", 'start: "a"')),
    ({"type": "json_object", "json_schema": None, "pattern": None}, ("json_schema", SCHEMA)),
]


@pytest.mark.parametrize(("members", "asked"), FORMATS)
def test_a_format_is_compiled(members: dict[str, object], asked: tuple[str, object]) -> None:
    """Each type is a grammar of its kind; a schema that is absent or null allows any JSON."""
    grammars = FakeGrammars()

    assert to_grammar(parse(**members), grammars) is not None
    assert grammars.asked == [asked]


@pytest.mark.parametrize("form", [None, ResponseFormat(type="text")])
def test_text_is_no_grammar(form: ResponseFormat | None) -> None:
    """Plain text, asked for or not, is not constrained."""
    grammars = FakeGrammars()

    assert to_grammar(form, grammars) is None
    assert grammars.asked == []


WRONG: list[tuple[object, str, str]] = [
    ("json_object", "", "valid dictionary"),
    ({}, "type", "required"),
    ({"type": "jsonobject"}, "type", "'text', 'json_object', 'json_schema', 'regex' or 'grammar'"),
    ({"type": "text", "x": 1}, "x", "not permitted"),
    ({"type": "json_schema"}, "json_schema", "is missing"),
    ({"type": "json_schema", "json_schema": None}, "json_schema", "is missing"),
    ({"type": "json_schema", "json_schema": "str"}, "json_schema", "valid dictionary"),
    ({"type": "json_schema", "json_schema": {}}, "json_schema.name", "required"),
    ({"type": "json_schema", "json_schema": {"name": ""}}, "json_schema.name", "pattern"),
    ({"type": "json_schema", "json_schema": {"name": "a" * 65}}, "json_schema.name", "pattern"),
    ({"type": "json_schema", "json_schema": {"name": "a b"}}, "json_schema.name", "pattern"),
    ({"type": "json_schema", "json_schema": {"name": "a\n"}}, "json_schema.name", "pattern"),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
        "json_schema.schema",
        "valid dictionary",
    ),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "strict": "yes"}},
        "json_schema.strict",
        "valid boolean",
    ),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "description": 1}},
        "json_schema.description",
        "valid string",
    ),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}},
        "json_schema.shema",
        "not permitted",
    ),
    (
        {"type": "text", "json_schema": {"name": "a"}},
        "json_schema",
        "belongs to the type 'json_schema'",
    ),
    ({"type": "regex"}, "pattern", "is missing"),
    ({"type": "regex", "pattern": 5}, "pattern", "valid string"),
    ({"type": "json_object", "pattern": "a"}, "pattern", "belongs to the type 'regex'"),
    ({"type": "grammar"}, "grammar", "is missing"),
    ({"type": "regex", "pattern": "a", "grammar": "b"}, "grammar", "belongs to the type 'grammar'"),
]


@pytest.mark.parametrize(("value", "place", "problem"), WRONG)
def test_what_is_wrong_is_named_by_its_place(value: object, place: str, problem: str) -> None:
    """The first error is at the member that is wrong, missing, or of another type."""
    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"response_format": value})
    first = caught.value.errors()[0]

    assert ".".join(map(str, first["loc"])) == f"response_format.{place}".removesuffix(".")
    assert problem in first["msg"]


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"type": "json_object"}, "response_format"),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema",
        ),
        ({"type": "regex", "pattern": "a"}, "response_format.pattern"),
        ({"type": "grammar", "grammar": "a"}, "response_format.grammar"),
    ],
)
def test_an_error_will_be_at_the_member(members: dict[str, object], field: str) -> None:
    """What cannot be enforced is named by the member that says it."""
    fields: list[str] = []

    class Listening(FakeGrammars):
        def json_schema(self, schema: object, *, field: str) -> Any:  # noqa: ANN401
            fields.append(field)
            return super().json_schema(schema, field=field)

        def regex(self, pattern: str, *, field: str) -> Any:  # noqa: ANN401
            fields.append(field)
            return super().regex(pattern, field=field)

        def lark(self, text: str, *, field: str) -> Any:  # noqa: ANN401
            fields.append(field)
            return super().lark(text, field=field)

    to_grammar(parse(**members), Listening())
    assert fields == [field]


def test_any_schema_can_be_compiled() -> None:
    """What is not of `response_format` is compiled as it is."""
    grammars = FakeGrammars()
    compile_schema(SCHEMA, grammars, field="tools")

    assert grammars.asked == [("json_schema", SCHEMA)]


def test_a_schema_is_read_and_written_by_its_own_name() -> None:
    """In Python the member has another name, since pydantic has a `schema` of its own."""
    assert JsonSchema.model_validate({"name": "a", "schema": SCHEMA}).schema_ == SCHEMA
