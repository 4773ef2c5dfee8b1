"""`response_format`: what an answer must look like, checked and compiled."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationInfo,
    field_validator,
)

from meshnet.generation import Grammar
from meshnet.grammar.compiler import GrammarCompiler

_TYPE_OF: Final = {"json_schema": "json_schema", "pattern": "regex", "grammar": "grammar"}


class JsonSchema(BaseModel):
    """A named schema.

    Every answer follows it, so `strict` changes nothing, and `description` is not shown to the
    model. Without `schema` any JSON is good, as with the schema {}.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: StrictStr | None = None
    schema_: Annotated[dict[str, object] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """What an answer must look like, one of OpenAI's three types or an extension of ours.

    Attributes:
        type: `text` is anything, `json_object` any JSON object.
        json_schema: Of the type `json_schema`.
        pattern: Of the extension `regex`: a regular expression, in Rust's dialect, that matches the
            answer as a whole.
        grammar: Of the extension `grammar`: rules in llguidance's form of Lark.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # One model rather than a union, whose errors would be at `response_format.json_schema.type`.
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: StrictStr | None = None
    grammar: StrictStr | None = None

    @field_validator(*_TYPE_OF)
    @classmethod
    def _belong_to_type(cls, value: object, info: ValidationInfo) -> object:
        type_, own_type = info.data.get("type"), _TYPE_OF[str(info.field_name)]
        if value is None and type_ == own_type:
            raise ValueError("is missing")
        if value is not None and type_ != own_type:
            raise ValueError(f"belongs to the type '{own_type}'")
        return value


def to_grammar(form: ResponseFormat | None, compiler: GrammarCompiler) -> Grammar | None:
    """Compile a format; None where anything is good. CPU work: call it in a thread.

    Raises:
        InvalidRequest: It cannot be enforced; `field` names the member.
        UnsupportedParameter: No answer of this model can be constrained.
    """
    match form:
        case ResponseFormat(type="json_object"):
            return compiler.json_schema({"type": "object"}, field="response_format")
        case ResponseFormat(json_schema=JsonSchema(schema_=schema)):
            field = "response_format.json_schema.schema"
            return compiler.json_schema({} if schema is None else schema, field=field)
        case ResponseFormat(pattern=str(pattern)):
            return compiler.regex(pattern, field="response_format.pattern")
        case ResponseFormat(grammar=str(grammar)):
            return compiler.lark(grammar, field="response_format.grammar")
        case _:
            return None


def compile_schema(schema: object, compiler: GrammarCompiler, *, field: str) -> Grammar:
    """Compile any JSON schema, such as that of forced tool calls. CPU work, and raises as above.

    Args:
        schema: As read from JSON.
        compiler: The served model's.
        field: Where it is in the request, for errors.
    """
    return compiler.json_schema(schema, field=field)
