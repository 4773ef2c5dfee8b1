"""`POST /v1/responses`: a chat in the shape of OpenAI's newer endpoint. Nothing is stored."""

from __future__ import annotations

from functools import partial
from time import time  # noqa: TID251  # `completed_at` is a wall-clock second by OpenAI's definition

from fastapi import APIRouter, Depends, Request, Response

from meshnet.openai.response_request import ResponseFields, parse_response_request, plan_response
from services.head.access import count_request
from services.head.openapi import GENERATION_ERRORS, body_of
from services.head.routes.answering import answer
from services.head.routes.request import HeadDep, read_json

responses = APIRouter(
    prefix="/v1", dependencies=[Depends(count_request)], responses=GENERATION_ERRORS
)


@responses.post("/responses", openapi_extra=body_of(ResponseFields))
async def create_response(request: Request, head: HeadDep) -> Response:
    """Answer a conversation, in one piece or as a stream of events."""
    body = await read_json(request, head)
    chat, echo = parse_response_request(body, strict=head.settings.strict_parameters)
    plan = partial(plan_response, echo=echo, clock=time)
    return await answer(request, head, chat, plan, "resp_")
