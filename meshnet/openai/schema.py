"""`POST /v1/chat/completions`: a body to a ChatRequest, and that to a GenerationRequest.

The one rule for fields: null is absent; what is in `parameters.PARAMETERS` is used, passed over or
refused as it says there; any other is accepted and listed in `ignored_params`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
)
from pydantic_core import from_json

from meshnet.errors import ContextLengthExceeded, InvalidRequest
from meshnet.generation import GenerationRequest, Sampling
from meshnet.openai.messages import Messages
from meshnet.openai.parameters import PARAMETERS, refuse_unsupported
from meshnet.text.tokenizer import ChatTokenizer

_MAX_IGNORED_PARAMS: Final = 20
_MAX_NAME_CHARS: Final = 64
_PROBLEMS: Final = {  # where pydantic's own words speak of Python
    "missing": "is missing",
    "model_type": "is not an object",
    "too_short": "is empty",
}
_UNSAFE_IN_HEADER: Final = re.compile(r"[^\w.-]", re.ASCII)


def _whole(value: object) -> object:
    """3.0 is a count, as JSON knows one kind of number; true and "3" are none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_nulls(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in cast("dict[str, object]", value).items() if v is not None}


Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Count = Annotated[Whole, Field(ge=1, lt=2**31)]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False
    """A no-op: nothing is padded here."""


class ChatRequest(BaseModel):
    """A checked chat request. Silent parameters have OpenAI's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[StrictStr, Field(min_length=1)]
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[Number, Field(le=2)] = 1.0
    top_p: Annotated[Number, Field(le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] = 0
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: StrictBool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(_without_nulls)] | None = None
    ignored_params: tuple[str, ...] = ()
    """Unknown fields of the body: at most 20, each safe as a word in a header."""

    @property
    def token_limit(self) -> int | None:
        """The most tokens the answer may have; None fills the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that carries the counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, seed: int) -> Sampling:
        """How to pick tokens; `seed` is used only if the client gave none."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=seed if self.seed is None else self.seed,
        )


def parse_chat_request(body: bytes) -> ChatRequest:
    """Check a request's body.

    Raises:
        InvalidRequest: The body is not a JSON object, or a field is wrong; `field` names the first
            one and `allowed` says what it may be. The text holds at most 200 characters of input.
        UnsupportedParameter: A field asks for what is not implemented.
    """
    fields = _read_object(body)
    for name, value in fields.items():
        refuse_unsupported(name, value)
    used: dict[str, object] = {
        name: value
        for name, value in fields.items()
        if name in PARAMETERS and PARAMETERS[name].handling == "used"
    }
    try:
        chat = ChatRequest.model_validate({**used, "ignored_params": _ignored(fields)})
    except ValidationError as error:
        raise _to_invalid_request(error) from error
    if chat.stream_options is not None and not chat.stream:
        raise _invalid("stream_options", "is only allowed with `stream`: true")
    return chat


def to_generation_request(
    chat: ChatRequest, tokenizer: ChatTokenizer, *, max_positions: int, seed: int
) -> GenerationRequest:
    """Encode the conversation and fit the answer into the context. CPU work: call it in a thread.

    Args:
        chat: The checked request.
        tokenizer: The served model's.
        max_positions: The context in tokens, prompt and answer together.
        seed: A fresh random one; used if the client gave none.

    Raises:
        InvalidRequest: The chat template refuses the messages, or makes nothing of them.
        ContextLengthExceeded: Prompt and answer do not fit the context.
    """
    prompt_ids = tokenizer.encode_chat([message.for_template() for message in chat.messages])
    if not prompt_ids:
        raise _invalid("messages", "the model's chat template makes no prompt of them")
    room = max_positions - len(prompt_ids)
    if room < 1 or (chat.token_limit or 0) > room:
        raise _too_long(len(prompt_ids), chat.token_limit, max_positions)
    return GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        max_tokens=chat.token_limit or room,
        sampling=chat.sampling(seed),
    )


def _read_object(body: bytes) -> dict[str, object]:
    """The body's fields, without those that are null."""
    try:
        # Unlike json.loads this refuses NaN, lone surrogates and hundreds of nested lists.
        raw: object = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body is not a JSON object")
    return cast("dict[str, object]", _without_nulls(cast("dict[str, object]", raw)))


def _ignored(fields: Mapping[str, object]) -> tuple[str, ...]:
    names = [name for name in fields if name not in PARAMETERS]
    options = fields.get("stream_options")
    if isinstance(options, dict):
        names += [
            f"stream_options.{name}"
            for name in cast("dict[str, object]", options)
            if name not in StreamOptions.model_fields
        ]
    return tuple(
        _UNSAFE_IN_HEADER.sub("?", name[:_MAX_NAME_CHARS]) for name in names[:_MAX_IGNORED_PARAMS]
    )


def _to_invalid_request(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name, *path = first["loc"]
    where = str(name) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    problem = _PROBLEMS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    return _invalid(str(name), problem[:1].lower() + problem[1:], where=where)


def _invalid(name: str, problem: str, *, where: str | None = None) -> InvalidRequest:
    where, allowed = where or name, PARAMETERS[name].allowed
    return InvalidRequest(f"{where}: {problem}; allowed: {allowed}", field=where, allowed=allowed)


def _too_long(n_prompt: int, token_limit: int | None, max_positions: int) -> ContextLengthExceeded:
    # LiteLLM looks for the first sentence and LangChain for the code, both in the text.
    if token_limit is None:
        problem = f"your messages are {n_prompt} tokens long and leave no room for an answer"
    else:
        problem = (
            f"you asked for {n_prompt + token_limit} tokens: {n_prompt} in the messages and"
            f" {token_limit} in the answer"
        )
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_positions} tokens. However, {problem}."
        " Please shorten one of them. (context_length_exceeded)",
        field="messages",
        allowed=max_positions,
    )
