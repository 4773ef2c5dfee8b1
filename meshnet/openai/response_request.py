"""`POST /v1/responses`: a body to that of a chat, whose parser and plan do the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr
from pydantic_core import to_json

from meshnet.errors import InvalidRequest
from meshnet.openai.answers import AnswerPlan, Serving
from meshnet.openai.chat_request import (
    ChatRequest,
    chat_work,
    parse_chat_request,
)
from meshnet.openai.fields import RequestFields, invalid, parse_fields, without_nulls
from meshnet.openai.parameters import CHAT, RESPONSES, Parameter
from meshnet.openai.response_answer import Echo, ResponseForm, ResponseWriter
from meshnet.openai.response_input import Items, to_messages
from meshnet.openai.sampling_fields import Limit, TopLogprobs

_LOGPROBS: Final = "message.output_text.logprobs"
_OUR_NAMES: Final = (
    (re.compile(r"messages\b.*"), "input"),
    (re.compile(r"max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"response_format\b(\.json_schema\b)*"), "text.format"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)
"""What the chat endpoint calls otherwise."""

Includable = Literal[
    "message.output_text.logprobs",
    # Parts of what no answer of this server holds, or that are there anyway: reasoning is plain.
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
Metadata = Annotated[
    dict[Annotated[StrictStr, Field(max_length=64)], Annotated[StrictStr, Field(max_length=512)]],
    Field(max_length=16),
]


class TextOptions(BaseModel):
    """What the text of an answer must look like. A misspelt constraint is not to be lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: dict[str, Any] | None = None
    verbosity: object = None
    """A no-op."""


class CacheOptions(BaseModel):
    """Hints, all but one."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    prewarm: Literal[False] | None = None
    """True asks for no answer."""


def _document_chats(schema: dict[str, Any]) -> None:
    """Add what is the chat endpoint's to the JSON schema of what is not."""
    own: dict[str, Any] = schema["properties"]
    used = [name for name, parameter in RESPONSES.items() if parameter.handling == "used"]
    chats = ChatRequest.model_json_schema()["properties"]
    own.update({name: chats[name] for name in used if name not in own})
    schema["required"].append("model")


class ResponseFields(RequestFields):
    """What this endpoint has in its own shape; the rest is the chat endpoint's, and unchecked."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_document_chats)

    input: Items
    instructions: StrictStr | None = None
    max_output_tokens: Limit | None = None
    text: Annotated[TextOptions, BeforeValidator(without_nulls)] = TextOptions()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: object = None
    include: tuple[Includable, ...] = ()
    top_logprobs: TopLogprobs | None = None
    metadata: Metadata = {}
    prompt_cache_options: CacheOptions = CacheOptions()

    def to_chat(self) -> dict[str, object]:
        """The body of a chat request that asks for the same; null is absent."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        has_logprobs = _LOGPROBS in self.include
        # Frameworks say that nothing is chosen among no tools.
        no_choice = not self.tools and self.tool_choice == "auto"
        return {
            **(self.model_extra or {}),
            "messages": [*system, *to_messages(self.input)],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _chat_format(self.text.format),
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": None if no_choice else _chat_choice(self.tool_choice),
            "logprobs": has_logprobs,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
        }

    def echo(self, chat: ChatRequest) -> Echo:
        """What the response repeats, with the values that count where the client gave none."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": chat.token_limit,
            "metadata": self.metadata,
            "parallel_tool_calls": chat.parallel_tool_calls,
            "temperature": chat.temperature,
            "text": {"format": self.text.format or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in self.tools],
            "top_logprobs": chat.top_logprobs or 0,
            "top_p": chat.top_p,
        }


def _chat_tool(tool: Mapping[str, object]) -> object:
    function = {name: value for name, value in tool.items() if name != "type"}
    return without_nulls({"type": tool.get("type"), "function": without_nulls(function)})


def _chat_choice(choice: object) -> object:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case _:
            return choice


def _chat_format(form: Mapping[str, object] | None) -> object:
    match form:
        case {"type": "json_schema", **schema}:
            return {"type": "json_schema", "json_schema": without_nulls(schema)}
        case _:
            return form


def parse_response_request(body: bytes, *, strict: bool = False) -> tuple[ChatRequest, Echo]:
    """Check a request's body; `strict` refuses unknown parameters.

    Returns:
        The chat request that asks for the same, and what the response repeats.

    Raises:
        InvalidRequest: As `parse_chat_request`, by the names of this endpoint.
    """
    fields = parse_fields(body, ResponseFields, RESPONSES, strict=strict)
    if fields.top_logprobs and _LOGPROBS not in fields.include:
        problem = f'is only allowed with `include`: ["{_LOGPROBS}"]'
        raise invalid(RESPONSES, "top_logprobs", problem)
    with _our_names():
        chat = parse_chat_request(to_json(fields.to_chat()))
    return chat.model_copy(update={"ignored_params": fields.ignored_params}), fields.echo(chat)


def plan_response(
    chat: ChatRequest, serving: Serving, *, echo: Echo, clock: Callable[[], float]
) -> AnswerPlan:
    """What to generate, and how to write it. CPU work: call it in a thread.

    Args:
        chat: From `parse_response_request`.
        serving: What answers it.
        echo: From `parse_response_request`.
        clock: Seconds since 1970.

    Raises:
        InvalidRequest: As `plan_chat`, by the names of this endpoint.
        ContextLengthExceeded: Prompt and answer do not fit the context.
    """
    with _our_names():
        work = chat_work(chat, serving)
    (parser,) = work.parsers
    form = ResponseForm(
        heading=serving.heading,
        n_prompt=len(work.generation.prompt_ids),
        texts=serving.tokenizer,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        echo=echo,
        clock=clock,
    )
    return AnswerPlan([work.generation], ResponseWriter(form, parser))


@contextmanager
def _our_names() -> Generator[None]:
    """Let the chat layer's refusals speak of this endpoint's parameters."""
    try:
        yield
    except InvalidRequest as error:
        raise _renamed(error) from error


def _renamed(error: InvalidRequest) -> InvalidRequest:
    theirs = str(error.members.get("field", ""))
    ours = _our_name(theirs)
    said, says = _allowed(CHAT, theirs), _allowed(RESPONSES, ours)
    message = re.sub(f"^{re.escape(theirs)}", lambda _: ours, error.message)
    if message.endswith(said):
        message = message.removesuffix(said) + says
    members = error.members | ({"field": ours} if theirs else {})
    if members.get("allowed") == said:
        members["allowed"] = says
    return type(error)(message, **members)


def _our_name(theirs: str) -> str:
    for pattern, ours in _OUR_NAMES:
        if pattern.match(theirs):
            return pattern.sub(ours, theirs, count=1)
    return theirs


def _allowed(table: Mapping[str, Parameter], field: str) -> str:
    """What is said to be allowed for the parameter that `field` is in; "" of an unknown one."""
    parameter = table.get(re.split(r"\W", field)[0])
    return "" if parameter is None else parameter.allowed
