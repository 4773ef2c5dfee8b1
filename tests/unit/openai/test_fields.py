from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field, StrictBool, StrictStr

from meshnet.errors import InvalidRequest, UnsupportedParameter
from meshnet.openai.fields import (
    Count,
    CountOrNone,
    Number,
    Real,
    RequestFields,
    StreamOptions,
    TokenIds,
    parse_fields,
    without_nulls,
)
from meshnet.openai.parameters import Parameter

TABLE = {
    "count": Parameter("used", "a whole number from 1"),
    "zero": Parameter("used", "a whole number from 0"),
    "number": Parameter("used", "a number from 0"),
    "real": Parameter("used", "a number"),
    "flag": Parameter("used", "true or false"),
    "name": Parameter("used", "a string"),
    "items": Parameter("used", "a list of objects"),
    "ids": Parameter("used", "a list of token ids"),
    "stream_options": Parameter("used", "an object"),
    "user": Parameter("no_op", "anything"),
    "audio": Parameter("refused", "only false", (False,)),
}


class Item(RequestFields):
    size: Count


class Request(RequestFields):
    count: Count = 7
    zero: CountOrNone = 0
    number: Number = 1.0
    real: Real = 0.0
    flag: StrictBool = False
    name: Annotated[StrictStr, Field(min_length=1)] = "a"
    items: Annotated[list[Item], Field(fail_fast=True, min_length=1)] | None = None
    ids: TokenIds = ()
    stream_options: Annotated[StreamOptions, BeforeValidator(without_nulls)] | None = None


def parse(strict: bool = False, /, **fields: object) -> Request:
    return parse_fields(json.dumps(fields).encode(), Request, TABLE, strict=strict)


def refusal(strict: bool = False, /, **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(strict, **fields)
    return caught.value


def test_what_is_absent_has_its_default() -> None:
    """An empty object is a request of defaults, with nothing ignored."""
    assert parse() == Request()
    assert parse().ignored_params == ()


def test_null_is_absent() -> None:
    """A request whose fields are all null is the request without them, and none is a stray."""
    assert parse(**dict.fromkeys([*TABLE, "invented"])) == parse()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"number": NaN}',
        b'{"number": Infinity}',
        b'{"user": -Infinity}',
        b'{"user": "\\ud800"}',
        b"[" * 100_000,
        b'{"count": ' + b"1" * 10_000 + b"}",
        b"[]",
        b"null",
        b'"x"',
        b"3",
        b'{"user": "' + b"x" * 10_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    """Cut, non-standard, hostile and non-object JSON is the client's fault, told in one line."""
    with pytest.raises(InvalidRequest, match=r"^the body is not (valid JSON|a JSON object)") as e:
        parse_fields(body, Request, TABLE)

    assert len(e.value.message) < 200
    assert "\n" not in e.value.message


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    """No body makes anything but a request or an InvalidRequest."""
    with suppress(InvalidRequest):
        assert parse_fields(body, Request, TABLE).count >= 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(TABLE)), JSON)
def test_any_value_is_taken_or_refused_by_its_field(name: str, value: object) -> None:
    """Whatever JSON a field holds, it is taken, or refused in a short text that begins with it."""
    with suppress(InvalidRequest):
        assert parse(**{name: value}).count >= 1
        return
    error = refusal(**{name: value})

    assert error.message.startswith((name, "the body"))
    assert len(error.message) < 500


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("count", 0, "input should be greater than or equal to 1"),
        ("count", 2**31, f"input should be less than {2**31}"),
        ("count", True, "is not a whole number"),
        ("count", "3", "is not a whole number"),
        ("count", 3.5, "is not a whole number"),
        ("count", [3], "is not a whole number"),
        ("zero", -1, "input should be greater than or equal to 0"),
        ("number", -0.1, "input should be greater than or equal to 0"),
        ("number", True, "is not a number"),
        ("number", "1", "is not a number"),
        ("flag", 1, "is not true or false"),
        ("flag", "true", "is not true or false"),
        ("name", "", "is empty"),
        ("name", 5, "is not a string"),
        ("items", "a", "is not a list"),
        ("items", {}, "is not a list"),
        ("items", [], "is empty"),
        ("ids", "a", "is not a list of token ids"),
        ("ids", 5, "is not a list of token ids"),
        ("ids", [1, "2"], "is not a list of token ids"),
        ("ids", [True], "is not a list of token ids"),
        ("ids", [1.5], "is not a list of token ids"),
        ("ids", [1, -1], "is not a list of token ids"),
        ("ids", [[1]], "is not a list of token ids"),
        ("ids", [None], "is not a list of token ids"),
        ("stream_options", [], "is not an object"),
        ("stream_options", "a", "is not an object"),
    ],
)
def test_a_wrong_value_names_field_problem_and_what_is_allowed(
    name: str, value: object, problem: str
) -> None:
    """A value of the wrong type or out of range is refused in one sentence of three parts."""
    error = refusal(**{name: value})

    assert error.message == f"{name}: {problem}; allowed: {TABLE[name].allowed}"
    assert error.members["field"] == name
    assert error.members["allowed"] == TABLE[name].allowed


@pytest.mark.parametrize(
    ("value", "field", "problem"),
    [
        ([{"size": 1}, 2], "items[1]", "is not an object"),
        ([dict[str, int]()], "items[0].size", "is missing"),
        ([{"size": "x"}], "items[0].size", "is not a whole number"),
    ],
)
def test_a_fault_inside_a_field_is_told_with_its_place(
    value: list[object], field: str, problem: str
) -> None:
    """The parameter of a fault inside a list says which item and which member."""
    error = refusal(items=value)

    assert error.members["field"] == field
    assert error.message == f"{field}: {problem}; allowed: a list of objects"


def test_a_number_too_large_for_a_float_is_refused() -> None:
    """1e400 is JSON, but no number that can be used."""
    with pytest.raises(InvalidRequest, match=r"^real: is not finite"):
        parse_fields(b'{"real": 1e400}', Request, TABLE)
    with pytest.raises(InvalidRequest, match=r"^count: is not a whole number"):
        parse_fields(b'{"count": 1e400}', Request, TABLE)


def test_three_point_zero_is_three() -> None:
    """JSON has one kind of number: 3.0 is a count and a token id."""
    parsed = parse(count=3.0, zero=0.0, ids=[4.0, 5])

    assert (parsed.count, parsed.zero, parsed.ids) == (3, 0, (4, 5))
    assert all(type(token_id) is int for token_id in parsed.ids)


def test_an_integer_is_a_number() -> None:
    """A number may be written without a point."""
    assert parse(number=2).number == 2.0


@pytest.mark.parametrize(
    "fields",
    [
        {"name": {"x" * 10_000: 1}},
        {"items": [{"x" * 10_000: 1}]},
        {"count": "x" * 10_000},
        {"audio": "x" * 10_000},
        {"ids": ["x" * 10_000]},
        {"stream_options": {"include_usage": "x" * 10_000}},
    ],
)
def test_an_error_never_copies_the_input(fields: dict[str, object]) -> None:
    """However long the wrong value, the error repeats at most 100 characters of it."""
    error = refusal(**fields)

    assert error.message.count("x") <= 100
    assert str(error.members).count("x") <= 100


def test_many_token_ids_make_no_long_error() -> None:
    """One wrong id of many, or many wrong ones, make the same short error."""
    few, many = refusal(ids=[1, "x"]), refusal(ids=["x"] * 100_000)

    assert few.message == many.message


def test_no_ops_are_accepted() -> None:
    """A parameter that cannot change the answer is passed over, whatever it holds."""
    assert parse(user={"any": ["thing"]}) == parse()


def test_what_is_not_implemented_is_refused() -> None:
    """A known parameter that would change the answer is refused by its name, unless it is off."""
    error = refusal(audio={"voice": "x"})

    assert isinstance(error, UnsupportedParameter)
    assert error.members["field"] == "audio"
    assert parse(audio=False) == parse()


def test_unknown_fields_are_listed() -> None:
    """Strays are accepted and listed, those inside the stream options too, unless they are null."""
    options = {"chunky": True, "include_usage": True, "hidden": None}
    parsed = parse(cuont=3, nmae="b", gone=None, stream_options=options)

    assert parsed.ignored_params == ("cuont", "nmae", "stream_options.chunky")
    assert parsed.stream_options == StreamOptions(include_usage=True)


def test_where_stream_options_are_not_read_their_members_are_not_listed() -> None:
    """An endpoint that passes over the stream options passes over their members."""
    table = {**TABLE, "stream_options": Parameter("no_op", "anything")}
    body = b'{"stream_options": {"chunky": true}}'

    assert parse_fields(body, Request, table) == parse()


def test_the_stream_options_null_members_are_absent() -> None:
    """Null inside the stream options is the same as nothing."""
    nulls = dict.fromkeys(StreamOptions.model_fields)

    assert parse(stream_options=nulls).stream_options == StreamOptions()


def test_a_client_cannot_write_the_list_itself() -> None:
    """A field named like our own list is a stray as any other."""
    assert parse(ignored_params=["a"]).ignored_params == ("ignored_params",)


def test_listed_names_are_safe_in_a_header() -> None:
    """Listed names are short, few, and without commas, line ends or non-ASCII letters."""
    strays = {f"a{n}": 1 for n in range(50)}
    parsed = parse(**{"x\r\nset-cookie: a,é": 1, "y" * 1000: 1}, **strays)

    assert parsed.ignored_params[:3] == ("x??set-cookie??a??", "y" * 64, "a0")
    assert len(parsed.ignored_params) == 20


def test_strict_refuses_what_is_unknown() -> None:
    """With the strict switch the first stray is an error that names it; null still is absent."""
    error = refusal(True, cuont=3)

    assert error.message == "cuont: there is no such parameter"
    assert error.members["field"] == "cuont"
    assert parse(True, count=3, user="u", cuont=None).count == 3


def test_strict_refuses_what_is_unknown_in_the_stream_options() -> None:
    """A stray member of the stream options is named by its path."""
    error = refusal(True, stream_options={"chunky": True})

    assert error.members["field"] == "stream_options.chunky"
