"""What is lost in the middle of an answer changes nothing of it, whatever was asked for.

Penalties, bias, seed, scores, grammars, stop strings, calls and several choices: each answer is the
undisturbed one, chunk by chunk. Over fake stages, and over a random real model.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import StageModel
from meshnet.model.loading import plan_stage
from meshnet.topology import LayerSpan
from services.shard.app import create_app as create_shard
from tests.support.answers import CHAT, COMPLETIONS, answer, parts_of, stream, texts_of
from tests.support.fake_mesh import byte_tokenizer
from tests.support.flaky import Delivery, Line, Reply
from tests.support.mesh import get_shard, serve_head, shard_settings
from tests.support.recorder import Recorder, SeenStep
from tests.support.serving import Served, serve
from tests.support.steps import shard_client
from tests.support.streams import eventually
from tests.support.tiny import config_of

pytestmark = pytest.mark.mesh

SPANS = ((0, 2), (2, 4))
N_POSITIONS = 1024
TOKENIZER = byte_tokenizer(N_POSITIONS)
"""A token a byte, so that a grammar can have anything written."""
CHUNK_TOKENS = 16

MakeStages = Callable[[], list[StageModel]]


# What is asked for.


def _place(name: str) -> dict[str, Any]:
    """A schema of one member, which is one of two words."""
    members = {name: {"enum": ["here", "there"]}}
    return {"properties": members, "required": [name], "additionalProperties": False}


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_DRAWN: dict[str, Any] = {
    "model": "fake",
    "temperature": 0.9,
    "top_p": 0.97,
    "min_p": 0.001,
    "seed": 7,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {str(TOKENIZER.encode(letter)[0]): 0.4 for letter in "aeiou"},
    "max_tokens": 120,
}
_QUESTION = "Who is it that comes when nobody calls?"
_ASKED: dict[str, Any] = _DRAWN | {"messages": [{"role": "user", "content": _QUESTION}]}
_LETTERS = {"type": "regex", "pattern": "[a-z ]{30}"}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": _place(key)}}
    for name, key in (("find", "where"), ("keep", "what"))
]
_PROMPT = list(range(60, 100))


@dataclass(frozen=True)
class Ask:
    """A request; in one piece where it cannot be streamed."""

    body: dict[str, Any]
    path: str = CHAT
    streamed: bool = True

    async def run(self, client: httpx.AsyncClient) -> list[Any]:
        """All that is told, but for what differs by nature: ids and time."""
        if self.streamed:
            options = {"include_usage": True, "continuous_usage_stats": False}
            bodies = await stream(client, self.path, **self.body, stream_options=options)
        else:
            bodies = [await answer(client, self.path, **self.body)]
        for body in bodies:
            body["id"] = body["created"] = None
            for call in _calls(body):
                call["id"] = None
        return self._by_choice(bodies)

    def check(self, told: Any, expected: Any) -> None:  # noqa: ANN401  # JSON
        """Whether the same was told: to the last digit, unless choices share batches."""
        if isinstance(told, float) and self.body.get("n", 1) > 1:
            assert told == pytest.approx(expected, abs=1e-4)
        elif isinstance(told, dict):
            assert told.keys() == expected.keys()
            for name, value in told.items():
                self.check(value, expected[name])
        elif isinstance(told, list):
            assert len(told) == len(expected)
            for value, other in zip(told, expected, strict=True):
                self.check(value, other)
        else:
            assert told == expected

    def _by_choice(self, bodies: list[Any]) -> list[Any]:
        """Choices take turns as they please, but each tells its own in order."""
        return sorted(bodies, key=lambda body: [part["index"] for part in body["choices"]] or [99])


def _calls(body: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # JSON
    messages = [part.get("delta") or part.get("message") or {} for part in body["choices"]]
    return [call for message in messages for call in message.get("tool_calls", [])]


SCORED = {"logprobs": True, "top_logprobs": 3}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
ASKS = {
    "schema": Ask(_ASKED | SCORED | {"response_format": FORMAT}),
    "three-choices": Ask(_ASKED | SCORED | {"response_format": _LETTERS, "n": 3}),
    "forced-calls": Ask(_ASKED | {"tools": _TOOLS, "tool_choice": "required"}),
    "ids-and-prompt-scores": Ask(
        _ASKED
        | {"min_tokens": 10, "max_tokens": 20, "stop_token_ids": [9]}
        | {"prompt_logprobs": 1, "return_token_ids": True},
        streamed=False,
    ),
    "echo": Ask(
        _DRAWN | {"prompt": _PROMPT, "echo": True, "logprobs": 2, "max_tokens": 12}, COMPLETIONS
    ),
    "prompt-scores": Ask(
        _DRAWN | {"prompt": _PROMPT, "prompt_logprobs": 2, "max_tokens": 12, "n": 2},
        COMPLETIONS,
        streamed=False,
    ),
}
hops = pytest.mark.parametrize("lost", [0, 1])


# Over what it is asked.


def _fakes() -> list[StageModel]:
    facts = [fake_facts(LayerSpan(*span), 4, TOKENIZER.vocab_size) for span in SPANS]
    return [FakeStage(replace(one, max_positions=N_POSITIONS)) for one in facts]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of four layers that writes bytes."""
    config = config_of("llama", 4, tied=False)
    config.update({"vocab_size": TOKENIZER.vocab_size, "max_position_embeddings": N_POSITIONS})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=["fake", "real"])
def make_stages(request: pytest.FixtureRequest) -> MakeStages:
    """The pieces of a model, as a restarted shard would load them."""
    if request.param == "fake":
        return _fakes
    folder = str(request.getfixturevalue("random_model"))

    def load() -> list[StageModel]:
        return [
            plan_stage(folder, LayerSpan(*span), "float32", n_threads=1).load() for span in SPANS
        ]

    return load


@dataclass
class Place:
    """One hop, whoever serves it."""

    hop: int
    stage: StageModel
    stack: AsyncExitStack
    served: Served = field(init=False)
    recorder: Recorder = field(init=False)
    line: Line = field(init=False)
    n_starts: int = 0

    async def start(self) -> None:
        """Serve it, at the port of its last life."""
        self.recorder = Recorder(create_shard(shard_settings(), stage=self.stage))
        self.line = Line(self.recorder)
        port = self.served.port if self.n_starts else 0
        self.served = await self.stack.enter_async_context(serve(self.line, port))
        self.n_starts += 1


@dataclass
class Fleet:
    """A head over two places."""

    places: list[Place]
    client: httpx.AsyncClient

    async def is_empty(self) -> bool:
        """Whether no hop holds a session, not even the head's own that proves a new shard."""
        views = [await get_shard(place.served.url) for place in self.places]
        return {view["cache"]["sessions"] for view in views} == {0}


@asynccontextmanager
async def serve_fleet(stages: Sequence[StageModel]) -> AsyncGenerator[Fleet]:
    async with AsyncExitStack() as stack:
        places = [Place(hop, stage, stack) for hop, stage in enumerate(stages)]
        for place in places:
            await place.start()
        head = serve_head(
            [place.served.url for place in places],
            TOKENIZER,
            prefill_chunk_tokens=CHUNK_TOKENS,
            prefix_reuse=False,  # the same is asked for twice, and is to be computed twice
            recovery_timeout_s=30.0,
        )
        _, client = await stack.enter_async_context(head)
        yield Fleet(places, client)


# A shard that forgets.


def forget_at(place: Place, past_lens: set[int]) -> list[int]:
    """Have each session lost before its steps at these positions, once; lists where it was."""
    seen: set[tuple[str, int]] = set()
    forgotten: list[int] = []

    async def before(step: SeenStep) -> None:
        moment = (step.session, step.past_len)
        if step.past_len in past_lens and moment not in seen:
            seen.add(moment)
            forgotten.append(step.past_len)
            async with shard_client(place.served.url) as hop:
                assert (await hop.close(step.session)).status_code == 204

    place.recorder.before_step = before
    return forgotten


def moments_of(told: Sequence[Any]) -> set[int]:
    """Where to disturb: between chunks of the prompt, at some tokens of the answer, at the last."""
    counts = told[-1]["usage"]
    n_choices = 1 + max(part["index"] for part in parts_of(told))
    n_prompt, n_tokens = counts["prompt_tokens"], counts["completion_tokens"] // n_choices
    last_chunk = (n_prompt - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    last_step = n_prompt + n_tokens - 2
    assert last_chunk > CHUNK_TOKENS
    assert n_tokens > 5
    return {CHUNK_TOKENS, last_chunk, last_step} | {
        *range(n_prompt, last_step, max(5, n_tokens // 8))
    }


@hops
@pytest.mark.parametrize("name", ASKS)
async def test_lost_sessions_change_nothing(make_stages: MakeStages, name: str, lost: int) -> None:
    """A session lost in the prompt, at the first token, now and then, and at the last token."""
    ask = ASKS[name]
    async with serve_fleet(make_stages()) as fleet:
        undisturbed = await ask.run(fleet.client)
        moments = moments_of(undisturbed)
        forgotten = forget_at(fleet.places[lost], moments)
        ask.check(await ask.run(fleet.client), undisturbed)
        assert set(forgotten) == moments
        assert len(forgotten) == len(moments) * ask.body.get("n", 1)
        await eventually(fleet.is_empty, within_s=5)


@hops
async def test_held_back_text_survives(make_stages: MakeStages, lost: int) -> None:
    """What was held for a stop string at the loss comes out if it was none, and not if it was."""
    async with serve_fleet(make_stages()) as fleet:
        body = _ASKED | SCORED | {"response_format": _LETTERS}
        (text,) = texts_of(await Ask(body).run(fleet.client))
        begun, found = text[8:14] + "!", text[18:25]
        assert text.index(found) == 18
        ask = Ask(body | {"stop": [begun, found]})
        undisturbed = await ask.run(fleet.client)
        n_prompt = undisturbed[-1]["usage"]["prompt_tokens"]
        moments = {n_prompt + 11, n_prompt + 14, n_prompt + 21}  # in the strings, and between
        forgotten = forget_at(fleet.places[lost], moments)
        disturbed = await ask.run(fleet.client)

    assert texts_of(disturbed) == [text[:18]]
    assert parts_of(disturbed)[-1]["finish_reason"] == "stop"
    assert disturbed == undisturbed
    assert set(forgotten) == moments


# A shard that goes and comes back.


DEATHS = [(name, "answer") for name in ASKS] + [("echo", "prompt"), ("prompt-scores", "prompt")]


@hops
@pytest.mark.parametrize(("name", "part"), DEATHS)
async def test_restarted_shards_change_nothing(
    make_stages: MakeStages, name: str, part: str, lost: int
) -> None:
    """A shard that dies in the middle of a step, and comes back knowing nothing."""
    ask = ASKS[name]
    async with serve_fleet(make_stages()) as fleet:
        undisturbed = await ask.run(fleet.client)
        place = fleet.places[lost]
        n_steps = place.line.n_steps
        dying = die_at(place, n_steps + (2 if part == "prompt" else n_steps // 2))
        disturbed = await ask.run(fleet.client)
        await dying

        ask.check(disturbed, undisturbed)
        assert place.n_starts == 2
        assert place.line.n_steps > 0
        await eventually(fleet.is_empty, within_s=5)


def die_at(place: Place, nth: int) -> asyncio.Future[None]:
    """Have a place killed when its nth step has come, and started again; done when it has been."""
    due, gone = asyncio.Event(), asyncio.Event()

    async def on_step(delivery: Delivery) -> Reply | None:
        if delivery.n < nth:
            return await delivery.deliver()
        due.set()
        await gone.wait()
        return None

    async def die() -> None:
        await due.wait()
        await place.served.kill()
        gone.set()
        await place.start()

    place.line.on_step = on_step
    return asyncio.create_task(die())


# That the above shows something.


async def test_all_that_is_asked_for_matters(make_stages: MakeStages) -> None:
    """Without the penalties, the bias, the seed or the grammar the text would be another one."""
    async with serve_fleet(make_stages()) as fleet:
        whole = ASKS["schema"].body
        (text,) = texts_of(await Ask(whole).run(fleet.client))
        jsonschema.validate(json.loads(text), SCHEMA)
        without = {
            name: texts_of(await Ask(whole | {name: None}).run(fleet.client))
            for name in ("frequency_penalty", "logit_bias", "response_format")
        }

    assert [name for name, texts in without.items() if texts == [text]] == []


async def test_calls_are_told_in_a_stream(make_stages: MakeStages) -> None:
    """The forced answer is calls and nothing else, each with arguments that its tool takes."""
    async with serve_fleet(make_stages()) as fleet:
        told = await ASKS["forced-calls"].run(fleet.client)
    calls = [call for chunk in told for call in _calls(chunk)]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in _TOOLS}

    assert texts_of(told) == [""]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len(calls) >= 1
    for call in calls:
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])


async def test_the_choices_of_a_random_model_differ(random_model: Path) -> None:
    """With a seed each choice is drawn anew, and each stays the same."""
    stages = [
        plan_stage(str(random_model), LayerSpan(*span), "float32", n_threads=1).load()
        for span in SPANS
    ]
    async with serve_fleet(stages) as fleet:
        ask = ASKS["three-choices"]
        texts = texts_of(await ask.run(fleet.client))
        again = texts_of(await ask.run(fleet.client))
        other = texts_of(await Ask(ask.body | {"seed": 8}).run(fleet.client))

    assert len({*texts, *other}) == 6
    assert again == texts
