"""A chat answer: `chat.completion`, or `chat.completion.chunk`s of the same content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshnet.generation import FinishReason, TokenEvent, TokenScore
from meshnet.openai.bodies import AnswerFinish, Heading, Usage, usage
from meshnet.openai.errors import ErrorBody
from meshnet.openai.logprobs import ChatLogprobs, TokenTexts, chat_logprobs, prompt_logprobs
from meshnet.openai.stream import DONE, Body, Chunk
from meshnet.text.response_parser import Content, Part, Reasoning, ResponseParser, ToolCall


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What a chat answer is to carry besides its text.

    Attributes:
        heading: What every chunk repeats.
        prompt_ids: The prompt, counted in the usage.
        texts: Single tokens as text.
        logprobs: How many alternatives are told beside each token's score; None tells neither.
        prompt_logprobs: The same for the prompt's tokens.
        token_ids: Whether the ids of prompt and answer are.
        usage_at_end: Whether a stream's last chunk carries the counts.
        usage_always: Whether every chunk carries the counts so far.
    """

    heading: Heading
    prompt_ids: Sequence[int]
    texts: TokenTexts
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    usage_at_end: bool = False
    usage_always: bool = False


@dataclass
class _Choice:
    """One choice as it grows."""

    parser: ResponseParser | None
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    scores: list[TokenScore] = field(default_factory=list[TokenScore])
    ids: list[int] = field(default_factory=list[int])
    finish: AnswerFinish | None = None

    def take(self, event: TokenEvent) -> list[dict[str, object]]:
        """Grow by one token; the deltas that it makes."""
        if event.token_id is not None:
            self.ids.append(event.token_id)
        if event.score is not None:
            self.scores.append(event.score)
        deltas = [self._add(part) for part in self._parts(event)]
        if event.finish_reason is not None:
            self.finish = self._finish(event.finish_reason)
        return deltas

    def message(self) -> dict[str, object]:
        """The whole answer."""
        text = "".join(self.text)
        message: dict[str, object] = {
            "role": "assistant",
            "content": None if self.calls and not text else text,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [_call(call) for call in self.calls]
        return message

    def _parts(self, event: TokenEvent) -> list[Part]:
        if self.parser is None:
            return [Content(event.text)] if event.text else []
        parts = self.parser.push(event.text) if event.text else []
        return parts if event.finish_reason is None else [*parts, *self.parser.finish()]

    def _add(self, part: Part) -> dict[str, object]:
        match part:
            case Content():
                self.text.append(part.text)
                return {"content": part.text}
            case Reasoning():
                self.reasoning.append(part.text)
                return {"reasoning_content": part.text}
            case _:
                self.calls.append(part)
                return {"tool_calls": [{"index": len(self.calls) - 1, **_call(part)}]}

    def _finish(self, reason: FinishReason) -> AnswerFinish:
        return "tool_calls" if self.calls and reason == "stop" else reason


class ChatWriter:
    """Writes one answer of the chat endpoint; see AnswerWriter.

    Args:
        form: What it carries.
        parsers: One for each choice; None where the text is the content.
    """

    def __init__(self, form: ChatForm, parsers: Sequence[ResponseParser | None]) -> None:
        self._form = form
        self._choices = [_Choice(parser) for parser in parsers]
        self._prompt_scores: Sequence[TokenScore] = ()
        self._n_generated = 0
        self._n_cached: dict[int, int] = {}

    def begin(self) -> Iterator[Chunk]:
        """Each choice's role: in this order, or openai-python's stream helper fails."""
        for index in range(len(self._choices)):
            opening: dict[str, object] = {"role": "assistant", "content": ""}
            chunk = self._chunk([self._part(index, opening)])
            if self._form.token_ids:
                chunk["prompt_token_ids"] = list(self._form.prompt_ids)
            yield Chunk(chunk)

    def take(self, index: int, event: TokenEvent) -> Iterator[Chunk]:
        """The token's deltas, and the closing chunk after the last one."""
        choice = self._choices[index]
        self._n_generated += event.n_tokens
        self._n_cached.setdefault(index, event.n_cached)
        self._prompt_scores = self._prompt_scores or event.prompt_scores
        deltas = choice.take(event)
        if not deltas and (self._form.logprobs is not None or self._form.token_ids):
            deltas.append({"content": ""})  # its text is held back, but its number is not
        for number, delta in enumerate(deltas):
            yield Chunk(self._chunk([self._part(index, delta, event if number == 0 else None)]))
        if choice.finish is not None:
            yield Chunk(self._chunk([{**self._part(index, {}), "finish_reason": choice.finish}]))

    def end(self) -> Iterator[Chunk]:
        """The counts, if they are asked for."""
        if self._form.usage_at_end:
            yield Chunk({**self._chunk([]), "usage": self._usage()})
        yield DONE

    def fail(self, error: ErrorBody) -> Iterator[Chunk]:
        """The error in place of a closing chunk."""
        yield Chunk(dict(error))
        yield DONE

    def body(self) -> Body:
        """The answer in one piece."""
        body: dict[str, object] = {
            **self._form.heading.of("chat.completion"),
            "choices": [self._whole(index) for index in range(len(self._choices))],
            "usage": self._usage(),
        }
        if self._form.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                self._prompt_scores, self._form.texts, self._form.prompt_logprobs
            )
        if self._form.token_ids:
            body["prompt_token_ids"] = list(self._form.prompt_ids)
        return body

    def _whole(self, index: int) -> dict[str, object]:
        choice, form = self._choices[index], self._form
        whole: dict[str, object] = {
            "index": index,
            "message": choice.message(),
            "finish_reason": choice.finish,
            "logprobs": self._logprobs(choice.scores),
        }
        return whole | ({"token_ids": choice.ids} if form.token_ids else {})

    def _part(
        self, index: int, delta: dict[str, object], event: TokenEvent | None = None
    ) -> dict[str, object]:
        """A chunk's choice; the token's own numbers go with its first delta."""
        scores = [event.score] if event is not None and event.score is not None else []
        part: dict[str, object] = {
            "index": index,
            "delta": delta,
            "finish_reason": None,
            "logprobs": self._logprobs(scores) if scores else None,
        }
        if self._form.token_ids and event is not None and event.token_id is not None:
            part["token_ids"] = [event.token_id]
        return part

    def _logprobs(self, scores: Sequence[TokenScore]) -> ChatLogprobs | None:
        if self._form.logprobs is None:
            return None
        return chat_logprobs(scores, self._form.texts, self._form.logprobs)

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = {**self._form.heading.of("chat.completion.chunk"), "choices": choices}
        if self._form.usage_at_end:
            chunk["usage"] = self._usage() if self._form.usage_always else None
        return chunk

    def _usage(self) -> Usage:
        return usage(
            prompt_tokens=len(self._form.prompt_ids),
            completion_tokens=self._n_generated,
            # The prompt counts once, whatever its choices have of each other.
            cached_tokens=min(self._n_cached.values(), default=0),
        )


def _call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
