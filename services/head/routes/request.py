"""What routes take from a request: the head, the body, a pinned route."""

from __future__ import annotations

from hmac import compare_digest
from typing import Annotated, cast

from fastapi import Depends, Request
from pydantic import Field, TypeAdapter, ValidationError

from meshnet.errors import Forbidden, InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from meshnet.openai.fields import RequestFields
from meshnet.topology import HopSpec, Route
from meshnet.wire.headers import ROUTE
from services.head.head import Head
from services.head.served_model import ServedModel
from services.head.settings import HopSetting

_ROUTE_HEADER = TypeAdapter[tuple[HopSetting, ...]](
    Annotated[tuple[HopSetting, ...], Field(min_length=1)]
)


def _head(request: Request) -> Head:
    return cast("Head", request.state.head)


HeadDep = Annotated[Head, Depends(_head)]


async def read_json(request: Request, head: Head) -> bytes:
    """The body, which must say that it is JSON, or say nothing.

    Raises:
        UnsupportedMediaType: It says something else.
        PayloadTooLarge: It is longer than the settings allow; the rest of it was not read.
    """
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media_type.lower() != "application/json":
        raise UnsupportedMediaType(
            f"content-type: {media_type[:100]!r} is not read here; allowed: application/json",
            field="content-type",
            allowed="application/json",
        )
    limit = head.settings.max_body_bytes
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


async def pinned_route(request: Request, head: Head, model: ServedModel) -> Route | None:
    """The route that a caller with the cluster key pins, if one does.

    Raises:
        Forbidden: The caller may not, or an endpoint is not a configured one.
        InvalidRequest: The header is malformed.
        RouteError: The hops do not make a route.
    """
    pinned = request.headers.get(ROUTE)
    if pinned is None:
        return None
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
    return await model.book.pinned_route([HopSpec(hop.endpoint, hop.start_layer) for hop in hops])


def ignored_params(fields: RequestFields) -> dict[str, str]:
    """The header that names what was passed over, if anything was."""
    return {"x-ignored-params": ",".join(fields.ignored_params)} if fields.ignored_params else {}


def _check_cluster_key(request: Request, head: Head) -> None:
    key = head.settings.cluster_key
    if key is None:
        raise Forbidden(f"{ROUTE} needs a cluster key, and this head has none", field=ROUTE)
    given = request.headers.get("authorization", "")
    if not compare_digest(given.encode(), f"Bearer {key.get_secret_value()}".encode()):
        raise Forbidden(f"{ROUTE} needs the cluster key as bearer token", field=ROUTE)
