"""Tools of a chat request: what they are, which of them an answer may or must call.

How a model is told of them is the tokenizer's, how calls are found in its text is the response
parser's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictStr,
    field_validator,
)

from meshnet.errors import InvalidRequest

Schema = Mapping[str, object]

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 8
"""The most calls of an answer that must be calls; a small model would go on for ever."""

_MAX_ECHO_CHARS: Final = 40
_NO_ARGUMENTS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}
_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)


def _only_functions(kind: object) -> object:
    if isinstance(kind, str) and kind != "function":
        raise ValueError(_unsupported(kind))
    return kind


def _unsupported(kind: str) -> str:
    return f"the type {kind[:_MAX_ECHO_CHARS]!r} is not supported; only 'function' is"


class Function(BaseModel):
    """What can be called.

    `strict` changes nothing: calls that must be made always follow `parameters`, and those that the
    model chose to make are told as it wrote them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema of the arguments; null, absent and {} take none."""
    strict: StrictBool | None = None

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, schema: dict[str, object] | None) -> dict[str, object] | None:
        if schema and schema.get("type", "object") != "object":
            raise ValueError("the schema's type is not 'object'")
        return schema

    def arguments(self) -> Schema:
        """The arguments' schema, which is always one of an object."""
        return {"type": "object", **self.parameters} if self.parameters else _NO_ARGUMENTS


class Tool(BaseModel):
    """A tool that an answer may call."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Annotated[Literal["function"], BeforeValidator(_only_functions)]
    function: Function

    def for_template(self) -> dict[str, object]:
        """As chat templates take it, and as models have seen it in training.

        Some templates raise where there is no description.
        """
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """The answer is one call of this function."""

    name: str


def _read_choice(value: object) -> object:
    match value:
        case "none" | "auto" | "required" | NamedChoice():
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedChoice(name)
        case {"type": str(kind)} if kind != "function":
            raise ValueError(_unsupported(kind))
        case _:
            raise ValueError("is none of the choices")


Mode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Mode | NamedChoice, PlainValidator(_read_choice, json_schema_input_type=Mode | dict[str, Any])
]
"""Which calls an answer makes: none, as the model likes, one at least, or one of this function."""


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Check what no tool shows alone.

    Args:
        tools: None is the same as no `tools` in the request.
        choice: None is "auto" where there are tools, else "none".

    Raises:
        InvalidRequest: There are too many tools, two of one name, or not the one that is chosen.
    """
    if len(tools) > MAX_TOOLS:
        raise _invalid("tools", f"are {len(tools)}", f"at most {MAX_TOOLS} tools")
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"tools[{index}].function.name"
            raise _invalid(field, f"{name} is there already", "a name of its own for each tool")
    if choice not in (None, "none") and not tools:
        raise _invalid("tool_choice", "there are no tools to choose from", "null without `tools`")
    if isinstance(choice, NamedChoice) and choice.name not in names:
        allowed = ", ".join(names)[:200]
        raise _invalid("tool_choice", f"there is no tool {choice.name[:64]!r}", allowed)


def shown_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> list[dict[str, object]]:
    """The tools that the prompt tells of: none if none may be called (as vLLM, unlike OpenAI)."""
    return [] if choice == "none" else [tool.for_template() for tool in tools]


def call_schema(
    tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool = True
) -> dict[str, object] | None:
    """The JSON schema of an answer that must be calls; None where it need not.

    The answer is an object `{"name": ..., "arguments": {...}}`, or a list of 1 to `MAX_CALLS` of
    them where any tool and several calls at once are allowed. See `response_parser.ForcedCalls`.

    Args:
        tools: Checked by `check_tools` together with `choice`.
        choice: Which must be called, if any.
        parallel: Whether several calls may be made; a function that is named is called once.
    """
    functions = [tool.function for _, tool in _forced(tools, choice)]
    if not functions:
        return None
    calls = [_call(function.name) for function in functions]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if choice == "required" and parallel:
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_CALLS}
    definitions = {function.name: _moved_arguments(function) for function in functions}
    return {**call, "$defs": definitions}


def argument_schemas(
    tools: Sequence[Tool], choice: ToolChoice | None
) -> Iterator[tuple[str, Schema]]:
    """What `call_schema` is made of: each tool's place in the request and its arguments' schema.

    Where the whole cannot be compiled, the first of these that cannot either is the one to name.
    """
    for index, tool in _forced(tools, choice):
        yield f"tools[{index}].function.parameters", tool.function.arguments()


def _forced(tools: Sequence[Tool], choice: ToolChoice | None) -> list[tuple[int, Tool]]:
    """Those of which one must be called, by their places."""
    match choice:
        case "required":
            return list(enumerate(tools))
        case NamedChoice(name):
            return [(i, tool) for i, tool in enumerate(tools) if tool.function.name == name]
        case _:
            return []


def _call(name: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved_arguments(function: Function) -> object:
    """The arguments' schema as a definition of another one, with its references still right."""
    schema = {k: v for k, v in function.arguments().items() if k not in ("$id", "$schema")}
    return _moved(schema, f"#/$defs/{function.name}")


def _moved(schema: object, base: str) -> object:
    """`schema` with its references to itself, which begin with "#", under `base`."""
    if isinstance(schema, list):
        return [_moved(item, base) for item in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    members = cast("dict[str, object]", schema)
    return {keyword: _moved_member(keyword, value, base) for keyword, value in members.items()}


def _moved_member(keyword: str, value: object, base: str) -> object:
    if keyword == "$ref" and isinstance(value, str) and value.startswith("#"):
        return base + value[1:]
    if keyword in _DATA:
        return value
    if keyword in _BY_NAME and isinstance(value, dict):
        named = cast("dict[str, object]", value)
        return {name: _moved(schema, base) for name, schema in named.items()}
    return _moved(value, base)


def _invalid(field: str, problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {problem}; allowed: {allowed}", field=field, allowed=allowed)
