"""Our own OpenAPI document: bodies are parsed by hand, so it is told here what they may hold."""

from __future__ import annotations

from typing import Any, Final, cast

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from meshnet.openai.chat_request import ChatRequest
from meshnet.openai.completion_request import CompletionRequest
from meshnet.openai.fields import RequestFields
from meshnet.openai.response_request import ResponseFields
from meshnet.openai.tokenization import DetokenizeRequest, TokenizeRequest

_REF: Final = "#/components/schemas/{model}"
_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES: Final = {
    400: "the request is wrong; `param` names the field",
    401: "an API key is missing or wrong",
    403: "not allowed",
    404: "no such model",
    413: "the body is too long",
    415: "the body is not JSON",
    429: "too many requests of this key; see Retry-After",
    500: "a fault of ours; the message holds the request's id",
    503: "not now: too many requests, or a shard is missing; see Retry-After",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of these statuses, for a route's `responses`."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


GENERATION_ERRORS: Final = errors(400, 401, 403, 404, 413, 415, 429, 500, 503)
"""What an endpoint that generates may answer besides an answer."""


def body_of(kind: type[RequestFields]) -> dict[str, Any]:
    """The documentation of a body, for a route's `openapi_extra`."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


_BODIES: Final = (
    ChatRequest,
    CompletionRequest,
    ResponseFields,
    TokenizeRequest,
    DetokenizeRequest,
)


def document(app: FastAPI) -> None:
    """Have the app's document hold the schemas of bodies and of an error."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = made.setdefault("components", {}).setdefault("schemas", {})
            components.update(_schemas(), Error=_ERROR)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi


def _schemas() -> dict[str, Any]:
    _, made = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_REF)
    definitions = cast("dict[str, dict[str, Any]]", made.get("$defs", {}))
    for kind in _BODIES:
        definition = definitions[kind.__name__]
        definition["properties"].pop("ignored_params")  # not the client's to give
        definition["additionalProperties"] = True
    return definitions
