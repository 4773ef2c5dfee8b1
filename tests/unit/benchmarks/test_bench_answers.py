from __future__ import annotations

import json
import math

import pytest

from benchmarks.bench.answers import (
    Answer,
    gaps_s,
    perplexity,
    read_answer,
    tokens_per_s_together,
)


def event(text: str, **members: object) -> str:
    return json.dumps({"choices": [{"text": text, **members}]})


def test_every_told_id_is_a_token_of_its_events_time() -> None:
    """An event may carry none or several; a prompt's or a last event carries none."""
    events = [
        (1.0, event("", token_ids=[], prompt_token_ids=[9])),
        (2.0, event("a", token_ids=[5])),
        (3.0, event("bc", token_ids=[6, 7])),
        (4.0, event("", token_ids=[], finish_reason="length")),
    ]
    assert read_answer(0.5, events) == Answer(0.5, (2.0, 3.0, 3.0), (5, 6, 7))


def test_a_server_without_ids_sends_a_token_an_event() -> None:
    """Events without text are no tokens there."""
    events = [(1.0, event("a")), (2.0, event("b")), (3.0, event("", finish_reason="length"))]
    assert read_answer(0.0, events) == Answer(0.0, (1.0, 2.0))


@pytest.mark.parametrize("events", [[], [(1.0, event(""))], [(1.0, '{"error": {"code": "x"}}')]])
def test_an_answer_without_a_token_or_with_an_error_is_none(
    events: list[tuple[float, str]],
) -> None:
    """Nothing is measured of an answer that failed."""
    with pytest.raises(RuntimeError, match="the stream ended"):
        read_answer(0.0, events)


def test_the_first_token_counts_for_the_wait_and_not_for_the_rate() -> None:
    """Four tokens, the first after 2 s and the others within 1 s, are 3 a second."""
    answer = Answer(10.0, (12.0, 12.2, 12.9, 13.0))
    assert answer.first_token_s == pytest.approx(2.0)
    assert answer.tokens_per_s == pytest.approx(3.0)


def test_of_one_stream_the_rate_together_is_its_own() -> None:
    """So that many over one compares like with like."""
    answer = Answer(0.0, (1.0, 1.5, 2.0, 3.0))
    assert tokens_per_s_together([answer]) == pytest.approx(answer.tokens_per_s)


def test_only_tokens_that_came_while_all_streams_ran_count_together() -> None:
    """From 2 s to 4 s: two tokens of the first stream and one of the second, in 2 s."""
    first = Answer(0.0, (1.0, 2.0, 3.0, 4.0))
    second = Answer(0.0, (2.0, 3.5, 6.0))
    assert tokens_per_s_together([first, second]) == pytest.approx(3 / 2)


def test_streams_that_never_ran_together_have_no_rate() -> None:
    """One that begins when another has ended makes it 0, whatever each does alone."""
    assert tokens_per_s_together([Answer(0.0, (1.0, 2.0)), Answer(0.0, (2.0, 3.0))]) == 0


def test_gaps_are_sorted_by_whether_they_touch_a_time() -> None:
    """A gap that the time begins or ends in is inside."""
    answers = [Answer(0.0, (1.0, 2.0, 4.0, 7.0, 8.0)), Answer(0.0, (3.0, 3.5))]
    assert gaps_s(answers, 3.1, 6.0) == ([2.0, 3.0, 0.5], [1.0, 1.0])


def test_the_perplexity_of_even_odds_is_their_number() -> None:
    """A quarter each is 4."""
    assert perplexity([math.log(0.25)] * 3) == pytest.approx(4.0)
