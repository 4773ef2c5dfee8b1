"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`: a tokenizer, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StrictBool, StrictStr
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from meshnet.openai.fields import RequestFields, TokenIds, invalid, parse_fields
from meshnet.openai.messages import Messages
from meshnet.openai.parameters import DETOKENIZE, TOKENIZE
from meshnet.openai.sampling_fields import check_ids
from meshnet.openai.tools import Tool, check_tools, shown_tools
from meshnet.text.tokenizer import ChatTokenizer

_OF_A_CHAT: Final = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


class TokenizeRequest(RequestFields):
    """A checked request for the tokens of a text or of a conversation."""

    model: Annotated[StrictStr, Field(min_length=1)] | None = None
    prompt: StrictStr | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True, min_length=1)] = ()
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, object] = {}


class DetokenizeRequest(RequestFields):
    """A checked request for the text of some tokens."""

    model: Annotated[StrictStr, Field(min_length=1)] | None = None
    tokens: TokenIds


class Tokens(TypedDict):
    """What `/tokenize` answers. `max_model_len` is the context in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """What `/detokenize` answers."""

    prompt: str


def parse_tokenize_request(body: bytes, *, strict: bool = False) -> TokenizeRequest:
    """Check a body of `/tokenize`.

    Raises:
        InvalidRequest: As `parse_fields`; or there are both a text and a conversation, or neither,
            or a parameter is the other one's.
    """
    fields = parse_fields(body, TokenizeRequest, TOKENIZE, strict=strict)
    if fields.messages is None:
        if fields.prompt is None:
            raise invalid(TOKENIZE, "prompt", "is missing, and so are `messages`")
        for name in _OF_A_CHAT:
            if name in fields.model_fields_set:
                raise invalid(TOKENIZE, name, "is only allowed with `messages`")
    elif fields.prompt is not None:
        raise invalid(TOKENIZE, "prompt", "is not allowed beside `messages`")
    elif fields.add_special_tokens:
        raise invalid(TOKENIZE, "add_special_tokens", "is only allowed with `prompt`")
    check_tools(fields.tools, None)
    return fields


def parse_detokenize_request(body: bytes, *, strict: bool = False) -> DetokenizeRequest:
    """Check a body of `/detokenize`. Raises as `parse_fields`."""
    return parse_fields(body, DetokenizeRequest, DETOKENIZE, strict=strict)


def tokenize(fields: TokenizeRequest, tokenizer: ChatTokenizer) -> Tokens:
    """The tokens of a text or of a conversation. CPU work: call it in a thread.

    Raises:
        InvalidRequest: The chat template refuses the conversation.
    """
    ids = _ids(fields, tokenizer)
    return {
        "count": len(ids),
        "max_model_len": tokenizer.max_positions or 0,
        "tokens": ids,
        "token_strs": [*map(tokenizer.token_text, ids)] if fields.return_token_strs else None,
    }


def detokenize(fields: DetokenizeRequest, tokenizer: ChatTokenizer) -> Text:
    """The text of some tokens, control tokens and all. CPU work: call it in a thread.

    Raises:
        InvalidRequest: An id is not in the vocabulary.
    """
    check_ids("tokens", fields.tokens, tokenizer.vocab_size)
    return {"prompt": tokenizer.decode(fields.tokens)}


def tokenizer_info(tokenizer: ChatTokenizer) -> dict[str, object]:
    """What a client must know besides, so that it needs no tokenizer of its own."""
    return {**tokenizer.describe(), "model_max_length": tokenizer.max_positions or 0}


def _ids(fields: TokenizeRequest, tokenizer: ChatTokenizer) -> list[int]:
    if fields.messages is None:
        add = fields.add_special_tokens is not False
        return tokenizer.encode_prompt(fields.prompt or "", add_special_tokens=add)
    return tokenizer.encode_chat(
        [message.for_template() for message in fields.messages],
        tools=shown_tools(fields.tools, None),
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        template_variables=fields.chat_template_kwargs,
    )
