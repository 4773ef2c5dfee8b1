"""Writes beside a GGUF file what transformers would read of an ordinary model's folder.

So a head needs neither torch nor the GGUF file, and a shard need not make a config of its metadata.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its loaders loosely.

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, cast

import structlog
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata

from meshnet.errors import ModelError

SINGLE_DIGITS: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""`tokenizer.ggml.pre` of vocabularies that cut numbers into digits before GPT-2's split.

llama.cpp's table; transformers 5.24 knows none of them, and splits as GPT-2 does.
"""

_GPT2_SPLIT: Final = frozenset({"default", "gpt-2", "mpt", "olmo", "jais", "trillion"})
_UNREADABLE: Final = (ValueError, KeyError, IndexError, TypeError, OSError, struct.error)
"""What transformers raises of a file that is no GGUF, is cut off, or of an unknown family."""

_log = structlog.get_logger(__name__)


def prepare_gguf(gguf: Path, folder: Path) -> None:
    """Write the config, generation config, tokenizer and chat template that `gguf` describes.

    Args:
        gguf: The file; none of its tensors is read.
        folder: Where the files go; must exist. Not atomic: hand in a folder of your own.

    Raises:
        ModelError: The file is no GGUF, is cut off, or of a kind that transformers cannot read.
            The folder may hold some of the files.
    """
    try:
        _write_config(gguf, folder)
        _write_tokenizer(gguf, folder)
    except _UNREADABLE as error:
        raise ModelError(
            f"{gguf} cannot be prepared: {error}",
            field="model",
            value=str(gguf),
            allowed="a GGUF file of an architecture and tokenizer that transformers can read",
        ) from error


def _write_config(gguf: Path, folder: Path) -> None:
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    metadata, _ = read_gguf_metadata(str(gguf))
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        split = str(metadata.get("tokenizer.ggml.pre", "default"))
        mend_split(cast("Tokenizer", tokenizer.backend_tokenizer), split)
    tokenizer.save_pretrained(folder)


def mend_split(tokenizer: Tokenizer, split: str) -> None:
    """Split text before the merges as the vocabulary's makers did, where transformers does not.

    Args:
        tokenizer: A byte-level BPE as transformers made it. Mutated.
        split: The file's `tokenizer.ggml.pre`.
    """
    if split in SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _GPT2_SPLIT:
        _log.warning("unknown pre-tokenizer: text is split as GPT-2 does", pre=split)
