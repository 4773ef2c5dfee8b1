"""The process of a grammar engine, as seen by who asks it; see `engine`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final, Literal, NoReturn, TypedDict

from meshnet.errors import Draining, ModelError

OK: Final = b"="
"""Begins an answer; behind it is the mask that was asked for. Alone: it is ready."""
REFUSED: Final = b"!"
"""Begins an answer; behind it is what is wrong with the grammar."""
UNKNOWN: Final = b"?"
"""The whole answer where the grammar must be sent along."""

Kind = Literal["json_schema", "regex", "lark"]

_START_LIMIT_S: Final = 60.0
_MODULE: Final = "meshnet.grammar.engine"


class Settings(TypedDict):
    """What an engine has to know of a model.

    Attributes:
        tokenizer: tokenizer.json's text.
        vocab_size: Ids that the tokenizer knows are [0, vocab_size).
        end_ids: Each of them ends an answer; at least one is below `vocab_size`.
    """

    tokenizer: str
    vocab_size: int
    end_ids: list[int]


class Definition(TypedDict):
    """A grammar as it is written."""

    kind: Kind
    text: str


class Question(TypedDict):
    """What an engine is asked: to know a grammar, or for a mask.

    Attributes:
        grammar: Its name.
        definition: Sent along in case that it is not known.
        answer: A number for the answer whose mask is asked for.
        tokens: All of that answer so far; None asks for no mask.
    """

    grammar: str
    definition: Definition | None
    answer: int
    tokens: list[int] | None


class EngineLostError(Exception):
    """The engine had to be stopped, or crashed; what it was asked is to blame."""


@dataclass
class EngineProcess:
    """Starts an engine when it is asked something; asks one question at a time.

    Attributes:
        settings: The model's; called in the thread that asks.
        limit_s: The longest that an answer may take.
    """

    settings: Callable[[], Settings]
    limit_s: float
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _running: _Running | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)

    def ask(self, question: Question) -> bytes:
        """The engine's answer: `OK` and what was asked for, `REFUSED` and why, or `UNKNOWN`.

        Raises:
            EngineLostError: There was none within the limit, or the engine crashed.
            ModelError: The engine does not start.
            Draining: It was closed.
        """
        message = json.dumps(question).encode()
        with self._lock:
            # It may crash of what others asked before, once.
            return self._try(message) or self._try(message) or self._give_up()

    def close(self) -> None:
        """End the process, and what it computes."""
        self._is_closed = True
        running = self._running
        if running is not None:
            running.process.kill()  # whoever waits for it has the lock
        with self._lock:
            self._end()

    def _try(self, message: bytes) -> bytes | None:
        """The answer, or None if the engine is gone."""
        running = self._running or self._start()
        try:
            running.connection.send_bytes(message)
            if running.connection.poll(self.limit_s):
                return running.connection.recv_bytes()
        except (EOFError, OSError):
            self._end()
            return None
        self._end()
        raise EngineLostError(f"it takes longer than {self.limit_s:g} s")

    def _give_up(self) -> NoReturn:
        raise EngineLostError("it crashes the grammar engine")

    def _start(self) -> _Running:
        """Start it and wait until it is ready."""
        if self._is_closed:
            raise Draining("no grammars are followed any more")
        settings = json.dumps(self.settings()).encode()
        running = self._running = _start(self.limit_s)
        try:
            running.connection.send_bytes(settings)
            is_ready = running.connection.poll(_START_LIMIT_S) and running.connection.recv_bytes()
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._end()
            raise ModelError("the grammar engine does not start")
        return running

    def _end(self) -> None:
        if self._running is not None:
            self._running.connection.close()
            self._running.process.kill()
            self._running.process.wait()
            self._running = None


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    connection: Connection


def _start(limit_s: float) -> _Running:
    ours, theirs = Pipe()
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            [sys.executable, "-m", _MODULE, str(descriptor), str(limit_s)],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C is for the head, which ends it
        )
    return _Running(process, ours)
