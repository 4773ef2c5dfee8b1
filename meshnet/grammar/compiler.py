"""What an answer must look like, and what may come next in one: JSON schemas, regexes, Lark."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from meshnet.errors import HopProtocolError, InvalidRequest, UnsupportedParameter
from meshnet.grammar.engine_process import (
    OK,
    REFUSED,
    UNKNOWN,
    Definition,
    EngineLostError,
    EngineProcess,
    Kind,
    Question,
    Settings,
)
from meshnet.grammar.json_schema import to_engine_schema

DEFAULT_LIMIT_S: Final = 5.0


class GrammarTokenizer(Protocol):
    """What a grammar must know of a model's tokenizer; see meshnet.text.tokenizer."""

    end_token_ids: frozenset[int]
    """Each of them ends an answer."""
    vocab_size: int
    """Known ids are [0, vocab_size)."""

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        ...


class GrammarCompiler:
    """Makes grammars for one model. Its methods may be called by several threads at once.

    The work is done in a process of its own, which is started in most of a second when it is first
    needed: a schema could stop the head for good. See `engine`.

    Args:
        tokenizer: The model's.
        limit_s: No grammar may take longer to compile, nor a token of an answer to be followed.
    """

    def __init__(self, tokenizer: GrammarTokenizer, *, limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._tokenizer = tokenizer
        self._engine = EngineProcess(self._settings, limit_s)
        self._numbers = itertools.count()

    def json_schema(self, schema: object, *, field: str) -> CompiledGrammar:
        """A grammar for the JSON, without blanks, of the values that a schema allows.

        Args:
            schema: A JSON schema, as read from JSON.
            field: Where it is in the request, for errors.

        Raises:
            InvalidRequest: It is no schema, cannot be enforced, allows nothing, or costs too much.
            UnsupportedParameter: The model has no token that could end the answer.
            ModelError: The engine does not start.
        """
        return self._compile("json_schema", to_engine_schema(schema, field=field), field)

    def regex(self, pattern: str, *, field: str) -> CompiledGrammar:
        """A grammar for texts that a regular expression, in Rust's dialect, matches as a whole.

        Raises:
            MeshError: As `json_schema`.
        """
        return self._compile("regex", pattern, field)

    def lark(self, text: str, *, field: str) -> CompiledGrammar:
        """A grammar written in llguidance's form of Lark.

        Raises:
            MeshError: As `json_schema`.
        """
        return self._compile("lark", text, field)

    def close(self) -> None:
        """End the process; what is asked of the grammars from now on is refused."""
        self._engine.close()

    def _compile(self, kind: Kind, text: str, field: str) -> CompiledGrammar:
        if min(self._tokenizer.end_token_ids, default=math.inf) >= self._tokenizer.vocab_size:
            problem = f"{field}: this model has no token that could end such an answer"
            raise UnsupportedParameter(problem, field=field)
        name = hashlib.sha256(f"{kind}:{text}".encode()).hexdigest()
        definition: Definition = {"kind": kind, "text": text}
        grammar = CompiledGrammar(name, definition, field, self._engine, self._numbers)
        grammar.check()
        return grammar

    def _settings(self) -> Settings:
        return {
            "tokenizer": self._tokenizer.to_json(),
            "vocab_size": self._tokenizer.vocab_size,
            "end_ids": sorted(self._tokenizer.end_token_ids),
        }


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that was found to be good; see meshnet.generation.Grammar."""

    name: str
    definition: Definition
    field: str
    engine: EngineProcess
    numbers: itertools.count[int]

    def new_constraint(self) -> AnswerConstraint:
        """One for each answer."""
        return AnswerConstraint(self, next(self.numbers))

    def check(self) -> None:
        """Have it compiled.

        Raises:
            MeshError: As `GrammarCompiler.json_schema`.
        """
        self._ask(
            {"grammar": self.name, "definition": self.definition, "answer": 0, "tokens": None}
        )

    def mask(self, answer: int, tokens: list[int]) -> bytes:
        """What may come after these tokens of an answer; a bit an id, the lowest bit first.

        Raises:
            MeshError: As `check`.
        """
        question: Question = {
            "grammar": self.name,
            "definition": None,
            "answer": answer,
            "tokens": tokens,
        }
        reply = self._ask(question)
        if reply == UNKNOWN:  # another engine was started, or too many other grammars were in use
            reply = self._ask({**question, "definition": self.definition})
        return reply[len(OK) :]

    def _ask(self, question: Question) -> bytes:
        try:
            reply = self.engine.ask(question)
        except EngineLostError as error:
            raise self._refusal(str(error)) from error
        if reply.startswith(REFUSED):
            raise self._refusal(reply[len(REFUSED) :].decode())
        return reply

    def _refusal(self, problem: str) -> InvalidRequest:
        return InvalidRequest(f"{self.field}: {problem}", field=self.field)


@dataclass(slots=True)
class AnswerConstraint:
    """One answer on its way through a grammar; see meshnet.generation.Constraint."""

    grammar: CompiledGrammar
    number: int
    _tokens: list[int] = field(default_factory=list[int], init=False)
    _mask: bytes = field(default=b"", init=False)

    def allowed(self) -> bytes:
        """The next token's mask, a bit an id, the lowest bit first; end tokens where it may end.

        Raises:
            InvalidRequest: The grammar is too costly to follow, or nothing can come.
        """
        self._mask = self.grammar.mask(self.number, self._tokens)
        return self._mask

    def accept(self, token_id: int) -> None:
        """Go on with this token, which was allowed; one that ends the answer is the last.

        Raises:
            HopProtocolError: It was not allowed: the tail does not follow grammars.
        """
        byte = self._mask[token_id >> 3 : (token_id >> 3) + 1]
        if not byte or not byte[0] >> (token_id & 7) & 1:
            raise HopProtocolError(f"the tail picked token {token_id}, which the grammar forbids")
        self._tokens.append(token_id)
