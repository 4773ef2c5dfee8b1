"""What single tokens stand for, as bytes: a text's tokens join to its UTF-8."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    """The bytes of a tokenizer's tokens, of whichever kind its decoder is.

    The first word's token of a sentencepiece tokenizer may carry a space that the text has not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._to_bytes = _to_bytes(tokenizer.decoder)
        self._is_byte_level = self._to_bytes is _from_alphabet

    def __getitem__(self, token_id: int) -> bytes:
        """A token's bytes; none for an id that is no token: `lm_head` may be wider."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        added = self._added.get(token_id)
        # Sentencepiece models also add pieces of text, such as runs of spaces.
        is_verbatim = added is not None and (added.special or self._is_byte_level)
        return token.encode() if is_verbatim else self._to_bytes(token)


def _to_bytes(decoder: Decoder | None) -> Callable[[str], bytes]:
    """How the vocabulary writes bytes. Asked of the decoder: it may be a sequence of others."""
    if decoder is None:
        return str.encode
    if decoder.decode(["\u0120"]) == " ":
        return _from_alphabet
    if decoder.decode(["<0x41>"]) == "A":
        return _from_piece_or_byte
    return _from_piece


def _from_alphabet(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # as the decoder: a token with any other character is its own text
        return token.encode()


def _from_piece_or_byte(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _from_piece(token)


def _from_piece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _alphabet() -> Mapping[str, int]:
    """GPT-2's: bytes that print are their Latin-1 characters, the others follow from U+0100."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printing} | shifted


_ALPHABET: Final = _alphabet()
