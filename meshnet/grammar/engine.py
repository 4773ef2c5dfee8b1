"""Compiles grammars and follows answers through them, in a process of its own.

Some schemas of a few hundred bytes make llguidance compute for hours, fill the memory or overflow
its stack, and nothing can stop a thread. So `meshnet.grammar.compiler` runs it here, sets a limit
in time, and starts another when that is over: `python -m meshnet.grammar.engine FD SECONDS`.

A question is JSON, an answer is bytes. The first question is of the model, `Settings`, and is
answered once the engine is ready.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from meshnet.errors import InvalidRequest
from meshnet.grammar.engine_process import OK, REFUSED, UNKNOWN, Definition, Question, Settings
from meshnet.text.token_bytes import TokenBytes

Key = TypeVar("Key")
Value = TypeVar("Value")

_MAX_GRAMMARS: Final = 64
_MAX_ANSWERS: Final = 256
_MAX_BYTES: Final = 2 * 2**30
_MAX_PROBLEM_CHARS: Final = 200
_LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""The states' default would be half a gigabyte for one grammar."""

_PROBLEMS: Final = {  # where the engine's own words do not help
    "NoExtensionBias": "no text fits from here on",
    "oneOf constraints are not supported": "`oneOf` cannot be enforced where more than one option"
    " may fit; write `anyOf`, or a `const` in each that tells them apart",
}


@dataclass
class Follower:
    """An answer on its way through a grammar."""

    matcher: LLMatcher
    n_tokens: int = 0


class Engine:
    """One model's grammars, and the answers that follow them, the last used ones.

    What was forgotten is told again by whoever asks: an answer is a function of the question.
    """

    def __init__(self, settings: Settings) -> None:
        """Takes most of a second."""
        pieces = Pieces(settings)
        self._end_ids = settings["end_ids"]
        self._tokenizer = LLTokenizer(TokenizerWrapper(pieces), eos_token=self._end_ids)
        self._n_bytes = (pieces.n_ids + 7) // 8
        self._grammars: OrderedDict[str, LLMatcher] = OrderedDict()
        self._followers: OrderedDict[int, Follower] = OrderedDict()

    def answer(self, question: Question) -> bytes:
        """The answer to any question but the first."""
        name, definition, tokens = question["grammar"], question["definition"], question["tokens"]
        try:
            if name not in self._grammars:
                if definition is None:
                    return UNKNOWN
                self.compile(name, definition)
            return OK if tokens is None else OK + self.mask(name, question["answer"], tokens)
        except InvalidRequest as error:
            return REFUSED + error.message.encode()

    def compile(self, name: str, definition: Definition) -> None:
        """Make a grammar known by `name`.

        Raises:
            InvalidRequest: It is wrong, too large, or no answer can begin.
        """
        matcher = LLMatcher(self._tokenizer, _source(definition), log_level=0, limits=_LIMITS)
        self._allowed(matcher)
        _remember(self._grammars, name, matcher, _MAX_GRAMMARS)

    def mask(self, name: str, answer: int, tokens: Sequence[int]) -> bytes:
        """What may come after `tokens` in an answer that follows a known grammar.

        Args:
            name: The grammar's.
            answer: Its number; its tokens only ever become more.
            tokens: All of them so far, none of which ends it.

        Returns:
            A bit an id, the lowest bit first. The end ids are in it where the grammar can end.

        Raises:
            InvalidRequest: The grammar is too costly to follow, or nothing can come.
        """
        follower = self._followers.get(answer) or Follower(self._grammars[name].deep_copy())
        follower.matcher.consume_tokens(list(tokens[follower.n_tokens :]))
        follower.n_tokens = len(tokens)
        self._grammars.move_to_end(name)
        _remember(self._followers, answer, follower, _MAX_ANSWERS)
        return self._allowed(follower.matcher)

    def _allowed(self, matcher: LLMatcher) -> bytes:
        mask = bytearray(matcher.compute_bitmask()[: self._n_bytes])
        if matcher.is_error():  # the mask is of the end tokens then
            raise InvalidRequest(_problem(matcher.get_error()))
        # A token may end an answer and yet be one of text to the engine.
        is_end = matcher.is_accepting()
        for end_id in self._end_ids:
            mask[end_id >> 3] &= ~(1 << (end_id & 7))
            mask[end_id >> 3] |= is_end << (end_id & 7)
        if not any(mask):
            raise InvalidRequest(_PROBLEMS["NoExtensionBias"])
        return bytes(mask)


class Pieces:
    """A model's tokens as pieces of text, in llguidance's words for it.

    Attributes:
        n_ids: Ids of tokens that a model may pick.
        tokens: Each token's bytes. Behind them, in bytes of the mask that are cut off, are single
            bytes without a token: the engine wants to write any text.
    """

    bos_token_id = None

    def __init__(self, settings: Settings) -> None:
        self._tokenizer = Tokenizer.from_str(settings["tokenizer"])
        # Text that spells a control token is text in an answer.
        self._tokenizer.encode_special_tokens = True
        token_bytes = TokenBytes(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder().items()
        end_ids = settings["end_ids"]
        # `lm_head` may be wider than the tokenizer, and have ends that only it knows.
        self.n_ids = max(settings["vocab_size"], *(end_id + 1 for end_id in end_ids))
        self.eos_token_id = end_ids[0]
        self.special_token_ids = sorted({*end_ids, *(i for i, token in added if token.special)})
        self.tokens = [token_bytes[token_id] for token_id in range(self.n_ids)]
        self.tokens += [b""] * (-self.n_ids % 8)
        special = {*self.special_token_ids}
        known = {piece for i, piece in enumerate(self.tokens) if i not in special}
        self.tokens += [bytes([byte]) for byte in range(256) if bytes([byte]) not in known]
        self._ids = {piece: i for i, piece in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text that a grammar leaves no choice about."""
        ids = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        # Some tokenizers put a space before it, or change it.
        is_text = b"".join(self.tokens[token_id] for token_id in ids) == text
        return ids if is_text else self._longest_pieces(text)

    def _longest_pieces(self, text: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next(end for end in ends if text[start:end] in self._ids)
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def _source(definition: Definition) -> str:
    kind, text = definition["kind"], definition["text"]
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    # The bare text would be taken for something else if it began with {.
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _remember(known: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Keep `value` as the last used one, and forget the first if there are too many."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)


def _problem(error: str) -> str:
    """One line of what is wrong."""
    for known, problem in _PROBLEMS.items():
        if error.startswith(known):
            return problem
    lines = error.strip().splitlines()
    # A regular expression's error is drawn over several lines, one of which tells it.
    drawn = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    problem = f"a `pattern` cannot be read: {drawn[0]}" if drawn else lines[0]
    return problem[:_MAX_PROBLEM_CHARS]


def serve(connection: Connection, limit_s: float) -> None:
    """Answer questions until nobody asks any more.

    Args:
        connection: Where they come from.
        limit_s: The asker stops waiting after so many seconds.
    """
    engine = Engine(json.loads(connection.recv_bytes()))
    connection.send_bytes(OK)
    while True:
        try:
            question: Question = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The asker kills us first, unless it died: nothing else would end an endless computation.
        signal.setitimer(signal.ITIMER_REAL, 2 * limit_s)
        answer = engine.answer(question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(answer)


def main() -> None:
    """Serve the connection that the command line names."""
    descriptor, limit_s = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MAX_BYTES if most == resource.RLIM_INFINITY else min(_MAX_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    serve(Connection(int(descriptor)), float(limit_s))


if __name__ == "__main__":  # pragma: no cover  # in a process of its own
    main()
