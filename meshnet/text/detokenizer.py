"""Token ids back to text, one token at a time. Knows no model and no stop strings."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """One choice's text so far; special tokens are left out, unless they are asked for.

    What `push` and `finish` return joins to the decoding of all ids together. A character whose
    bytes are spread over tokens comes out whole, with its last token.

    There is no prompt in here on purpose: a stream that is primed with a prompt which ends inside
    a character gives that prompt out again.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._restart([])

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        # tokenizers raises a bare Exception ("Invalid prefix") when a token changes text that is
        # out already: byte fallback decodes a run of bytes as a whole, and a late one can break it.
        except Exception:  # noqa: BLE001
            return self._resume()
        self._n_chars += len(text)
        return text

    def finish(self) -> str:
        """What is still held back, once: the bytes of an incomplete character, as U+FFFD."""
        text = self._decode(self._ids)
        rest = text[self._n_chars :]
        self._n_chars = len(text)
        return rest

    def _resume(self) -> str:
        """Give out what is new, by length, and begin a new stream behind it."""
        rest = self.finish()
        self._restart(self._context())
        return rest

    def _context(self) -> list[int]:
        """The fewest last ids that decode to whole characters.

        A new stream needs them: a sentencepiece decoder drops the space before the first token.
        """
        start = len(self._ids) - 1
        while start > 0 and not _is_whole(self._decode(self._ids[start:])):
            start -= 1
        return self._ids[start:]

    def _restart(self, context: list[int]) -> None:
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)
        self._ids = context
        self._n_chars = len(self._decode(context))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def _is_whole(text: str) -> bool:
    return bool(text) and not text.endswith("\N{REPLACEMENT CHARACTER}")
