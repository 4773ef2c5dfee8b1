"""Several choices of one chat: their order in a stream, their seeds, and the limits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from meshnet.generation import uniform
from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.openai.bodies import usage
from meshnet.topology import LayerSpan
from meshnet.wire.messages import TailAnswer
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
from tests.support.mesh import VOCAB_SIZE, Mesh, fake_text, serve_mesh, spell
from tests.support.streams import eventually

# One loop and one mesh for the whole file.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
N_TOKENS = 8
ASK: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": spell(PROMPT)}],
    "max_tokens": N_TOKENS,
}


class DrawingStage(FakeStage):
    """Draws its tokens, by seed and position alone, unless it is to be greedy."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """As the fake stage, with another token."""
        output = super().run(step, state)
        sampling = step.sampling
        if not isinstance(output, TailAnswer) or sampling is None or sampling.greedy:
            return output
        drawn = uniform(sampling.seed, step.position + step.frame.n_tokens)
        return TailAnswer(token_id=int(drawn * VOCAB_SIZE))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncGenerator[Mesh]:
    stages = [
        DrawingStage(fake_facts(LayerSpan(*span), 4, VOCAB_SIZE)) for span in ((0, 2), (2, 4))
    ]
    async with serve_mesh(stages) as served:
        yield served


async def texts(mesh: Mesh, **changes: object) -> list[str]:
    body = await answer(mesh.client, CHAT, **(ASK | changes))
    return [choice["message"]["content"] for choice in body["choices"]]


async def test_roles_come_first_and_in_order(mesh: Mesh) -> None:
    """Three choices open in ascending order, before any text, and each closes once."""
    chunks = await stream(mesh.client, CHAT, **ASK, n=3)
    parts = parts_of(chunks)

    assert [(part["index"], part["delta"]) for part in parts[:3]] == [
        (index, {"role": "assistant", "content": ""}) for index in range(3)
    ]
    assert all("role" not in part["delta"] for part in parts[3:])
    assert sorted(finishes_of(chunks)) == [(0, "length"), (1, "length"), (2, "length")]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


async def test_greedy_choices_are_equal(mesh: Mesh) -> None:
    """Without randomness every choice is the model's one answer, streamed or not."""
    expected = [fake_text(PROMPT, N_TOKENS)] * 3

    assert await texts(mesh, n=3, temperature=0) == expected
    assert texts_of(await stream(mesh.client, CHAT, **ASK, n=3, temperature=0)) == expected


async def test_choices_of_a_seed_differ_and_repeat(mesh: Mesh) -> None:
    """With a seed three choices are three texts, the same each time, streamed or not."""
    first = await texts(mesh, n=3, seed=42)

    assert len(set(first)) == 3
    assert await texts(mesh, n=3, seed=42) == first
    assert texts_of(await stream(mesh.client, CHAT, **ASK, n=3, seed=42)) == first


async def test_a_choice_does_not_depend_on_how_many_there_are(mesh: Mesh) -> None:
    """Fewer choices of a seed are the first ones of more."""
    three = await texts(mesh, n=3, seed=42)

    assert await texts(mesh, n=2, seed=42) == three[:2]
    assert await texts(mesh, seed=42) == three[:1]


async def test_a_seed_decides_alone(mesh: Mesh) -> None:
    """Another seed is another text; requests without one differ (vllm#51226)."""
    assert await texts(mesh, seed=42) != await texts(mesh, seed=43)
    assert await texts(mesh) != await texts(mesh)
    assert len(set(await texts(mesh, n=8))) == 8


async def test_a_prompt_of_a_batch_has_the_seed_it_has_alone(mesh: Mesh) -> None:
    """A seeded prompt's choices are the same beside another prompt; unseeded equal ones differ."""
    ask: dict[str, object] = {"model": "fake", "max_tokens": N_TOKENS, "n": 2}
    alone = await answer(mesh.client, COMPLETIONS, **ask, prompt=[PROMPT], seed=42)
    batch = await answer(mesh.client, COMPLETIONS, **ask, prompt=[[9, 9, 9, 9], PROMPT], seed=42)
    unseeded = await answer(mesh.client, COMPLETIONS, **ask, prompt=[PROMPT, PROMPT])

    expected = [choice["text"] for choice in alone["choices"]]
    assert [choice["text"] for choice in batch["choices"][2:]] == expected
    assert len({choice["text"] for choice in unseeded["choices"]}) == 4


async def test_usage_counts_the_prompt_once_and_all_answers(mesh: Mesh) -> None:
    """Three answers of 8 tokens to 4 are 24 and 4, streamed or not."""
    body = await answer(mesh.client, CHAT, **ASK, n=3)
    options = {"include_usage": True}
    *_, last = await stream(mesh.client, CHAT, **ASK, n=3, stream_options=options)

    assert body["usage"] == usage(prompt_tokens=4, completion_tokens=24, cached_tokens=0)
    assert last["usage"] == body["usage"]


async def test_counts_grow_with_each_chunk(mesh: Mesh) -> None:
    """With `continuous_usage_stats` each chunk has the tokens of all choices so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(mesh.client, CHAT, **ASK, n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 16)


@pytest.mark.parametrize("n", [17, 128])
async def test_more_choices_than_the_server_makes_are_refused(mesh: Mesh, n: int) -> None:
    """The error names the parameter and the limit."""
    status, error = await refusal(mesh.client, CHAT, **ASK, n=n)

    assert (status, error["param"]) == (400, "n")
    assert error["message"] == f"n: {n} answers to one request are too many; allowed: 16"


@pytest.mark.parametrize("n", [0, 129, "2", True, 1.5])
async def test_what_is_no_number_of_choices_is_refused(mesh: Mesh, n: object) -> None:
    """It is a whole number from 1 to 128, whatever the server makes."""
    status, error = await refusal(mesh.client, CHAT, **ASK, n=n)

    assert (status, error["param"]) == (400, "n")


async def test_a_client_that_leaves_frees_every_choice(mesh: Mesh) -> None:
    """A closed stream ends all of its choices on every hop."""
    body = ASK | {"stream": True, "max_tokens": 400, "n": 4}
    async with mesh.client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if '"index":3' in line:
                break

    async def is_empty() -> bool:
        return {sessions for sessions, _ in await mesh.usage()} == {0}

    await eventually(is_empty, within_s=5)


async def test_official_stream_helper_takes_several_choices(mesh: Mesh) -> None:
    """The helper of openai-python, which wants choices in order, puts all three together."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(
        base_url=f"{mesh.head.url}/v1", api_key="any", max_retries=0, http_client=http
    ) as client:
        stop = fake_text(PROMPT, N_TOKENS)[-4:]
        ask = ASK | {"n": 3, "temperature": 0, "stop": stop}
        async with cast("Any", client.chat.completions.stream)(**ask) as streamed:
            final = await streamed.get_final_completion()

    expected = fake_text(PROMPT, N_TOKENS).split(stop)[0]
    assert [choice.message.content for choice in final.choices] == [expected] * 3
    assert [choice.index for choice in final.choices] == [0, 1, 2]
