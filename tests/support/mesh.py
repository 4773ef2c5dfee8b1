"""A head and shards, served, over fake or tiny stages; and a tokenizer that spells ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import httpx
from pydantic import SecretStr
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshnet.model.fake_stage import FakeStage, fake_facts, next_token
from meshnet.model.interface import StageModel
from meshnet.text.model_files import ModelFacts
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.topology import LayerSpan
from services.head.app import create_app as create_head
from services.head.settings import HeadSettings, HopSetting
from services.shard.app import create_app as create_shard
from services.shard.settings import ShardSettings
from tests.support.http import plain_client
from tests.support.openai_schema import SchemaCheck
from tests.support.recorder import Recorder
from tests.support.serving import Served, serve

CLUSTER_KEY = "test-cluster-key"
VOCAB_SIZE = 64
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def number_tokenizer(end_token_ids: frozenset[int] = frozenset()) -> ChatTokenizer:
    """Token i is written `<i>`, and prompts are such words: "<5><6>" is [5, 6]."""
    vocab = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    backend.pre_tokenizer = pre_tokenizers.Split(">", "merged_with_previous")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=_TEMPLATE)
    return ChatTokenizer(tokenizer, ModelFacts(end_token_ids, n_layers=4, max_positions=512))


def spell(ids: Sequence[int]) -> str:
    """The text of token ids in the number tokenizer."""
    return "".join(f"<{i}>" for i in ids)


def fake_text(prompt_ids: Sequence[int], n_tokens: int) -> str:
    """What the fake model answers to a prompt."""
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        ids.append(next_token(ids, VOCAB_SIZE))
    return spell(ids[len(prompt_ids) :])


def shard_settings(**overrides: object) -> ShardSettings:
    """Settings of a shard whose stage is given."""
    base: dict[str, object] = {
        "model": "fake",
        "layers": "0-1",
        "cluster_key": SecretStr(CLUSTER_KEY),
        "threads": 1,
    }
    return ShardSettings.model_validate(base | overrides)


@dataclass
class Shard:
    """One served shard, and what it was asked."""

    served: Served
    recorder: Recorder

    @property
    def url(self) -> str:
        """Where it is."""
        return self.served.url


@dataclass
class Mesh:
    """A running head and its shards, and a client for the head."""

    head: Served
    shards: list[Shard]
    client: httpx.AsyncClient

    async def usage(self) -> list[tuple[int, int]]:
        """Sessions and leases on every hop."""
        counts: list[tuple[int, int]] = []
        for shard in self.shards:
            cache = (await get_shard(shard.url))["cache"]
            counts.append((cache["sessions"], cache["leases"]))
        return counts

    async def chat(self, content: str, **parameters: object) -> httpx.Response:
        """One greedy request in one piece."""
        return await self.client.post("/v1/chat/completions", json=body_of(content, **parameters))


def body_of(content: str, **parameters: object) -> dict[str, object]:
    """A greedy request's body."""
    messages = [{"role": "user", "content": content}]
    return {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 8} | parameters


async def get_shard(url: str) -> dict[str, dict[str, int]]:
    """A shard's description."""
    auth = {"authorization": f"Bearer {CLUSTER_KEY}"}
    async with plain_client(headers=auth) as client:
        return (await client.get(f"{url}/v1/shard")).json()


@asynccontextmanager
async def serve_shard(
    stage: StageModel,
    *,
    settings: ShardSettings | None = None,
    port: int = 0,
    clock: Callable[[], float] = monotonic,
) -> AsyncGenerator[Shard]:
    """Serve one stage."""
    app = create_shard(settings or shard_settings(), stage=stage, clock=clock)
    recorder = Recorder(app)
    async with serve(recorder, port) as served:
        yield Shard(served, recorder)


def fake_stages(*spans: tuple[int, int], n_layers: int = 4) -> list[StageModel]:
    """Fake stages of one model."""
    return [FakeStage(fake_facts(LayerSpan(a, b), n_layers, VOCAB_SIZE)) for a, b in spans]


@asynccontextmanager
async def serve_head(
    urls: Sequence[str], tokenizer: ChatTokenizer | None = None, **overrides: object
) -> AsyncGenerator[tuple[Served, httpx.AsyncClient]]:
    """Serve a head over shards at `urls`."""
    base: dict[str, object] = {
        "model": "fake",
        "route": tuple(HopSetting(endpoint=url) for url in urls),
        "cluster_key": SecretStr(CLUSTER_KEY),
        "hop_transport": "post",  # what recorders and lines see; streams have their own tests
        "hop_return": "star",  # `auto` goes by what a ping took, and that by the machine's load
        "recovery_timeout_s": 5.0,
        "route_poll_s": 0.2,
    }
    settings = HeadSettings.model_validate(base | overrides)
    app = create_head(settings, tokenizer=tokenizer or number_tokenizer())
    faults: list[str] = []
    app.add_middleware(SchemaCheck, faults=faults)
    async with (
        serve(app) as head,
        plain_client(head.url) as client,
    ):
        yield head, client
    if faults:
        raise AssertionError("\n".join(faults))


@asynccontextmanager
async def serve_mesh(
    stages: Sequence[StageModel],
    tokenizer: ChatTokenizer | None = None,
    *,
    settings: ShardSettings | None = None,
    **head_overrides: object,
) -> AsyncGenerator[Mesh]:
    """Serve a whole mesh."""
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(serve_shard(stage, settings=settings))
            for stage in stages
        ]
        stack.callback(_stop_together, shards)
        urls = [shard.url for shard in shards]
        head, client = await stack.enter_async_context(
            serve_head(urls, tokenizer, **head_overrides)
        )
        yield Mesh(head, shards, client)


def _stop_together(shards: Sequence[Shard]) -> None:
    """Let the servers end at once: each takes 0.2 s, most of it uvicorn's pauses."""
    for shard in shards:
        shard.served.server.should_exit = True
