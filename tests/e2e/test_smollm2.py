"""The real model over two real shard processes gives the unsplit model's tokens, in fp32."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from benchmarks.library_head import LibraryHead, WatchedHop, open_hops, open_library_head
from meshnet.generation import Sampling
from meshnet.head.hop_client import HopAnswer, HopClient
from meshnet.ids import SessionId
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.wire.headers import StepHeaders
from services.cli.cluster import LocalCluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),  # the set-up fetches a model and loads it three times
]

N_TOKENS = 128
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a lost ship.",
    "List five uses of a paper clip, and say why each of them works.",
)


class ForgetfulHop(WatchedHop):
    """A hop whose shard loses the session before chosen decode steps.

    Attributes:
        forget_at: Past lengths of those steps; each is lost once.
    """

    def __init__(self, inner: HopClient) -> None:
        super().__init__(inner)
        self.forget_at: set[int] = set()

    async def step(
        self, step: StepHeaders, body: bytes, *, limit_s: float, max_answer_bytes: int
    ) -> HopAnswer:
        """As the hop, with a loss now and then."""
        if step.cache == "decode" and step.past_len in self.forget_at:
            self.forget_at.remove(step.past_len)
            await self.close_session(SessionId(step.session or ""), epoch=0)
        return await super().step(step, body, limit_s=limit_s, max_answer_bytes=max_answer_bytes)


@dataclass
class Bench:
    """A head's library over two shard processes."""

    head: LibraryHead
    hops: list[ForgetfulHop]
    tokenizer: ChatTokenizer


@asynccontextmanager
async def _open_bench(cluster: LocalCluster, model: Path) -> AsyncGenerator[Bench]:
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(open_hops(cluster))
        hops = [ForgetfulHop(hop) for hop in plain]
        head = await stack.enter_async_context(open_library_head(cluster, hops))
        yield Bench(head, hops, ChatTokenizer.load(str(model)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(smollm2: Path, two_nodes: LocalCluster) -> AsyncGenerator[Bench]:
    async with _open_bench(two_nodes, smollm2) as bench:
        yield bench


@pytest.fixture(scope="module")
def unsplit(smollm2: Path) -> torch.nn.Module:
    """The whole model, by transformers' own GGUF loader; one thread, as the shards."""
    torch.set_num_threads(1)
    (gguf,) = smollm2.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(smollm2, gguf_file=gguf.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def _prompt(bench: Bench, text: str) -> list[int]:
    return bench.tokenizer.encode_chat([{"role": "user", "content": text}])


def _greedy(unsplit: torch.nn.Module, prompt: list[int]) -> list[int]:
    out = unsplit.generate(  # pyright: ignore[reportCallIssue]  # a module by its type
        torch.tensor([prompt]), max_new_tokens=N_TOKENS, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("text", PROMPTS)
async def test_two_processes_give_the_unsplit_models_tokens(
    bench: Bench, unsplit: torch.nn.Module, text: str
) -> None:
    """128 greedy tokens over two processes are those of transformers' generate."""
    prompt = _prompt(bench, text)
    assert await bench.head.generate(prompt, N_TOKENS) == _greedy(unsplit, prompt)


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("text", PROMPTS)
async def test_lost_sessions_change_no_token(
    bench: Bench, unsplit: torch.nn.Module, text: str, hop: int
) -> None:
    """The same with the session lost at token 1, in the middle and at the last, on either hop."""
    prompt = _prompt(bench, text)
    bench.head.failures.clear()
    bench.hops[hop].forget_at = {len(prompt) + n for n in (0, N_TOKENS // 2, N_TOKENS - 2)}
    tokens = await bench.head.generate(prompt, N_TOKENS)
    assert tokens == _greedy(unsplit, prompt)
    assert [error.code for error in bench.head.failures] == ["cache_miss"] * 3


async def test_cached_and_stateless_generation_agree(bench: Bench) -> None:
    """Behaviour 7 of the protocol: with caches and without, the token ids are the same."""
    prompt = _prompt(bench, PROMPTS[2])
    cached = await bench.head.generate(prompt, 32)
    stateless = await bench.head.generate(prompt, 32, stateless=True)
    assert stateless == cached


async def test_a_seeded_draw_survives_lost_sessions(bench: Bench) -> None:
    """At temperature 1 the same seed gives the same tokens, with a session lost and without."""
    prompt = _prompt(bench, PROMPTS[0])
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=7)
    undisturbed = await bench.head.generate(prompt, N_TOKENS, sampling)
    bench.hops[1].forget_at = {len(prompt), len(prompt) + 40}
    assert await bench.head.generate(prompt, N_TOKENS, sampling) == undisturbed


async def test_another_seed_gives_another_text(bench: Bench) -> None:
    """At temperature 1 another seed draws other tokens."""
    prompt = _prompt(bench, PROMPTS[0])
    texts = [
        await bench.head.generate(prompt, N_TOKENS, Sampling(temperature=1.0, seed=seed))
        for seed in (1, 2)
    ]
    assert texts[0] != texts[1]
