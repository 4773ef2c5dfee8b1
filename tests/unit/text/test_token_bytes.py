# tokenizers' stubs leave some arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Replace as ReplaceText
from tokenizers.pre_tokenizers import Metaspace

from meshnet.text.token_bytes import TokenBytes
from tests.unit.text.making import END_ID, byte_level_tokenizer, sentencepiece_tokenizer

TEXTS = ["hello world", " two  spaces ", "日本語 ÿ\u0120", "🌶️👨‍👩‍👧", "a\nb\tc\0", "<0x41>▁", ""]


def gemma_tokenizer() -> Tokenizer:
    """Words that begin with U+2581, bytes for the rest, runs of spaces as added tokens."""
    specials = ["<bos>", "<eos>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helo", "▁▁", "▁h", "▁▁h"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "h"), ("▁▁", "h")]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    tokenizer.normalizer = ReplaceText(" ", "▁")
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    return tokenizer


def joined(tokenizer: Tokenizer, text: str) -> bytes:
    table = TokenBytes(tokenizer)
    return b"".join(table[i] for i in tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_join_to_its_utf8(text: str) -> None:
    """What a text's tokens stand for, be it parts of characters, is the text."""
    assert joined(byte_level_tokenizer(), text) == text.encode()
    # It writes U+2581 for spaces, and so cannot tell one from the other.
    assert joined(gemma_tokenizer(), text) == text.replace("▁", " ").encode()


def test_a_sentencepiece_tokenizer_may_add_a_space() -> None:
    """The space that such a tokenizer puts before a text belongs to the first token."""
    assert joined(sentencepiece_tokenizer(), "hello 日") == " hello 日".encode()


def test_every_byte_has_a_token_of_its_own() -> None:
    """Both ways to write bytes give all 256 of them."""
    byte_level, sentencepiece = byte_level_tokenizer(), sentencepiece_tokenizer()
    singles = [t for t in byte_level.get_vocab() if len(t) == 1]
    written = [f"<0x{byte:02X}>" for byte in range(256)]

    assert {TokenBytes(byte_level)[byte_level.get_vocab()[t]] for t in singles} == {
        bytes([byte]) for byte in range(256)
    }
    assert [TokenBytes(sentencepiece)[sentencepiece.get_vocab()[t]] for t in written] == [
        bytes([byte]) for byte in range(256)
    ]


@pytest.mark.parametrize("token", ["<tool_call>", "é ▁", "<begin▁of▁sentence>"])
def test_an_added_token_is_its_own_text(token: str) -> None:
    """Tokens beside a byte-level vocabulary are not written in its alphabet."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(token)])

    assert TokenBytes(tokenizer)[tokenizer.get_vocab_size() - 1] == token.encode()


def test_special_tokens_are_their_own_text() -> None:
    """A control token stands for its name, with either kind of tokenizer."""
    assert TokenBytes(byte_level_tokenizer())[END_ID] == b"<|end|>"
    assert TokenBytes(sentencepiece_tokenizer())[END_ID] == b"<|end|>"


def test_an_id_that_is_no_token_stands_for_nothing() -> None:
    """The model's head may be wider than the vocabulary."""
    assert TokenBytes(byte_level_tokenizer())[100_000] == b""


def test_other_kinds_of_tokenizers_have_tokens_of_text() -> None:
    """Without bytes in the vocabulary a token is its text, with U+2581 as a space if so decoded."""
    vocab = {"a": 0, "▁b": 1, "<0x41>": 2}
    words, spaced = Tokenizer(WordLevel(vocab, unk_token="a")), Tokenizer(BPE(vocab, []))
    spaced.decoder = Sequence([Replace("▁", " "), Fuse()])
    spaced.pre_tokenizer = Metaspace()

    assert [TokenBytes(words)[i] for i in range(3)] == [b"a", "▁b".encode(), b"<0x41>"]
    assert [TokenBytes(spaced)[i] for i in range(3)] == [b"a", b" b", b"<0x41>"]


def test_a_token_outside_the_alphabet_is_its_own_text() -> None:
    """A byte-level vocabulary may hold what its alphabet cannot write, as its decoder has it."""
    tokenizer = byte_level_tokenizer()
    vocab = {**{t: i for t, i in tokenizer.get_vocab().items() if i > END_ID}, "日": 500}
    other = Tokenizer(BPE(vocab, []))
    other.decoder = tokenizer.decoder

    assert TokenBytes(other)[500] == "日".encode()
    assert other.decode([500]) == "日"
