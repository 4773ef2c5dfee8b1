"""What a model's tokenizer does, for clients that have none. Not under `/v1`, as vLLM has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from meshnet.errors import InvalidRequest
from meshnet.openai.fields import RequestFields
from meshnet.openai.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    parse_detokenize_request,
    parse_tokenize_request,
    tokenize,
    tokenizer_info,
)
from meshnet.text.tokenizer import ChatTokenizer
from services.head.head import Head
from services.head.openapi import body_of, errors
from services.head.routes.request import HeadDep, ignored_params, read_json

tokens = APIRouter()


@tokens.post(
    "/tokenize",
    responses=errors(400, 401, 404, 413, 415),
    openapi_extra=body_of(TokenizeRequest),
)
async def tokenize_text(request: Request, head: HeadDep) -> JSONResponse:
    """The tokens of a text or of a conversation."""
    body = await read_json(request, head)
    fields = parse_tokenize_request(body, strict=head.settings.strict_parameters)
    answer = await asyncio.to_thread(tokenize, fields, _tokenizer(head, fields.model))
    return _answer(answer, fields)


@tokens.post(
    "/detokenize",
    responses=errors(400, 401, 404, 413, 415),
    openapi_extra=body_of(DetokenizeRequest),
)
async def detokenize_ids(request: Request, head: HeadDep) -> JSONResponse:
    """The text of some tokens."""
    body = await read_json(request, head)
    fields = parse_detokenize_request(body, strict=head.settings.strict_parameters)
    answer = await asyncio.to_thread(detokenize, fields, _tokenizer(head, fields.model))
    return _answer(answer, fields)


@tokens.get("/tokenizer_info", responses=errors(400, 401, 404))
@tokens.head("/tokenizer_info", include_in_schema=False)
async def describe_tokenizer(head: HeadDep, model: str | None = None) -> dict[str, object]:
    """The special tokens and the chat template."""
    return tokenizer_info(_tokenizer(head, model))


def _answer(body: Mapping[str, object], fields: RequestFields) -> JSONResponse:
    headers = ignored_params(fields)
    return JSONResponse(body, headers=headers)


def _tokenizer(head: Head, model: str | None) -> ChatTokenizer:
    """That of a served model, which need not be named if it is the only one."""
    served = list(head.models)
    if model is None and len(served) > 1:
        allowed = ", ".join(served)
        raise InvalidRequest(
            f"model: is missing, and several are served; allowed: {allowed}",
            field="model",
            allowed=served,
        )
    return head.model(served[0] if model is None else model).tokenizer
