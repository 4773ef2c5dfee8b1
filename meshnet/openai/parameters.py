"""Every parameter that this server has heard of, by endpoint, and what it does with each.

The one place: parsing follows the tables, and docs/parameters.md is made from them. A parameter
that is in none is a stray of some framework: it is accepted and named in the answer's headers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from meshnet.errors import UnsupportedParameter

Handling = Literal["used", "no_op", "refused"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One top-level field of a request.

    `used` has an effect, `no_op` is accepted and cannot change the answer, `refused` is answered
    400 unless its value is one of `off`, which ask for what happens anyway.
    """

    handling: Handling
    allowed: str
    off: tuple[object, ...] = ()


def _used(allowed: str) -> Parameter:
    return Parameter("used", allowed)


def _no_op(purpose: str) -> Parameter:
    return Parameter("no_op", f"anything; {purpose}")


def _refused(*off: str, why: str = "") -> Parameter:
    """Refused unless the value is one of `off`, which are JSON."""
    allowed = ", ".join([*off, "null"]) + " or absent" + (f"; {why}" if why else "")
    return Parameter("refused", f"only {allowed}", tuple(json.loads(text) for text in off))


_NO_LEGACY_TOOLS: Final = "`tools` and `tool_choice` took their place"
_RESPONSE_FORMAT: Final = (
    '{"type": "text"}, {"type": "json_object"},'
    ' {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}},'
    ' and, as extensions, {"type": "regex", "pattern": ...} and'
    ' {"type": "grammar", "grammar": ...} in Lark\'s notation'
)
_WITH_GRAMMAR: Final = "where the answer must have a format"

_TOKENS: Final = "a whole number from 1; absent or -1 fills the context, as far as caches have room"

_GENERATION: Final[dict[str, Parameter]] = {
    # How many answers, how random, where they end, in which form.
    "model": _used("the id of a served model, see GET /v1/models"),
    "n": _used("a whole number from 1 to what this server allows, 128 at most"),
    "temperature": _used("a number from 0 (greedy) to 2"),
    "top_p": _used("a number from 0 to 1"),
    "seed": _used("a whole number from -2^63 to 2^63 - 1"),
    "stop": _used("a string, or a list of at most 16; none of them empty"),
    "frequency_penalty": _used("a number from -2 to 2"),
    "presence_penalty": _used("a number from -2 to 2"),
    "logit_bias": _used("an object of at most 1024 token ids, each with a number from -100 to 100"),
    "stream": _used("true or false"),
    "stream_options": _used(
        '{"include_usage": true or false, "continuous_usage_stats": true or false},'
        " only with `stream`: true"
    ),
    # Extensions that other servers know too.
    "top_k": _used("a whole number; 0 or -1 keeps all tokens"),
    "min_p": _used("a number from 0 to 1"),
    "repetition_penalty": _used("a number from 0.01 to 10; 1 is none"),
    "min_tokens": _used(
        "a whole number from 0, of tokens before the first end token or stop;"
        f" only 0 {_WITH_GRAMMAR}"
    ),
    "ignore_eos": _used(
        f"true or false; true goes on after the model's end token; only false {_WITH_GRAMMAR}"
    ),
    "stop_token_ids": _used("a list of at most 128 token ids"),
    "include_stop_str_in_output": _used("true or false"),
    "skip_special_tokens": _used("true or false; false leaves control tokens in the text"),
    "return_token_ids": _used("true or false; true adds `prompt_token_ids` and `token_ids`"),
    "prompt_logprobs": _used("a whole number from 0 to 20, only without `stream`: true"),
    "response_format": _used(_RESPONSE_FORMAT),
    # Who asks: nothing here depends on it.
    "user": _no_op("identity"),
    # Other servers' constraints: ignored, they would be missed.
    "allowed_token_ids": _refused(),
    "bad_words": _refused("[]"),
    "truncate_prompt_tokens": _refused(),
    "use_beam_search": _refused("false"),
}
_REMOVED: Final[dict[str, Parameter]] = {
    # Other servers' names for it, past and present: ignored, the constraint would be missed.
    name: _refused(why="`response_format` takes its place")
    for name in (
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "grammar",
        "json_schema",
        "regex",
        "ebnf",
        "structured_outputs",
    )
}

CHAT: Final[dict[str, Parameter]] = {
    "messages": _used(
        "a list of at least one message; a message has a `role` (system, developer, user,"
        " assistant, tool) and `content` (a string or a list of text parts)"
    ),
    "max_completion_tokens": _used(_TOKENS),
    "max_tokens": _used("a whole number from 1, or -1; deprecated, `max_completion_tokens` wins"),
    **_GENERATION,
    "logprobs": _used("true or false"),
    "top_logprobs": _used("a whole number from 0 to 20, only with `logprobs`: true"),
    "tools": _used("a list of at least one function tool"),
    "tool_choice": _used(
        'none, auto, required, or {"type": "function", "function": {"name": ...}};'
        " only with `tools`"
    ),
    "parallel_tool_calls": _used("true or false; false allows one call in an answer"),
    "add_generation_prompt": _used("true or false; false does not open the assistant's message"),
    "continue_final_message": _used(
        "true or false; true goes on with the last message, with `add_generation_prompt`: false"
    ),
    "chat_template_kwargs": _used("an object: more variables for the model's chat template"),
    # How OpenAI should run it: nothing here depends on it.
    "safety_identifier": _no_op("identity"),
    "metadata": _no_op("telemetry"),
    "store": _no_op("nothing is stored"),
    "service_tier": _no_op("there is one tier"),
    "prompt_cache_key": _no_op("a hint"),
    "prompt_cache_options": _no_op("a hint"),
    "prompt_cache_retention": _no_op("a hint"),
    "prediction": _no_op("a hint for speed; the answer is the same"),
    "reasoning_effort": _no_op("a wish that no served model knows"),
    "verbosity": _no_op("a wish that no served model knows"),
    # What would change the answer and is not implemented.
    "functions": _refused(why=_NO_LEGACY_TOOLS),
    "function_call": _refused('"none"', why=_NO_LEGACY_TOOLS),
    "modalities": _refused('["text"]'),
    "audio": _refused(),
    "moderation": _refused(),
    "web_search_options": _refused(),
    "chat_template": _refused(why="a template from outside could run for ever"),
    **_REMOVED,
}
"""Of `POST /v1/chat/completions`."""

COMPLETIONS: Final[dict[str, Parameter]] = {
    "prompt": _used(
        "a string, a list of token ids, or a list of at most 128 of these; none of them empty"
    ),
    "max_tokens": _used(
        "a whole number from 0, with `echo` or `prompt_logprobs` only, or -1, which fills the"
        " context; absent is 16"
    ),
    **_GENERATION,
    "echo": _used("true or false; true puts the prompt in front of the answer"),
    "logprobs": _used("a whole number from 0 to 20"),
    "add_special_tokens": _used(
        "true or false; false leaves out the tokens that the model's tokenizer puts around a text"
    ),
    # What would change the answer and is not implemented.
    "suffix": _refused('""'),
    "best_of": _refused("1", why="ask for `n` answers and choose"),
    **_REMOVED,
}
"""Of `POST /v1/completions`."""

_MODEL_IF_SEVERAL: Final = _used("the id of a served model; may be absent where one is served")

TOKENIZE: Final[dict[str, Parameter]] = {
    "model": _MODEL_IF_SEVERAL,
    "prompt": _used("a string; either this or `messages`"),
    "messages": _used("as in a chat; either these or `prompt`"),
    "add_special_tokens": _used(
        "true or false, only with `prompt`; false leaves out the tokens that the model's tokenizer"
        " puts around a text"
    ),
    "return_token_strs": _used("true or false; true adds `token_strs`, each token as text"),
    **{
        name: CHAT[name]
        for name in (
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
            "chat_template",
        )
    },
}
"""Of `POST /tokenize`."""

DETOKENIZE: Final[dict[str, Parameter]] = {
    "model": _MODEL_IF_SEVERAL,
    "tokens": _used("a list of token ids"),
}
"""Of `POST /detokenize`."""

_TAKES_ITS_PLACE: Final = {
    # What the Responses endpoint calls otherwise; ignored, it would be missed.
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    **dict.fromkeys(("response_format", *_REMOVED), "text.format"),
}

RESPONSES: Final[dict[str, Parameter]] = {
    "input": _used(
        "a string, or a list of at least one item: messages of user, assistant, system or"
        " developer with text, and function_call, function_call_output and reasoning items"
    ),
    "instructions": _used("a string; the first system message"),
    "max_output_tokens": _used(_TOKENS),
    "text": _used(
        '{"format": ...}, which is {"type": "text"}, {"type": "json_object"},'
        ' {"type": "json_schema", "name": ..., "schema": ...}, and, as extensions,'
        ' {"type": "regex", "pattern": ...} and {"type": "grammar", "grammar": ...}'
    ),
    "tools": _used(
        'a list of function tools, {"type": "function", "name": ..., "parameters": ...}'
    ),
    "tool_choice": _used(
        'none, auto, required, or {"type": "function", "name": ...}; only with `tools`'
    ),
    "include": _used(
        "a list of what OpenAI lists; only message.output_text.logprobs adds anything here"
    ),
    "top_logprobs": _used(
        'a whole number from 0 to 20, only with `include`: ["message.output_text.logprobs"]'
    ),
    "metadata": _used(
        "an object of at most 16 strings of at most 512 characters, the names of at most 64;"
        " the response repeats it"
    ),
    "prompt_cache_options": _used("an object, a hint; but its `prewarm` only false"),
    **{
        name: parameter
        for name, parameter in _GENERATION.items()
        if name
        not in ("n", "stream_options", "response_format", "return_token_ids", "prompt_logprobs")
    },
    **{
        name: CHAT[name]
        for name in (
            "parallel_tool_calls",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
        )
    },
    # How OpenAI should run it: nothing here depends on it.
    "stream_options": _no_op("nothing is padded, and the counts always come"),
    "reasoning": _no_op("a wish that no served model knows"),
    "max_tool_calls": _no_op("it counts OpenAI's own tools"),
    "access_programs": _no_op("a policy of OpenAI's models"),
    "background_options": _no_op("nothing runs in the background"),
    "image": _no_op("there are none"),
    **{
        name: CHAT[name]
        for name in (
            "safety_identifier",
            "store",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_retention",
        )
    },
    # What would change the answer and is not implemented.
    "previous_response_id": _refused(why="nothing is stored; send the conversation as `input`"),
    "conversation": _refused(why="nothing is stored; send the conversation as `input`"),
    "background": _refused("false"),
    "truncation": _refused('"disabled"'),
    "context_management": _refused("[]"),
    "prompt": _refused(why="there are no stored prompts"),
    "moderation": _refused(),
    "n": _refused("1"),
    "return_token_ids": _refused("false", why="the chat endpoint has it"),
    "prompt_logprobs": _refused(why="the chat endpoint has it"),
    "logprobs": _refused("false", why="`include` takes its place"),
    **{name: _refused(why=f"`{ours}` takes its place") for name, ours in _TAKES_ITS_PLACE.items()},
}
"""Of `POST /v1/responses`."""


def refuse_unsupported(name: str, value: object, table: Mapping[str, Parameter]) -> None:
    """Let `value` pass if it asks for nothing that is not implemented.

    Args:
        name: A field of the request; one that is not in the table passes.
        value: Not None: null is the same as absent, for every parameter.
        table: The endpoint's parameters.

    Raises:
        UnsupportedParameter: The parameter is known, not implemented, and not off.
    """
    parameter = table.get(name)
    if parameter is None or parameter.handling != "refused":
        return
    if not any(_same(value, off) for off in parameter.off):
        raise UnsupportedParameter(
            f"{name}: this value is not supported here; allowed: {parameter.allowed}",
            field=name,
            allowed=parameter.allowed,
        )


def _same(value: object, off: object) -> bool:
    # JSON's true is not 1, though Python's is.
    return value == off and isinstance(value, bool) == isinstance(off, bool)
