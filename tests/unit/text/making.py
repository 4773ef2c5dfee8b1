"""Small tokenizers of the two common kinds, and folders of models made of them."""

# tokenizers' stubs leave some arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend
from tokenizers.normalizers import Replace as ReplaceText
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SPECIALS = ["<s>", "</s>", "<|end|>"]
BOS_ID, EOS_ID, END_ID = 0, 1, 2

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}]{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_CORPUS = ["the quick brown fox", "hello world", "日本語のテキスト", "[user][assistant][system]"]


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it; BOS is added by its post-processor."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=320,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Words that begin with U+2581 and bytes for the rest, as Llama 2 and Mistral have it."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorw!"]
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.normalizer = NormalizerSequence([Prepend("▁"), ReplaceText(" ", "▁")])
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return tokenizer


def save_model(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    config: dict[str, object] | None = None,
    generation_config: dict[str, object] | None = None,
    template: str | None = TEMPLATE,
    response_template: object = None,
) -> Path:
    """Write the small files of a model, as the Hub has them; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    if response_template is not None:
        tokenizer_config["response_template"] = response_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config or {}))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
