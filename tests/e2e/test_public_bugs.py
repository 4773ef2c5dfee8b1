"""Other servers' public bugs, as small requests of ours: those that take a real model.

The others are in tests/mesh/test_public_bugs.py, which says where each row is shown.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from services.cli.cluster import LocalCluster
from tests.support.answers import (
    CHAT,
    COMPLETIONS,
    answer,
    finishes_of,
    parts_of,
    refusal,
    stream,
    texts_of,
)
from tests.support.http import plain_client

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),  # the set-up loads the model three times
]

USER = {"role": "user", "content": "Why is the sky blue?"}
ASK: dict[str, Any] = {"model": "smollm2", "temperature": 0, "messages": [USER], "max_tokens": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(two_nodes: LocalCluster) -> AsyncGenerator[httpx.AsyncClient]:
    async with plain_client(two_nodes.head_url) as made:
        made.timeout = httpx.Timeout(300)
        yield made


@pytest.fixture(scope="module")
def unsplit(smollm2: Path) -> Any:  # noqa: ANN401  # transformers types it loosely
    """The whole model in one process, as the shards hold it."""
    torch.set_num_threads(1)
    (gguf,) = smollm2.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(smollm2, gguf_file=gguf.name, dtype=torch.float32)
    return model.eval()


def content_of(body: Any) -> str:  # noqa: ANN401  # JSON
    return body["choices"][0]["message"]["content"]


def format_of(schema: object) -> dict[str, object]:
    """The format of answers that follow a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# Row 1: stop strings over tokens.


async def test_stop_string_over_two_tokens(client: httpx.AsyncClient) -> None:
    """Row 1: the text ends exactly before a string that two tokens share, streamed or not."""
    body = await answer(client, CHAT, **ASK, logprobs=True)
    text = content_of(body)
    tokens = [told["token"] for told in body["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == text
    for stop in straddling(text, tokens):
        ask = ASK | {"stop": [stop]}
        expected = text[: text.index(stop)]
        plain = (await answer(client, CHAT, **ask))["choices"][0]
        chunks = await stream(client, CHAT, **ask)

        assert (plain["message"]["content"], plain["finish_reason"]) == (expected, "stop")
        assert (texts_of(chunks), finishes_of(chunks)) == ([expected], [(0, "stop")])


def straddling(text: str, tokens: Sequence[str]) -> list[str]:
    """Two strings, each of the end of one token and the beginning of the next, not found before."""
    ends = [*accumulate(map(len, tokens))]
    found = [
        text[end - 2 : end + 2]
        for end, left, right in zip(ends[4:-1], tokens[4:-1], tokens[5:], strict=True)
        if min(len(left), len(right)) >= 3 and text.index(text[end - 2 : end + 2]) == end - 2
    ]
    assert len(found) >= 2
    return [found[0], found[-1]]


# Row 2: characters over tokens.


@pytest.mark.parametrize("text", ["🌶️👨‍👩‍👧 日本語", "naïve Ἀθῆναι 🏴‍☠️"])
async def test_characters_over_tokens(client: httpx.AsyncClient, text: str) -> None:
    """Row 2: a text of characters in many tokens comes whole, each delta in valid UTF-8."""
    ask = ASK | {"response_format": format_of({"const": text}), "max_tokens": 60}
    chunks = await stream(client, CHAT, **ask, return_token_ids=True)
    deltas = [part["delta"].get("content", "") for part in parts_of(chunks)]
    n_tokens = sum(len(part.get("token_ids", [])) for part in parts_of(chunks))

    assert texts_of(chunks) == [f'"{text}"']
    assert all("\N{REPLACEMENT CHARACTER}" not in delta for delta in deltas)
    assert [delta.encode().decode() for delta in deltas] == deltas
    assert n_tokens > len([delta for delta in deltas if delta]), "some character took two tokens"
    assert content_of(await answer(client, CHAT, **ask)) == f'"{text}"'


# Row 4: scores of a prompt, as lm_eval reads them.


@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "ends"])
async def test_echo_with_scores(
    client: httpx.AsyncClient,
    unsplit: Any,  # noqa: ANN401  # transformers types it loosely
    *,
    ends: bool,
) -> None:
    """Row 4: an entry for each token and the next, also if that ends it, as a forward pass has."""
    prompt = await finished_ids(client) if ends else [504, 5059, 282, 4649, 314]
    ask = {"prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    body = await answer(client, COMPLETIONS, model="smollm2", **ask, seed=1234)
    told = body["choices"][0]["logprobs"]
    with torch.inference_mode():
        logits = unsplit(torch.tensor([prompt])).logits[0]
    scores = torch.log_softmax(logits.double(), dim=-1)
    best = scores.max(dim=-1)
    next_id = int(best.indices[-1])
    expected = [scores[at, token].item() for at, token in enumerate([*prompt[1:], next_id])]

    assert (next_id == unsplit.config.eos_token_id) == ends
    assert len(told["tokens"]) == len(prompt) + 1
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    tops = [max(top.values()) for top in told["top_logprobs"][1:]]
    assert tops == pytest.approx(best.values.tolist(), abs=1e-3)
    # Greedy is told by equal floats, and no value is above the dictionary's largest.
    greedy = [number == top for number, top in zip(told["token_logprobs"][1:], tops, strict=True)]
    assert greedy == [token == int(best.indices[at]) for at, token in enumerate(prompt[1:])] + [
        True
    ]
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == ("stop" if ends else "length")


async def finished_ids(client: httpx.AsyncClient) -> list[int]:
    """The ids of a conversation that the model has ended, but for the end."""
    short = {"role": "user", "content": "Reply with one word only: yes."}
    ask = ASK | {"messages": [short], "max_tokens": 60, "return_token_ids": True}
    body = await answer(client, CHAT, **ask)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop", choice
    return [*body["prompt_token_ids"], *choice["token_ids"][:-1]]


# Row 5: schemas that cannot be enforced.

UNENFORCEABLE = [
    ({"type": "string", "pattern": "^[a-"}, "`pattern`"),
    ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "`not`"),
    ({"$ref": "#/$defs/nothing"}, "`$ref`"),
    ({"type": "array", "items": {"$ref": "https://example.com/else"}}, "`$ref`"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "`if`"),
    ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
    ({"type": "string", "format": "no-such-format"}, "`format`"),
    ({"type": "no-such-type"}, "#/type"),
]


async def test_bad_schemas_beside_a_good_request(client: httpx.AsyncClient) -> None:
    """Row 5: each is a 400 that names the keyword, and a request in flight does not notice."""
    expected = content_of(await answer(client, CHAT, **ASK))
    undisturbed = asyncio.create_task(stream(client, CHAT, **ASK))
    for schema, keyword in UNENFORCEABLE:
        ask = ASK | {"response_format": format_of(schema)}
        for streamed in (False, True):
            status, error = await refusal(client, CHAT, **ask, stream=streamed)
            assert (status, error["type"]) == (400, "invalid_request_error"), schema
            assert keyword in str(error["message"]), error
            assert error["param"] == "response_format.json_schema.schema"
    bad_patterns = ({"type": "regex", "pattern": "[a-"}, {"type": "regex", "pattern": "(?=a)b"})
    for form in bad_patterns:
        status, error = await refusal(client, CHAT, **ASK, response_format=form)
        assert (status, error["param"]) == (400, "response_format.pattern")

    assert texts_of(await undisturbed) == [expected]
    assert content_of(await answer(client, CHAT, **ASK)) == expected


async def test_a_bad_schema_of_a_tool(client: httpx.AsyncClient) -> None:
    """Row 5: where calls are forced, the tool to blame is named, and the keyword."""
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-"}}}
    tools = [TOOL, {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    status, error = await refusal(client, CHAT, **ASK, tools=tools, tool_choice="required")

    assert (status, error["param"]) == (400, "tools[1].function.parameters")
    assert "`pattern`" in str(error["message"])


# Row 7: forced calls.


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("parallel", [True, False])
async def test_a_forced_call(client: httpx.AsyncClient, choice: object, *, parallel: bool) -> None:
    """Row 7: streamed or not, the reason is `tool_calls`, and the arguments are the same."""
    ask = ASK | {
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 250,
    }
    (plain,) = (await answer(client, CHAT, **ask))["choices"]
    chunks = await stream(client, CHAT, **ask)
    told = [call for part in parts_of(chunks) for call in part["delta"].get("tool_calls", [])]
    calls = [call["function"] for call in plain["message"]["tool_calls"]]

    assert plain["finish_reason"] == "tool_calls"
    assert finishes_of(chunks) == [(0, "tool_calls")]
    assert plain["message"]["content"] is None
    assert [call["function"] for call in told] == calls
    assert [call["index"] for call in told] == list(range(len(calls)))
    assert {call["name"] for call in calls} == {"weather"}
    assert all(json.loads(call["arguments"])["city"].istitle() for call in calls)
    assert len(calls) == 1 or (parallel and choice == "required")


# Rows 10 and 11: who says what.


async def test_a_silent_call_in_the_history(client: httpx.AsyncClient) -> None:
    """Row 10: an assistant's null, missing or empty content beside calls makes one same prompt."""
    answers: list[Any] = []
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        history = [
            USER,
            {"role": "assistant", "tool_calls": [CALL], **content},
            {"role": "tool", "tool_call_id": "call_1", "content": "It is sunny."},
            {"role": "user", "content": "And tomorrow?"},
        ]
        ask = ASK | {"messages": history, "max_tokens": 4, "return_token_ids": True}
        answers.append(await answer(client, CHAT, **ask))
    prompt_ids = [body["prompt_token_ids"] for body in answers]
    prompt = await text_of_ids(client, prompt_ids[0])

    assert prompt_ids == [prompt_ids[0]] * 4
    assert len({content_of(body) for body in answers}) == 1
    assert answers[0]["usage"]["prompt_tokens"] == len(prompt_ids[0])
    assert '{"name": "weather", "arguments": {}}' in prompt
    assert "It is sunny." in prompt
    assert "None" not in prompt


async def text_of_ids(client: httpx.AsyncClient, ids: Sequence[int]) -> str:
    return (await answer(client, "/detokenize", model="smollm2", tokens=ids))["prompt"]


async def test_the_developer_is_the_system(client: httpx.AsyncClient) -> None:
    """Row 11: the prompt is the one that `system` makes, and has the instruction in it."""
    answers: list[Any] = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Answer in French, s'il vous plaît."}, USER]
        ask = ASK | {"messages": messages, "max_tokens": 8, "return_token_ids": True}
        answers.append(await answer(client, CHAT, **ask))
    developer, system = answers
    alone = await answer(client, CHAT, **(ASK | {"max_tokens": 1, "return_token_ids": True}))

    assert developer["usage"]["prompt_tokens"] == system["usage"]["prompt_tokens"]
    assert developer["prompt_token_ids"] == system["prompt_token_ids"]
    assert developer["prompt_token_ids"] != alone["prompt_token_ids"]
    prompt = await text_of_ids(client, developer["prompt_token_ids"])
    assert "<|im_start|>system\nAnswer in French, s'il vous plaît.<|im_end|>" in prompt
    assert content_of(developer) == content_of(system)


@pytest.mark.parametrize("role", ["wizard", "System", "", None, 7])
async def test_an_invented_role(client: httpx.AsyncClient, role: object) -> None:
    """Row 11: a role that nobody has is a 400 that names it, though the template would print it."""
    messages = [{"role": role, "content": "Hocus pocus."}, USER]
    status, error = await refusal(client, CHAT, **(ASK | {"messages": messages}))

    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == "messages[0].role"


# Row 13: seeds.


async def test_seeds(client: httpx.AsyncClient) -> None:
    """Row 13: a seed gives its text alone and in company; without one, two texts differ."""
    drawn = ASK | {"temperature": 0.8}
    alone = content_of(await answer(client, CHAT, **drawn, seed=42))
    seeded, *unseeded = await asyncio.gather(
        answer(client, CHAT, **drawn, seed=42),
        answer(client, CHAT, **drawn),
        answer(client, CHAT, **drawn),
    )
    texts = [content_of(body) for body in unseeded]

    assert content_of(seeded) == alone
    assert len({alone, *texts}) == 3
    assert texts_of(await stream(client, CHAT, **drawn, seed=42)) == [alone]


async def test_seeds_of_several_choices(client: httpx.AsyncClient) -> None:
    """Row 13: the first choice is the one that the seed gives alone; the others differ from it."""
    drawn = ASK | {"temperature": 0.8, "seed": 42, "max_tokens": 12}
    alone = content_of(await answer(client, CHAT, **drawn))
    bodies = [await answer(client, CHAT, **drawn, n=3) for _ in range(2)]
    first, again = [[one["message"]["content"] for one in body["choices"]] for body in bodies]

    assert first[0] == alone
    assert len(set(first)) == 3
    assert again == first
