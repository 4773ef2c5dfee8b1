"""JSON-Schema-Test-Suite: a schema is refused, or no answer that follows it is invalid."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from meshnet.errors import InvalidRequest
from meshnet.grammar.engine import Engine
from meshnet.grammar.json_schema import to_engine_schema
from meshnet.text.token_bytes import TokenBytes
from tests.support.schemas import Case, Scribbler, byte_matcher, cases, forms, takes
from tests.unit.text.making import EOS_ID, byte_level_tokenizer

N_ANSWERS = 4
N_ENFORCED = {"draft2020-12": 173, "draft2019-09": 178, "draft7": 175, "draft6": 173}
"""Schemas that are not refused. More is progress; none would make the tests say nothing."""
each_draft = pytest.mark.parametrize("draft", N_ENFORCED)


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = byte_level_tokenizer()
    return Engine(
        {
            "tokenizer": tokenizer.to_str(),
            "vocab_size": tokenizer.get_vocab_size(),
            "end_ids": [EOS_ID],
        }
    )


@pytest.fixture(scope="module")
def scribbler() -> Scribbler:
    tokenizer = byte_level_tokenizer()
    return Scribbler(TokenBytes(tokenizer).__getitem__, tokenizer.get_vocab_size(), [EOS_ID])


def is_enforced(engine: Engine, case: Case) -> bool:
    """Whether the engine knows a schema now."""
    try:
        text = to_engine_schema(case.schema, field="schema")
        engine.compile(case.text, {"kind": "json_schema", "text": text})
    except InvalidRequest:
        return False
    return True


@each_draft
def test_no_invalid_value_can_be_written(draft: str) -> None:
    """A grammar takes none of the values that the suite says are invalid, in no order of keys."""
    n_enforced = 0
    for case in cases(draft):
        try:
            matcher = byte_matcher(case.schema)
        except InvalidRequest:
            continue
        n_enforced += not matcher.is_error()
        invalid = [text for value, good in case.values if not good for text in forms(value)]
        assert [text for text in invalid if takes(matcher, text)] == [], case.name
    assert n_enforced >= N_ENFORCED[draft]


@each_draft
def test_what_is_written_is_valid(draft: str, engine: Engine, scribbler: Scribbler) -> None:
    """Whatever tokens are picked of those allowed, an answer that ends is valid."""
    rng = Random(draft)  # noqa: S311  # no secret
    numbers = count()
    enforced = [case for case in cases(draft) if is_enforced(engine, case)]
    n_ended = 0
    for case in enforced:
        assert is_enforced(engine, case)  # it forgets all but the last
        for number in (next(numbers) for _ in range(N_ANSWERS)):
            answer = scribbler.answer(lambda t: engine.mask(case.text, number, t), rng)  # noqa: B023
            n_ended += answer is not None
            assert answer is None or case.allows(answer), f"{case.name}: {answer}"
    assert len(enforced) >= N_ENFORCED[draft]
    assert n_ended > 0.9 * len(enforced) * N_ANSWERS
