from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import ContextLengthExceeded, InvalidRequest
from meshnet.generation import Sampling, Stopping
from meshnet.openai.fields import parse_fields
from meshnet.openai.parameters import COMPLETIONS
from meshnet.openai.sampling_fields import (
    SamplingFields,
    check_ids,
    check_together,
    check_with_grammar,
    choice_seed,
    fit,
    most_logprobs,
)

VOCAB_SIZE = 100
SEEDS = st.integers(-(2**63), 2**63 - 1)


def parse(**fields: object) -> SamplingFields:
    body = json.dumps({"model": "m", **fields}).encode()
    return parse_fields(body, SamplingFields, COMPLETIONS)


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value


def check(fields: SamplingFields, *, n_prompts: int = 1, max_choices: int = 8) -> None:
    check_together(
        fields,
        COMPLETIONS,
        vocab_size=VOCAB_SIZE,
        n_choices=n_prompts * fields.n,
        max_choices=max_choices,
    )


def test_a_silent_client_gets_openais_defaults() -> None:
    """Without parameters: temperature 1 over all tokens, one answer, to the model's own end."""
    fields = parse()

    assert fields.to_sampling(7, None) == Sampling(temperature=1.0, seed=7)
    assert fields.to_stopping() == Stopping()
    assert (fields.n, fields.logit_bias, fields.stream) == (1, {}, False)
    assert (fields.usage_at_end, fields.usage_always, fields.skip_special_tokens) == (
        False,
        False,
        True,
    )


def test_parameters_reach_the_sampling() -> None:
    """What the client says about sampling is what the tail is told."""
    fields = parse(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-5,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.1,
    )

    assert fields.to_sampling(7, 3) == Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-5,
        frequency_penalty=-1.5,
        presence_penalty=1.5,
        repetition_penalty=1.1,
        top_logprobs=3,
    )


def test_parameters_reach_the_stopping() -> None:
    """What the client says about the end is what the generation is told."""
    fields = parse(
        stop=["a", "b"],
        stop_token_ids=[3, 4.0],
        min_tokens=5,
        ignore_eos=True,
        include_stop_str_in_output=True,
    )

    assert fields.to_stopping() == Stopping(
        strings=("a", "b"),
        token_ids=frozenset({3, 4}),
        min_tokens=5,
        ignore_end=True,
        keep_string=True,
    )


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0, "top_p": 0}, Sampling(temperature=0, top_p=0, seed=7)),
        ({"temperature": 2, "top_p": 1}, Sampling(temperature=2, top_p=1, seed=7)),
        ({"top_k": -1}, Sampling(temperature=1, top_k=0, seed=7)),
        ({"top_k": 2**31 - 1}, Sampling(temperature=1, top_k=2**31 - 1, seed=7)),
        ({"min_p": 1}, Sampling(temperature=1, min_p=1, seed=7)),
        ({"seed": 0}, Sampling(temperature=1, seed=0)),
        ({"seed": 2**63 - 1}, Sampling(temperature=1, seed=2**63 - 1)),
        ({"seed": -(2**63)}, Sampling(temperature=1, seed=-(2**63))),
        (
            {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 0.01},
            Sampling(
                temperature=1,
                frequency_penalty=-2,
                presence_penalty=2,
                repetition_penalty=0.01,
                seed=7,
            ),
        ),
        ({"repetition_penalty": 10}, Sampling(temperature=1, repetition_penalty=10, seed=7)),
    ],
)
def test_the_ends_of_each_range_are_in_it(fields: dict[str, object], sampling: Sampling) -> None:
    """The smallest and the largest value of each sampling parameter work."""
    assert parse(**fields).to_sampling(7, None) == sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 5),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", "2"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "7"),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", False),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 10.1),
        ("logit_bias", []),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"1.0": 5}),
        ("logit_bias", {" 1": 5}),
        ("logit_bias", {"": 5}),
        ("logit_bias", {"\u0663": 5}),
        ("logit_bias", {"1" * 11: 5}),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("stop", {}),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [5] * 129),
        ("min_tokens", -1),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "true"),
        ("skip_special_tokens", 0),
        ("return_token_ids", "false"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", []),
    ],
)
def test_a_wrong_value_names_field_problem_and_what_is_allowed(name: str, value: object) -> None:
    """A value of the wrong type or out of range is refused in one sentence of three parts."""
    error = refusal(**{name: value})

    assert error.members["field"] == name
    assert error.message.startswith(f"{name}: ")
    assert error.message.endswith(f"; allowed: {COMPLETIONS[name].allowed}")
    assert len(error.message) > len(f"{name}: ; allowed: {COMPLETIONS[name].allowed}")


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("logit_bias", {"5": 100.5}, "logit_bias[5]"),
        ("logit_bias", {"5": "1"}, "logit_bias[5]"),
        ("logit_bias", {"5": None}, "logit_bias[5]"),
        ("stop", "", "stop[0]"),
        ("stop", [""], "stop[0]"),
        ("stop", ["a", 5], "stop[1]"),
        ("stop", ["a", None], "stop[1]"),
        ("stop", "a" * 1001, "stop[0]"),
        ("stop_token_ids", [5, -1], "stop_token_ids[1]"),
        ("stop_token_ids", [True], "stop_token_ids[0]"),
        ("stop_token_ids", ["5"], "stop_token_ids[0]"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ],
)
def test_a_fault_inside_a_field_is_told_with_its_place(
    name: str, value: object, field: str
) -> None:
    """The parameter of a fault inside a list or an object says where it is."""
    error = refusal(stream=True, **{name: value})

    assert error.members["field"] == field


@pytest.mark.parametrize(
    ("stop", "strings"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        ([], ()),
        ([" ", "\n"], (" ", "\n")),
        (["a"] * 16, ("a",) * 16),
        ("a" * 1000, ("a" * 1000,)),
    ],
)
def test_stop_is_a_string_or_a_list_of_them(stop: object, strings: tuple[str, ...]) -> None:
    """One string is the same as a list of it; up to 16 of them, 1000 characters each."""
    assert parse(stop=stop).to_stopping().strings == strings


def test_bias_is_by_token_id() -> None:
    """The names of the object are token ids, and the ends of the range are in it."""
    assert parse(logit_bias={"0": -100, "99": 100.0}).logit_bias == {0: -100.0, 99: 100.0}


@pytest.mark.parametrize(
    ("options", "at_end", "always"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "include_obfuscation": False}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"continuous_usage_stats": True}, False, False),
    ],
)
def test_usage_is_streamed_only_when_asked_for(options: object, at_end: bool, always: bool) -> None:
    """A stream carries the counts at its end, or always, only if its options say so."""
    fields = parse(stream=True, stream_options=options)

    assert (fields.usage_at_end, fields.usage_always) == (at_end, always)


def test_a_right_request_passes() -> None:
    """The largest token id, as many answers as are allowed, and options with a stream are right."""
    check(parse(logit_bias={"99": 1}, stop_token_ids=[99], n=8, stream=True, stream_options={}))
    check(parse(n=4, prompt_logprobs=0), n_prompts=2)


def test_stream_options_need_a_stream() -> None:
    """Options of a stream that is not asked for are an error, also empty ones."""
    for stream in (None, False):
        with pytest.raises(InvalidRequest, match=r"^stream_options: is only allowed with") as e:
            check(parse(stream=stream, stream_options={}))
        assert e.value.members["field"] == "stream_options"


def test_prompt_logprobs_need_an_answer_in_one_piece() -> None:
    """No chunk has a place for the prompt's scores, so that a stream with them is an error."""
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs: is not allowed with") as caught:
        check(parse(stream=True, prompt_logprobs=1))

    assert caught.value.members["field"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("n", "n_prompts", "field"), [(9, 1, "n"), (1, 9, "prompt"), (3, 3, "prompt")]
)
def test_too_many_answers_are_refused(n: int, n_prompts: int, field: str) -> None:
    """More answers to one request than this server makes are refused with both numbers."""
    with pytest.raises(InvalidRequest) as caught:
        check(parse(n=n), n_prompts=n_prompts)

    expected = f"{field}: 9 answers to one request are too many; allowed: 8"
    assert caught.value.message == expected
    assert caught.value.members == {"field": field, "value": 9, "allowed": 8}


@pytest.mark.parametrize(
    ("name", "value", "token_id"),
    [
        ("logit_bias", {"5": 1, "100": 1}, "100"),
        ("logit_bias", {"99999999": 5}, "99999999"),
        ("stop_token_ids", [5, 100], "100"),
        ("stop_token_ids", [99999999], "99999999"),
    ],
)
def test_a_token_that_is_none_of_the_models_is_refused(
    name: str, value: object, token_id: str
) -> None:
    """A token id beyond the vocabulary never gets to a shard."""
    with pytest.raises(InvalidRequest) as caught:
        check(parse(**{name: value}))

    expected = f"{name}: token id {token_id} is not in the vocabulary; allowed: 0 to 99"
    assert caught.value.message == expected
    assert caught.value.members["field"] == name


def test_a_huge_token_id_makes_no_long_error() -> None:
    """Of an id with thousands of digits the first ones are told."""
    with pytest.raises(InvalidRequest) as caught:
        check_ids("prompt", [10**4000], VOCAB_SIZE)

    assert len(caught.value.message) < 100


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 1), ("ignore_eos", True)])
def test_a_grammar_alone_says_when_its_answer_ends(name: str, value: object) -> None:
    """What would have an answer go on past its grammar's end is refused by name."""
    with pytest.raises(InvalidRequest, match=rf"^{name}: is not allowed where a format") as caught:
        check_with_grammar(parse(**{name: value}), COMPLETIONS)

    assert caught.value.members["field"] == name


def test_a_grammar_goes_with_all_else() -> None:
    """Stop strings, stop tokens and the defaults are right with a grammar."""
    fields = parse(stop="a", stop_token_ids=[5], min_tokens=0, ignore_eos=False)

    check_with_grammar(fields, COMPLETIONS)


@pytest.mark.parametrize(
    ("n_prompt", "token_limit", "max_tokens"),
    [(40, None, 60), (99, None, 1), (40, 5, 5), (40, 60, 60), (100, 0, 0), (1, 0, 0)],
)
def test_an_answer_that_fits_is_as_long_as_asked(
    n_prompt: int, token_limit: int | None, max_tokens: int
) -> None:
    """The answer has the tokens asked for, or all that the context has room for."""
    assert fit(n_prompt, token_limit, 100, field="prompt") == max_tokens


@pytest.mark.parametrize(
    ("n_prompt", "token_limit", "problem"),
    [
        (100, None, "your messages resulted in 100 tokens, which leaves no room for an answer"),
        (101, None, "your messages resulted in 101 tokens, which leaves no room for an answer"),
        (40, 61, "you asked for 101 tokens: 40 in the messages and 61 in the answer"),
        (101, 0, "you asked for 101 tokens: 101 in the messages and 0 in the answer"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_words_that_clients_look_for(
    n_prompt: int, token_limit: int | None, problem: str
) -> None:
    """The error has all numbers, OpenAI's first sentence, and its code."""
    with pytest.raises(ContextLengthExceeded) as caught:
        fit(n_prompt, token_limit, 100, field="messages")

    assert caught.value.message == (
        f"This model's maximum context length is 100 tokens. However, {problem}."
        " Please shorten one of them. (context_length_exceeded)"
    )
    assert caught.value.members == {"field": "messages", "allowed": 100}


@pytest.mark.parametrize(
    ("wanted", "most"),
    [((), None), ((None,), None), ((None, None), None), ((0, None), 0), ((2, 5), 5), ((5, 0), 5)],
)
def test_the_tail_tells_as_many_alternatives_as_anybody_wants(
    wanted: tuple[int | None, ...], most: int | None
) -> None:
    """Of two wishes the larger one counts; none at all is no scores."""
    assert most_logprobs(*wanted) == most


@given(SEEDS)
def test_each_choice_has_a_seed_of_its_own(seed: int) -> None:
    """The first choice has the request's seed, others have other ones, all of them 64 bits."""
    seeds = [choice_seed(seed, index) for index in range(128)]

    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(Sampling(seed=made).seed == made for made in seeds)


def test_a_choices_seed_never_changes() -> None:
    """Seeds that are written down give the same answers with any later release."""
    assert [choice_seed(42, index) for index in range(3)] == [
        42,
        -5314433883107329203,
        -7515320672440904595,
    ]
