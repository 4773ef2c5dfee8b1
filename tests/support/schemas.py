"""JSON-Schema-Test-Suite, and answers as a model without any sense would write them.

`json_schema_suite.zip` holds the suite's LICENSE (MIT) and of some drafts tests/DRAFT/*.json and
tests/DRAFT/optional/*.json, as they are in the folder json/ of jsonschema 4.26.0's source package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from itertools import islice, permutations, product
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any, Final, cast
from zipfile import ZipFile

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from meshnet.grammar.json_schema import to_engine_schema

DRAFTS: Final[dict[str, Any]] = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
}

_SUITE: Final = Path(__file__).with_name("json_schema_suite.zip")
_N_FORMS: Final = 200
_EXACT: Final = Context(prec=400, Emax=10**9, Emin=-(10**9))


@dataclass(frozen=True)
class Case:
    """A schema of the suite and values that it allows, or does not."""

    name: str
    draft: str
    text: str
    """The schema."""
    values: Sequence[tuple[object, bool]]

    @property
    def schema(self) -> object:
        """The schema, which says of which draft it is."""
        return json.loads(self.text)

    def allows(self, text: str) -> bool:
        """Whether a text is JSON of a value that the schema allows.

        What is of ECMA-262's regular expressions is let pass: jsonschema has Python's.
        """
        return self.name.startswith("ecmascript-regex") or is_valid(self.schema, text, self.draft)


def cases(draft: str) -> Iterator[Case]:
    """All of a draft; those of formats, which no draft enforces, are left out."""
    with ZipFile(_SUITE) as archive:
        for path in archive.namelist():
            if path.startswith(f"tests/{draft}/"):
                name = PurePosixPath(path).stem
                for case in json.loads(archive.read(path)):
                    yield _case(draft, name, case)


def _case(draft: str, name: str, case: Mapping[str, Any]) -> Case:
    schema = case["schema"]
    if isinstance(schema, dict):
        dialect = str(DRAFTS[draft].META_SCHEMA["$schema"])
        schema = {"$schema": dialect, **cast("dict[str, object]", schema)}
    values = [(test["data"], bool(test["valid"])) for test in case["tests"]]
    return Case(f"{name}: {case['description']}", draft, json.dumps(schema), values)


def is_valid(schema: object, text: str, draft: str = "draft2020-12") -> bool:
    """Whether a text is JSON of a value that the schema allows, with numbers to the last digit."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    with localcontext(_EXACT):
        return bool(DRAFTS[draft](exact).is_valid(json.loads(text, parse_float=Decimal)))


def byte_matcher(schema: object) -> LLMatcher:
    """Follows a checked schema byte by byte."""
    grammar = LLMatcher.grammar_from_json_schema(to_engine_schema(schema, field="schema"))
    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0)


def takes(matcher: LLMatcher, text: str) -> bool:
    """Whether a whole text, as UTF-8, follows a grammar."""
    matcher.reset()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def forms(value: object) -> Iterator[str]:
    """A value as JSON without blanks, its members in every order."""
    if isinstance(value, dict):
        members = [
            [f"{json.dumps(name, ensure_ascii=False)}:{form}" for form in forms(member)]
            for name, member in cast("dict[str, object]", value).items()
        ]
        orders = (order for choice in product(*members) for order in permutations(choice))
        yield from (f"{{{','.join(order)}}}" for order in islice(orders, _N_FORMS))
    elif isinstance(value, list):
        choices = product(*(forms(item) for item in cast("list[object]", value)))
        yield from (f"[{','.join(items)}]" for items in islice(choices, _N_FORMS))
    else:
        yield json.dumps(value, ensure_ascii=False)


class Scribbler:
    """Writes what a mask allows at random, with a liking for what ends things."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], n_ids: int, end_ids: Iterable[int]
    ) -> None:
        self._pieces = [token_bytes(token_id) for token_id in range(n_ids)]
        self._end_ids = [*end_ids]
        self._closing = np.array([piece[:1] in (b'"', b"]", b"}") for piece in self._pieces])
        self._short = np.array([0 < len(piece) <= 2 for piece in self._pieces])

    def answer(
        self, mask_after: Callable[[list[int]], bytes], rng: Random, max_tokens: int = 120
    ) -> str | None:
        """An answer, or None if it does not come to an end.

        Args:
            mask_after: What may come after some tokens.
            rng: Decides.
            max_tokens: The most to write.
        """
        tokens: list[int] = []
        for n in range(max_tokens):
            is_late = n > max_tokens // 2
            bits = np.unpackbits(np.frombuffer(mask_after(tokens), np.uint8), bitorder="little")
            allowed = bits[: len(self._pieces)].astype(bool)
            may_end = allowed[self._end_ids].any()
            allowed[self._end_ids] = False
            if may_end and (is_late or not allowed.any() or rng.random() < 0.6):
                return b"".join(self._pieces[token] for token in tokens).decode()
            tokens.append(self._pick(allowed, 0 if is_late else rng.random(), rng))
        return None

    def _pick(self, allowed: NDArray[np.bool_], mood: float, rng: Random) -> int:
        liked = allowed & (self._closing if mood < 0.45 else self._short)
        pool = liked if mood < 0.8 and liked.any() else allowed
        return int(rng.choice(np.flatnonzero(pool)))
