from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from meshnet.text.detokenizer import Detokenizer
from tests.unit.text.making import (
    BOS_ID,
    END_ID,
    EOS_ID,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()

TEXTS = [
    "hello world",
    " leading and trailing ",
    "🌶️ and 👨‍👩‍👧 and 🏳️‍🌈",
    "日本語のテキスト、漢字",
    "é e\u0301 \u200d \u2028 \n\t",
    "\ufffd is a character of its own \ufffd",
]


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def byte_ids(data: bytes) -> list[int]:
    vocab = SENTENCEPIECE.get_vocab()
    return [vocab[f"<0x{byte:02X}>"] for byte in data]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60), st.booleans())
def test_any_ids_join_to_their_decoding(ids: list[int], skip: bool) -> None:
    """What is pushed and finished joins to the decoding of all ids, with control tokens or not."""
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)

    assert whole == "".join(deltas(BYTE_LEVEL, ids, skip_special_tokens=skip))


@given(st.text(max_size=40))
def test_any_text_comes_back_whole(text: str) -> None:
    """A text that was encoded comes back as it was, and nothing is left for the end."""
    *pushed, last = deltas(BYTE_LEVEL, encode(BYTE_LEVEL, text))

    assert text == "".join(pushed) + last
    assert last.strip("\ufffd") == ""  # only a real U+FFFD at the end is held back


@given(st.text(alphabet="abeh lorw!é日🌶", max_size=40), st.booleans())
def test_any_text_of_a_sentencepiece_tokenizer_joins_to_its_decoding(text: str, skip: bool) -> None:
    """The deltas of a sentencepiece tokenizer join to the decoding of all ids."""
    ids = [BOS_ID, *encode(SENTENCEPIECE, text), END_ID, *encode(SENTENCEPIECE, text), EOS_ID]
    whole = SENTENCEPIECE.decode(ids, skip_special_tokens=skip)

    assert whole == "".join(deltas(SENTENCEPIECE, ids, skip_special_tokens=skip))


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1), max_size=40))
def test_broken_byte_runs_never_raise(ids: list[int]) -> None:
    """Ids that no text encodes to, broken byte runs among them, give text and no error."""
    assert len(SENTENCEPIECE.decode(ids)) <= len("".join(deltas(SENTENCEPIECE, ids)))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
def test_no_character_is_ever_split(tokenizer: Tokenizer, text: str) -> None:
    """Emoji, joined emoji and CJK come out whole, though their bytes are several tokens."""
    ids = encode(tokenizer, text)
    pushed = deltas(tokenizer, ids)

    assert text == "".join(pushed)
    assert text.count("\ufffd") == "".join(pushed).count("\ufffd")


def test_the_first_word_loses_its_space_and_the_second_keeps_it() -> None:
    """A sentencepiece tokenizer's own leading space is dropped, as in a full decode."""
    ids = encode(SENTENCEPIECE, "hello hello")

    assert deltas(SENTENCEPIECE, ids) == ["hello", " hello", ""]


def test_a_real_leading_space_is_kept() -> None:
    """A byte-level tokenizer's first space belongs to the text."""
    assert "".join(deltas(BYTE_LEVEL, encode(BYTE_LEVEL, " the"))) == " the"


def test_special_tokens_have_no_text() -> None:
    """BOS, EOS and other special tokens give nothing, wherever they stand."""
    hello = encode(BYTE_LEVEL, "hello")

    assert "".join(deltas(BYTE_LEVEL, [BOS_ID, *hello, END_ID, *hello, EOS_ID])) == "hellohello"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
def test_special_tokens_are_written_if_asked_for(tokenizer: Tokenizer) -> None:
    """Each comes out whole and at once, as its own text."""
    hello = encode(tokenizer, "hello")
    ids = [BOS_ID, *hello, END_ID, EOS_ID]
    told = deltas(tokenizer, ids, skip_special_tokens=False)

    assert (told[0], told[-3:]) == ("<s>", ["<|end|>", "</s>", ""])


def test_an_incomplete_character_is_flushed_once() -> None:
    """A character cut by the end is one U+FFFD at the end, and a second finish adds nothing."""
    detokenizer = Detokenizer(BYTE_LEVEL)
    pushed = [detokenizer.push(token_id) for token_id in encode(BYTE_LEVEL, "a🌶")[:-1]]

    assert "".join(pushed) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_byte_that_breaks_its_run_loses_no_text() -> None:
    """When a late byte breaks text that is out already, the stream goes on behind it."""
    detokenizer = Detokenizer(SENTENCEPIECE)
    broken = [*byte_ids(b"\x26"), *byte_ids(b"\x98")]
    ids = [*broken, *encode(SENTENCEPIECE, "hello hello"), *encode(SENTENCEPIECE, "🌶")]
    pushed = [detokenizer.push(token_id) for token_id in ids]

    # The full decode has a second U+FFFD in place of the "&" that is out.
    assert "".join(pushed) + detokenizer.finish() == "&\ufffd hello hello 🌶"


def test_a_space_after_a_broken_byte_is_kept() -> None:
    """A new stream begins far enough back that its decoder does not drop a real space."""
    detokenizer = Detokenizer(SENTENCEPIECE)
    space, hello = (SENTENCEPIECE.get_vocab()[piece] for piece in ("▁", "▁hello"))
    ids = [*byte_ids(b"\x26"), *byte_ids(b"\x98"), space, hello]
    pushed = [detokenizer.push(token_id) for token_id in ids]

    assert "".join(pushed) + detokenizer.finish() == "&\ufffd  hello"
