"""What all request bodies share: how one is read, the kinds of its fields, how it is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    ValidationError,
)
from pydantic_core import from_json

from meshnet.errors import InvalidRequest
from meshnet.openai.parameters import Parameter, refuse_unsupported

_MAX_IGNORED_PARAMS: Final = 20
_MAX_NAME_CHARS: Final = 64
_MAX_PLACE_CHARS: Final = 100
_MAX_PROBLEM_CHARS: Final = 200
_PROBLEMS: Final = {  # where pydantic's own words speak of Python
    "missing": "is missing",
    "model_type": "is not an object",
    "dict_type": "is not an object",
    "list_type": "is not a list",
    "tuple_type": "is not a list",
    "string_type": "is not a string",
    "bool_type": "is not true or false",
    "float_type": "is not a number",
    "int_type": "is not a whole number",
    "finite_number": "is not finite",
    "too_short": "is empty",
    "string_too_short": "is empty",
}
_UNSAFE_IN_HEADER: Final = re.compile(r"[^\w.-]", re.ASCII)


def without_nulls(value: object) -> object:
    """An object without its null members, which are the same as absent ones."""
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in cast("dict[str, object]", value).items() if v is not None}


def _with_whole_numbers(value: object) -> object:
    """JSON has one kind of number: 3.0 is a count, alone or in a list; true and "3" are none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and float in map(type, cast("list[object]", value)):
        return [_with_whole_numbers(item) for item in cast("list[object]", value)]
    return cast("object", value)


def read_ids(value: object) -> tuple[int, ...]:
    """The token ids of a list, quickly, since there may be millions.

    Raises:
        ValueError: It is no list, or something in it is no token id.
    """
    values = (
        cast("list[int]", _with_whole_numbers(cast("object", value)))
        if isinstance(value, list)
        else [-1]
    )
    if not {*map(type, values)} <= {int} or min(values, default=0) < 0:
        raise ValueError("is not a list of token ids")
    return tuple(values)


Whole = Annotated[int, Field(strict=True)]
Count = Annotated[Whole, Field(ge=1, lt=2**31)]
CountOrNone = Annotated[Whole, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(read_ids, json_schema_input_type=list[int])]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Number = Annotated[Real, Field(ge=0)]


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    """The counts so far in every chunk."""
    include_obfuscation: StrictBool = False
    """A no-op: nothing is padded here."""


class RequestFields(BaseModel):
    """A checked body. Subclasses are named by what they ask for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ignored_params: tuple[str, ...] = ()
    """Unknown fields of the body: at most 20, each safe as a word in a header."""


RequestT = TypeVar("RequestT", bound=RequestFields)


def parse_fields(
    body: bytes, kind: type[RequestT], table: Mapping[str, Parameter], *, strict: bool = False
) -> RequestT:
    """Check a request's body.

    The one rule for fields: null is absent; what is in `table` is used, passed over or refused as
    it says there; any other is accepted and listed in `ignored_params`.

    Args:
        body: JSON.
        kind: What to make of it.
        table: The endpoint's parameters.
        strict: Refuse what is not in the table instead.

    Raises:
        InvalidRequest: The body is not a JSON object, or a field is wrong; `field` names the first
            one and `allowed` says what it may be. However long the input, the text is short.
        UnsupportedParameter: A field asks for what is not implemented.
    """
    fields = _read_object(body)
    for name, value in fields.items():
        refuse_unsupported(name, value, table)
    ignored = _ignored(fields, table)
    if strict and ignored:
        raise InvalidRequest(
            f"{ignored[0]}: there is no such parameter",
            field=ignored[0],
            allowed="the parameters in the documentation",
        )
    used = {name: value for name, value in fields.items() if _is_used(name, table)}
    try:
        return kind.model_validate({**used, "ignored_params": ignored})
    except ValidationError as error:
        raise _to_invalid_request(error, table) from error


def invalid(
    table: Mapping[str, Parameter], name: str, problem: str, *, where: str | None = None
) -> InvalidRequest:
    """The refusal of one parameter; `where` is the place in it, if not all of it is wrong."""
    where, allowed = where or name, table[name].allowed
    return InvalidRequest(f"{where}: {problem}; allowed: {allowed}", field=where, allowed=allowed)


def _read_object(body: bytes) -> dict[str, object]:
    """The body's fields, without those that are null."""
    try:
        # Unlike json.loads this refuses NaN, lone surrogates and hundreds of nested lists.
        raw: object = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body is not a JSON object")
    fields = cast("dict[str, object]", without_nulls(cast("dict[str, object]", raw)))
    return {name: _with_whole_numbers(value) for name, value in fields.items()}


def _ignored(fields: Mapping[str, object], table: Mapping[str, Parameter]) -> tuple[str, ...]:
    names = [name for name in fields if name not in table]
    if _is_used("stream_options", table):
        options = without_nulls(fields.get("stream_options"))
        known = StreamOptions.model_fields
        if isinstance(options, dict):
            members = cast("dict[str, object]", options)
            names += [f"stream_options.{name}" for name in members if name not in known]
    return tuple(
        _UNSAFE_IN_HEADER.sub("?", name[:_MAX_NAME_CHARS]) for name in names[:_MAX_IGNORED_PARAMS]
    )


def _is_used(name: str, table: Mapping[str, Parameter]) -> bool:
    return name in table and table[name].handling == "used"


def _to_invalid_request(error: ValidationError, table: Mapping[str, Parameter]) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name, *path = first["loc"]
    where = str(name) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    problem = _PROBLEMS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    problem = problem[:1].lower() + problem[1:_MAX_PROBLEM_CHARS]
    return invalid(table, str(name), problem, where=where[:_MAX_PLACE_CHARS])
