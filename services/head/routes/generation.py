"""The endpoints that generate: chat and completions. Embeddings are refused."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from meshnet.errors import UnsupportedParameter
from meshnet.openai.chat_request import ChatRequest, parse_chat_request, plan_chat
from meshnet.openai.completion_request import (
    CompletionRequest,
    parse_completion_request,
    plan_completion,
)
from services.head.access import count_request
from services.head.openapi import GENERATION_ERRORS, body_of, errors
from services.head.routes.answering import answer
from services.head.routes.request import HeadDep, read_json

generation = APIRouter(
    prefix="/v1", dependencies=[Depends(count_request)], responses=GENERATION_ERRORS
)


@generation.post("/chat/completions", openapi_extra=body_of(ChatRequest))
async def create_chat_completion(request: Request, head: HeadDep) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    body = await read_json(request, head)
    chat = parse_chat_request(body, strict=head.settings.strict_parameters)
    return await answer(request, head, chat, plan_chat, "chatcmpl-")


@generation.post("/completions", openapi_extra=body_of(CompletionRequest))
async def create_completion(request: Request, head: HeadDep) -> Response:
    """Go on with one or more texts, in one piece or as a stream."""
    body = await read_json(request, head)
    completion = parse_completion_request(body, strict=head.settings.strict_parameters)
    return await answer(request, head, completion, plan_completion, "cmpl-")


@generation.post("/embeddings", responses=errors(400))
async def create_embedding() -> Response:
    """Refused: what a causal model's hidden states make is no good embedding."""
    raise UnsupportedParameter(
        "this server makes no embeddings: a causal language model's hidden states are poor ones;"
        " use a model that was trained for them",
        field="model",
        allowed="chat and completions",
    )
