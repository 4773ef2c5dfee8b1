from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.generation import TokenScore
from meshnet.openai.logprobs import (
    PlacedToken,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from tests.unit.openai.making import score

LOGPROBS = st.floats(-9999.0, 0.0)


class Texts:
    """Token 1 is "a", 2 and 3 are both "b", 4 is the first byte of a character."""

    _bytes = {1: b"a", 2: b"b", 3: b"b", 4: b"\xf0"}

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


TEXTS = Texts()
SCORES = [score(1, -0.5, (1, -0.5), (2, -1.5)), score(4, -3.0, (2, -0.25), (3, -2.0))]


def test_a_chats_scores_are_openais_objects() -> None:
    """Each token has its text, number, bytes and alternatives, the likeliest first."""
    assert chat_logprobs(SCORES, TEXTS, 2) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -1.5, "bytes": [98]},
                ],
            },
            {
                "token": "\N{REPLACEMENT CHARACTER}",
                "logprob": -3.0,
                "bytes": [0xF0],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.25, "bytes": [98]},
                    {"token": "b", "logprob": -2.0, "bytes": [98]},
                ],
            },
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("n_top", [0, 1, 2, 20])
def test_no_more_alternatives_than_asked_for(n_top: int) -> None:
    """The tail may tell more than this endpoint was asked for, or fewer."""
    (token, _) = chat_logprobs(SCORES, TEXTS, n_top)["content"]

    assert len(token["top_logprobs"]) == min(n_top, 2)


def test_a_completions_scores_are_lists() -> None:
    """Texts, numbers, alternatives by text and offsets are one entry a token each."""
    tokens = [
        PlacedToken(2, 0, None),
        PlacedToken(1, 1, SCORES[0]),
        PlacedToken(4, 2, SCORES[1]),
    ]

    assert completion_logprobs(tokens, TEXTS, 1) == {
        "tokens": ["b", "a", "\N{REPLACEMENT CHARACTER}"],
        "token_logprobs": [None, -0.5, -3.0],
        "top_logprobs": [None, {"a": -0.5}, {"b": -0.25, "\N{REPLACEMENT CHARACTER}": -3.0}],
        "text_offset": [0, 1, 2],
    }


def test_without_alternatives_there_is_the_token_itself() -> None:
    """With `logprobs: 0` the dictionary holds the token that came."""
    tokens = [PlacedToken(1, 0, SCORES[0])]

    assert completion_logprobs(tokens, TEXTS, 0)["top_logprobs"] == [{"a": -0.5}]


@pytest.mark.parametrize(
    "made",
    [score(3, -2.0, (2, -0.25), (3, -2.0)), score(2, -0.25, (2, -0.25), (3, -2.0))],
)
def test_of_two_tokens_with_one_text_the_likelier_number_stands(made: TokenScore) -> None:
    """The largest number is the likeliest token's, so that greedy choices can be told by it."""
    logprobs = completion_logprobs([PlacedToken(made.token_id, 0, made)], TEXTS, 2)

    assert logprobs["top_logprobs"] == [{"b": -0.25}]
    assert logprobs["token_logprobs"] == [made.logprob]


@given(st.lists(LOGPROBS, min_size=3, max_size=3))
def test_a_number_is_the_same_wherever_it_is_told(logprobs: list[float]) -> None:
    """Also as JSON, the likeliest token's number equals the largest of its dictionary."""
    ranked = sorted(zip(logprobs, (1, 2, 4), strict=True), reverse=True)
    best, best_id = ranked[0]
    made = score(best_id, best, *((token_id, logprob) for logprob, token_id in ranked))
    told = json.loads(json.dumps(completion_logprobs([PlacedToken(best_id, 0, made)], TEXTS, 3)))

    assert told["token_logprobs"] == [best]
    assert max(told["top_logprobs"][0].values()) == told["token_logprobs"][0]


def test_a_prompts_scores_are_by_token_id() -> None:
    """The first token has none; the others have their own number and their alternatives'."""
    assert prompt_logprobs(SCORES, TEXTS, 1) == [
        None,
        {"1": {"logprob": -0.5, "decoded_token": "a"}},
        {
            "2": {"logprob": -0.25, "decoded_token": "b"},
            "4": {"logprob": -3.0, "decoded_token": "\N{REPLACEMENT CHARACTER}"},
        },
    ]


def test_a_prompt_of_one_token_has_no_scores() -> None:
    """Of a single token there is nothing to tell but that."""
    assert prompt_logprobs([], TEXTS, 5) == [None]
