"""Generations of given events, and what they become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from meshnet.errors import InvalidRequest
from meshnet.generation import TokenEvent, TokenScore
from meshnet.grammar.compiler import CompiledGrammar, GrammarCompiler
from meshnet.openai.bodies import Heading

HEADING = Heading(id="id-1", created=5, model="m", system_fingerprint="fp_1")
IDENTITY = {"id": "id-1", "created": 5, "model": "m", "system_fingerprint": "fp_1"}


class Generation:
    """A generation of given events. An error among them is raised, an `asyncio.Event` waited for.

    Attributes:
        n_begun: Events that were asked for.
        is_open: It was begun and is not closed.
    """

    def __init__(self, *items: TokenEvent | Exception | asyncio.Event) -> None:
        self.n_begun = 0
        self.is_open = False
        self._items = items

    async def events(self) -> AsyncGenerator[TokenEvent]:
        """Run it."""
        self.is_open = True
        try:
            for item in self._items:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                self.n_begun += 1
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            try:
                await asyncio.sleep(0)  # as one that closes sessions
            finally:
                self.is_open = False


def answer(text: str, *, first_id: int = 10) -> list[TokenEvent]:
    """An answer of one token for each character, ended by its length."""
    ids = range(first_id, first_id + len(text))
    *others, last = (TokenEvent(char, i) for char, i in zip(text, ids, strict=True))
    return [*others, TokenEvent(last.text, last.token_id, "length")]


def score(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenScore:
    """A token's score and its alternatives'."""
    return TokenScore(token_id=token_id, logprob=logprob, top=top)


async def indexed(
    *events: tuple[int, TokenEvent | Exception],
) -> AsyncGenerator[tuple[int, TokenEvent]]:
    """Events of several choices in a given order; an error among them is raised."""
    for index, event in events:
        if isinstance(event, Exception):
            raise event
        yield index, event


def of_one(events: Sequence[TokenEvent | Exception]) -> AsyncGenerator[tuple[int, TokenEvent]]:
    """Events of a single choice."""
    return indexed(*((0, event) for event in events))


class FakeGrammars(GrammarCompiler):
    """Starts no process; what it makes cannot be followed.

    Attributes:
        asked: Every grammar's kind and what it was made of.
        refuses: Says of what a grammar cannot be made; None makes all.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.refuses: Callable[[object], bool] | None = None

    def json_schema(self, schema: object, *, field: str) -> CompiledGrammar:
        """A new grammar for each call."""
        return self._made("json_schema", schema, field)

    def regex(self, pattern: str, *, field: str) -> CompiledGrammar:
        """A new grammar for each call."""
        return self._made("regex", pattern, field)

    def lark(self, text: str, *, field: str) -> CompiledGrammar:
        """A new grammar for each call."""
        return self._made("lark", text, field)

    def _made(self, kind: str, of: object, field: str) -> CompiledGrammar:
        self.asked.append((kind, of))
        if self.refuses is not None and self.refuses(of):
            raise InvalidRequest(f"{field}: cannot be enforced", field=field)
        return cast("CompiledGrammar", object())
