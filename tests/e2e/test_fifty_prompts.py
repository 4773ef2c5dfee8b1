"""Over fifty prompts the endpoint's greedy text is transformers' on the same weights, in fp32."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.cli.cluster import LocalCluster
from tests.support.http import plain_client

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),  # 50 answers a test, and 50 of the reference
]

N_TOKENS = 12
AT_ONCE = 8

_TASKS = (
    "Write one sentence about",
    "Explain to a child",
    "Give three facts about",
    "What is the use of",
    "Write a short poem about",
)
_SUBJECTS = (
    "the sea",
    "a bicycle",
    "photosynthesis",
    "Ada Lovelace",
    "bread",
    "the number seven",
    "winter",
    "a broken clock",
    "Japan",
    "honesty",
)
PROMPTS = [f"{task} {subject}." for task in _TASKS for subject in _SUBJECTS]

Ask = Callable[[httpx.AsyncClient, str], Awaitable[str]]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> list[str]:
    """What transformers says, one prompt after the other, on one thread as the shards."""
    torch.set_num_threads(1)
    (gguf,) = smollm2.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(smollm2, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    return [_say(model.eval(), tokenizer, prompt) for prompt in PROMPTS]


def _say(model: Any, tokenizer: Any, prompt: str) -> str:  # noqa: ANN401  # transformers' types
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**encoded, max_new_tokens=N_TOKENS, do_sample=False, pad_token_id=0)
    new = out[0, encoded["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(two_nodes: LocalCluster) -> AsyncGenerator[httpx.AsyncClient]:
    async with plain_client(two_nodes.base_url) as made:
        made.timeout = httpx.Timeout(300)  # eight at once on two cores
        yield made


def _body(prompt: str, *, stream: bool) -> dict[str, object]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": N_TOKENS,
        "stream": stream,
    }


async def _plain(client: httpx.AsyncClient, prompt: str) -> str:
    response = await client.post("chat/completions", json=_body(prompt, stream=False))
    return response.json()["choices"][0]["message"]["content"]


async def _streamed(client: httpx.AsyncClient, prompt: str) -> str:
    deltas: list[str] = []
    async with client.stream(
        "POST", "chat/completions", json=_body(prompt, stream=True)
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                deltas.append(choice["delta"].get("content", ""))
    return "".join(deltas)


@pytest.mark.parametrize("ask", [_plain, _streamed], ids=["plain", "stream"])
async def test_alone(client: httpx.AsyncClient, reference: list[str], ask: Ask) -> None:
    """One request after the other gives transformers' fifty texts."""
    assert [await ask(client, prompt) for prompt in PROMPTS] == reference


@pytest.mark.parametrize("ask", [_plain, _streamed], ids=["plain", "stream"])
async def test_eight_at_once(client: httpx.AsyncClient, reference: list[str], ask: Ask) -> None:
    """So do requests that share the shards with seven others."""
    free = asyncio.Semaphore(AT_ONCE)

    async def ask_in_turn(prompt: str) -> str:
        async with free:
            return await ask(client, prompt)

    assert await asyncio.gather(*map(ask_in_turn, PROMPTS)) == reference
