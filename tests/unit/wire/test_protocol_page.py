"""docs/wire-protocol.md lists what the code knows, and its examples are read as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from meshnet.generation import Sampling, SamplingContext, TokenScore, is_allowed
from meshnet.wire import headers
from meshnet.wire.context import parse_context
from meshnet.wire.headers import MAX_CONTEXT_BYTES, StepHeaders
from meshnet.wire.messages import TailAnswer

PAGE = (Path(__file__).parents[3] / "docs" / "wire-protocol.md").read_text()


def section(title: str) -> str:
    """A section's own text, without those below it."""
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[str]:
    """What the rows of its tables are about."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def example(title: str) -> dict[str, Any]:
    """A section's JSON example."""
    (text,) = re.findall(r"```json\n(.*?)```", section(title), re.DOTALL)
    return json.loads(text)


def test_every_header_has_a_row() -> None:
    """The table of a step's headers is the code's."""
    aliases = [field.alias for field in StepHeaders.model_fields.values()]

    assert sorted(rows(section("Headers of a step"))) == sorted(map(str, aliases))


@pytest.mark.parametrize(
    ("title", "models"),
    [
        ("Sampling", [Sampling]),
        ("Sampling context", [SamplingContext]),
        ("Answers", [TailAnswer, TokenScore]),
    ],
)
def test_every_member_has_a_row(title: str, models: list[type[BaseModel]]) -> None:
    """The tables of JSON members are the code's."""
    members = [name for model in models for name in model.model_fields]
    told = [row for row in rows(section(title)) if not row.startswith("X-Meshnet-")]

    assert sorted(told) == sorted(members)


def test_every_default_of_sampling_is_told() -> None:
    """What is left out has the value that the page says."""
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", section("Sampling"), re.MULTILINE))

    assert {name: json.loads(text) for name, text in told.items()} == {
        name: field.get_default() or 0 if name != "top_logprobs" else None
        for name, field in Sampling.model_fields.items()
    }


def test_the_example_of_a_context_is_one() -> None:
    """Read as it stands on the page, its mask has the tokens 9 and 17."""
    sent = json.dumps(example("Sampling context")).encode()
    context = parse_context(sent, vocab_size=64, n_tokens=1)

    assert (context.generated_ids, context.logit_bias) == ((17, 9, 17), {9: -1.5})
    assert [i for i in range(64) if is_allowed(context.allowed or b"", i)] == [9, 17]


def test_the_example_of_an_answer_is_one() -> None:
    """Read and written again it is the same."""
    answer = TailAnswer.model_validate(example("Answers"))

    assert json.loads(answer.model_dump_json(exclude_defaults=True)) == example("Answers")


def test_the_longest_context_is_told() -> None:
    """The protocol's own limit stands beside the header."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{headers.CONTEXT_BYTES}`")]

    assert str(MAX_CONTEXT_BYTES) in row
