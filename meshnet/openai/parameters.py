"""Every parameter of a chat request that this server has heard of, and what it does with each.

The one table: parsing follows it, and the documentation is made from it. A parameter that is not in
it is a stray of some framework: it is accepted and named in the answer's headers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, Literal

from meshnet.errors import UnsupportedParameter

Handling = Literal["used", "no_op", "refused"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One top-level field of a chat request.

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


_NO_TOOLS: Final = "tools are not implemented"
_NO_GRAMMAR: Final = "constrained output is not implemented"

PARAMETERS: Final[dict[str, Parameter]] = {
    # What is asked.
    "model": _used("the id of a served model, see GET /v1/models"),
    "messages": _used(
        "a list of at least one message; a message has a `role` (system, developer, user,"
        " assistant, tool) and `content` (a string or a list of text parts)"
    ),
    # How long, how random, in which form.
    "max_tokens": _used("a whole number from 1; deprecated, `max_completion_tokens` wins"),
    "max_completion_tokens": _used("a whole number from 1; absent fills the context"),
    "temperature": _used("a number from 0 (greedy) to 2"),
    "top_p": _used("a number from 0 to 1"),
    "top_k": _used("a whole number; 0 or -1 keeps all tokens"),
    "seed": _used("a whole number from -2^63 to 2^63 - 1"),
    "stream": _used("true or false"),
    "stream_options": _used('{"include_usage": true or false}, only with `stream`: true'),
    # Who asks, and how OpenAI should run it: nothing here depends on it.
    "user": _no_op("identity"),
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
    "parallel_tool_calls": _no_op("without tools it has no meaning"),
    # What would change the answer and is not implemented.
    "n": _refused("1"),
    "stop": _refused("[]"),
    "logprobs": _refused("false"),
    "top_logprobs": _refused("0"),
    "frequency_penalty": _refused("0"),
    "presence_penalty": _refused("0"),
    "logit_bias": _refused("{}"),
    "response_format": _refused('{"type": "text"}'),
    "tools": _refused(why=_NO_TOOLS),
    "tool_choice": _refused('"none"', why=_NO_TOOLS),
    "functions": _refused(why=_NO_TOOLS),
    "function_call": _refused('"none"', why=_NO_TOOLS),
    "modalities": _refused('["text"]'),
    "audio": _refused(),
    "moderation": _refused(),
    "web_search_options": _refused(),
    # Extensions that other servers know and that change the answer.
    "min_p": _refused("0"),
    "repetition_penalty": _refused("1"),
    "min_tokens": _refused("0"),
    "ignore_eos": _refused("false"),
    "stop_token_ids": _refused("[]"),
    "chat_template": _refused(),
    "chat_template_kwargs": _refused("{}"),
    "add_generation_prompt": _refused("true"),
    "continue_final_message": _refused("false"),
    # Names that other servers dropped; to ignore them would drop a constraint in silence.
    "guided_json": _refused(why=_NO_GRAMMAR),
    "guided_regex": _refused(why=_NO_GRAMMAR),
    "guided_choice": _refused(why=_NO_GRAMMAR),
    "guided_grammar": _refused(why=_NO_GRAMMAR),
    "grammar": _refused(why=_NO_GRAMMAR),
}


def refuse_unsupported(name: str, value: object) -> None:
    """Let `value` pass if it asks for nothing that is not implemented.

    Args:
        name: A field of the request; one that is not in the table passes.
        value: Not None: null is the same as absent, for every parameter.

    Raises:
        UnsupportedParameter: The parameter is known, not implemented, and not off.
    """
    parameter = PARAMETERS.get(name)
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
