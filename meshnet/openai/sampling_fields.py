"""The parameters of every endpoint that generates: how many answers, how random, where they end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, cast

from pydantic import BeforeValidator, Field, StrictBool, StrictStr

from meshnet.errors import ContextLengthExceeded, InvalidRequest
from meshnet.generation import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, Sampling, Stopping
from meshnet.openai.fields import (
    Count,
    CountOrNone,
    Number,
    Real,
    RequestFields,
    StreamOptions,
    Whole,
    invalid,
    without_nulls,
)
from meshnet.openai.parameters import Parameter

NO_LIMIT: Final = -1
"""As a limit of tokens: as many as the context has room for."""

_MAX_STOPS: Final = 16
_MAX_STOP_CHARS: Final = 1000
_MAX_STOP_IDS: Final = 128


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _read_bias(value: object) -> object:
    """Token ids are JSON's member names, so they come as strings."""
    if not isinstance(value, dict):
        return value
    biases = cast("dict[object, object]", value)
    if len(biases) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(biases)} token ids")
    return {_token_id(key): bias for key, bias in biases.items()}


def _token_id(key: object) -> object:
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        return int(key)
    raise ValueError(f"{str(key)[:20]!r} is no token id")


Limit = Annotated[Whole, Field(ge=NO_LIMIT, lt=2**31)]
TopLogprobs = Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)]
_StopString = Annotated[StrictStr, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
_StopStrings = Annotated[
    list[_StopString],
    Field(fail_fast=True, max_length=_MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=_StopString | list[_StopString]),
]
_StopIds = Annotated[list[CountOrNone], Field(fail_fast=True, max_length=_MAX_STOP_IDS)]
_Bias = Annotated[Real, Field(ge=-100, le=100)]
_LogitBias = Annotated[
    dict[int, _Bias], BeforeValidator(_read_bias, json_schema_input_type=dict[str, _Bias])
]


class SamplingFields(RequestFields):
    """Parameters with OpenAI's defaults where they are silent."""

    model: Annotated[StrictStr, Field(min_length=1)]
    n: Annotated[Count, Field(le=128)] = 1
    temperature: Annotated[Number, Field(le=2)] = 1.0
    top_p: Annotated[Number, Field(le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[Number, Field(le=1)] = 0.0
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Real, Field(ge=0.01, le=10)] = 1.0
    logit_bias: _LogitBias = {}
    stop: _StopStrings = []
    stop_token_ids: _StopIds = []
    min_tokens: CountOrNone = 0
    ignore_eos: StrictBool = False
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    return_token_ids: StrictBool = False
    prompt_logprobs: TopLogprobs | None = None
    stream: StrictBool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_nulls)] | None = None

    @property
    def usage_at_end(self) -> bool:
        """Whether the stream ends with a chunk that carries the counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        """Whether every chunk of the stream carries the counts so far."""
        return self.usage_at_end and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def to_sampling(self, seed: int, top_logprobs: int | None) -> Sampling:
        """How to pick tokens; `seed` is used only if the client gave none."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=seed if self.seed is None else self.seed,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            top_logprobs=top_logprobs,
        )

    def to_stopping(self) -> Stopping:
        """When an answer ends."""
        return Stopping(
            strings=tuple(self.stop),
            token_ids=frozenset(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_end=self.ignore_eos,
            keep_string=self.include_stop_str_in_output,
        )


def check_together(
    fields: SamplingFields,
    table: Mapping[str, Parameter],
    *,
    vocab_size: int,
    n_choices: int,
    max_choices: int,
) -> None:
    """Check what no field shows alone.

    Args:
        fields: Each of them is right.
        table: The endpoint's parameters.
        vocab_size: Every token id lies in [0, vocab_size).
        n_choices: Answers that the request makes, `n` to each of its prompts.
        max_choices: The most that this server makes in one request.

    Raises:
        InvalidRequest: The first that is wrong.
    """
    if fields.stream_options is not None and not fields.stream:
        raise invalid(table, "stream_options", "is only allowed with `stream`: true")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid(table, "prompt_logprobs", "is not allowed with `stream`: true")
    if n_choices > max_choices:
        name = "n" if n_choices == fields.n else "prompt"
        raise InvalidRequest(
            f"{name}: {n_choices} answers to one request are too many; allowed: {max_choices}",
            field=name,
            value=n_choices,
            allowed=max_choices,
        )
    check_ids("logit_bias", fields.logit_bias, vocab_size)
    check_ids("stop_token_ids", fields.stop_token_ids, vocab_size)


def check_with_grammar(fields: SamplingFields, table: Mapping[str, Parameter]) -> None:
    """Check that a request whose answer follows a grammar leaves its end to that.

    Raises:
        InvalidRequest: It does not.
    """
    for name, is_set in (("min_tokens", fields.min_tokens > 0), ("ignore_eos", fields.ignore_eos)):
        if is_set:
            raise invalid(table, name, "is not allowed where a format says when the answer ends")


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Check that each of these ids is a token's; none is negative.

    Raises:
        InvalidRequest: One is not; names `name` and the largest.
    """
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"{name}: token id {str(largest)[:20]} is not in the vocabulary; allowed: 0 to"
            f" {vocab_size - 1}",
            field=name,
            allowed=f"0 to {vocab_size - 1}",
        )


def fit(n_prompt: int, token_limit: int | None, max_positions: int, *, field: str) -> int:
    """The most tokens that an answer may have.

    Args:
        n_prompt: Tokens of the prompt.
        token_limit: What the client asked for; None fills the context.
        max_positions: The context in tokens, prompt and answer together.
        field: Where the prompt is in the request.

    Raises:
        ContextLengthExceeded: Prompt and answer do not fit the context.
    """
    room = max_positions - n_prompt
    if token_limit is None and room >= 1:
        return room
    if token_limit is not None and token_limit <= room:
        return token_limit
    # LiteLLM looks for the first sentence and LangChain for the code, both in the text.
    if token_limit is None:
        problem = f"your {field} resulted in {n_prompt} tokens, which leaves no room for an answer"
    else:
        problem = (
            f"you asked for {n_prompt + token_limit} tokens: {n_prompt} in the {field} and"
            f" {token_limit} in the answer"
        )
    raise ContextLengthExceeded(
        f"This model's maximum context length is {max_positions} tokens. However, {problem}."
        " Please shorten one of them. (context_length_exceeded)",
        field=field,
        allowed=max_positions,
    )


def most_logprobs(*wanted: int | None) -> int | None:
    """How many alternatives the tail is to tell of each token; None is no score at all."""
    return max((n for n in wanted if n is not None), default=None)


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of several answers; the first one's is the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:choice:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
