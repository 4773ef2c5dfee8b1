from __future__ import annotations

import json
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from meshnet.errors import InvalidRequest
from meshnet.grammar import engine as engine_module
from meshnet.grammar.engine import Engine
from meshnet.grammar.engine_process import (
    OK,
    REFUSED,
    UNKNOWN,
    Definition,
    Kind,
    Question,
    Settings,
)
from meshnet.text.tokenizer import ChatTokenizer
from tests.support.mesh import VOCAB_SIZE, number_tokenizer
from tests.unit.text.making import (
    END_ID,
    EOS_ID,
    SPECIALS,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

TOKENIZER = byte_level_tokenizer()
N_IDS = TOKENIZER.get_vocab_size()
SENTENCEPIECE = sentencepiece_tokenizer()
N_PIECES = SENTENCEPIECE.get_vocab_size()


def settings_of(
    tokenizer: Tokenizer | ChatTokenizer = TOKENIZER,
    end_ids: tuple[int, ...] = (EOS_ID,),
    vocab_size: int = N_IDS,
) -> Settings:
    text = tokenizer.to_str() if isinstance(tokenizer, Tokenizer) else tokenizer.to_json()
    return {"tokenizer": text, "vocab_size": vocab_size, "end_ids": [*end_ids]}


def engine_of(
    text: str,
    kind: Kind = "regex",
    tokenizer: Tokenizer = TOKENIZER,
    end_ids: tuple[int, ...] = (EOS_ID,),
) -> Engine:
    """An engine that knows the grammar "g"."""
    engine = Engine(settings_of(tokenizer, end_ids, tokenizer.get_vocab_size()))
    engine.compile("g", {"kind": kind, "text": text})
    return engine


def ids_in(mask: bytes) -> set[int]:
    return {i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1}


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def question(
    tokens: list[int] | None = None, *, regex: str | None = None, grammar: str = "g"
) -> Question:
    definition: Definition | None = None if regex is None else {"kind": "regex", "text": regex}
    return {"grammar": grammar, "definition": definition, "answer": 0, "tokens": tokens}


# Masks.


def test_a_mask_has_a_bit_for_each_token_that_may_come() -> None:
    """The lowest bit of the first byte is token 0; there are as few bytes as hold all ids."""
    mask = engine_of("(x|yy)z").mask("g", 0, [])

    assert ids_in(mask) == {*encode("x"), *encode("y")}
    assert len(mask) == (N_IDS + 7) // 8


def test_an_answer_goes_on_where_it_was() -> None:
    """Each mask is that of the tokens so far, whether the engine saw the others or not."""
    engine, text = engine_of("hello (world|there)"), encode("hello ")
    steps = [engine.mask("g", 1, text[:n]) for n in range(len(text) + 1)]

    assert steps[-1] == engine.mask("g", 2, text)
    assert ids_in(steps[-1]) >= {*encode("world")[:1], *encode("there")[:1]}
    assert EOS_ID not in ids_in(steps[-1])


def test_only_the_end_is_allowed_at_the_end() -> None:
    """Where nothing can follow, every end token is allowed and nothing else."""
    engine = engine_of("ab", end_ids=(EOS_ID, END_ID))

    assert ids_in(engine.mask("g", 0, encode("ab"))) == {EOS_ID, END_ID}


def test_the_end_is_allowed_wherever_it_may_be() -> None:
    """End tokens are allowed beside others where the text may go on, and not before."""
    engine = engine_of("ab*")

    assert ids_in(engine.mask("g", 0, [])) == {*encode("a")}
    assert ids_in(engine.mask("g", 0, encode("a"))) == {EOS_ID, *encode("b")}


def test_a_token_of_text_that_ends_answers_is_no_text() -> None:
    """A model may end with a token that its tokenizer takes for text: it must end nothing early."""
    x, y = encode("x")[0], encode("y")[0]
    engine = engine_of("x?y", end_ids=(x,))

    assert ids_in(engine.mask("g", 0, [])) == {y}
    assert ids_in(engine.mask("g", 0, [y])) == {x}


def test_an_end_that_the_tokenizer_does_not_know_has_a_bit() -> None:
    """`lm_head` may be wider than the tokenizer: its end tokens are in the mask all the same."""
    engine = engine_of("a", end_ids=(EOS_ID, N_IDS + 20))
    mask = engine.mask("g", 0, encode("a"))

    assert ids_in(mask) == {EOS_ID, N_IDS + 20}
    assert len(mask) == (N_IDS + 21 + 7) // 8


def test_no_control_token_is_text() -> None:
    """What spells a control token is written with other tokens, which is not lost in the text."""
    engine, tokens = engine_of(r"<\|end\|>"), list[int]()
    while EOS_ID not in (allowed := ids_in(engine.mask("g", 0, tokens))):
        tokens.append(min(allowed))

    assert SPECIALS[END_ID] == TOKENIZER.decode(tokens) == "<|end|>"
    assert END_ID not in tokens


@pytest.mark.parametrize("text", ['"日本語"', '"🌶"', '"\\n"'])
def test_characters_may_be_spread_over_tokens(text: str) -> None:
    """Bytes of a character are allowed one after the other, and only such that make one."""
    engine, tokens = engine_of("{}", "json_schema"), encode(text)

    for n, token in enumerate(tokens):
        assert token in ids_in(engine.mask("g", 0, tokens[:n]))
    assert EOS_ID in ids_in(engine.mask("g", 0, tokens))


# Tokenizers.


def test_pieces_with_a_fallback_to_bytes() -> None:
    """A sentencepiece model's pieces are text with spaces, and its byte tokens are bytes."""
    engine = engine_of("a( hello|é)", tokenizer=SENTENCEPIECE)
    vocab = SENTENCEPIECE.get_vocab()
    a, space, hello, byte = (vocab[piece] for piece in ("a", "▁", "▁hello", "<0xC3>"))

    assert ids_in(engine.mask("g", 0, [])) == {a}
    assert ids_in(engine.mask("g", 0, [a])) >= {space, hello, byte}
    assert ids_in(engine.mask("g", 0, [a, hello])) == {EOS_ID}
    assert ids_in(engine.mask("g", 1, [a, byte])) == {vocab["<0xA9>"]}


def test_a_tokenizer_of_any_other_kind() -> None:
    """Whole words, as the numbers of the mesh tests, are followed as the text they are."""
    settings = settings_of(number_tokenizer(frozenset({60})), (60, 70), VOCAB_SIZE)
    engine = Engine(settings)
    engine.compile("g", {"kind": "regex", "text": "<5>(<6>|<7>)<8><9>"})

    assert ids_in(engine.mask("g", 0, [])) == {5}
    assert ids_in(engine.mask("g", 0, [5])) == {6, 7}
    assert ids_in(engine.mask("g", 0, [5, 7])) == {8}
    assert ids_in(engine.mask("g", 0, [5, 7, 8, 9])) == {60, 70}


def test_a_text_without_a_choice_is_cut_as_the_tokenizer_does() -> None:
    """Byte-level BPE cuts it itself; where it would add a space, the longest pieces are taken."""
    pieces = engine_module.Pieces(settings_of())
    others = engine_module.Pieces(settings_of(SENTENCEPIECE, (EOS_ID,), N_PIECES))
    texts = (b"hello world <|end|>", " 日本語".encode(), b"")

    assert pieces(texts[0]) == [*encode("hello world <|"), *encode("end"), *encode("|>")]
    for some in (pieces, others):
        assert [b"".join(some.tokens[i] for i in some(text)) for text in texts] == [*texts]
    assert len(others(b"hello")) < 5


def test_what_no_token_writes_is_refused() -> None:
    """A tokenizer without a token for a byte cannot write it, and no token it has is in the way."""
    tokenizer = number_tokenizer(frozenset({60}))
    settings = settings_of(tokenizer, (60,), VOCAB_SIZE)

    with pytest.raises(InvalidRequest, match="no text fits from here on"):
        Engine(settings).compile("g", {"kind": "regex", "text": "x<5>"})


# Grammars.


@pytest.mark.parametrize(
    ("kind", "text", "first"),
    [
        ("regex", "b|c", "bc"),
        ("lark", 'start: "b" | x\nx: "c"', "bc"),
        ("json_schema", '{"type": ["null", "boolean"]}', "ntf"),
    ],
)
def test_each_kind_of_grammar(kind: Kind, text: str, first: str) -> None:
    """A regex is of the whole text, Lark begins at `start`, a schema is JSON."""
    ids = ids_in(engine_of(text, kind).mask("g", 0, []))

    assert {TOKENIZER.decode([i])[0] for i in ids} == {*first}


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)", "look-around, including look-ahead and look-behind, is not supported"),
        ("regex", "[^\\s\\S]", "no text fits from here on"),
        ("lark", "start: x", 'unknown name: "x"'),
        ("lark", "{}", "expecting rule"),
        ("lark", "start: a\na: a", "no text fits from here on"),
        ("json_schema", '{"type": "string", "pattern": "^[a-"}', "unclosed character class"),
        ("json_schema", '{"oneOf": [{}, {}]}', "`oneOf` cannot be enforced where more than one"),
        ("json_schema", '{"required": ["a"], "properties": {"a": false}, "type": "object"}', "'a'"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
    ],
)
def test_a_bad_grammar_is_refused_in_one_line(kind: Kind, text: str, problem: str) -> None:
    """The engine's error is cut to what is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        engine_of(text, kind)

    assert problem in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) <= 200


def test_a_dead_end_is_an_error_and_no_end() -> None:
    """A schema whose inside allows nothing must not end there."""
    options = {"json_allowed_escapes": "n", "whitespace_flexible": False}
    schema = {"prefixItems": [{"const": "\x01"}], "minItems": 1, "type": "array"}
    engine = engine_of(json.dumps({**schema, "x-guidance": options}), "json_schema")

    with pytest.raises(InvalidRequest, match="no text fits from here on"):
        engine.mask("g", 0, encode("["))


def test_what_costs_too_much_on_the_way_is_an_error() -> None:
    """A limit that is reached while an answer is followed refuses it, and keeps refusing."""
    rules = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(300))
    engine = engine_of(f'start: "x" r0\n{rules}\nr300: "a"', "lark")

    assert ids_in(engine.mask("g", 0, [])) == {*encode("x")}
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="Too many items"):
            engine.mask("g", 0, encode("x"))


def test_a_token_that_was_not_allowed_is_an_error() -> None:
    """An answer that left the grammar has no mask."""
    with pytest.raises(InvalidRequest):
        engine_of("ab").mask("g", 0, encode("ba"))


# Questions.


def test_a_grammar_is_sent_once() -> None:
    """An engine says when it does not know a grammar, and knows it once it was told."""
    engine = Engine(settings_of())
    assert engine.answer(question()) == UNKNOWN
    assert engine.answer(question([])) == UNKNOWN
    assert engine.answer(question(regex="ab")) == OK
    assert engine.answer(question()) == OK
    assert engine.answer(question([])) == OK + engine.mask("g", 1, [])


def test_a_grammar_may_be_sent_along_with_the_tokens() -> None:
    """One question is enough for an engine that is new."""
    engine = Engine(settings_of())
    answer = engine.answer(question(encode("a"), regex="ab"))

    assert ids_in(answer[1:]) == {*encode("b")}


def test_an_error_is_an_answer() -> None:
    """What is wrong with a grammar is told behind a mark."""
    engine = Engine(settings_of())

    answer = engine.answer(question(regex="("))
    assert answer == REFUSED + b"a `pattern` cannot be read: unclosed group"


def test_the_last_used_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not used for the longest is forgotten, and told again changes nothing."""
    monkeypatch.setattr(engine_module, "_MAX_GRAMMARS", 2)
    monkeypatch.setattr(engine_module, "_MAX_ANSWERS", 1)
    engine = engine_of("ab")
    engine.compile("h", {"kind": "regex", "text": "cd"})
    first = engine.mask("g", 0, encode("a"))
    engine.mask("g", 1, encode("a"))
    engine.compile("i", {"kind": "regex", "text": "ef"})

    assert engine.answer(question(grammar="h")) == UNKNOWN
    assert engine.answer(question(encode("a"))) == OK + first


def test_questions_are_answered_until_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is told of the model, says that it is ready, answers, and ends with its asker."""
    timers: list[float] = []

    def set_timer(_: int, seconds: float) -> None:
        timers.append(seconds)  # timers are the main thread's

    monkeypatch.setattr(signal, "setitimer", set_timer)
    ours, theirs = Pipe()
    with ThreadPoolExecutor(1) as pool, theirs:
        served = pool.submit(engine_module.serve, theirs, limit_s=60)
        ours.send_bytes(json.dumps(settings_of()).encode())
        assert ours.recv_bytes() == OK
        ours.send_bytes(json.dumps(question(regex="ab")).encode())
        assert ours.recv_bytes() == OK
        ours.close()
        served.result(timeout=60)

    assert timers == [120, 0]


@pytest.mark.parametrize(
    ("most", "limit"), [(resource.RLIM_INFINITY, 2 * 2**30), (2**30, 2**30), (2**40, 2 * 2**30)]
)
def test_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch, most: int, limit: int) -> None:
    """The process may use 2 GiB, or as much as it may anyway, and serves what it is told."""
    set_limit, serve = Mock(), Mock()
    monkeypatch.setattr(sys, "argv", ["engine", "7", "2.5"])
    monkeypatch.setattr(resource, "getrlimit", Mock(return_value=(0, most)))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    monkeypatch.setattr(engine_module, "Connection", int)
    monkeypatch.setattr(engine_module, "serve", serve)
    engine_module.main()

    set_limit.assert_called_once_with(resource.RLIMIT_AS, (limit, most))
    serve.assert_called_once_with(7, 2.5)
