"""JSON schemas in the terms of the grammar engine, or refused: what is taken is enforced wholly.

The engine, llguidance, refuses most of what it cannot enforce. This module refuses the rest: what
the engine passes over, reads in another way, or gets wrong; and rewrites what can be said in other
words. A keyword that no draft knows is an annotation, as the specification has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, cast
from urllib.parse import unquote

from meshnet.errors import InvalidRequest
from meshnet.grammar.ecma_regex import to_engine

Members = dict[str, object]

_DIALECTS: Final = frozenset(
    {
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
    }
)
_REFUSED: Final = frozenset(
    {
        *("not", "if", "then", "else"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
        *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedProperties", "$dynamicRef", "$recursiveRef", "x-guidance"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
        *("disallow", "divisibleBy", "extends"),
    }
)
"""What says something of the value and is not enforced; or sets the engine."""

_APPLICATORS: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_ENGINE_FORMATS: Final = frozenset(
    {"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"},
)
_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_OWN_FORMATS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""The engine's own have a 29th of February in every year, and leap seconds in every minute."""

_MAX_NUMBER: Final = 2**53 - 1
"""The engine's numbers are floats: above it neighbours are one."""
_MAX_MULTIPLE: Final = 2**16
"""The engine multiplies two of them in 32 bits, without a look at the overflow."""
_MAX_DEPTH: Final = 100
"""The engine's JSON parser ends at 128."""
_MAX_PLACE_CHARS: Final = 100

_OPTIONS: Final = {
    # A small model would write blanks for ever.
    "whitespace_flexible": False,
    # With \u, `"\u0061"` would be a key besides `"a"`, and take its place. So it would be the only
    # spelling of most control characters: there are none of those.
    "json_allowed_escapes": 'nrbtf\\"',
}


def to_engine_schema(schema: object, *, field: str) -> str:
    """A schema with the engine's options in it, as JSON; also good after `%json` in Lark.

    Args:
        schema: Read from JSON.
        field: Where it is in the request.

    Raises:
        InvalidRequest: It is no JSON schema, or something in it cannot be enforced.
    """
    reader = _Reader(field)
    checked = reader.schema(schema, "#")
    if checked is False:
        raise reader.refusal("#", "the schema `false` allows no value")
    reader.check_references()
    reader.check_numbers()
    reader.open_unions()
    members: Members = {} if checked is True else cast("Members", checked)
    return json.dumps({**members, "x-guidance": _OPTIONS})


@dataclass
class _Reader:
    """Walks through one schema; a place in it is a JSON pointer behind a `#`."""

    request_field: str
    schemas: dict[str, object] = field(default_factory=dict[str, object])
    """Those that were read, by their places."""
    references: dict[str, str] = field(default_factory=dict[str, str])
    """Places by what they refer to."""
    numbers: list[Numbers] = field(default_factory=list["Numbers"])
    """Of each schema."""
    is_merged: bool = False
    """Whether several schemas say something of the same value."""

    def refusal(self, place: str, problem: str) -> InvalidRequest:
        """What to raise; `problem` says what is wrong there, and with what."""
        where = place if len(place) <= _MAX_PLACE_CHARS else f"{place[:_MAX_PLACE_CHARS]}..."
        return InvalidRequest(
            f"{self.request_field}: {problem}, at {where}",
            field=self.request_field,
            allowed=f"a JSON schema, of the keywords {', '.join(_READERS)}",
        )

    def schema(self, schema: object, place: str) -> object:
        """The same for the engine: no keyword is in it that is not enforced."""
        self.check_depth(place)
        self.schemas[place] = schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.refusal(place, "this is no schema: neither an object nor true or false")
        members = cast("Members", schema)
        self._check_dialect(members, place)
        for keyword in members:
            if keyword in _REFUSED:
                raise self.refusal(place, f"`{keyword}` cannot be enforced")
        checked = {
            keyword: _READERS[keyword](self, value, f"{place}/{_escaped(keyword)}")
            for keyword, value in members.items()
            if keyword in _READERS
        }
        self._check_together(checked, place)
        self._note(checked, place)
        self.schemas[place] = checked = self._with_formats(checked, place)
        return checked

    def check_depth(self, place: str) -> None:
        if place.count("/") > _MAX_DEPTH:
            raise self.refusal(place, f"this is more than {_MAX_DEPTH} levels deep")

    def check_references(self) -> None:
        """Find out whether each leads to a schema: what is elsewhere was not checked."""
        for target, place in self.references.items():
            if unquote(target) not in self.schemas:
                raise self.refusal(place, "`$ref` leads to no schema in here; write #/... to one")

    def check_numbers(self) -> None:
        """Refuse what the engine gets wrong of numbers, together where schemas are merged."""
        for group in [self.numbers] if self.is_merged else [[one] for one in self.numbers]:
            low = {n.more_than for n in group}
            high = {n.less_than for n in group}
            for numbers in group:
                # The engine would let the bound itself pass.
                if any(math.floor(n) in low for n in numbers.fractions_above):
                    problem = "`exclusiveMinimum` with a maximum less than 1 above it"
                elif any(math.ceil(n) in high for n in numbers.fractions_below):
                    problem = "`exclusiveMaximum` with a minimum less than 1 below it"
                else:
                    continue
                raise self.refusal(numbers.place, f"{problem} cannot be enforced")
        multiples = {n.multiple_of: n.place for n in self.numbers if n.multiple_of is not None}
        if self.is_merged and _common_multiple(multiples) >= _MAX_MULTIPLE:
            place = next(iter(multiples.values()))
            raise self.refusal(place, "`multipleOf` cannot be enforced on merged schemas, so large")

    def open_unions(self) -> None:
        """Write `anyOf` for `oneOf` where a constant tells the options apart.

        The engine would refuse most unions of references, since it does not follow them.
        """
        for schema in self.schemas.values():
            if isinstance(schema, dict) and "oneOf" in schema and "anyOf" not in schema:
                members = cast("Members", schema)
                if self._are_apart(cast("list[object]", members["oneOf"])):
                    members["anyOf"] = members.pop("oneOf")

    def _are_apart(self, options: Sequence[object]) -> bool:
        """Whether all are objects that must have a property with other texts in each option."""
        objects = [self._followed(option) for option in options]
        if not objects or any(o.get("type") != "object" for o in objects):
            return False
        named = [cast("Members", o.get("properties", {})) for o in objects]
        required = [cast("list[str]", o.get("required", [])) for o in objects]
        return any(
            _are_different([_texts(properties.get(key)) for properties in named])
            for key in set(required[0]).intersection(*required)
        )

    def _followed(self, schema: object) -> Members:
        """What a schema says, or what it refers to says; nothing where that has no end."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                break
            members = cast("Members", schema)
            if "$ref" not in members:
                return members
            schema = self.schemas[unquote(cast("str", members["$ref"]))]
        return {}

    def _check_dialect(self, members: Members, place: str) -> None:
        dialect = members.get("$schema")
        if dialect is not None and str(dialect).removesuffix("#") not in _DIALECTS:
            raise self.refusal(place, "`$schema` names no dialect from draft-06 to 2020-12")
        if place != "#" and isinstance(members.get("$id"), str):
            raise self.refusal(place, "`$id` cannot be enforced below the top")

    def _check_together(self, checked: Members, place: str) -> None:
        """Refuse what the engine gets wrong of keywords side by side."""
        if isinstance(checked.get("items"), list):
            if "prefixItems" in checked:
                raise self.refusal(place, "a list of `items` beside `prefixItems`")
            if "additionalItems" in checked and checked.keys() & {*_APPLICATORS, "const", "enum"}:
                raise self.refusal(
                    place, "`additionalItems` beside other schemas cannot be enforced"
                )
        else:
            checked.pop("additionalItems", None)  # it has no meaning, but takes `prefixItems`'
        n_named = len(set(cast("list[str]", checked.get("required", []))))
        if cast("int", checked.get("minProperties", 0)) > n_named + 1:
            # The engine takes a key that is written twice for two.
            raise self.refusal(
                place, "`minProperties` cannot be enforced beyond one more than `required`"
            )

    def _note(self, checked: Members, place: str) -> None:
        """Remember what is to be checked once all is read."""
        applied = checked.keys() & _APPLICATORS
        own = checked.keys() - {*_APPLICATORS, "type", "$defs", "definitions"}
        self.is_merged |= (
            "allOf" in applied
            or len(applied) > 1
            or bool(applied and own)
            or {"properties", "patternProperties"} <= own
        )
        self.numbers.append(Numbers.of(checked, place))

    def _with_formats(self, checked: Members, place: str) -> Members:
        """A format is enforced on strings; of other types it says nothing."""
        name = cast("str | None", checked.get("format"))
        if name is None or name in _ENGINE_FORMATS:
            return checked
        rest = {keyword: value for keyword, value in checked.items() if keyword != "format"}
        if "string" not in cast("str | list[str]", checked.get("type", "string")):
            return rest
        if name not in _OWN_FORMATS:
            allowed = ", ".join(sorted({*_ENGINE_FORMATS, *_OWN_FORMATS}))
            problem = f"the `format` {name[:_MAX_PLACE_CHARS]!r} cannot be enforced, only {allowed}"
            raise self.refusal(place, problem)
        if "pattern" not in rest:
            return {**rest, "pattern": _OWN_FORMATS[name]}
        others = cast("list[object]", rest.get("allOf", []))
        return {**rest, "allOf": [*others, {"pattern": _OWN_FORMATS[name]}]}

    # The keywords: each takes its value and place, and returns the value for the engine.

    def list_of_schemas(self, value: object, place: str) -> list[object]:
        return [self.schema(s, f"{place}/{i}") for i, s in enumerate(self._list(value, place))]

    def named_schemas(self, value: object, place: str) -> Members:
        named = self._object(value, place)
        return {n: self.schema(s, f"{place}/{_escaped(n)}") for n, s in named.items()}

    def schemas_by_pattern(self, value: object, place: str) -> Members:
        by_pattern = self._object(value, place)
        checked = self.named_schemas(by_pattern, place)
        patterns = {self.pattern(p, f"{place}/{_escaped(p)}"): s for p, s in checked.items()}
        if len(patterns) < len(checked):
            raise self.refusal(place, "two patterns of one meaning cannot be enforced")
        return patterns

    def schema_or_list(self, value: object, place: str) -> object:
        if isinstance(value, list):
            return self.list_of_schemas(cast("object", value), place)
        return self.schema(value, place)

    def reference(self, value: object, place: str) -> str:
        target = self.string(value, place)
        self.references[target] = place
        return target

    def pattern(self, value: object, place: str) -> str:
        try:
            return to_engine(self.string(value, place))
        except ValueError as error:
            raise self.refusal(place, f"the `pattern` cannot be enforced: {error}") from error

    def string(self, value: object, place: str) -> str:
        if not isinstance(value, str):
            raise self.refusal(place, "this is no string")
        return value

    def strings(self, value: object, place: str) -> list[str]:
        return [self.string(v, f"{place}/{i}") for i, v in enumerate(self._list(value, place))]

    def types(self, value: object, place: str) -> object:
        names = self.strings([value] if isinstance(value, str) else value, place)
        if not {*names} <= {*_TYPES}:
            raise self.refusal(place, f"this is no type; allowed: {', '.join(_TYPES)}")
        return value

    def count(self, value: object, place: str) -> int:
        number = self.number(value, place)
        if number < 0 or not float(number).is_integer():
            raise self.refusal(place, "this is no whole number from 0")
        return int(number)

    def divisor(self, value: object, place: str) -> float:
        number = self.number(value, place)
        if number <= 0:
            raise self.refusal(place, "this is no number above 0")
        return number

    def number(self, value: object, place: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refusal(place, "this is no number")
        if not abs(value) <= _MAX_NUMBER:
            raise self.refusal(place, f"a number beyond {_MAX_NUMBER} cannot be enforced")
        return value

    def values(self, value: object, place: str) -> list[object]:
        return [self.value(v, f"{place}/{i}") for i, v in enumerate(self._list(value, place))]

    def value(self, value: object, place: str) -> object:
        """What a value must be equal to."""
        self.check_depth(place)
        match value:
            case dict():
                members = cast("Members", value)
                return {n: self.value(v, f"{place}/{_escaped(n)}") for n, v in members.items()}
            case list():
                return self.values(cast("list[object]", value), place)
            case bool() | None:
                return value
            case int() | float():
                return self.number(value, place)
            case _:
                return self._writable(self.string(value, place), place)

    def _writable(self, text: str, place: str) -> str:
        if any(char < " " and char not in "\b\f\n\r\t" for char in text):
            raise self.refusal(place, "a control character cannot be enforced")
        return text

    def _list(self, value: object, place: str) -> list[object]:
        if not isinstance(value, list):
            raise self.refusal(place, "this is no list")
        return cast("list[object]", value)

    def _object(self, value: object, place: str) -> Members:
        if not isinstance(value, dict):
            raise self.refusal(place, "this is no object")
        return cast("Members", value)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one schema says of numbers, as far as the engine may get it wrong.

    Attributes:
        place: The schema's.
        more_than: An exclusive lower bound, or None.
        less_than: An exclusive upper bound, or None.
        fractions_above: Upper bounds that are not whole.
        fractions_below: Lower bounds that are not whole.
        multiple_of: What the number is a multiple of, or None.
    """

    place: str
    more_than: float | None
    less_than: float | None
    fractions_above: tuple[float, ...]
    fractions_below: tuple[float, ...]
    multiple_of: float | None

    @classmethod
    def of(cls, checked: Mapping[str, object], place: str) -> Numbers:
        """Those of a schema that was checked."""
        bounds = cast("Mapping[str, float]", checked)

        def fractions(*keywords: str) -> tuple[float, ...]:
            given = (bounds[keyword] for keyword in keywords if keyword in bounds)
            return tuple(number for number in given if not float(number).is_integer())

        return cls(
            place,
            bounds.get("exclusiveMinimum"),
            bounds.get("exclusiveMaximum"),
            fractions("maximum", "exclusiveMaximum"),
            fractions("minimum", "exclusiveMinimum"),
            bounds.get("multipleOf"),
        )


def _common_multiple(numbers: Iterable[float]) -> int:
    """At least the engine's: all of them multiplied, as whole numbers of the smallest unit."""
    exact = [Decimal(repr(number)) for number in numbers]
    unit = max((-cast("int", n.normalize().as_tuple().exponent) for n in exact), default=0)
    product = 1
    for number in exact:
        product = min(product * int(number.scaleb(max(unit, 0))), _MAX_MULTIPLE)
    return product


def _are_different(groups: Sequence[set[str]]) -> bool:
    """Whether there are texts in each group, and none of them is in two."""
    return all(groups) and len(set[str]().union(*groups)) == sum(map(len, groups))


def _texts(schema: object) -> set[str]:
    """All values that a schema allows, if it lists them and they are texts; else none."""
    if not isinstance(schema, dict):
        return set()
    members = cast("Members", schema)
    values = [members["const"]] if "const" in members else members.get("enum", [])
    texts = {value for value in cast("list[object]", values) if isinstance(value, str)}
    return texts if len(texts) == len(cast("list[object]", values)) else set()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_READERS: Final[dict[str, Callable[[_Reader, object, str], object]]] = {
    "$ref": _Reader.reference,
    "$defs": _Reader.named_schemas,
    "definitions": _Reader.named_schemas,
    "type": _Reader.types,
    "const": _Reader.value,
    "enum": _Reader.values,
    "allOf": _Reader.list_of_schemas,
    "anyOf": _Reader.list_of_schemas,
    "oneOf": _Reader.list_of_schemas,
    "properties": _Reader.named_schemas,
    "patternProperties": _Reader.schemas_by_pattern,
    "additionalProperties": _Reader.schema,
    "required": _Reader.strings,
    "minProperties": _Reader.count,
    "maxProperties": _Reader.count,
    "items": _Reader.schema_or_list,
    "prefixItems": _Reader.list_of_schemas,
    "additionalItems": _Reader.schema,
    "minItems": _Reader.count,
    "maxItems": _Reader.count,
    "pattern": _Reader.pattern,
    "format": _Reader.string,
    "minLength": _Reader.count,
    "maxLength": _Reader.count,
    "minimum": _Reader.number,
    "maximum": _Reader.number,
    "exclusiveMinimum": _Reader.number,
    "exclusiveMaximum": _Reader.number,
    "multipleOf": _Reader.divisor,
}
"""The keywords that are enforced, and how each is read."""
