"""Text to token ids: a model's own tokenizer and chat template. Knows no weights and no torch."""

# transformers is loosely typed: what it returns is narrowed here, and nowhere else.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from jinja2 import TemplateError

from meshnet.errors import InvalidRequest
from meshnet.text.detokenizer import Detokenizer
from meshnet.text.model_files import ModelFacts, as_ids, find_folder, model_error, read_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What a template may raise that is not the template's own: it runs Python's operators on our data.
_TEMPLATE_ERRORS: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ChatTokenizer:
    """A model's tokenizer, its chat template, and which tokens end an answer.

    Its methods are CPU work without a lock; several threads may use one at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, facts: ModelFacts) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may ask for either, and would cut or fill prompts in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        template = _template_text(tokenizer)
        self._has_template = template is not None
        self._knows_developer = "developer" in (template or "")
        self.end_token_ids = facts.end_token_ids | frozenset(as_ids(tokenizer.eos_token_id))
        """A generated token of these ends the answer."""
        self.vocab_size = len(tokenizer)
        """Known ids are [0, vocab_size), added ones included; `lm_head` may be wider."""
        self.n_layers = facts.n_layers
        """Decoder layers, or None if config.json does not say."""
        self.max_positions = facts.max_positions
        """The context in tokens, or None if config.json does not say."""

    @classmethod
    def load(cls, model: str) -> ChatTokenizer:
        """Load from a folder or a Hugging Face id; of the latter only small files are fetched.

        Raises:
            ModelError: Something is missing, broken, or of a kind that cannot be streamed.
        """
        folder = find_folder(model)
        facts = read_facts(folder)
        return cls(_load_tokenizer(folder), facts)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The prompt's ids: the conversation in the model's template, and the answer's opening.

        Text that spells a control token, such as `<|im_end|>`, becomes that token.

        Args:
            messages: `role` and `content` (a string) each, and what else the template may know.

        Raises:
            InvalidRequest: The model has no template, or the template refuses these messages.
        """
        if not self._has_template:
            raise InvalidRequest(
                "messages: this model has no chat template; it is a base model and cannot chat",
                field="messages",
            )
        try:
            # Never render first and tokenise then: that would add a second BOS.
            ids = self._tokenizer.apply_chat_template(
                self._with_known_roles(messages),
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {str(error)[:200]}",
                field="messages",
            ) from error
        return cast("list[int]", ids)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, without BOS or any other special token of our own."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def new_detokenizer(self) -> Detokenizer:
        """A fresh stream from ids to text, for one choice."""
        return Detokenizer(self._backend)

    def _with_known_roles(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
        """Most templates do not know `developer`, and print any role as it stands."""
        known = [
            {**message, "role": "system"}
            if message["role"] == "developer" and not self._knows_developer
            else dict(message)
            for message in messages
        ]
        return cast("list[dict[str, str]]", known)  # transformers' word for any conversation


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    # Costs 1 to 2 s, most of it torch where that is installed: whoever only needs the types of
    # this module (the CLI's help, the schema) should not pay for it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise model_error(f"{folder} has no tokenizer.json", str(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # transformers and tokenizers raise whatever they meet, the latter a bare Exception.
    except Exception as error:
        raise model_error(
            f"the tokenizer in {folder} is broken: {str(error)[:200]}", str(folder)
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise model_error(f"{folder} has no tokenizer of the `tokenizers` library", str(folder))
    return tokenizer


def _template_text(tokenizer: PreTrainedTokenizerFast) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # none at all, or several without a default
        return None
