"""A split model scores tokens as the unsplit one does, and penalties follow a session anywhere."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, PreTrainedConfig

from meshnet.generation import GenerationRequest, Sampling, SamplingContext, TokenEvent, TokenScore
from meshnet.head.background import Background
from meshnet.head.call import Trace
from meshnet.head.generator import Generator, TextModel
from meshnet.head.hop_client import HopTimeouts, open_hop
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.prefixes import PrefixIndex
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.replay import ReplayBudget
from meshnet.head.route_book import RouteBook
from meshnet.model.interface import StageModel, StageStep
from meshnet.model.layers.family import FamilyLayers
from meshnet.model.layers.lean import LeanLayers
from meshnet.model.loading import plan_stage
from meshnet.model.sampler import sample
from meshnet.topology import HopSpec, LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer
from tests.support.mesh import (
    CLUSTER_KEY,
    Shard,
    number_tokenizer,
    serve_shard,
    shard_settings,
)
from tests.support.recorder import SeenStep
from tests.support.steps import shard_client
from tests.support.tiny import VOCAB_SIZE, WINDOW, TinyModel, config_of

pytestmark = pytest.mark.mesh

N_LAYERS = 5
CUTS = {1: [(0, 5)], 2: [(0, 3), (3, 5)], 3: [(0, 1), (1, 3), (3, 5)]}
PROMPT = [5, 17, 33, 2, 12, 44, 9, 60, 1, 33, 17, 5, 20]
N_TOKENS = 6
CHUNK_TOKENS = 5
N_ROWS = 3
"""Positions whose logits are made at once: fewer than a chunk's."""

Generate = Callable[[GenerationRequest], Awaitable[list[TokenEvent]]]


@pytest.fixture(params=["llama", "qwen2", "gemma3", "cohere"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets three positions' logits be made at once, and lists how many each lm_head made."""
    made: list[int] = []
    for kind in (FamilyLayers, LeanLayers):
        _watch(monkeypatch, kind, made)
    monkeypatch.setattr("meshnet.model.torch_stage._LOGITS_BYTES", N_ROWS * 4 * VOCAB_SIZE)
    return made


def _watch(
    monkeypatch: pytest.MonkeyPatch, kind: type[FamilyLayers] | type[LeanLayers], made: list[int]
) -> None:
    logits = cast("Callable[[object, torch.Tensor], torch.Tensor]", kind.logits)

    def watched(layers: object, hidden: torch.Tensor) -> torch.Tensor:
        made.append(len(hidden))
        return logits(layers, hidden)

    monkeypatch.setattr(kind, "logits", watched)


@pytest.mark.parametrize("kv_cache", [True, False], ids=["cached", "stateless"])
@pytest.mark.parametrize("n_spans", CUTS)
async def test_scores_are_the_unsplit_models(
    tmp_path: Path, rows: list[int], family: str, n_spans: int, *, kv_cache: bool
) -> None:
    """Prompt and answer are scored as by the whole model, in chunks and blocks, to 1e-5."""
    assert len(PROMPT) > WINDOW
    tiny = save(tmp_path, family)
    ids = PROMPT + tiny.greedy(PROMPT, N_TOKENS)
    request = GenerationRequest(
        tuple(PROMPT), N_TOKENS, Sampling(top_logprobs=4), score_prompt=True
    )
    async with serve_cut(tiny, n_spans, kv_cache=kv_cache) as (generate, _):
        rows.clear()
        events = await generate(request)

    assert (max(rows), sum(rows)) == (N_ROWS, len(ids) - 1)
    assert [event.token_id for event in events] == ids[len(PROMPT) :]
    check_scores(scores_of(events), ids, tiny)


def test_scaled_logits_are_scored_as_they_are_scaled(tmp_path: Path) -> None:
    """Granite divides its logits; and where each token has a next one, nothing is picked."""
    tiny = save(tmp_path, "granite")
    (stage,) = stages(tiny, 1)
    next_ids = SamplingContext(next_ids=tuple(PROMPT[1:]))
    step = StageStep(Frame.of_token_ids(PROMPT[:-1]), 0, 0, Sampling(top_logprobs=4), next_ids)
    answer = stage.run(step, stage.new_state(0))

    assert isinstance(answer, TailAnswer)
    assert (answer.token_id, answer.score) == (None, None)
    check_scores(answer.prompt_scores, PROMPT, tiny)


def test_a_pick_is_the_same_with_and_without_scores(tmp_path: Path, family: str) -> None:
    """To ask for the prompt's scores changes neither the token nor its own score, to the bit."""
    (stage,) = stages(save(tmp_path, family), 1)
    sampling = Sampling(temperature=1.0, seed=4, top_logprobs=20)
    answers = [
        stage.run(
            StageStep(Frame.of_token_ids(PROMPT), 0, 0, sampling, SamplingContext(next_ids=ids)),
            None,
        )
        for ids in ((), tuple(PROMPT[1:]))
    ]
    alone, beside = (answer for answer in answers if isinstance(answer, TailAnswer))

    assert len(beside.prompt_scores) == len(PROMPT) - 1
    assert alone == beside.model_copy(update={"prompt_scores": ()})


# Sampling that depends on all tokens so far.

MIXED = Sampling(
    temperature=0.9,
    top_p=0.95,
    min_p=0.01,
    seed=7,
    frequency_penalty=0.7,
    presence_penalty=0.4,
    repetition_penalty=1.3,
    top_logprobs=2,
)
BIAS = {3: 2.0, 44: -100.0, 9: 1.5}
N_SAMPLED = 12
FORGOTTEN = [10, 15, 20]
"""Where the tail loses the session: before the prompt's last chunk, and in the answer."""


class ThirdTokens:
    """A grammar: after n tokens only those with id = n modulo 3 are allowed."""

    def __init__(self) -> None:
        self._n_tokens = 0

    def new_constraint(self) -> ThirdTokens:
        return ThirdTokens()

    def allowed(self) -> bytes:
        bits = sum(1 << i for i in range(self._n_tokens % 3, VOCAB_SIZE, 3))
        return bits.to_bytes(8, "little")

    def accept(self, token_id: int) -> None:
        del token_id
        self._n_tokens += 1


@pytest.mark.parametrize("mode", ["cached", "stateless", "lost"])
@pytest.mark.parametrize("n_spans", CUTS)
async def test_what_depends_on_all_tokens_is_the_same_for_each_split(
    tmp_path: Path, n_spans: int, mode: str
) -> None:
    """Drawn tokens are one process's, also where the tail loses the session before some of them."""
    tiny = save(tmp_path, "llama")
    expected = sampled(tiny, MIXED, BIAS)
    unpenalised = Sampling(temperature=MIXED.temperature, top_p=MIXED.top_p, seed=MIXED.seed)
    others = [sampled(tiny, unpenalised, BIAS), sampled(tiny, MIXED, {})]
    assert expected not in others, "a context that changes nothing shows nothing"
    request = GenerationRequest(
        tuple(PROMPT), N_SAMPLED, MIXED, logit_bias=BIAS, grammar=ThirdTokens(), score_prompt=True
    )
    async with serve_cut(tiny, n_spans, kv_cache=mode != "stateless") as (generate, shards):
        forgotten = make_forgetful(shards[-1]) if mode == "lost" else []
        events = await generate(request)

    assert [event.token_id for event in events] == expected
    check_scores(scores_of(events), [*PROMPT, *expected], tiny)
    assert forgotten == (FORGOTTEN if mode == "lost" else [])


def make_forgetful(tail: Shard) -> list[int]:
    """Lets the tail lose the session before its steps at some positions, which it lists."""
    forgotten: list[int] = []

    async def before(step: SeenStep) -> None:
        if step.past_len in FORGOTTEN and step.past_len not in forgotten:
            forgotten.append(step.past_len)
            async with shard_client(tail.url) as hop:
                await hop.close(step.session)

    tail.recorder.before_step = before
    return forgotten


def sampled(tiny: TinyModel, sampling: Sampling, bias: dict[int, float]) -> list[int]:
    """The tokens in one process: transformers' logits of all tokens so far, and the sampler."""
    ids, constraint = list(PROMPT), ThirdTokens()
    for _ in range(N_SAMPLED):
        context = SamplingContext(
            prompt_ids=tuple(PROMPT),
            generated_ids=tuple(ids[len(PROMPT) :]),
            logit_bias=bias,
            allowed=constraint.allowed(),
        )
        with torch.inference_mode():
            logits = tiny.model(torch.tensor([ids])).logits[0, -1]
        ids.append(sample(logits, sampling, context, len(ids)))
        constraint.accept(ids[-1])
    return ids[len(PROMPT) :]


# Models, and a head's library over their shards.


def save(folder: Path, family: str) -> TinyModel:
    """A random model whose logits are far apart, and scaled or capped where the family does."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(scaled_config(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return TinyModel(folder, N_LAYERS, model)


def scaled_config(family: str) -> PreTrainedConfig:
    """As the other tests' tiny models; caps and factors are such that they matter."""
    if family in {"cohere", "granite"}:
        common = config_of("llama", N_LAYERS, tied=False).to_dict()
        for name in ("model_type", "architectures", "transformers_version", "head_dim"):
            del common[name]
        if family == "cohere":
            return CohereConfig(**common, logit_scale=0.3)
        return GraniteConfig(**common, logits_scaling=4.0, embedding_multiplier=3.0)
    config = config_of(family, N_LAYERS, tied=False)
    if family == "gemma3":
        config.final_logit_softcapping = 2.0
    return config


def scores_of(events: Sequence[TokenEvent]) -> list[TokenScore]:
    """Of the prompt's tokens but the first, and of the answer's."""
    return [*events[0].prompt_scores, *(event.score for event in events if event.score)]


def check_scores(scores: Sequence[TokenScore], ids: Sequence[int], tiny: TinyModel) -> None:
    """Each token of `ids` but the first has the whole model's number, and its neighbours too."""
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([ids])).logits[0].double()
    logprobs: list[list[float]] = torch.log_softmax(logits, dim=-1).tolist()
    assert [score.token_id for score in scores] == list(ids[1:])
    for score, row in zip(scores, logprobs, strict=False):
        assert score.logprob == pytest.approx(row[score.token_id], abs=1e-5)
        ranked = sorted(range(len(row)), key=row.__getitem__, reverse=True)
        assert [token_id for token_id, _ in score.top] == ranked[: len(score.top)]
        assert [x for _, x in score.top] == pytest.approx([row[i] for i, _ in score.top], abs=1e-5)


def stages(tiny: TinyModel, n_spans: int) -> list[StageModel]:
    """The model, cut."""
    return [
        plan_stage(str(tiny.folder), LayerSpan(*span), "float32", n_threads=1).load()
        for span in CUTS[n_spans]
    ]


@asynccontextmanager
async def serve_cut(
    tiny: TinyModel, n_spans: int, *, kv_cache: bool
) -> AsyncGenerator[tuple[Generate, list[Shard]]]:
    """Serve the model's pieces; what generates over them, and the shards."""
    settings = shard_settings(kv_cache=kv_cache)
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(serve_shard(stage, settings=settings))
            for stage in stages(tiny, n_spans)
        ]
        clients = {
            shard.url: await stack.enter_async_context(
                open_hop(shard.url, HopTimeouts(), CLUSTER_KEY)
            )
            for shard in shards
        }
        book = RouteBook(
            [HopSpec(url) for url in clients], clients, clock=monotonic, jitter=lambda: 1.0
        )
        await book.refresh()
        book.mark_proven(book.unproven())
        kit = pipeline_kit(await stack.enter_async_context(Background()))
        tokenizer = number_tokenizer()
        generator = Generator(TextModel(frozenset(), tokenizer.new_detokenizer, tokenizer.encode))

        async def generate(request: GenerationRequest) -> list[TokenEvent]:
            events = generator.generate(request, lambda: Pipeline(book.route(), book, kit, Trace()))
            return [event async for event in events]

        yield generate, shards


def pipeline_kit(background: Background) -> PipelineKit:
    def ignore(_: object) -> None: ...

    budget = ReplayBudget(2**20)
    return PipelineKit(
        times=HopTimesBook(),
        recovery=Recovery(
            RecoveryLimits(), note=ignore, note_replay=ignore, clock=monotonic, jitter=lambda: 1.0
        ),
        budget=budget,
        replay="exact",
        prefixes=PrefixIndex(budget, exact=True),
        background=background,
        prefill_chunk_tokens=CHUNK_TOKENS,
    )
