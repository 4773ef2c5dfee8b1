"""Text to token ids: a model's own tokenizer and chat template. Knows no weights and no torch."""

# transformers is loosely typed: what it returns is narrowed here, and nowhere else.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from jinja2 import TemplateError

from meshnet.errors import InvalidRequest
from meshnet.text import hermes
from meshnet.text.detokenizer import Detokenizer
from meshnet.text.model_files import ModelFacts, as_ids, find_folder, model_error, read_facts
from meshnet.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_TEMPLATE_VARIABLES: Final = 16
MAX_TEMPLATE_VARIABLE_CHARS: Final = 16_384
"""All of them together, as JSON."""

# What a template may raise that is not the template's own: it runs Python's operators on our data.
_TEMPLATE_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_PROBE: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probed": {"type": "string", "description": "A probe."}},
            "required": ["probed"],
        },
    },
}
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Regions(Protocol):
    """One answer on its way through transformers' ResponseParser, which tells what it finds.

    Its events are of the `type` region_open, region_chunk (with `text`, and `dirty` where that is
    not the region's value) and region_close (with its `value`), each with its `field`. Both methods
    raise what a content parser raises on a region that is malformed, or cut short by the end.
    """

    initial_events: list[dict[str, object]]
    """What the end of the prompt holds of the answer."""

    def feed(self, text: str) -> list[dict[str, object]]:
        """What is found in the text so far, and was not told before."""
        ...

    def finalize(self) -> tuple[dict[str, object], list[dict[str, object]]]:
        """The whole message, and what is found at its end."""
        ...


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
        self._token_bytes = TokenBytes(self._backend)
        template = _template_text(tokenizer)
        self._has_template = template is not None
        self._knows_developer = "developer" in (template or "")
        own = cast("Mapping[str, object] | None", tokenizer.response_template)
        thinks = "<think>" in (template or "") or self._backend.token_to_id("<think>") is not None
        self.response_template = hermes.response_template(own, thinks=thinks)
        """How answers are read, in transformers' words for it."""
        self._tells_tools = self._can_tell_tools(own)
        self._reserved_names = _reserved_names(tokenizer)
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

    def encode_chat(
        self,
        messages: Sequence[hermes.Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, object] = {},
    ) -> list[int]:
        """The prompt's ids: the conversation in the model's template, and the answer's opening.

        Text that spells a control token, such as `<|im_end|>`, becomes that token. Tools, calls and
        results are written into the text of the messages where the template knows none, or asks
        for calls that `response_template` cannot read.

        Args:
            messages: `role` and `content` (a string) each, and what else the template may know.
            tools: What may be called, as OpenAI has it: `type` and `function`.
            add_generation_prompt: Whether the answer is opened.
            continue_final_message: Whether the answer goes on with the last message, which is the
                assistant's. Not together with `add_generation_prompt`.
            template_variables: What else the template is told.

        Raises:
            InvalidRequest: The model has no template, or the template refuses these messages; the
                last message cannot be gone on with; a variable has a name that is taken, or they
                are too many or too long.
        """
        if not self._has_template:
            raise InvalidRequest(
                "messages: this model has no chat template; it is a base model and cannot chat",
                field="messages",
            )
        if continue_final_message:
            _check_continued(messages, add_generation_prompt=add_generation_prompt)
        self._check_variables(template_variables)
        try:
            text = self._tokenizer.apply_chat_template(
                self._for_template(messages, tools),
                tools=[dict(tool) for tool in tools] if tools and self._tells_tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **cast("dict[str, Any]", template_variables),  # none of the names above
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {str(error)[:200]}",
                field="messages",
            ) from error
        # The template has written what special tokens there are: not a second BOS.
        return self.encode(cast("str", text))

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, without BOS or any other special token of our own."""
        return self.encode_prompt(text, add_special_tokens=False)

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text of any length, as transformers has them when it is simply called.

        Args:
            text: What spells a control token becomes that token.
            add_special_tokens: Whether the tokenizer puts its own around the text, such as BOS.
        """
        # One text by itself would be encoded under the interpreter's lock: megabytes take seconds.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, control tokens and all."""
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=False)
        return text

    def describe(self) -> dict[str, str | None]:
        """Its class, the special tokens that have a name, and the chat template."""
        tokenizer = self._tokenizer
        specials = {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
        }
        return {
            "tokenizer_class": type(tokenizer).__name__,
            **cast("dict[str, str | None]", specials),
            "chat_template": _template_text(tokenizer),
        }

    def to_json(self) -> str:
        """The text of its tokenizer.json."""
        return self._backend.to_str()

    def new_detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh stream from ids to text, for one choice."""
        return Detokenizer(self._backend, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The very bytes that a token stands for, be they a part of a character."""
        return self._token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token alone as text; U+FFFD where it holds a part of a character."""
        return self._token_bytes[token_id].decode(errors="replace")

    def new_regions(
        self,
        template: Mapping[str, object],
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, object]],
    ) -> Regions:
        """A fresh parse of one answer.

        Args:
            template: A response template.
            prompt_ids: What the answer follows; it may hold the answer's beginning.
            tools: Their schemas turn arguments that are written as text into numbers and the like.

        Raises:
            ValueError: The prompt holds a malformed beginning of an answer.
        """
        # The NUL, which no tag contains, keeps the parser from holding back the prompt's end, which
        # would come out with the answer.
        prompt = self.decode(prompt_ids)
        parser = self._tokenizer.get_response_parser(
            dict(template),
            prefix=f"{prompt}\0" if prompt else "",
            tools=[dict(tool) for tool in tools],
        )
        return cast("Regions", parser)

    def mentions_special_token(self, template: Mapping[str, object]) -> bool:
        """Whether answers that this response template reads need their special tokens as text."""
        fields = json.dumps(template["fields"], ensure_ascii=False).replace("\\", "")
        added = self._backend.get_added_tokens_decoder().items()
        return any(
            token.special and token_id not in self.end_token_ids and token.content in fields
            for token_id, token in added
        )

    def _for_template(
        self, messages: Sequence[hermes.Message], tools: Sequence[Mapping[str, object]]
    ) -> list[dict[str, str]]:
        known = self._with_known_roles(messages)
        told = known if self._tells_tools else hermes.in_text(known, tools)
        return cast("list[dict[str, str]]", told)  # transformers' word for any conversation

    def _with_known_roles(self, messages: Sequence[hermes.Message]) -> list[dict[str, object]]:
        """Most templates do not know `developer`, and print any role as it stands."""
        return [
            {**message, "role": "system"}
            if message["role"] == "developer" and not self._knows_developer
            else dict(message)
            for message in messages
        ]

    def _can_tell_tools(self, own: Mapping[str, object] | None) -> bool:
        """Whether the template tells the model of tools, and how to call them so that we see it."""
        try:
            prompt = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "?"}],
                tools=[_PROBE],
                tokenize=False,
                add_generation_prompt=True,
            )
        except _TEMPLATE_ERRORS:
            return False
        is_read = own is not None and "tool_calls" in hermes.response_fields(own)
        return "probe_tool" in prompt and (is_read or hermes.can_read(str(prompt)))

    def _check_variables(self, variables: Mapping[str, object]) -> None:
        field = "chat_template_kwargs"
        for name in variables:
            if name in self._reserved_names:
                raise _invalid(field, f"{name} is taken", "names of the chat template's own")
        if len(variables) > MAX_TEMPLATE_VARIABLES:
            raise _invalid(field, f"are {len(variables)}", f"at most {MAX_TEMPLATE_VARIABLES}")
        if len(json.dumps(dict(variables))) > MAX_TEMPLATE_VARIABLE_CHARS:
            allowed = f"at most {MAX_TEMPLATE_VARIABLE_CHARS} characters of JSON"
            raise _invalid(field, "are too long", allowed)


def _check_continued(messages: Sequence[hermes.Message], *, add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        problem = "contradicts `add_generation_prompt`: true"
        raise _invalid("continue_final_message", problem, "one of the two")
    if messages[-1]["role"] != "assistant":
        problem = "the last message is not the assistant's"
        raise _invalid("continue_final_message", problem, "after a message of the assistant")


def _reserved_names(tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """What apply_chat_template, or what it calls, takes or gives to the template itself."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return frozenset({"self", "messages", "conversations", *parameters}) | frozenset(
        tokenizer.special_tokens_map
    )


def _invalid(field: str, problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {problem}; allowed: {allowed}", field=field, allowed=allowed)


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
    _check_response_template(tokenizer, folder)
    return tokenizer


def _check_response_template(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Lest each answer of the model fails."""
    if tokenizer.response_template is None:
        return
    try:
        tokenizer.get_response_parser(prefix="")
    except (TypeError, ValueError) as error:
        raise model_error(
            f"the response_template in {folder} is broken: {str(error)[:200]}", str(folder)
        ) from error


def _template_text(tokenizer: PreTrainedTokenizerFast) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # none at all, or several without a default
        return None
