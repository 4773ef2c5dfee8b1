"""The real model follows JSON schemas: its answers are valid, or the schema is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.cli.cluster import LocalCluster
from tests.support.http import plain_client
from tests.support.schemas import is_valid

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),  # the set-up fetches a model and loads it twice
]


def an_object(**properties: object) -> dict[str, object]:
    """All of them, and nothing else."""
    required = list(properties)
    base = {"type": "object", "properties": properties, "required": required}
    return {**base, "additionalProperties": False}


WORD = {"type": "string", "maxLength": 12}
TWO = {"minItems": 2, "maxItems": 2}
PROMPT = "Give the number 7 as JSON. It has no children and nothing comes next: null."
"""With this one the model's recursion comes to an end."""
SCHEMAS: dict[str, dict[str, object]] = {
    "a nested object": an_object(
        name=WORD, address=an_object(street=WORD, zip={"type": "integer", "maximum": 99999})
    ),
    "an enum": an_object(colour={"enum": ["red", "green", "blue"]}, sure={"type": "boolean"}),
    "an array with bounds": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "exclusiveMaximum": 10},
        "minItems": 3,
        "maxItems": 4,
    },
    "recursion": {
        "$ref": "#/$defs/term",
        "$defs": {
            "term": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 99},
                    an_object(add={"type": "array", "items": {"$ref": "#/$defs/term"}, **TWO}),
                ]
            }
        },
    },
    "a pattern": an_object(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(two_nodes: LocalCluster) -> AsyncGenerator[httpx.AsyncClient]:
    async with plain_client(two_nodes.base_url) as made:
        made.timeout = httpx.Timeout(300)
        yield made


def body_of(schema: object, **changes: object) -> dict[str, object]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 250,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
        **changes,
    }


async def ask(client: httpx.AsyncClient, schema: object) -> tuple[str, str]:
    """The answer's text, and why it ended."""
    response = await client.post("chat/completions", json=body_of(schema))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


async def stream(client: httpx.AsyncClient, schema: object) -> tuple[str, str]:
    """The same, of a stream."""
    text, finish = "", ""
    body = body_of(schema, stream=True)
    async with client.stream("POST", "chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    return text, finish


@pytest.mark.parametrize("name", SCHEMAS)
async def test_an_answer_is_valid(client: httpx.AsyncClient, name: str) -> None:
    """Plain and streamed, the answer is the same, ends by itself, and the schema allows it."""
    text, finish = await ask(client, SCHEMAS[name])

    assert is_valid(SCHEMAS[name], text), text
    assert finish == "stop"
    assert await stream(client, SCHEMAS[name]) == (text, finish)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"not": {}}}}, "`not`"),
        ({"type": "string", "pattern": "^[a-"}, "unclosed character class"),
        ({"$ref": "#/$defs/nothing"}, "`$ref`"),
        ({"type": "integer", "multipleOf": 100000007}, "takes longer"),
    ],
)
async def test_what_cannot_be_enforced_is_refused(
    client: httpx.AsyncClient, schema: dict[str, object], problem: str
) -> None:
    """It is answered 400 with the field and the keyword; a request beside it is answered well."""
    good = SCHEMAS["an enum"]
    refused, (text, _) = await asyncio.gather(
        client.post("chat/completions", json=body_of(schema)), ask(client, good)
    )
    error: dict[str, Any] = refused.json()["error"]

    assert (refused.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert problem in error["message"]
    assert is_valid(good, text)
