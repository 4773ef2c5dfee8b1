"""`POST /v1/completions`: a body to a CompletionRequest, and that to generations and a writer."""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated, Final, cast

from pydantic import PlainValidator, StrictBool

from meshnet.generation import GenerationRequest, Grammar
from meshnet.openai.answers import AnswerPlan, Serving, each_choice
from meshnet.openai.completion_answer import CompletionForm, CompletionWriter, Prompt
from meshnet.openai.fields import invalid, parse_fields, read_ids
from meshnet.openai.formats import ResponseFormat, to_grammar
from meshnet.openai.parameters import COMPLETIONS
from meshnet.openai.sampling_fields import (
    NO_LIMIT,
    Limit,
    SamplingFields,
    TopLogprobs,
    check_ids,
    check_together,
    check_with_grammar,
    choice_seed,
    fit,
    most_logprobs,
)
from meshnet.text.tokenizer import ChatTokenizer

_DEFAULT_MAX_TOKENS: Final = 16
_MAX_PROMPTS: Final = 128
"""No server makes more answers to one request."""

GivenPrompt = str | tuple[int, ...]
"""Text, or token ids."""


def _read_prompts(value: object) -> tuple[GivenPrompt, ...]:
    """A list of prompts, also of a single one."""
    if not isinstance(value, list):
        return (_read_prompt(value),)
    items = cast("list[object]", value)
    if not any(isinstance(item, str | list) for item in items):
        return (_read_prompt(items),)
    if len(items) > _MAX_PROMPTS:
        raise ValueError(f"is {len(items)} prompts")
    return tuple(map(_read_prompt, items))


def _read_prompt(value: object) -> GivenPrompt:
    prompt = value if isinstance(value, str) else read_ids(value)
    if not prompt:
        raise ValueError("is empty")
    return prompt


class CompletionRequest(SamplingFields):
    """A checked completion request."""

    prompt: Annotated[
        tuple[GivenPrompt, ...],
        PlainValidator(
            _read_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    max_tokens: Limit | None = None
    echo: StrictBool = False
    logprobs: TopLogprobs | None = None
    add_special_tokens: StrictBool = True
    response_format: ResponseFormat | None = None


def parse_completion_request(body: bytes, *, strict: bool = False) -> CompletionRequest:
    """Check a request's body. Raises as `parse_fields`."""
    fields = parse_fields(body, CompletionRequest, COMPLETIONS, strict=strict)
    if fields.max_tokens == 0 and not fields.echo and fields.prompt_logprobs is None:
        raise invalid(COMPLETIONS, "max_tokens", "0 asks for nothing")
    return fields


def plan_completion(fields: CompletionRequest, serving: Serving) -> AnswerPlan:
    """What to generate for some prompts, and how to write it. CPU work: call it in a thread.

    Raises:
        InvalidRequest: A prompt makes no tokens, a token id is not the model's, or what the answer
            must look like cannot be enforced.
        ContextLengthExceeded: A prompt and its answer do not fit the context.
    """
    check_together(
        fields,
        COMPLETIONS,
        vocab_size=serving.tokenizer.vocab_size,
        n_choices=fields.n * len(fields.prompt),
        max_choices=serving.max_choices,
    )
    grammar = to_grammar(fields.response_format, serving.grammars)
    if grammar is not None:
        check_with_grammar(fields, COMPLETIONS)
    tokenizer = serving.tokenizer
    prompt_ids = [_encode(given, fields, tokenizer) for given in fields.prompt]
    generations = [
        # Without a seed of the client's, two equal prompts are not to have one answer.
        _generation(fields, serving, ids, grammar, choice_seed(serving.seed, index * fields.n))
        for index, ids in enumerate(prompt_ids)
    ]
    prompts = [
        _prompt(given, ids, fields, tokenizer)
        for given, ids in zip(fields.prompt, prompt_ids, strict=True)
    ]
    return AnswerPlan(
        [choice for one in generations for choice in each_choice(one, fields.n)],
        CompletionWriter(_form(fields, serving), prompts),
    )


def _form(fields: CompletionRequest, serving: Serving) -> CompletionForm:
    return CompletionForm(
        heading=serving.heading,
        tokenizer=serving.tokenizer,
        n=fields.n,
        echo=fields.echo,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        token_ids=fields.return_token_ids,
        skip_special_tokens=fields.skip_special_tokens,
        usage_at_end=fields.usage_at_end,
        usage_always=fields.usage_always,
    )


def _encode(
    given: GivenPrompt, fields: CompletionRequest, tokenizer: ChatTokenizer
) -> tuple[int, ...]:
    if not isinstance(given, str):
        check_ids("prompt", given, tokenizer.vocab_size)
        return given
    ids = tokenizer.encode_prompt(given, add_special_tokens=fields.add_special_tokens)
    if not ids:
        raise invalid(COMPLETIONS, "prompt", "makes no tokens")
    return tuple(ids)


def _prompt(
    given: GivenPrompt,
    ids: tuple[int, ...],
    fields: CompletionRequest,
    tokenizer: ChatTokenizer,
) -> Prompt:
    if not fields.echo:
        return Prompt(ids)
    if isinstance(given, str):
        return _echoed(given, ids, tokenizer)
    return _decoded(ids, tokenizer, skip_special_tokens=fields.skip_special_tokens)


def _echoed(text: str, ids: tuple[int, ...], tokenizer: ChatTokenizer) -> Prompt:
    """The text as it was given: what the tokenizer put in front of it is no part of it."""
    decoded = _decoded(ids, tokenizer, skip_special_tokens=False)
    n_added = len(decoded.text) - len(text) if decoded.text.endswith(text) else 0
    offsets = tuple(min(max(offset - n_added, 0), len(text)) for offset in decoded.offsets)
    return Prompt(ids, text, offsets)


def _decoded(
    ids: tuple[int, ...], tokenizer: ChatTokenizer, *, skip_special_tokens: bool
) -> Prompt:
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    ends = accumulate(map(len, pieces), initial=0)
    return Prompt(ids, "".join(pieces) + detokenizer.finish(), tuple(ends)[: len(ids)])


def _generation(
    fields: CompletionRequest,
    serving: Serving,
    ids: tuple[int, ...],
    grammar: Grammar | None,
    seed: int,
) -> GenerationRequest:
    scores_prompt = fields.prompt_logprobs is not None or (
        fields.echo and fields.logprobs is not None
    )
    return GenerationRequest(
        prompt_ids=ids,
        max_tokens=_max_tokens(fields, len(ids), serving.max_positions),
        sampling=fields.to_sampling(seed, most_logprobs(fields.logprobs, fields.prompt_logprobs)),
        stopping=fields.to_stopping(),
        logit_bias=fields.logit_bias,
        grammar=grammar,
        score_prompt=scores_prompt,
        skip_special_tokens=fields.skip_special_tokens,
    )


def _max_tokens(fields: CompletionRequest, n_prompt: int, max_positions: int) -> int:
    asked = None if fields.max_tokens == NO_LIMIT else fields.max_tokens
    most = fit(n_prompt, asked, max_positions, field="prompt")
    return min(most, _DEFAULT_MAX_TOKENS) if fields.max_tokens is None else most
