"""Law 12: any split gives the unsplit model's greedy tokens, token for token, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from meshnet.generation import Sampling
from meshnet.model.interface import StageModel, StageStep
from meshnet.model.loading import plan_stage
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer
from services.head.settings import HopSetting
from tests.support.mesh import (
    body_of,
    number_tokenizer,
    serve_head,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.tiny import WINDOW, TinyModel, all_cuts, save_tiny

pytestmark = pytest.mark.mesh

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
PROMPT = [5, 17, 33, 2, 12, 44, 9]
N_TOKENS = 12

Cut = list[tuple[int, int]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("n_layers", [4, 5, 6])
def test_every_split_gives_the_unsplit_models_tokens(
    tmp_path: Path, family: str, n_layers: int, *, tied: bool
) -> None:
    """Every split into 1 to 4 spans gives generate's tokens, cached and stateless."""
    assert len(PROMPT) + N_TOKENS > 2 * WINDOW
    tiny = save_tiny(tmp_path, family, n_layers, tied=tied)
    expected = tiny.greedy(PROMPT, N_TOKENS)
    assert len(set(expected)) > 3, "a model that repeats itself shows nothing"
    spans = {span for cut in all_cuts(n_layers, 4) for span in cut}
    stages = {span: _load(tiny, span) for span in spans}
    wrong: list[tuple[str, Cut]] = []
    for cut in all_cuts(n_layers, 4):
        route = [stages[span] for span in cut]
        if _cached(route, chunk=len(PROMPT)) != expected:
            wrong.append(("cached", cut))
        if _stateless(route) != expected:
            wrong.append(("stateless", cut))
    assert wrong == []


def test_chunked_prefill_gives_the_same_tokens(tmp_path: Path, family: str, *, tied: bool) -> None:
    """A prompt prefilled in chunks of 3 gives generate's tokens, for every split in two."""
    tiny = save_tiny(tmp_path, family, 5, tied=tied)
    expected = tiny.greedy(PROMPT, N_TOKENS)
    cuts = [cut for cut in all_cuts(5, 2) if len(cut) == 2]
    outcomes = [_cached([_load(tiny, span) for span in cut], chunk=3) for cut in cuts]
    assert outcomes == [expected] * len(cuts)


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_overlapping_spans_with_start_layers_give_the_same_text(
    tmp_path: Path, family: str, *, kv_cache: bool, tied: bool
) -> None:
    """Served shards [0,3), [1,5), [2,6) entered at layers 0, 3 and 5 give generate's tokens."""
    tiny = save_tiny(tmp_path, family, 6, tied=tied)
    expected = spell(tiny.greedy(PROMPT, N_TOKENS))
    text = await _served_text(tiny, [((0, 3), 0), ((1, 5), 3), ((2, 6), 5)], kv_cache=kv_cache)
    assert text == expected


async def _served_text(
    tiny: TinyModel, hops: Sequence[tuple[tuple[int, int], int]], *, kv_cache: bool
) -> str:
    """The text of a mesh over HTTP whose hops are spans with start layers."""
    settings = shard_settings(kv_cache=kv_cache)
    async with AsyncExitStack() as stack:
        route: list[HopSetting] = []
        for span, start_layer in hops:
            shard = await stack.enter_async_context(
                serve_shard(_load(tiny, span), settings=settings)
            )
            route.append(HopSetting(endpoint=shard.url, start_layer=start_layer))
        _, client = await stack.enter_async_context(
            serve_head([], number_tokenizer(), route=tuple(route))
        )
        body = body_of(spell(PROMPT), max_tokens=N_TOKENS)
        response = await client.post("/v1/chat/completions", json=body)
        return response.json()["choices"][0]["message"]["content"]


def _load(tiny: TinyModel, span: tuple[int, int]) -> StageModel:
    return plan_stage(str(tiny.folder), LayerSpan(*span), "float32", n_threads=1).load()


def _cached(route: Sequence[StageModel], chunk: int) -> list[int]:
    """Prefill in chunks, then decode."""
    states = [stage.new_state(stage.facts.span.start) for stage in route]
    ids, held = list(PROMPT), 0
    while len(ids) < len(PROMPT) + N_TOKENS:
        step = ids[held : held + chunk]
        is_last = held + len(step) == len(ids)
        answer = Frame.of_token_ids(step)
        for stage, state in zip(route, states, strict=True):
            sampling = Sampling() if is_last else None
            work = StageStep(_frame(answer), stage.facts.span.start, held, sampling)
            answer = stage.run(work, state)
        held += len(step)
        if is_last:
            ids.append(_token(answer))
    return ids[len(PROMPT) :]


def _stateless(route: Sequence[StageModel]) -> list[int]:
    """Every step a full prefill."""
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + N_TOKENS:
        answer = Frame.of_token_ids(ids)
        for stage in route:
            work = StageStep(_frame(answer), stage.facts.span.start, 0, Sampling())
            answer = stage.run(work, None)
        ids.append(_token(answer))
    return ids[len(PROMPT) :]


def _frame(answer: Frame | TailAnswer) -> Frame:
    assert isinstance(answer, Frame)
    return answer


def _token(answer: Frame | TailAnswer) -> int:
    assert isinstance(answer, TailAnswer)
    assert answer.token_id is not None
    return answer.token_id
