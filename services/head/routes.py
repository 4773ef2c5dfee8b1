"""The head's HTTP surface: the OpenAI endpoint, the cluster's view, health and metrics."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from hmac import compare_digest
from time import time  # noqa: TID251  # `created` is a wall-clock second by OpenAI's definition
from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field, TypeAdapter, ValidationError

from meshnet.errors import Forbidden, InvalidRequest, PayloadTooLarge
from meshnet.generation import GenerationRequest, TokenEvent
from meshnet.head.call import Trace
from meshnet.ids import is_traceparent, new_id
from meshnet.openai.bodies import Completion
from meshnet.openai.models import ModelCard, ModelList, model_card, model_list, require_served
from meshnet.openai.schema import ChatRequest, parse_chat_request, to_generation_request
from meshnet.openai.stream import collect, sse_chunks
from meshnet.topology import HopSpec, Route
from meshnet.wire.headers import ROUTE, TRACEPARENT
from services.head.cluster_view import ClusterView, cluster_view
from services.head.head import Head
from services.head.settings import HopSetting
from services.head.streaming import EventStream, until_client_leaves

_ROUTE_HEADER = TypeAdapter[tuple[HopSetting, ...]](
    Annotated[tuple[HopSetting, ...], Field(min_length=1)]
)


def _head(request: Request) -> Head:
    return cast("Head", request.state.head)


HeadDep = Annotated[Head, Depends(_head)]

openai = APIRouter(prefix="/v1")
operations = APIRouter()


@openai.post("/chat/completions")
async def create_chat_completion(request: Request, head: HeadDep) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    chat = parse_chat_request(await _read_body(request, head.settings.max_body_bytes))
    require_served(chat.model, [head.model_name])
    head.readiness.check_admission()
    route = await _route(request, head)
    generation = await asyncio.to_thread(
        to_generation_request,
        chat,
        head.tokenizer,
        max_positions=route.max_positions,
        seed=secrets.randbits(63),
    )
    return await _answer(request, head, chat, generation, route)


async def _answer(
    request: Request, head: Head, chat: ChatRequest, generation: GenerationRequest, route: Route
) -> Response:
    completion = Completion(
        id=f"chatcmpl-{new_id()}",
        created=int(time()),
        model=head.model_name,
        system_fingerprint=f"mesh_{route.hops[0].facts.revision[:12]}",
    )
    headers = {"x-ignored-params": ",".join(chat.ignored_params)} if chat.ignored_params else {}
    events = _events(request, head, generation, route)
    prompt_tokens = len(generation.prompt_ids)
    if not chat.stream:
        body = await until_client_leaves(
            request, collect(events, completion, prompt_tokens=prompt_tokens)
        )
        return JSONResponse(body, headers=headers)
    chunks = sse_chunks(
        events,
        completion,
        prompt_tokens=prompt_tokens,
        include_usage=chat.include_usage,
        request_id=request.state.request_id,
    )
    # The status is sent with the first token: until then an error is still answered with its own.
    first = await until_client_leaves(request, _first(chunks))
    return EventStream(first, chunks, headers)


async def _first(chunks: AsyncGenerator[str]) -> str:
    return await anext(chunks)


def _events(
    request: Request, head: Head, generation: GenerationRequest, route: Route
) -> AsyncGenerator[TokenEvent]:
    given = request.headers.get(TRACEPARENT, "")
    trace = Trace(request.state.request_id, given if is_traceparent(given) else None)
    pinned = route if ROUTE in request.headers else None
    events = head.generator.generate(generation, lambda: head.pipeline(trace, pinned))
    return head.metrics.observed(events)


async def _route(request: Request, head: Head) -> Route:
    """The configured route, or the one that a caller with the cluster key pins."""
    pinned = request.headers.get(ROUTE)
    if pinned is None:
        return await head.readiness.route()
    _check_cluster_key(request, head)
    try:
        hops = _ROUTE_HEADER.validate_json(pinned)
    except ValidationError as error:
        raise InvalidRequest(
            f"{ROUTE}: {error.errors(include_url=False, include_input=False)[0]['msg']}",
            field=ROUTE,
            value=pinned[:200],
            allowed='[{"endpoint": "http://host:port", "start_layer": 0}, ...]',
        ) from error
    return await head.book.pinned_route([HopSpec(hop.endpoint, hop.start_layer) for hop in hops])


def _check_cluster_key(request: Request, head: Head) -> None:
    key = head.settings.cluster_key
    if key is None:
        raise Forbidden(f"{ROUTE} needs a cluster key, and this head has none", field=ROUTE)
    given = request.headers.get("authorization", "")
    if not compare_digest(given.encode(), f"Bearer {key.get_secret_value()}".encode()):
        raise Forbidden(f"{ROUTE} needs the cluster key as bearer token", field=ROUTE)


async def _read_body(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > limit:
            raise PayloadTooLarge(
                f"the body is longer than {limit} bytes", field="body", allowed=limit
            )
        parts.append(part)
    return b"".join(parts)


@openai.get("/models")
@openai.head("/models", include_in_schema=False)
async def list_models(head: HeadDep) -> ModelList:
    """The one model served."""
    return model_list([_card(head)])


@openai.get("/models/{model:path}")
@openai.head("/models/{model:path}", include_in_schema=False)
async def retrieve_model(model: str, head: HeadDep) -> ModelCard:
    """The model, if it is the one served."""
    require_served(model, [head.model_name])
    return _card(head)


def _card(head: Head) -> ModelCard:
    return model_card(
        head.model_name, created=head.started_at, max_model_len=head.tokenizer.max_positions or 0
    )


@openai.get("/cluster")
async def cluster(head: HeadDep) -> ClusterView:
    """The hops, what each says of itself, and where the time of recent decode steps went."""
    return cluster_view(head.book, head.kit.times)


@operations.get("/livez")
@operations.head("/livez", include_in_schema=False)
@operations.get("/health")
@operations.head("/health", include_in_schema=False)
async def livez() -> dict[str, str]:
    """The event loop turns."""
    return {"status": "alive"}


@operations.get("/readyz")
@operations.head("/readyz", include_in_schema=False)
async def readyz(head: HeadDep) -> JSONResponse:
    """Whether a request would be served; the body says why not."""
    ready = head.readiness.state()
    body = {"state": ready.state, "reason": ready.reason}
    return JSONResponse(body, status_code=200 if ready.serves else 503)


@operations.get("/metrics")
async def metrics(head: HeadDep) -> Response:
    """Numbers for Prometheus."""
    return Response(head.metrics.render(), media_type=CONTENT_TYPE_LATEST)
