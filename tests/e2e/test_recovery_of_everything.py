"""A shard process that is killed in the middle of an answer changes nothing of it.

Whatever was asked for: the bytes of the stream are those of the undisturbed answer, but for ids and
time. The moments between are in tests/mesh/test_recovery_of_everything.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from meshnet.topology import even_spans
from services.cli.cluster import LocalCluster
from tests.support.answers import CHAT, COMPLETIONS, parts_of, texts_of
from tests.support.http import plain_client
from tests.support.streams import DONE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),  # each kill costs a shard's start
]

LINE = {"type": "string", "minLength": 12, "maxLength": 40}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "mood": {"enum": ["glad", "sad", "angry"]},
        "lines": {"type": "array", "items": LINE, "minItems": 4, "maxItems": 4},
    },
    "required": ["year", "mood", "lines"],
    "additionalProperties": False,
}
DRAWN: dict[str, Any] = {
    "model": "smollm2",
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.9,
    "top_p": 0.95,
    "min_p": 0.01,
    "seed": 11,
    "frequency_penalty": 1.2,
    "presence_penalty": 0.8,
    "repetition_penalty": 1.2,
    "logit_bias": {"281": 1.5, "260": -100},
}
PLACE = {"properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Write a song about the sea."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "song", "schema": SCHEMA},
            },
            "logprobs": True,
            "top_logprobs": 5,
            "max_tokens": 160,
        },
    ),
    "three-choices-with-stops": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "n": 3,
            "stop": [". ", "!\n\n"],
            "min_tokens": 12,
            "logprobs": True,
            "max_tokens": 24,
        },
    ),
    "forced-calls": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Compare the weather in Rome and Oslo."}],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": 60,
        },
    ),
    "echo": (
        COMPLETIONS,
        {"prompt": "Once upon a time", "echo": True, "logprobs": 3, "max_tokens": 24},
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(smollm2: Path) -> AsyncGenerator[LocalCluster]:
    """Two shard processes, which may take their time to come back on a busy machine."""
    env = {
        "MESHNET_HEAD_RECOVERY_TIMEOUT_S": "300",
        # The same is asked for twice, and told to the last digit.
        "MESHNET_HEAD_PREFIX_REUSE": "false",
    }
    async with LocalCluster(str(smollm2), even_spans(30, 2), threads=1, env=env) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncGenerator[httpx.AsyncClient]:
    async with plain_client(cluster.head_url) as made:
        made.timeout = httpx.Timeout(400)
        yield made


async def read(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncGenerator[str]:
    """The data of each event, as it comes."""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def as_told(events: list[str]) -> dict[int, list[Any]]:
    """What each choice is told, in order: all but what differs by nature, ids and time."""
    assert events[-1] == DONE
    told: dict[int, list[Any]] = {}
    for event in events[:-1]:
        chunk: dict[str, Any] = json.loads(event)
        chunk["id"] = chunk["created"] = None
        parts: list[dict[str, Any]] = chunk["choices"]
        for part in parts:
            for call in part.get("delta", {}).get("tool_calls", []):
                call["id"] = None
        told.setdefault(parts[0]["index"] if parts else -1, []).append(chunk)
    return told


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("schema", "tail"),
        ("schema", "first"),
        ("three-choices-with-stops", "tail"),
        ("forced-calls", "first"),
        ("echo", "tail"),
    ],
)
async def test_a_killed_shard_changes_nothing(
    cluster: LocalCluster, client: httpx.AsyncClient, name: str, lost: str
) -> None:
    """Killed by SIGKILL in mid-answer and started again: each choice's chunks are the same."""
    path, fields = ASKS[name]
    body = DRAWN | fields
    undisturbed = [event async for event in read(client, path, body)]
    shard = cluster.shards[0 if lost == "first" else -1]
    pid = shard.pid
    events: list[str] = []
    async for event in read(client, path, body):
        events.append(event)
        if len(events) == len(undisturbed) // 3:
            shard.kill()

    assert as_told(events) == as_told(undisturbed)
    assert shard.pid != pid, "the answer came without the one that was killed"
    await cluster.wait_ready(shard)


async def test_the_answer_is_what_was_asked_for(client: httpx.AsyncClient) -> None:
    """The song is one by its schema, and without a penalty, the bias or the seed another one."""
    path, fields = ASKS["schema"]
    body = DRAWN | fields
    song = await text_of(client, path, body)
    jsonschema.validate(json.loads(song), SCHEMA)
    others = [
        await text_of(client, path, body | {name: None})
        for name in ("frequency_penalty", "repetition_penalty", "logit_bias", "seed")
    ]

    assert song not in others


async def text_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    chunks = [json.loads(event) async for event in read(client, path, body) if event != DONE]
    assert parts_of(chunks)[-1]["finish_reason"] == "stop"
    (text,) = texts_of(chunks)
    return text
