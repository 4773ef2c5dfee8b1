"""`POST /v1/chat/completions`: a body to a ChatRequest, and that to generations and a writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, StrictBool

from meshnet.errors import InvalidRequest
from meshnet.generation import GenerationRequest, Grammar
from meshnet.openai.answers import AnswerPlan, Serving, each_choice
from meshnet.openai.chat_answer import ChatForm, ChatWriter
from meshnet.openai.fields import invalid, parse_fields
from meshnet.openai.formats import ResponseFormat, compile_schema, to_grammar
from meshnet.openai.messages import Messages
from meshnet.openai.parameters import CHAT
from meshnet.openai.sampling_fields import (
    NO_LIMIT,
    Limit,
    SamplingFields,
    TopLogprobs,
    check_together,
    check_with_grammar,
    fit,
    most_logprobs,
)
from meshnet.openai.tools import (
    Tool,
    ToolChoice,
    argument_schemas,
    call_schema,
    check_tools,
    shown_tools,
)
from meshnet.text.response_parser import ResponseParser, new_parser
from meshnet.text.tokenizer import ChatTokenizer


class ChatRequest(SamplingFields):
    """A checked chat request."""

    messages: Messages
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: StrictBool = False
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True, min_length=1)] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool = True
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, object] = {}

    @property
    def token_limit(self) -> int | None:
        """The most tokens an answer may have; None fills the context."""
        given = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return None if given == NO_LIMIT else given


def parse_chat_request(body: bytes, *, strict: bool = False) -> ChatRequest:
    """Check a request's body; `strict` refuses unknown parameters.

    Raises:
        InvalidRequest: As `parse_fields`; or two fields contradict each other.
    """
    chat = parse_fields(body, ChatRequest, CHAT, strict=strict)
    check_chat(chat)
    return chat


def check_chat(chat: ChatRequest) -> None:
    """Check what no field shows alone.

    Raises:
        InvalidRequest: The first that is wrong.
    """
    if chat.token_limit == 0:
        field = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
        raise invalid(CHAT, field, "is 0")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid(CHAT, "top_logprobs", "is only allowed with `logprobs`: true")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise invalid(CHAT, "continue_final_message", "contradicts `add_generation_prompt`: true")
    check_tools(chat.tools, chat.tool_choice)


def plan_chat(chat: ChatRequest, serving: Serving) -> AnswerPlan:
    """What to generate for a conversation, and how to write it. CPU work: call it in a thread.

    Raises:
        InvalidRequest: The chat template refuses the messages or makes nothing of them, a token id
            is not the model's, or what the answer must look like cannot be enforced.
        ContextLengthExceeded: Prompt and answer do not fit the context.
    """
    work = chat_work(chat, serving)
    form = ChatForm(
        heading=serving.heading,
        prompt_ids=work.generation.prompt_ids,
        texts=serving.tokenizer,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        prompt_logprobs=chat.prompt_logprobs,
        token_ids=chat.return_token_ids,
        usage_at_end=chat.usage_at_end,
        usage_always=chat.usage_always,
    )
    return AnswerPlan(each_choice(work.generation, chat.n), ChatWriter(form, work.parsers))


@dataclass(frozen=True, slots=True)
class ChatWork:
    """What is to be done for a conversation, whatever shape the answer has.

    Attributes:
        generation: Of each of the choices.
        parsers: One for each choice: what takes reasoning and calls out of its text. None where
            all of it is content.
    """

    generation: GenerationRequest
    parsers: Sequence[ResponseParser | None]


def chat_work(chat: ChatRequest, serving: Serving) -> ChatWork:
    """What to generate, and who reads the text. Raises as `plan_chat`."""
    tokenizer = serving.tokenizer
    check_together(
        chat,
        CHAT,
        vocab_size=tokenizer.vocab_size,
        n_choices=chat.n,
        max_choices=serving.max_choices,
    )
    calls = call_schema(chat.tools, chat.tool_choice, parallel=chat.parallel_tool_calls)
    grammar = _grammar(chat, calls, serving)
    prompt_ids = _encode(chat, tokenizer)
    parsers = [
        new_parser(
            tokenizer,
            prompt_ids,
            tools=shown_tools(chat.tools, chat.tool_choice),
            forced=calls is not None,
            parallel=chat.parallel_tool_calls,
        )
        for _ in range(chat.n)
    ]
    parts_are_marked = any(parser and parser.reads_special_tokens for parser in parsers)
    n_top = most_logprobs((chat.top_logprobs or 0) if chat.logprobs else None, chat.prompt_logprobs)
    generation = GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        max_tokens=fit(len(prompt_ids), chat.token_limit, serving.max_positions, field="messages"),
        sampling=chat.to_sampling(serving.seed, n_top),
        stopping=chat.to_stopping(),
        logit_bias=chat.logit_bias,
        grammar=grammar,
        score_prompt=chat.prompt_logprobs is not None,
        skip_special_tokens=chat.skip_special_tokens and not parts_are_marked,
    )
    return ChatWork(generation, parsers)


def _encode(chat: ChatRequest, tokenizer: ChatTokenizer) -> list[int]:
    """The prompt's ids, at least one."""
    prompt_ids = tokenizer.encode_chat(
        [message.for_template() for message in chat.messages],
        tools=shown_tools(chat.tools, chat.tool_choice),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_variables=chat.chat_template_kwargs,
    )
    if not prompt_ids:
        raise invalid(CHAT, "messages", "the model's chat template makes no prompt of them")
    return prompt_ids


def _grammar(
    chat: ChatRequest, calls: Mapping[str, object] | None, serving: Serving
) -> Grammar | None:
    """What the answer must look like: forced calls, or the format asked for."""
    format_grammar = to_grammar(chat.response_format, serving.grammars)
    if format_grammar is not None and shown_tools(chat.tools, chat.tool_choice):
        problem = "leaves no room for the calls of `tools`; set `tool_choice` to none, or"
        raise invalid(CHAT, "response_format", f"{problem} leave the format out")
    if format_grammar is not None or calls is not None:
        check_with_grammar(chat, CHAT)
    if calls is None:
        return format_grammar
    try:
        return compile_schema(calls, serving.grammars, field="tools")
    except InvalidRequest:
        for field, schema in argument_schemas(chat.tools, chat.tool_choice):
            compile_schema(schema, serving.grammars, field=field)  # names the tool to blame
        raise
