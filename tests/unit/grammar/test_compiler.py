from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from meshnet.errors import HopProtocolError, InvalidRequest, UnsupportedParameter
from meshnet.generation import Constraint, Grammar
from meshnet.grammar.compiler import GrammarCompiler
from tests.unit.text.making import EOS_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
ENDLESS: dict[str, object] = {"type": "integer", "multipleOf": 100000007}
DEEP = "start: r0\n" + "\n".join(f'r{n}: "x" r{n + 1}' for n in range(100_000)) + '\nr100000: "a"'


@dataclass
class Tokens:
    """The tests' tokenizer, as a compiler sees it."""

    end_token_ids: frozenset[int] = frozenset({EOS_ID})
    vocab_size: int = TOKENIZER.get_vocab_size()

    def to_json(self) -> str:
        return TOKENIZER.to_str()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Tokens(), limit_s=2)
    yield compiler
    compiler.close()


def ids_in(mask: bytes) -> set[int]:
    return {i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1}


def write(constraint: Constraint, text: str) -> set[int]:
    """Have an answer go on with a text; returns what may come then."""
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        constraint.allowed()
        constraint.accept(token_id)
    return ids_in(constraint.allowed())


def restart(compiler: GrammarCompiler) -> None:
    """Make the compiler use another engine, as after a crash."""
    with pytest.raises(InvalidRequest):
        compiler.json_schema(ENDLESS, field="f")


def test_an_answer_is_followed_to_its_end(compiler: GrammarCompiler) -> None:
    """A schema allows its JSON token by token, and then the end."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    grammar: Grammar = compiler.json_schema(
        {**schema, "additionalProperties": False}, field="response_format"
    )
    constraint = grammar.new_constraint()

    assert EOS_ID not in write(constraint, '{"a":')
    assert write(constraint, "2}") == {EOS_ID}
    constraint.accept(EOS_ID)


@pytest.mark.parametrize("text", ["ab", "b"])
def test_regexes_and_lark(compiler: GrammarCompiler, text: str) -> None:
    """The same texts follow the same rules in either notation."""
    for grammar in (
        compiler.regex("a?b", field="f"),
        compiler.lark('start: A? "b"\nA: "a"', field="f"),
    ):
        assert write(grammar.new_constraint(), text) == {EOS_ID}


def test_answers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    """Each choice has its own place in the grammar."""
    grammar = compiler.regex("(ab)+", field="f")
    first, second = grammar.new_constraint(), grammar.new_constraint()
    after_a = write(first, "a")

    assert write(second, "ab") == write(grammar.new_constraint(), "") | {EOS_ID}
    assert ids_in(first.allowed()) == after_a


def test_another_engine_goes_on_where_the_last_was(compiler: GrammarCompiler) -> None:
    """What may come depends on the grammar and the tokens alone: an engine that is new is told."""
    constraint = compiler.regex("x(ab|cd)+", field="f").new_constraint()
    expected = write(constraint, "xab")
    restart(compiler)

    assert ids_in(constraint.allowed()) == expected


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_token_that_is_not_allowed_is_the_tails_fault(
    compiler: GrammarCompiler, is_asked: bool
) -> None:
    """A tail that does not keep to the mask is found out; so is an answer that ends too early."""
    for token_id in (*TOKENIZER.encode("b", add_special_tokens=False).ids, EOS_ID, 10**6):
        constraint = compiler.regex("ab", field="f").new_constraint()
        if is_asked:
            constraint.allowed()
        with pytest.raises(HopProtocolError, match=f"token {token_id}, which the grammar forbids"):
            constraint.accept(token_id)


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", '{"not": {}}', "`not` cannot be enforced, at #"),
        ("json_schema", '{"type": "string", "pattern": "^[a-"}', "unclosed character class"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("json_schema", '{"type": "object", "minProperties": 1, "maxProperties": 0}', "Unsat"),
        ("json_schema", '{"$ref": "#"}', "no text fits from here on"),
        ("json_schema", json.dumps(ENDLESS), "it takes longer than 2 s"),
        ("regex", "a(", "unclosed group"),
        ("lark", "start: x", "unknown name"),
        ("lark", DEEP, "it crashes the grammar engine"),
    ],
)
def test_what_cannot_be_enforced_names_its_field(
    compiler: GrammarCompiler, kind: str, text: str, problem: str
) -> None:
    """The error says where in the request and what; and the next grammar is compiled."""
    make = {"regex": compiler.regex, "lark": compiler.lark, "json_schema": compiler.json_schema}
    source = json.loads(text) if kind == "json_schema" else text
    with pytest.raises(InvalidRequest) as caught:
        make[kind](source, field="a.b")

    assert caught.value.message.startswith("a.b: ")
    assert problem in caught.value.message
    assert caught.value.members["field"] == "a.b"
    assert len(caught.value.message) < 250
    assert write(compiler.regex("a", field="f").new_constraint(), "a") == {EOS_ID}


def test_an_endless_schema_spoils_no_other_answer(compiler: GrammarCompiler) -> None:
    """While one request's schema is found out, another's answer is followed to its end."""
    text = "x" * 50
    constraint = compiler.regex("x*y", field="f").new_constraint()
    with ThreadPoolExecutor(3) as pool:
        hostile = [pool.submit(compiler.json_schema, ENDLESS, field="f") for _ in range(2)]
        assert pool.submit(write, constraint, f"{text}y").result() == {EOS_ID}
        assert [type(one.exception()) for one in hostile] == [InvalidRequest] * 2


def test_what_costs_too_much_on_the_way_is_refused(compiler: GrammarCompiler) -> None:
    """A limit that is met in the middle of an answer names the grammar's field."""
    rules = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(300))
    grammar = compiler.lark(f'start: "x" r0\n{rules}\nr300: "a"', field="a.b")

    with pytest.raises(InvalidRequest, match=r"^a\.b: .*Too many items"):
        write(grammar.new_constraint(), "x")


@pytest.mark.parametrize(
    "end_token_ids", [frozenset[int](), frozenset({TOKENIZER.get_vocab_size()})]
)
def test_a_model_without_an_end_cannot_be_constrained(end_token_ids: frozenset[int]) -> None:
    """Nothing is started for a model whose tokenizer has no token that ends an answer."""
    compiler = GrammarCompiler(Tokens(end_token_ids))

    with pytest.raises(UnsupportedParameter, match=r"^a\.b: this model has no token") as caught:
        compiler.regex("a", field="a.b")
    assert caught.value.members["field"] == "a.b"
