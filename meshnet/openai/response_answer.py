"""A response of `POST /v1/responses`: the object, or the events that build it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from meshnet.generation import FinishReason, TokenEvent
from meshnet.openai.bodies import Heading
from meshnet.openai.errors import ErrorBody
from meshnet.openai.logprobs import TokenLogprob, TokenTexts, chat_logprobs
from meshnet.openai.response_output import (
    MESSAGE,
    REASONING,
    Event,
    ItemStatus,
    TextItem,
    TextKind,
    call_events,
    call_item,
)
from meshnet.openai.stream import Body, Chunk
from meshnet.text.response_parser import Content, Part, Reasoning, ResponseParser, ToolCall

Echo = Mapping[str, object]
"""What a response repeats of its request."""

Status = ItemStatus | Literal["failed"]

_ALWAYS: Final[Body] = {
    # Nothing is stored, nothing runs without its client, no prompt is cut, no effort is known.
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What a response is to carry besides its output.

    Attributes:
        heading: What identifies it.
        n_prompt: Tokens of the prompt.
        texts: Single tokens as text.
        logprobs: How many alternatives are told beside each token's score; None tells neither.
        echo: What it repeats of the request.
        clock: Seconds since 1970, for when it is completed.
    """

    heading: Heading
    n_prompt: int
    texts: TokenTexts
    logprobs: int | None
    echo: Echo
    clock: Callable[[], float]


class ResponseWriter:
    """Writes one response; see AnswerWriter.

    Reasoning, text and calls are output items, in the order in which they come.

    Args:
        form: What it carries.
        parser: None where the text is the message.
    """

    def __init__(self, form: ResponseForm, parser: ResponseParser | None) -> None:
        self._form = form
        self._parser = parser
        self._status: Status = "in_progress"
        self._completed_at: int | None = None
        self._done: list[Body] = []
        self._open: TextItem | None = None
        self._waiting: list[TokenEvent] = []
        """Tokens whose text is held back."""
        self._n_events = 0
        self._n_generated = 0
        self._n_reasoning = 0
        self._n_cached = 0

    def begin(self) -> Iterator[Chunk]:
        """The response before there is any of it."""
        yield self._chunk({"type": "response.created", "response": self.body()})
        yield self._chunk({"type": "response.in_progress", "response": self.body()})

    def take(self, index: int, event: TokenEvent) -> Iterator[Chunk]:
        """What one more token adds to the output; with the last one all of it is done."""
        del index  # there is one answer
        self._n_generated += event.n_tokens
        self._n_cached += event.n_cached
        self._waiting.append(event)
        for part in self._read(event.text):
            yield from self._add(part)
        if event.finish_reason is not None:
            yield from self._finish(event.finish_reason)

    def end(self) -> Iterator[Chunk]:
        """The whole response."""
        yield self._chunk({"type": f"response.{self._status}", "response": self.body()})

    def fail(self, error: ErrorBody) -> Iterator[Chunk]:
        """The error, and the response as far as it came.

        The error is told as OpenAI documents it and, within `error`, as OpenAI sends it: of these
        openai-python raises on the second only.
        """
        if self._n_events == 0:
            yield from self.begin()
        members = error["error"]
        told = {**members, "code": members["code"] or members["type"]}
        flat = {name: told[name] for name in ("code", "message", "param")}
        yield self._chunk({"type": "error", **flat, "error": told})
        self._status = "failed"
        # Few codes are documented here, most of them of images.
        code = "server_error" if members["type"] == "server_error" else "invalid_prompt"
        failed = {**self.body(), "error": {"code": code, "message": members["message"]}}
        yield self._chunk({"type": "response.failed", "response": failed})

    def body(self) -> Body:
        """The response as it is now."""
        heading = self._form.heading
        is_cut = self._status == "incomplete"
        has_ended = is_cut or self._status == "completed"
        unfinished = [] if self._open is None else [self._open.whole("incomplete")]
        return {
            "id": heading.id,
            "object": "response",
            "created_at": heading.created,
            "completed_at": self._completed_at,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": heading.model,
            "output": [*self._done, *unfinished],
            "usage": self._usage() if has_ended else None,
            **_ALWAYS,
            **self._form.echo,
        }

    def _read(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        return [Content(text)] if self._parser is None else self._parser.push(text)

    def _finish(self, reason: FinishReason) -> Iterator[Chunk]:
        status: ItemStatus = "completed" if reason == "stop" else "incomplete"
        for part in () if self._parser is None else self._parser.finish():
            yield from self._add(part, status)
        rest = self._logprobs(self._waiting)
        is_message = self._open is not None and self._open.kind is MESSAGE
        is_empty = self._open is None and not self._done  # that is a message, too
        if is_empty or (is_message and rest):
            yield from self._write(MESSAGE, "", rest)
        yield from self._close_item(status)
        self._status = status
        if status == "completed":
            self._completed_at = int(self._form.clock())

    def _add(self, part: Part, status: ItemStatus = "completed") -> Iterator[Chunk]:
        """Write a part; `status` is that of a call, which comes as a whole."""
        tokens, self._waiting = self._waiting, []
        if isinstance(part, ToolCall):
            yield from self._close_item("completed")
            index = len(self._done)
            item = call_item(part, self._form.heading.id, index, status)
            self._done.append(item)
            yield from self._chunks(call_events(item, index))
        elif isinstance(part, Reasoning):
            self._n_reasoning += sum(token.n_tokens for token in tokens)
            yield from self._write(REASONING, part.text, [])
        else:
            yield from self._write(MESSAGE, part.text, self._logprobs(tokens))

    def _write(
        self, kind: TextKind, text: str, logprobs: Sequence[TokenLogprob]
    ) -> Iterator[Chunk]:
        item = self._open
        if item is None or item.kind is not kind:
            yield from self._close_item("completed")
            item = self._open = TextItem(kind, self._form.heading.id, len(self._done))
            yield from self._chunks(item.begin())
        yield self._chunk(item.write(text, logprobs))

    def _close_item(self, status: ItemStatus) -> Iterator[Chunk]:
        item, self._open = self._open, None
        if item is not None:
            self._done.append(item.whole(status))
            yield from self._chunks(item.end(status))

    def _chunks(self, events: Iterable[Event]) -> Iterator[Chunk]:
        return map(self._chunk, events)

    def _chunk(self, event: Event) -> Chunk:
        numbered = {**event, "sequence_number": self._n_events}
        self._n_events += 1
        return Chunk(numbered, event=str(event["type"]))

    def _logprobs(self, tokens: Sequence[TokenEvent]) -> list[TokenLogprob]:
        n_top = self._form.logprobs
        if n_top is None:
            return []
        scores = [token.score for token in tokens if token.score is not None]
        return chat_logprobs(scores, self._form.texts, n_top)["content"]

    def _usage(self) -> Body:
        n_prompt, n_generated = self._form.n_prompt, self._n_generated
        return {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": self._n_cached, "cache_write_tokens": 0},
            "output_tokens": n_generated,
            "output_tokens_details": {"reasoning_tokens": self._n_reasoning},
            "total_tokens": n_prompt + n_generated,
        }
