from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshnet.errors import Draining, ModelError
from meshnet.grammar import engine_process
from meshnet.grammar.engine_process import (
    OK,
    REFUSED,
    UNKNOWN,
    EngineLostError,
    EngineProcess,
    Question,
    Settings,
)
from tests.unit.text.making import EOS_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
ENDLESS = '{"type": "integer", "multipleOf": 100000007}'
"""The engine looks for a whole number that is no multiple, one digit after the other."""
DEEP = "start: r0\n" + "\n".join(f'r{n}: "x" r{n + 1}' for n in range(100_000)) + '\nr100000: "a"'
"""A chain of rules that is longer than the engine's stack."""


def settings() -> Settings:
    return {
        "tokenizer": TOKENIZER.to_str(),
        "vocab_size": TOKENIZER.get_vocab_size(),
        "end_ids": [EOS_ID],
    }


def grammar(text: str, kind: engine_process.Kind = "regex") -> Question:
    definition: engine_process.Definition = {"kind": kind, "text": text}
    return {"grammar": text[:20], "definition": definition, "answer": 0, "tokens": None}


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(settings, limit_s=30)
    yield process
    process.close()


def pid_of(process: EngineProcess) -> int:
    running = process._running  # pyright: ignore[reportPrivateUsage]  # to see that it ends
    assert running is not None
    return running.process.pid


def test_questions_are_answered(engine: EngineProcess) -> None:
    """One process answers all questions, as the engine does."""
    assert engine.ask({**grammar("ab"), "definition": None}) == UNKNOWN
    first = pid_of(engine)
    assert engine.ask(grammar("ab")) == OK
    assert engine.ask(grammar("(")) == REFUSED + b"a `pattern` cannot be read: unclosed group"
    mask = engine.ask({**grammar("ab"), "tokens": []})

    assert (mask[:1], len(mask) - 1) == (OK, (TOKENIZER.get_vocab_size() + 7) // 8)
    assert pid_of(engine) == first


def test_what_takes_too_long_is_stopped() -> None:
    """An endless computation is ended with its process; the next question has another."""
    engine = EngineProcess(settings, limit_s=2)
    try:
        with pytest.raises(EngineLostError, match="it takes longer than 2 s"):
            engine.ask(grammar(ENDLESS, "json_schema"))
        assert engine.ask(grammar("ab")) == OK
    finally:
        engine.close()


def test_what_crashes_the_engine_crashes_nothing_else(engine: EngineProcess) -> None:
    """A stack that overflows ends the engine alone, and is told of."""
    with pytest.raises(EngineLostError, match="it crashes the grammar engine"):
        engine.ask(grammar(DEEP, "lark"))

    assert engine.ask(grammar("ab")) == OK


def test_a_process_that_died_is_replaced(engine: EngineProcess) -> None:
    """Who asks a dead engine, which is not to blame for it, is answered by another."""
    engine.ask(grammar("ab"))
    first = pid_of(engine)
    running = engine._running  # pyright: ignore[reportPrivateUsage]  # to end it
    assert running is not None
    running.process.kill()
    running.process.wait()

    assert engine.ask({**grammar("ab"), "definition": None}) == UNKNOWN
    assert pid_of(engine) != first


def test_an_engine_that_does_not_start_is_our_fault(capfd: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that cannot be read is no fault of the grammar's."""
    broken: Settings = {"tokenizer": "{}", "vocab_size": 1, "end_ids": [0]}
    engine = EngineProcess(lambda: broken, limit_s=30)

    with pytest.raises(ModelError, match="the grammar engine does not start"):
        engine.ask(grammar("ab"))
    assert engine._running is None  # pyright: ignore[reportPrivateUsage]
    assert "Traceback" in capfd.readouterr().err


def test_closing_ends_what_is_computed() -> None:
    """Who waits for an answer when the engine is closed is told so, at once, and so is who asks."""
    engine = EngineProcess(settings, limit_s=60)
    engine.ask(grammar("ab"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.ask, grammar(ENDLESS, "json_schema"))
        while not engine._lock.locked():  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.01)
        time.sleep(0.2)
        engine.close()
        with pytest.raises(Draining):
            waiting.result(timeout=30)
    with pytest.raises(Draining):
        engine.ask(grammar("ab"))


def test_closing_what_was_never_asked_does_nothing() -> None:
    """An engine that was not needed was not started."""
    engine = EngineProcess(settings, limit_s=30)
    engine.close()

    assert engine._running is None  # pyright: ignore[reportPrivateUsage]


def test_threads_ask_one_after_the_other(engine: EngineProcess) -> None:
    """Each of many threads gets the answer to its own question."""
    texts = ["ab", "(", "cd", "a{", "[", "ef"] * 3
    begin = threading.Barrier(len(texts))

    def ask(text: str) -> bytes:
        begin.wait()
        return engine.ask(grammar(text))

    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(ask, texts))

    assert [answer == OK for answer in answers] == [text.isalpha() for text in texts]
