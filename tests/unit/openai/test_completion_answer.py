from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion

from meshnet.generation import FinishReason, TokenEvent
from meshnet.openai.bodies import usage
from meshnet.openai.completion_answer import CompletionForm, CompletionWriter, Prompt
from meshnet.openai.errors import error_body
from meshnet.openai.stream import DONE, Chunk
from meshnet.text.tokenizer import ChatTokenizer
from tests.unit.openai.making import HEADING, IDENTITY, score
from tests.unit.text.making import END_ID, save_model

Events = Sequence[tuple[int, TokenEvent]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(str(save_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def form(tokenizer: ChatTokenizer) -> CompletionForm:
    return CompletionForm(HEADING, tokenizer)


def written(writer: CompletionWriter, events: Events) -> list[Chunk]:
    chunks = list(writer.begin())
    for index, event in events:
        chunks += writer.take(index, event)
    return [*chunks, *writer.end()]


def streamed(form: CompletionForm, prompts: Sequence[Prompt], events: Events) -> list[Any]:
    """The bodies of all chunks."""
    *chunks, done = written(CompletionWriter(form, prompts), events)
    assert done == DONE
    return [json.loads(json.dumps(chunk.data)) for chunk in chunks]


def whole(form: CompletionForm, prompts: Sequence[Prompt], events: Events) -> Any:  # noqa: ANN401  # JSON
    """The answer in one piece."""
    writer = CompletionWriter(form, prompts)
    for index, event in events:
        list(writer.take(index, event))
    return json.loads(json.dumps(writer.body()))


def joined(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """The choices that a stream's chunks make together."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = made.setdefault(part["index"], {"text": "", "index": part["index"]})
            assert "finish_reason" not in choice, "nothing comes after the closing chunk"
            choice["text"] += part["text"]
            for name in ("token_ids", "prompt_token_ids"):
                if name in part:
                    choice[name] = choice.get(name, []) + part[name]
            choice["logprobs"] = _with(choice.get("logprobs"), part["logprobs"])
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
    return [made[index] for index in sorted(made)]


def _with(logprobs: dict[str, list[Any]] | None, more: dict[str, list[Any]] | None) -> Any:  # noqa: ANN401  # JSON
    if logprobs is None or more is None:
        return logprobs or more
    return {name: logprobs[name] + more[name] for name in logprobs}


def prompt_of(tokenizer: ChatTokenizer, text: str) -> Prompt:
    """A prompt of single characters, to be echoed."""
    ids = [token_id for char in text for token_id in tokenizer.encode(char)]
    return Prompt(tuple(ids), text, tuple(range(len(text))))


def events_of(tokenizer: ChatTokenizer, text: str, finish: FinishReason) -> list[TokenEvent]:
    """An answer, byte by byte, and the end token if it stops; each scored by minus its place."""
    ids = [token_id for char in text for token_id in tokenizer.encode(char)]
    ids += [END_ID] if finish == "stop" else []
    detokenizer = tokenizer.new_detokenizer()
    events = [
        TokenEvent(detokenizer.push(token_id), token_id, score=score(token_id, -float(place)))
        for place, token_id in enumerate(ids, start=1)
    ]
    return [*events[:-1], replace(events[-1], finish_reason=finish)]


def one(events: Sequence[TokenEvent]) -> Events:
    return [(0, event) for event in events]


def choice_of(body: Any) -> Any:  # noqa: ANN401  # JSON
    (choice,) = body["choices"]
    return choice


def test_a_body_has_openais_keys(form: CompletionForm, tokenizer: ChatTokenizer) -> None:
    """The body holds the joined text, the reason and the counts, with all required keys."""
    events = [replace(event, score=None) for event in events_of(tokenizer, "ab 🌶", "stop")]
    body = whole(form, [Prompt((7, 8))], one(events))

    assert body == {
        **IDENTITY,
        "object": "text_completion",
        "choices": [{"text": "ab 🌶", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage(prompt_tokens=2, completion_tokens=8, cached_tokens=0),
    }
    Completion.model_validate(body, strict=True)


def test_a_stream_is_text_then_reason(form: CompletionForm, tokenizer: ChatTokenizer) -> None:
    """Each piece of text is a chunk, the reason is the last one's, and each has all keys."""
    chunks = streamed(form, [Prompt((7,))], one(events_of(tokenizer, "ab", "length")))
    parts = [("a", None), ("b", None), ("", "length")]

    assert chunks == [
        {
            **IDENTITY,
            "object": "text_completion",
            "choices": [{"text": text, "index": 0, "logprobs": None, "finish_reason": reason}],
        }
        for text, reason in parts
    ]


def test_a_token_without_text_makes_no_chunk(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Bytes of a character that is not whole yet, and an end token, are not worth a chunk."""
    chunks = streamed(form, [Prompt((7,))], one(events_of(tokenizer, "🌶", "stop")))

    assert [choice_of(chunk)["text"] for chunk in chunks] == ["🌶", ""]


FORMS: list[dict[str, object]] = [
    {},
    {"echo": True},
    {"logprobs": 1},
    {"echo": True, "logprobs": 0},
    {"token_ids": True},
    {"echo": True, "logprobs": 2, "token_ids": True},
    {"logprobs": 1, "skip_special_tokens": False},
    {"usage_at_end": True, "usage_always": True, "echo": True},
]


@pytest.mark.parametrize("changes", FORMS)
def test_a_stream_joins_to_the_body(
    form: CompletionForm, tokenizer: ChatTokenizer, changes: dict[str, Any]
) -> None:
    """Whatever is asked for, the chunks of two prompts with two choices make the body's choices."""
    form = replace(form, n=2, **changes)
    prompts = [prompt_of(tokenizer, text) for text in ("abc", "d")]
    if not form.echo:
        prompts = [Prompt(prompt.ids) for prompt in prompts]
    events = list[tuple[int, TokenEvent]]()
    for index, text in enumerate(("x🌶y", "", "z", "日本")):
        scores = tuple(score(token_id, -1.5, (9, -0.5)) for token_id in prompts[index // 2].ids[1:])
        first, *others = events_of(tokenizer, text, "stop")
        events += [(index, replace(first, prompt_scores=scores)), *((index, e) for e in others)]
    shuffled = sorted(events, key=lambda item: item[1].score.logprob if item[1].score else 0)[::-1]

    assert joined(streamed(form, prompts, shuffled)) == whole(form, prompts, shuffled)["choices"]


def test_an_echo_comes_first(form: CompletionForm, tokenizer: ChatTokenizer) -> None:
    """With an echo the prompt is in front of the text, in a stream as a chunk of its own."""
    prompts, events = [prompt_of(tokenizer, "abc")], one(events_of(tokenizer, "de", "length"))
    form = replace(form, echo=True)
    texts = [choice_of(chunk)["text"] for chunk in streamed(form, prompts, events)]

    assert texts == ["abc", "d", "e", ""]
    assert choice_of(whole(form, prompts, events))["text"] == "abcde"


def test_an_echos_scores_cover_prompt_and_answer(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """A prompt of 5 and one token have 6 entries, the first null, the end token's the last."""
    prompt = prompt_of(tokenizer, "hello")
    scores = [score(token_id, -place / 8) for place, token_id in enumerate(prompt.ids)][1:]
    (event,) = events_of(tokenizer, "", "stop")
    event = replace(event, prompt_scores=scores)
    body = whole(replace(form, echo=True, logprobs=1), [prompt], [(0, event)])

    assert choice_of(body) == {
        "text": "hello",
        "index": 0,
        "logprobs": {
            "tokens": ["h", "e", "l", "l", "o", "<|end|>"],
            "token_logprobs": [None, -0.125, -0.25, -0.375, -0.5, -1.0],
            "top_logprobs": [
                None,
                {"e": -0.125},
                {"l": -0.25},
                {"l": -0.375},
                {"o": -0.5},
                {"<|end|>": -1.0},
            ],
            "text_offset": [0, 1, 2, 3, 4, 5],
        },
        "finish_reason": "stop",
    }


def test_an_echo_of_one_token_has_nothing_to_score(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """The single token of a prompt has an entry, and that is null."""
    prompts, events = [prompt_of(tokenizer, "a")], one(events_of(tokenizer, "b", "length"))
    body = whole(replace(form, echo=True, logprobs=0), prompts, events)

    assert choice_of(body)["logprobs"]["token_logprobs"] == [None, -1.0]


def test_without_an_echo_only_the_answer_is_scored(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Scores and offsets begin with the first generated token."""
    prompts, events = [Prompt((7, 8))], one(events_of(tokenizer, "ab", "length"))
    logprobs = choice_of(whole(replace(form, logprobs=0), prompts, events))["logprobs"]

    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["text_offset"] == [0, 1]


def test_each_offset_is_where_the_token_begins_in_the_text(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Bytes of one character begin where it does, and the next token after it."""
    first, *others = events_of(tokenizer, "x🌶y", "length")
    events = one([replace(first, prompt_scores=(score(9, -1.0),)), *others])
    form = replace(form, echo=True, logprobs=0)
    choice = choice_of(whole(form, [prompt_of(tokenizer, "ab")], events))

    assert choice["text"] == "abx🌶y"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 3, 3, 4]


def test_text_that_is_held_back_moves_no_offset(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Where text waits for a stop string that does not come, its tokens are where they were."""
    first, second, third = events_of(tokenizer, "abc", "length")
    held = [replace(first, text=""), replace(second, text="ab"), third]
    form = replace(form, logprobs=0)
    choice = choice_of(whole(form, [Prompt((7,))], one(held)))

    assert choice["text"] == "abc"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    chunks = streamed(form, [Prompt((7,))], one(held))
    assert [choice_of(chunk)["text"] for chunk in chunks] == ["", "ab", "c", ""]


def test_nothing_generated_is_an_echo_alone(form: CompletionForm, tokenizer: ChatTokenizer) -> None:
    """With `max_tokens: 0` there are the prompt, its scores, and no token to count."""
    prompt = prompt_of(tokenizer, "ab")
    nothing = TokenEvent("", None, "length", prompt_scores=(score(9, -0.5),), n_tokens=0)
    form = replace(form, echo=True, logprobs=0, usage_at_end=True)
    body = whole(form, [prompt], [(0, nothing)])

    assert choice_of(body)["text"] == "ab"
    assert choice_of(body)["finish_reason"] == "length"
    assert choice_of(body)["logprobs"]["token_logprobs"] == [None, -0.5]
    assert body["usage"] == usage(prompt_tokens=2, completion_tokens=0, cached_tokens=0)
    *_, closing, last = streamed(form, [prompt], [(0, nothing)])
    assert choice_of(closing)["finish_reason"] == "length"
    assert last["usage"] == body["usage"]


def test_prompt_logprobs_are_each_choices_own(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Every choice has its prompt's scores, by token id."""
    (event,) = events_of(tokenizer, "a", "length")
    events = [(n, replace(event, prompt_scores=(score(n, -0.5, (9, -0.1)),))) for n in (3, 4)]
    body = whole(
        replace(form, prompt_logprobs=0),
        [Prompt((1, 3)), Prompt((1, 4))],
        [(index, event) for index, (_, event) in enumerate(events)],
    )

    told = [[*choice["prompt_logprobs"][1]] for choice in body["choices"]]
    assert [choice["prompt_logprobs"][0] for choice in body["choices"]] == [None, None]
    assert told == [["3"], ["4"]]


def test_token_ids_are_the_prompts_and_the_answers(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """A choice has both lists; in a stream the prompt's come once, before all else."""
    events = one(events_of(tokenizer, "a", "stop"))
    form = replace(form, token_ids=True)
    choice = choice_of(whole(form, [Prompt((7, 8))], events))
    chunks = [choice_of(chunk) for chunk in streamed(form, [Prompt((7, 8))], events)]

    assert choice["prompt_token_ids"] == [7, 8]
    assert choice["token_ids"] == [*tokenizer.encode("a"), END_ID]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 8], None, None, None]
    assert [chunk["token_ids"] for chunk in chunks] == [[], tokenizer.encode("a"), [END_ID], []]


def test_choices_are_numbered_prompt_by_prompt(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Of 3 prompts with 2 choices each the index is 2 * prompt + choice; prompts count once."""
    prompts = [prompt_of(tokenizer, text) for text in "abc"]
    (event,) = events_of(tokenizer, "x", "length")
    body = whole(replace(form, n=2, echo=True), prompts, [(i, event) for i in reversed(range(6))])

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in body["choices"]] == ["ax", "ax", "bx", "bx", "cx", "cx"]
    assert body["usage"] == usage(prompt_tokens=3, completion_tokens=6, cached_tokens=0)


def test_cached_tokens_are_summed_over_prompts(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Of each prompt counts what none of its choices had to have computed."""
    prompts = [prompt_of(tokenizer, text) for text in "ab"]
    (event,) = events_of(tokenizer, "x", "length")
    n_cached = [5, 3, 0, 9]
    events = [(index, replace(event, n_cached=n)) for index, n in enumerate(n_cached)]
    body = whole(replace(form, n=2), prompts, events)

    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_usage_is_not_sent_unasked(form: CompletionForm, tokenizer: ChatTokenizer) -> None:
    """Unasked, no chunk has usage and each has a choice."""
    chunks = streamed(form, [Prompt((7,))], one(events_of(tokenizer, "ab", "stop")))

    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_usage_is_one_last_chunk_when_asked_for(
    form: CompletionForm, tokenizer: ChatTokenizer
) -> None:
    """Asked for, usage is null in all chunks but the last, which has no choices."""
    events = one(events_of(tokenizer, "ab", "stop"))
    *chunks, last = streamed(replace(form, usage_at_end=True), [Prompt((7,))], events)

    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"] == usage(prompt_tokens=1, completion_tokens=3, cached_tokens=0)
    assert {name: last[name] for name in IDENTITY} == IDENTITY


def test_usage_can_be_in_every_chunk(form: CompletionForm, tokenizer: ChatTokenizer) -> None:
    """Asked for always, each chunk has the counts so far."""
    form = replace(form, usage_at_end=True, usage_always=True)
    chunks = streamed(form, [Prompt((7,))], one(events_of(tokenizer, "ab", "length")))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2, 2]


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
def test_at_the_limit_the_count_is_the_limit(
    form: CompletionForm, tokenizer: ChatTokenizer, n_tokens: int
) -> None:
    """Every generated token is counted, in a body and in a stream."""
    events = one(events_of(tokenizer, "a" * n_tokens, "length"))
    *_, last = streamed(replace(form, usage_at_end=True), [Prompt((7,))], events)

    assert whole(form, [Prompt((7,))], events)["usage"]["completion_tokens"] == n_tokens
    assert last["usage"]["completion_tokens"] == n_tokens


def test_tokens_of_a_tail_that_knows_text_only_are_counted(form: CompletionForm) -> None:
    """Events without ids are tokens like others, the one that ends the answer too."""
    events = one([TokenEvent("a"), TokenEvent("b"), TokenEvent("", None, "stop")])
    body = whole(form, [Prompt((7,))], events)

    assert choice_of(body)["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 3


def test_an_error_takes_the_place_of_the_end(form: CompletionForm) -> None:
    """The error is one chunk, and the end mark follows."""
    error = error_body("gone", "server_error", code="shard_unavailable")

    assert [*CompletionWriter(form, [Prompt((7,))]).fail(error)] == [Chunk(dict(error)), DONE]
