# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# transformers and gguf type their surface loosely.
from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from meshnet.errors import ModelError
from meshnet.model.prepare import prepare_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPACE, DIGIT = "\u0120", "2"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TEXTS = ["a  2", "Year 2024, it's 17x", "  x\n\n y\t z", "日本 🎉 é", "", "½ ² Ⅷ ٣"]


def _write_gguf(path: Path, pre: str | None, model: str = "gpt2") -> Path:
    """A model of no weights, whose vocabulary is the bytes and what a wrong split would join."""
    joined = [f"{SPACE}{SPACE}", f"{SPACE}{DIGIT}"]
    tokens = [*SPECIAL, *bytes_to_unicode().values(), *joined]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control] * len(SPECIAL) + [normal] * (len(tokens) - len(SPECIAL)))
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges([f"{SPACE} {DIGIT}", f"{SPACE} {SPACE}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the files go."""
    path = tmp_path / "out"
    path.mkdir()
    return path


def _prepared(folder: Path, pre: str | None) -> PreTrainedTokenizerFast:
    prepare_gguf(_write_gguf(folder.parent / "m.gguf", pre), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", [f"{SPACE}{SPACE}", DIGIT]),
        ("starcoder", [f"{SPACE}{SPACE}", DIGIT]),
        ("gpt-2", [SPACE, f"{SPACE}{DIGIT}"]),
        ("of-tomorrow", [SPACE, f"{SPACE}{DIGIT}"]),
        (None, [SPACE, f"{SPACE}{DIGIT}"]),
    ],
)
def test_digits_are_split_as_the_vocabulary_was_made(
    folder: Path, pre: str | None, pieces: list[str]
) -> None:
    """A digit takes no space before it with it where llama.cpp splits digits off first."""
    assert ["a", *pieces] == _prepared(folder, pre).tokenize("a  2")


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(folder: Path, text: str) -> None:
    """Decoding what was encoded gives the text, also after saving and loading."""
    tokenizer = _prepared(folder, "smollm")
    assert text == tokenizer.decode(tokenizer.encode(text))


def test_special_tokens_are_whole(folder: Path) -> None:
    """A control token is one id, the end of a turn the one that the file says."""
    tokenizer = _prepared(folder, "smollm")
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert tokenizer.eos_token_id == 2
    ids = tokenizer.apply_chat_template([{"role": "user", "content": ""}], return_dict=False)
    assert ids == [1, 2]


def test_config_stands_beside(folder: Path) -> None:
    """The config says how many layers there are and where an answer ends."""
    _prepared(folder, "smollm")
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (
        config["model_type"],
        config["num_hidden_layers"],
        config["max_position_embeddings"],
    ) == ("llama", 2, 128)
    assert generation["eos_token_id"] == 2


def test_another_kind_of_tokenizer_is_left_as_it_is(folder: Path, tmp_path: Path) -> None:
    """What is no byte-level BPE is not split as one, whatever its file says."""
    prepare_gguf(_write_gguf(tmp_path / "m.gguf", "smollm", model="llama"), folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    assert "Digits" not in json.dumps(saved["pre_tokenizer"])


def test_an_unknown_kind_of_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    """A tokenizer that transformers cannot make of the file is refused by name."""
    with pytest.raises(ModelError, match=r"m\.gguf cannot be prepared: .*rwkv"):
        prepare_gguf(_write_gguf(tmp_path / "m.gguf", "smollm", model="rwkv"), folder)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<html>" * 100])
def test_what_is_no_gguf_is_refused(folder: Path, tmp_path: Path, content: bytes) -> None:
    """A file that is no GGUF, or only the beginning of one, is refused by name."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf cannot be prepared"):
        prepare_gguf(path, folder)


def test_a_cut_header_is_refused(folder: Path, tmp_path: Path) -> None:
    """A file that ends within its header is refused."""
    path = _write_gguf(tmp_path / "m.gguf", "smollm")
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cannot be prepared"):
        prepare_gguf(path, folder)
