"""A model that computes next to nothing, and whose hidden states are as wide as the default's."""
# pyright: reportUnknownMemberType=false
# transformers types its methods loosely.

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

N_LAYERS: Final = 4
_HIDDEN_SIZE: Final = 576
_VOCAB_SIZE: Final = 256
_UNKNOWN: Final = "word-0"


def save_small_model(folder: Path) -> None:
    """Write it, with a tokenizer that knows no word of any text, as a Hugging Face folder."""
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=16,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"word-{number}": number for number in range(_VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, _UNKNOWN))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=_UNKNOWN).save_pretrained(folder)
