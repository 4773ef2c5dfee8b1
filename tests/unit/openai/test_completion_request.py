from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.normalizers import Lowercase, Replace
from transformers import AutoTokenizer

from meshnet.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from meshnet.generation import Sampling, Stopping, TokenEvent
from meshnet.openai.answers import AnswerPlan, Serving
from meshnet.openai.bodies import usage
from meshnet.openai.completion_request import (
    CompletionRequest,
    parse_completion_request,
    plan_completion,
)
from meshnet.openai.sampling_fields import choice_seed
from meshnet.text.tokenizer import ChatTokenizer
from tests.unit.openai.making import HEADING, FakeGrammars, score
from tests.unit.text.making import BOS_ID, END_ID, save_model, sentencepiece_tokenizer

MAX_POSITIONS = 100
SEED = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(str(folder))


@pytest.fixture(scope="module")
def serving(tokenizer: ChatTokenizer) -> Serving:
    return Serving(tokenizer, FakeGrammars(), HEADING, MAX_POSITIONS, 8, SEED)


def parse(prompt: object = "hello", **fields: object) -> CompletionRequest:
    return parse_completion_request(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


def refusal(prompt: object = "hello", **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(prompt, **fields)
    return caught.value


def plan(serving: Serving, prompt: object = "hello", **fields: object) -> AnswerPlan:
    return plan_completion(parse(prompt, **fields), serving)


def body(planned: AnswerPlan, *events: TokenEvent) -> Any:  # noqa: ANN401  # JSON
    """The answer if each choice has the same events."""
    for index in range(len(planned.generations)):
        for event in events:
            list(planned.writer.take(index, event))
    return json.loads(json.dumps(planned.writer.body()))


NOTHING = TokenEvent("", None, "length", n_tokens=0)


# Prompts.


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        ([5], ((5,),)),
        ([5, 6.0], ((5, 6),)),
        ([[5]], ((5,),)),
        ([[5, 6], [7]], ((5, 6), (7,))),
        ([[5.0]], ((5,),)),
        (["a", [5]], ("a", (5,))),
    ],
)
def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_them(
    given: object, prompts: tuple[object, ...]
) -> None:
    """One prompt is the same as a list of it."""
    assert parse(given).prompt == prompts


NO_PROMPTS: list[tuple[Any, str]] = [
    ("", "is empty"),
    ([], "is empty"),
    ([""], "is empty"),
    ([[]], "is empty"),
    (["a", ""], "is empty"),
    (5, "is not a list of token ids"),
    (True, "is not a list of token ids"),
    ({}, "is not a list of token ids"),
    ([True], "is not a list of token ids"),
    ([1.5], "is not a list of token ids"),
    ([-1], "is not a list of token ids"),
    ([None], "is not a list of token ids"),
    ([{}], "is not a list of token ids"),
    ([5, "a"], "is not a list of token ids"),
    ([[5, "6"]], "is not a list of token ids"),
    ([[[5]]], "is not a list of token ids"),
    ([[5]] * 129, "is 129 prompts"),
]


@pytest.mark.parametrize(("prompt", "problem"), NO_PROMPTS)
def test_what_is_no_prompt_is_refused(prompt: object, problem: str) -> None:
    """Nothing, and what is neither text nor ids, is refused by the field's name."""
    error = refusal(prompt)

    assert error.message.startswith(f"prompt: {problem}; allowed: a string, ")
    assert error.members["field"] == "prompt"


def test_a_text_is_encoded_as_transformers_does_it(folder: Path, serving: Serving) -> None:
    """A text gets the tokenizer's own special tokens, here BOS, and once."""
    reference = AutoTokenizer.from_pretrained(folder)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  # loosely typed
    text = "hello world <|end|>"
    (one,) = plan(serving, text).generations

    assert list(one.prompt_ids) == cast("list[int]", reference(text)["input_ids"])
    assert one.prompt_ids.count(BOS_ID) == 1


def test_special_tokens_can_be_left_out(serving: Serving, tokenizer: ChatTokenizer) -> None:
    """A text that has them already needs no second BOS."""
    (one,) = plan(serving, "<s>hello", add_special_tokens=False).generations

    assert list(one.prompt_ids) == [BOS_ID, *tokenizer.encode("hello")]


def test_token_ids_are_the_prompt(serving: Serving) -> None:
    """A list of ids gets nothing added: whoever counts them counts on that."""
    (one,) = plan(serving, [5, 6, 7]).generations

    assert one.prompt_ids == (5, 6, 7)


def test_a_token_that_is_none_is_refused(serving: Serving, tokenizer: ChatTokenizer) -> None:
    """An id beyond the vocabulary is the client's fault and never gets to a shard."""
    last = tokenizer.vocab_size - 1

    assert plan(serving, [last]).generations[0].prompt_ids == (last,)
    with pytest.raises(InvalidRequest, match=f"^prompt: token id {last + 1} is not in the vocab"):
        plan(serving, [[5], [5, last + 1]])


def test_a_text_without_tokens_is_refused(tmp_path: Path, serving: Serving) -> None:
    """A generation needs at least one prompt token."""
    raw = sentencepiece_tokenizer()
    raw.normalizer = Replace(" ", "")
    model = ChatTokenizer.load(str(save_model(tmp_path, tokenizer=raw)))
    with pytest.raises(InvalidRequest, match=r"^prompt: makes no tokens; allowed: "):
        plan(replace(serving, tokenizer=model), " ")


# What is generated.


def test_a_silent_client_gets_openais_defaults(serving: Serving) -> None:
    """16 tokens, one choice, temperature 1, and nothing is scored."""
    (one,) = plan(serving, [5]).generations

    assert one.max_tokens == 16
    assert one.sampling == Sampling(temperature=1.0, seed=SEED)
    assert one.stopping == Stopping()
    assert (one.grammar, one.score_prompt, one.logit_bias) == (None, False, {})
    assert one.skip_special_tokens


def test_parameters_reach_the_generation(serving: Serving) -> None:
    """What the client asks for is what is generated."""
    (one,) = plan(
        serving,
        [5],
        max_tokens=3,
        temperature=0,
        seed=11,
        stop=["x"],
        min_tokens=2,
        logit_bias={"6": -1},
        skip_special_tokens=False,
        logprobs=2,
    ).generations

    assert one.max_tokens == 3
    assert one.sampling == Sampling(temperature=0, seed=11, top_logprobs=2)
    assert one.stopping == Stopping(strings=("x",), min_tokens=2)
    assert one.logit_bias == {6: -1.0}
    assert not one.skip_special_tokens


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "expected"),
    [
        (40, None, 16),
        (90, None, 10),
        (99, None, 1),
        (40, -1, 60),
        (40, 60, 60),
        (40, 1, 1),
    ],
)
def test_the_answer_is_as_long_as_asked(
    serving: Serving, n_prompt: int, max_tokens: int | None, expected: int
) -> None:
    """A given limit is the limit, -1 fills the context, and 16 is the most without one."""
    (one,) = plan(serving, [5] * n_prompt, max_tokens=max_tokens).generations

    assert one.max_tokens == expected


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens"), [(100, None), (100, -1), (85, 16), (101, 1), (40, 2**31 - 1)]
)
def test_what_does_not_fit_the_context_is_refused(
    serving: Serving, n_prompt: int, max_tokens: int | None
) -> None:
    """A prompt without room for its answer is named, also if others fit."""
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 100") as caught:
        plan(serving, [[5], [5] * n_prompt], max_tokens=max_tokens)

    assert caught.value.members["field"] == "prompt"


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
def test_nothing_may_be_generated_if_the_prompt_is_asked_for(
    serving: Serving, fields: dict[str, object]
) -> None:
    """`max_tokens: 0` is right with an echo or the prompt's scores, in a full context too."""
    (one,) = plan(serving, [5] * 100, max_tokens=0, **fields).generations

    assert one.max_tokens == 0


def test_nothing_at_all_is_refused() -> None:
    """`max_tokens: 0` without either asks for nothing."""
    error = refusal(max_tokens=0)

    assert error.message.startswith("max_tokens: 0 asks for nothing; allowed: ")
    assert error.members["field"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "score_prompt", "top_logprobs"),
    [
        ({}, False, None),
        ({"echo": True}, False, None),
        ({"logprobs": 0}, False, 0),
        ({"logprobs": 3}, False, 3),
        ({"echo": True, "logprobs": 1}, True, 1),
        ({"prompt_logprobs": 2}, True, 2),
        ({"logprobs": 1, "prompt_logprobs": 2}, True, 2),
        ({"logprobs": 5, "prompt_logprobs": 0}, True, 5),
    ],
)
def test_the_tail_scores_what_is_asked_for(
    serving: Serving, fields: dict[str, object], score_prompt: bool, top_logprobs: int | None
) -> None:
    """The prompt is scored for an echo with scores, or by itself; the larger number counts."""
    (one,) = plan(serving, [5, 6], **fields).generations

    assert one.score_prompt is score_prompt
    assert one.sampling.top_logprobs == top_logprobs


# Choices.


def test_choices_are_prompt_by_prompt(serving: Serving) -> None:
    """Of 3 prompts with 2 choices each there are 6 generations, in the order of their index."""
    generations = plan(serving, [[5], [6], [7]], n=2).generations

    assert [one.prompt_ids for one in generations] == [(5,), (5,), (6,), (6,), (7,), (7,)]


def test_a_given_seed_depends_on_no_other_prompt(serving: Serving) -> None:
    """Each prompt's choices have the seeds that they have alone."""
    alone = [one.sampling.seed for one in plan(serving, [6], n=2, seed=42).generations]
    beside = [one.sampling.seed for one in plan(serving, [[5], [6]], n=2, seed=42).generations]

    assert alone == [42, choice_seed(42, 1)]
    assert beside == alone * 2


def test_without_a_seed_all_choices_differ(serving: Serving) -> None:
    """Equal prompts are drawn for anew, each of their choices too."""
    generations = plan(serving, [[5], [5], [5]], n=2).generations

    assert len({one.sampling.seed for one in generations}) == 6


@pytest.mark.parametrize(
    ("n_prompts", "n", "field"), [(1, 9, "n"), (9, 1, "prompt"), (3, 3, "prompt")]
)
def test_too_many_choices_are_refused(serving: Serving, n_prompts: int, n: int, field: str) -> None:
    """More answers than this server makes to one request are refused with the limit."""
    with pytest.raises(InvalidRequest, match=r"9 answers .* allowed: 8$") as caught:
        plan(serving, [[5]] * n_prompts, n=n)

    assert caught.value.members["field"] == field


# What must be right together.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -2),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("max_tokens", 3.5),
        ("max_tokens", 2**31),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", 1),
        ("add_special_tokens", "false"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    """A value of the wrong type or out of range is refused by its field's name."""
    assert refusal(**{name: value}).members["field"] == name


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("best_of", 2)])
def test_what_is_not_implemented_is_refused(name: str, value: object) -> None:
    """Text in front of a suffix, and the best of several, are not made here."""
    assert isinstance(refusal(**{name: value}), UnsupportedParameter)
    assert parse(suffix="", best_of=1) == parse()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_does_not_go_together_is_refused(
    serving: Serving, fields: dict[str, object], field: str
) -> None:
    """What no field shows alone is refused before anything is generated."""
    with pytest.raises(InvalidRequest) as caught:
        plan(serving, **fields)

    assert caught.value.members["field"] == field


def test_a_format_is_one_grammar_for_all_choices(serving: Serving) -> None:
    """The format is compiled once, and every choice follows it; plain text needs none."""
    generations = plan(
        serving, [[5], [6]], n=2, response_format={"type": "json_object"}
    ).generations
    (plain,) = plan(serving, [5], response_format={"type": "text"}).generations

    assert len({id(one.grammar) for one in generations}) == 1
    assert generations[0].grammar is not None
    assert plain.grammar is None


# The echo.


def test_a_text_is_echoed_as_it_was_given(serving: Serving) -> None:
    """Control tokens that are spelt in it stay, and what the tokenizer added is not there."""
    text = "hello <|end|> 🌶️ 日本"
    planned = plan(serving, text, echo=True, max_tokens=0)

    assert body(planned, NOTHING)["choices"][0]["text"] == text


@pytest.mark.parametrize(("skip", "text"), [(True, "hello"), (False, "<s>hello<|end|>")])
def test_token_ids_are_echoed_as_the_answer_is(
    serving: Serving, tokenizer: ChatTokenizer, skip: bool, text: str
) -> None:
    """Their text has control tokens if the answer's has."""
    ids = [BOS_ID, *tokenizer.encode("hello"), END_ID]
    planned = plan(serving, ids, echo=True, max_tokens=0, skip_special_tokens=skip)

    assert body(planned, NOTHING)["choices"][0]["text"] == text


def test_without_an_echo_the_prompt_is_no_text(serving: Serving) -> None:
    """Nothing of the prompt is in an answer that does not ask for it."""
    planned = plan(serving, "hello", max_tokens=1)

    assert body(planned, TokenEvent("x", 5, "length"))["choices"][0]["text"] == "x"


def offsets(serving: Serving, prompt: object, **fields: object) -> tuple[str, list[int], list[str]]:
    planned = plan(serving, prompt, echo=True, logprobs=0, max_tokens=0, **fields)
    scores = tuple(score(token_id, -1.0) for token_id in planned.generations[0].prompt_ids[1:])
    choice = body(planned, replace(NOTHING, prompt_scores=scores))["choices"][0]
    return choice["text"], choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]


def test_added_tokens_are_at_the_beginning_of_a_text(serving: Serving) -> None:
    """BOS has no place of its own in the text, and the first token of the text begins it."""
    text, places, tokens = offsets(serving, "hello world")

    assert tokens[0] == "<s>"
    assert places[:2] == [0, 0]
    assert [text[start : start + len(token)] for start, token in zip(places, tokens, strict=True)][
        1:
    ] == tokens[1:]


@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
def test_every_token_begins_where_its_text_is(serving: Serving, text: str) -> None:
    """Each token that is whole characters is found at its offset, in order, within the text."""
    echoed, places, tokens = offsets(serving, text)

    assert echoed == text
    assert places == sorted(places)
    assert all(0 <= place <= len(text) for place in places)
    for place, token in list(zip(places, tokens, strict=True))[1:]:
        assert "\N{REPLACEMENT CHARACTER}" in token or text.startswith(token, place)


def test_places_in_a_text_that_the_tokenizer_changes_are_within_it(
    tmp_path: Path, serving: Serving
) -> None:
    """Where decoding does not give the text back, offsets are near, and never outside of it."""
    raw = sentencepiece_tokenizer()
    raw.normalizer = Lowercase()
    model = ChatTokenizer.load(str(save_model(tmp_path, tokenizer=raw)))
    text, places, _ = offsets(replace(serving, tokenizer=model), "HELLO")

    assert text == "HELLO"
    assert places == sorted(places)
    assert all(0 <= place <= 5 for place in places)


def test_usage_counts_each_prompt_once(serving: Serving) -> None:
    """Of two prompts with two choices each both are counted once, and all tokens."""
    planned = plan(serving, [[5, 6], [7]], n=2)

    told = body(planned, TokenEvent("x", 5, "length"))["usage"]
    assert told == usage(prompt_tokens=3, completion_tokens=4, cached_tokens=0)


def test_what_the_answer_carries_is_what_was_asked_for(serving: Serving) -> None:
    """Ids, scores of the prompt and counts are there if they were asked for."""
    planned = plan(serving, [5, 6], return_token_ids=True, prompt_logprobs=0)
    event = TokenEvent("x", 7, "length", score(7, -1.0), (score(6, -0.5),))
    (choice,) = body(planned, event)["choices"]

    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [7])
    assert choice["prompt_logprobs"][1]["6"]["logprob"] == -0.5
    assert choice["logprobs"] is None
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = plan(serving, [5, 6], stream=True, stream_options=options)
    (chunk, _) = streamed.writer.take(0, TokenEvent("x", 7, "length"))
    assert cast("Any", chunk.data)["usage"]["total_tokens"] == 3


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": "x" * 10_000}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": "x"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
        ({"type": "regex"}, "response_format.pattern"),
        ({"type": "regex", "pattern": 5}, "response_format.pattern"),
    ],
)
def test_a_fault_in_a_format_is_told_with_its_place(form: object, field: str) -> None:
    """The place is where the client wrote it, and the error is short."""
    error = refusal(response_format=form)

    assert error.members["field"] == field
    assert error.message.startswith(f"{field}: ")
    assert error.message.count("x") < 20
