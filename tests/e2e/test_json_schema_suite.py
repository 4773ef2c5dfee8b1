"""JSON-Schema-Test-Suite over the real vocabulary; over a small one it is a unit test."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from random import Random

import pytest

from meshnet.errors import InvalidRequest
from meshnet.grammar.engine import Engine
from meshnet.grammar.json_schema import to_engine_schema
from meshnet.text.tokenizer import ChatTokenizer
from tests.support.schemas import DRAFTS, Scribbler, cases

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # the set-up fetches a model

N_ANSWERS = 4
N_ENDED = 550
"""Of each draft; the others are cut off."""


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_written_is_valid(smollm2: Path, draft: str) -> None:
    """A schema is refused, or whatever tokens are picked, an answer that ends is valid."""
    tokenizer = ChatTokenizer.load(str(smollm2))
    end_ids = sorted(tokenizer.end_token_ids)
    engine = Engine(
        {
            "tokenizer": tokenizer.to_json(),
            "vocab_size": tokenizer.vocab_size,
            "end_ids": end_ids,
        }
    )
    scribbler = Scribbler(tokenizer.token_bytes, tokenizer.vocab_size, end_ids)
    rng = Random(draft)  # noqa: S311  # no secret
    numbers = count()
    n_ended = 0
    for case in cases(draft):
        try:
            text = to_engine_schema(case.schema, field="schema")
            engine.compile(case.text, {"kind": "json_schema", "text": text})
        except InvalidRequest:
            continue
        for number in (next(numbers) for _ in range(N_ANSWERS)):
            answer = scribbler.answer(lambda t: engine.mask(case.text, number, t), rng)  # noqa: B023
            n_ended += answer is not None
            assert answer is None or case.allows(answer), f"{case.name}: {answer}"
    assert n_ended > N_ENDED
