"""`POST /v1/completions` over a served mesh: prompts, echoes, scores, stops and streams."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient
from openai.types import Completion

from meshnet.errors import StageError
from meshnet.model.fake_stage import FakeStage, fake_facts, score_token
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.openai.bodies import usage
from meshnet.topology import LayerSpan
from tests.support.answers import (
    CHAT,
    COMPLETIONS,
    answer,
    fake_ids,
    finishes_of,
    parts_of,
    raw_stream,
    refusal,
    stream,
    texts_of,
)
from tests.support.fake_mesh import byte_tokenizer
from tests.support.mesh import (
    VOCAB_SIZE,
    Mesh,
    fake_stages,
    fake_text,
    number_tokenizer,
    serve_mesh,
    spell,
)
from tests.support.streams import DONE, eventually

# One loop and one mesh for the whole file.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
N_TOKENS = 8
TEXT = fake_text(PROMPT, N_TOKENS)
IDS = fake_ids(PROMPT, N_TOKENS)
ASK: dict[str, Any] = {
    "model": "fake",
    "prompt": PROMPT,
    "temperature": 0,
    "max_tokens": N_TOKENS,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncGenerator[Mesh]:
    async with serve_mesh(fake_stages((0, 2), (2, 4))) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ending() -> AsyncGenerator[Mesh]:
    """A mesh whose model ends its answer to PROMPT with its first token."""
    tokenizer = number_tokenizer(end_token_ids=frozenset({IDS[0]}))
    async with serve_mesh(fake_stages((0, 4)), tokenizer) as served:
        yield served


async def complete(mesh: Mesh, **changes: object) -> Any:  # noqa: ANN401  # JSON
    return await answer(mesh.client, COMPLETIONS, **(ASK | changes))


async def streamed(mesh: Mesh, **changes: object) -> list[Any]:
    return await stream(mesh.client, COMPLETIONS, **(ASK | changes))


async def choice_of(mesh: Mesh, **changes: object) -> Any:  # noqa: ANN401  # JSON
    (choice,) = (await complete(mesh, **changes))["choices"]
    return choice


# Prompts.


async def test_answer_is_the_models_continuation(mesh: Mesh) -> None:
    """Token ids go on as the model does, with the counts and the kind that OpenAI has."""
    body = await complete(mesh)

    assert body["choices"] == [
        {"text": TEXT, "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == usage(prompt_tokens=4, completion_tokens=8, cached_tokens=0)
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", "fake", "cmpl-")


async def test_text_is_the_same_as_its_tokens(mesh: Mesh) -> None:
    """A prompt as text gives what its ids give."""
    assert (await choice_of(mesh, prompt=spell(PROMPT)))["text"] == TEXT


async def test_sixteen_tokens_are_the_default(mesh: Mesh) -> None:
    """Without a limit there are 16 tokens; with -1 the context is filled."""
    body = await complete(mesh, max_tokens=None)
    full = await complete(mesh, prompt=PROMPT * 125, max_tokens=-1)

    assert body["usage"]["completion_tokens"] == 16
    assert full["usage"]["total_tokens"] == 512


async def test_batch_is_answered_prompt_by_prompt(mesh: Mesh) -> None:
    """Three prompts with two choices each are six, each prompt's text that of it alone."""
    prompts = [[5, 6], [7], [8, 9, 10]]
    body = await complete(mesh, prompt=prompts, n=2)
    expected = [fake_text(prompt, N_TOKENS) for prompt in prompts for _ in range(2)]

    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"] == usage(prompt_tokens=6, completion_tokens=48, cached_tokens=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n": 2},
        {"prompt": [[5, 6], [7]], "n": 2, "echo": True},
        {"prompt": "<5><6>", "echo": True, "logprobs": 2},
        {"logprobs": 0, "return_token_ids": True},
        {"prompt": ["<5>", "<6><7>"], "max_tokens": 0, "echo": True, "logprobs": 1},
    ],
)
async def test_stream_and_plain_agree(mesh: Mesh, changes: dict[str, Any]) -> None:
    """The chunks of each choice join to its text, and its reason comes once and last."""
    body = await complete(mesh, **changes)
    chunks = await streamed(mesh, **changes)

    assert texts_of(chunks) == [choice["text"] for choice in body["choices"]]
    assert sorted(finishes_of(chunks)) == [
        (choice["index"], choice["finish_reason"]) for choice in body["choices"]
    ]
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    for choice in body["choices"]:
        parts = [part for part in parts_of(chunks) if part["index"] == choice["index"]]
        assert [part["finish_reason"] is None for part in parts[:-1]] == [True] * (len(parts) - 1)
        if choice["logprobs"] is not None:
            told = [part["logprobs"] for part in parts if part["logprobs"]]
            for name, values in choice["logprobs"].items():
                assert [value for logprobs in told for value in logprobs[name]] == values


async def test_more_choices_than_turns_come_one_after_the_other() -> None:
    """A head that runs one generation at a time answers three choices, streamed and not."""
    async with serve_mesh(fake_stages((0, 4)), max_concurrent_requests=1) as narrow:
        body = await complete(narrow, n=3)
        chunks = await streamed(narrow, n=3)

    assert [choice["text"] for choice in body["choices"]] == [TEXT] * 3
    assert texts_of(chunks) == [TEXT] * 3


# Echo and scores: what lm_eval reads (llama.cpp#27174, lm-eval#4158).


async def test_echo_is_the_prompt_and_the_answer(mesh: Mesh) -> None:
    """The prompt's text is in front of the answer's, whether it was ids or text."""
    for prompt in (PROMPT, spell(PROMPT)):
        assert (await choice_of(mesh, prompt=prompt, echo=True))["text"] == spell(PROMPT) + TEXT


@pytest.mark.parametrize("prefill_chunk_tokens", [512, 4, 1])
async def test_echo_with_scores_covers_the_prompt(prefill_chunk_tokens: int) -> None:
    """Of 11 ids and one token there are 12 entries, the first null, the others the model's own."""
    prompt = list(range(20, 31))
    stages = fake_stages((0, 2), (2, 4))
    async with serve_mesh(stages, prefill_chunk_tokens=prefill_chunk_tokens) as chunked:
        choice = await choice_of(chunked, prompt=[prompt], max_tokens=1, logprobs=1, echo=True)
    ids = [*prompt, *fake_ids(prompt, 1)]
    scores = [score_token(ids[:end], ids[end], VOCAB_SIZE, 1) for end in range(1, 12)]
    logprobs = choice["logprobs"]

    assert logprobs["tokens"] == [f"<{token_id}>" for token_id in ids]
    assert logprobs["token_logprobs"] == [None, *(score.logprob for score in scores)]
    assert logprobs["top_logprobs"][0] is None
    for made, score in zip(logprobs["top_logprobs"][1:], scores, strict=True):
        best_id, best = score.top[0]
        assert made == {f"<{best_id}>": best, f"<{score.token_id}>": score.logprob}
    assert logprobs["text_offset"] == [4 * place for place in range(12)]
    assert choice["text"] == spell(ids)


async def test_an_end_token_is_scored_like_any_other(ending: Mesh) -> None:
    """The one generated entry is there also if it ends the answer, which has no text then."""
    choice = await choice_of(ending, max_tokens=1, logprobs=1, echo=True)

    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT) + 1
    assert choice["logprobs"]["tokens"][-1] == f"<{IDS[0]}>"
    assert choice["text"] == spell(PROMPT)


async def test_greedy_continuations_are_told_by_equal_floats(mesh: Mesh) -> None:
    """A continuation is greedy exactly if each number equals its dictionary's largest."""
    others = [(token_id + 1) % VOCAB_SIZE for token_id in IDS[:3]]
    continuations = [IDS[:3], [*IDS[:2], others[2]], others]
    body = await complete(
        mesh,
        prompt=[[*PROMPT, *ids] for ids in continuations],
        max_tokens=1,
        logprobs=1,
        echo=True,
    )

    assert [_is_greedy(choice["logprobs"], len(PROMPT)) for choice in body["choices"]] == [
        True,
        False,
        False,
    ]


def _is_greedy(logprobs: dict[str, list[Any]], n_context: int) -> bool:
    """As lm_eval's parse_logprobs."""
    numbers, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
    pairs = zip(numbers[n_context:-1], tops[n_context:-1], strict=True)
    return all(number == max(top.values()) for number, top in pairs)


async def test_nothing_generated_is_the_prompts_scores(mesh: Mesh) -> None:
    """`max_tokens: 0` gives the prompt and its scores, and counts no token."""
    body = await complete(mesh, max_tokens=0, echo=True, logprobs=1)
    (choice,) = body["choices"]

    assert (choice["text"], choice["finish_reason"]) == (spell(PROMPT), "length")
    assert len(choice["logprobs"]["tokens"]) == 4
    assert body["usage"]["completion_tokens"] == 0


async def test_the_answers_scores_are_the_models(mesh: Mesh) -> None:
    """Without an echo there is an entry for each generated token."""
    logprobs = (await choice_of(mesh, logprobs=2))["logprobs"]
    ids = [*PROMPT, *IDS]
    scores = [score_token(ids[:end], ids[end], VOCAB_SIZE, 2) for end in range(4, 12)]

    assert logprobs["tokens"] == [f"<{token_id}>" for token_id in IDS]
    assert logprobs["token_logprobs"] == [score.logprob for score in scores]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 8


async def test_prompt_scores_by_id_are_each_choices_own(mesh: Mesh) -> None:
    """`prompt_logprobs` are beside each choice, and cannot be streamed."""
    body = await complete(mesh, prompt=[[5, 6], [7, 8]], prompt_logprobs=0, max_tokens=0)
    status, error = await refusal(
        mesh.client, COMPLETIONS, **(ASK | {"prompt_logprobs": 0, "stream": True})
    )

    assert [[*choice["prompt_logprobs"][1]] for choice in body["choices"]] == [["6"], ["8"]]
    assert (status, error["param"]) == (400, "prompt_logprobs")


# Where an answer ends.


@pytest.mark.parametrize("keep", [False, True])
async def test_stop_string_spans_tokens(mesh: Mesh, keep: bool) -> None:
    """A string over three tokens ends the text before it, or behind it, streamed or not."""
    first, second, third = (spell([token_id]) for token_id in IDS[1:4])
    stop = first[1:] + second + third[:2]
    place = TEXT.index(stop)
    expected = TEXT[: place + len(stop)] if keep else TEXT[:place]
    changes = {"stop": ["never", stop], "include_stop_str_in_output": keep}
    choice = await choice_of(mesh, **changes)
    chunks = await streamed(mesh, **changes)

    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    assert (texts_of(chunks), finishes_of(chunks)) == ([expected], [(0, "stop")])


async def test_text_that_only_begins_a_stop_string_comes(mesh: Mesh) -> None:
    """What was held back for a stop string that never came is in the text."""
    changes = {"stop": TEXT[-4:] + "!"}

    assert (await choice_of(mesh, **changes))["text"] == TEXT
    assert texts_of(await streamed(mesh, **changes)) == [TEXT]


async def test_a_stop_token_ends_the_answer(mesh: Mesh) -> None:
    """An id of `stop_token_ids` ends it as the model's own end does, and is counted."""
    body = await complete(mesh, stop_token_ids=[IDS[2]])
    place = IDS.index(IDS[2])

    assert body["choices"][0]["text"] == spell(IDS[:place])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == place + 1


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_count_equals_the_limit(ending: Mesh, n_tokens: int, path: str) -> None:
    """With `ignore_eos` there are as many tokens as asked for, streamed or not."""
    messages = [{"role": "user", "content": spell(PROMPT)}]
    ask: dict[str, object] = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": messages}
    ask |= {"model": "fake", "temperature": 0, "max_tokens": n_tokens, "ignore_eos": True}
    body = await answer(ending.client, path, **ask)
    *_, last = await stream(ending.client, path, **ask, stream_options={"include_usage": True})

    assert body["usage"]["completion_tokens"] == n_tokens
    assert body["choices"][0]["finish_reason"] == "length"
    assert last["usage"] == body["usage"]


async def test_no_end_before_the_least_length(ending: Mesh) -> None:
    """With `min_tokens` the model's end token does not come before so many others."""
    body = await complete(ending, min_tokens=3)

    assert body["usage"]["completion_tokens"] >= 4
    assert (await complete(ending))["usage"]["completion_tokens"] == 1


# Parameters that reach the tail.


async def test_bias_decides(mesh: Mesh) -> None:
    """A token that is favoured above all comes, and one that is ruled out does not."""
    assert (await choice_of(mesh, logit_bias={"7": 100}))["text"] == "<7>" * N_TOKENS
    banned = await choice_of(mesh, logit_bias={str(IDS[0]): -100})
    assert not banned["text"].startswith(f"<{IDS[0]}>")


async def test_answer_has_the_form_asked_for() -> None:
    """A regular expression is followed token by token, streamed or not, and ends the answer."""
    tokenizer = byte_tokenizer(512)
    stage = FakeStage(fake_facts(LayerSpan(0, 4), 4, tokenizer.vocab_size))
    changes = {"response_format": {"type": "regex", "pattern": "a(b|c){3}"}, "n": 2}
    async with serve_mesh([stage], tokenizer) as formed:
        body = await complete(formed, **changes)
        chunks = await streamed(formed, **changes)

    for choice in body["choices"]:
        assert re.fullmatch("a(b|c){3}", choice["text"])
        assert choice["finish_reason"] == "stop"
    assert texts_of(chunks) == [choice["text"] for choice in body["choices"]]


# Counts (Arthur-Ficial/apfel#100, ROCm/ATOM#1711).


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_usage_is_streamed_as_asked(mesh: Mesh, path: str) -> None:
    """Without options and with false there is no count, with true one chunk without choices."""
    messages = [{"role": "user", "content": spell(PROMPT)}]
    ask: dict[str, object] = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": messages}
    ask |= {"model": "fake", "temperature": 0, "max_tokens": 3}
    for options in (None, {}, {"include_usage": False}):
        chunks = await stream(mesh.client, path, **ask, stream_options=options)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    *chunks, last = await stream(mesh.client, path, **ask, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == usage(prompt_tokens=4, completion_tokens=3, cached_tokens=0)


async def test_stream_options_need_a_stream(mesh: Mesh) -> None:
    """Options of a stream that is not asked for are refused by name."""
    status, error = await refusal(mesh.client, COMPLETIONS, **ASK, stream_options={})

    assert (status, error["param"]) == (400, "stream_options")


# What is refused, before any shard hears of it.


WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": [5, 99999999]}, "prompt", None),
    ({"prompt": [[5], [-1]]}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": [[]]}, "prompt", None),
    ({"prompt": ""}, "prompt", None),
    ({"prompt": None}, "prompt", None),
    ({"prompt": [5] * 513}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 500, "max_tokens": 13}, "prompt", "context_length_exceeded"),
    ({"prompt": [[5]] * 17}, "prompt", None),
    ({"prompt": [[5]] * 9, "n": 2}, "prompt", None),
    ({"n": 17}, "n", None),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"logprobs": 21}, "logprobs", None),
    ({"logprobs": True}, "logprobs", None),
    ({"logit_bias": {"99999999": 5}}, "logit_bias", None),
    ({"logit_bias": {"-1": 5}}, "logit_bias", None),
    ({"logit_bias": {"abc": 1}}, "logit_bias", None),
    ({"stop_token_ids": [99999999]}, "stop_token_ids", None),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", None),
    ({"stop": ""}, "stop[0]", None),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
]


@pytest.mark.parametrize(("changes", "param", "code"), WRONG)
async def test_what_is_wrong_is_refused_by_name(
    mesh: Mesh, changes: dict[str, object], param: str, code: str | None
) -> None:
    """The status is 400 and the error names the field; no shard was asked for a step."""
    steps = [len(shard.recorder.steps) for shard in mesh.shards]
    status, error = await refusal(mesh.client, COMPLETIONS, **(ASK | changes))

    assert (status, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert [len(shard.recorder.steps) for shard in mesh.shards] == steps


async def test_unknown_model_is_not_found(mesh: Mesh) -> None:
    """Another model's name is 404, as for a chat."""
    status, error = await refusal(mesh.client, COMPLETIONS, **(ASK | {"model": "nope"}))

    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_strays_are_named_in_a_header(mesh: Mesh) -> None:
    """An unknown field is passed over, and the answer says so."""
    response = await mesh.client.post(COMPLETIONS, json=ASK | {"temperatur": 1, "max_token": 3})

    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "temperatur,max_token"


async def test_every_field_may_be_null(mesh: Mesh) -> None:
    """A request with null in each optional field is the one without them."""
    names = (
        "echo n logprobs stop stream stream_options logit_bias seed suffix best_of user top_p"
        " response_format prompt_logprobs min_tokens stop_token_ids top_k min_p"
    )
    assert (await choice_of(mesh, **dict.fromkeys(names.split())))["text"] == TEXT


# What goes wrong, and who leaves.


class _FailingStage(FakeStage):
    """Fails at a position."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        if step.position == len(PROMPT) + 2:
            raise StageError("a broken stage")
        return super().run(step, state)


@pytest.mark.parametrize("n", [1, 3])
async def test_failure_in_a_stream_is_an_error_and_the_end(n: int) -> None:
    """A stage that fails after some tokens is one error event, no reason, and the end mark."""
    stage = _FailingStage(fake_facts(LayerSpan(0, 4), 4, VOCAB_SIZE))
    async with serve_mesh([stage], recovery_timeout_s=0.5) as broken:
        *events, error, done = await raw_stream(broken.client, COMPLETIONS, **ASK, n=n)
        await eventually(lambda: _is_empty(broken), within_s=5)

    assert done == DONE
    assert json.loads(error)["error"]["type"] == "server_error"
    assert finishes_of([json.loads(event) for event in events]) == []
    assert len(events) >= 1


async def _is_empty(mesh: Mesh) -> bool:
    return {sessions for sessions, _ in await mesh.usage()} == {0}


async def test_client_that_leaves_frees_every_choice(mesh: Mesh) -> None:
    """A closed stream ends all of its choices on every hop."""
    body = ASK | {"stream": True, "max_tokens": 400, "n": 4}
    async with mesh.client.stream("POST", COMPLETIONS, json=body) as response:
        async for _ in response.aiter_lines():
            break
    await eventually(lambda: _is_empty(mesh), within_s=5)


async def test_requests_beside_each_other_do_not_mix(mesh: Mesh) -> None:
    """Batches that run at once have the texts that they have alone."""
    prompts = [[[n, n + 1], [n + 2]] for n in range(5, 8)]
    bodies = await asyncio.gather(*(complete(mesh, prompt=prompt) for prompt in prompts))

    for prompt, body in zip(prompts, bodies, strict=True):
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == [fake_text(one, N_TOKENS) for one in prompt]


# The official client.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncGenerator[AsyncOpenAI]:
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(
        base_url=f"{mesh.head.url}/v1", api_key="any", max_retries=0, http_client=http
    ) as made:
        yield made


async def test_official_client_completes(client: AsyncOpenAI) -> None:
    """The client of OpenAI reads text, scores and counts."""
    create = cast("Any", client.completions.create)
    completion: Completion = await create(**ASK, logprobs=1, echo=True)
    (choice,) = completion.choices

    assert choice.text == spell(PROMPT) + TEXT
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"<{token_id}>" for token_id in [*PROMPT, *IDS]]
    assert completion.usage is not None
    assert completion.usage.completion_tokens == N_TOKENS


async def test_official_client_streams(client: AsyncOpenAI) -> None:
    """The textbook loop over a stream of two prompts gives both texts."""
    texts: tuple[list[str], list[str]] = ([], [])
    prompts = [[5, 6], [7]]
    create = cast("Any", client.completions.create)
    chunks: AsyncStream[Completion] = await create(**(ASK | {"prompt": prompts}), stream=True)
    async for chunk in chunks:
        texts[chunk.choices[0].index].append(chunk.choices[0].text)

    assert ["".join(text) for text in texts] == [fake_text(p, N_TOKENS) for p in prompts]


async def test_no_event_is_cut_at_a_line_separator(mesh: Mesh) -> None:
    """Data is ASCII: many clients split lines as Python does, at U+2028 too."""
    prompt = "<5>\u2028\x85<6>"
    first, *_ = await raw_stream(mesh.client, COMPLETIONS, **(ASK | {"prompt": prompt}), echo=True)

    assert first.isascii()
    assert json.loads(first)["choices"][0]["text"] == prompt


async def test_response_is_plain_json(mesh: Mesh) -> None:
    """An answer in one piece is JSON, a stream server-sent events that nothing caches."""
    plain = await mesh.client.post(COMPLETIONS, json=ASK)
    streaming: httpx.Response = await mesh.client.post(COMPLETIONS, json=ASK | {"stream": True})

    assert plain.headers["content-type"] == "application/json"
    assert streaming.headers["content-type"].startswith("text/event-stream")
    assert streaming.headers["cache-control"] == "no-cache"
