"""A completion: `text_completion` as one body, or as chunks of the same content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from meshnet.generation import FinishReason, TokenEvent, TokenScore
from meshnet.openai.bodies import Heading, Usage, usage
from meshnet.openai.errors import ErrorBody
from meshnet.openai.logprobs import (
    CompletionLogprobs,
    PlacedToken,
    completion_logprobs,
    prompt_logprobs,
)
from meshnet.openai.stream import DONE, Body, Chunk
from meshnet.text.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; its text, and where each token begins in that, only where it is echoed."""

    ids: tuple[int, ...]
    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What a completion is to carry besides its text.

    Attributes:
        heading: What every chunk repeats.
        tokenizer: The served model's.
        n: Choices of each prompt.
        echo: Whether the prompt is in front of each choice's text.
        logprobs: How many alternatives are told beside the score of each token, of an echo too;
            None tells neither.
        prompt_logprobs: The same for the prompt's tokens, in a list of their own.
        token_ids: Whether the ids of prompt and answer are.
        skip_special_tokens: Whether control tokens are left out of the text.
        usage_at_end: Whether a stream's last chunk carries the counts.
        usage_always: Whether every chunk carries the counts so far.
    """

    heading: Heading
    tokenizer: ChatTokenizer
    n: int = 1
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    skip_special_tokens: bool = True
    usage_at_end: bool = False
    usage_always: bool = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a choice grows by. `tokens` are those of `text`, `ids` only the generated ones."""

    text: str = ""
    tokens: tuple[PlacedToken, ...] = ()
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()


class _Choice:
    """One choice as it grows."""

    def __init__(self, prompt: Prompt, form: CompletionForm) -> None:
        self.prompt_scores: Sequence[TokenScore] = ()
        self.finish: FinishReason | None = None
        self._prompt = prompt
        self._echoes_scores = form.echo and form.logprobs is not None
        self._pieces: list[_Piece] = []
        # The text that comes out is no measure: some is held back where it may end the answer.
        self._detokenizer = form.tokenizer.new_detokenizer(
            skip_special_tokens=form.skip_special_tokens
        )
        self._offset = len(prompt.text)

    def take(self, event: TokenEvent) -> list[_Piece]:
        """Grow by one token; the first one brings the prompt with it."""
        new = [self._generated(event)]
        if not self._pieces:
            self.prompt_scores = event.prompt_scores
            new.insert(0, self._opening())
        self._pieces += new
        self.finish = event.finish_reason
        return new

    def whole(self) -> _Piece:
        """All of it."""
        return _Piece(
            "".join(piece.text for piece in self._pieces),
            tuple(chain.from_iterable(piece.tokens for piece in self._pieces)),
            tuple(chain.from_iterable(piece.ids for piece in self._pieces)),
            self._prompt.ids,
        )

    def _opening(self) -> _Piece:
        """The prompt, of which there is no text unless it is echoed."""
        prompt = self._prompt
        if not self._echoes_scores:
            return _Piece(prompt.text, prompt_ids=prompt.ids)
        places = zip(prompt.ids, prompt.offsets, (None, *self.prompt_scores), strict=True)
        tokens = tuple(PlacedToken(*place) for place in places)
        return _Piece(prompt.text, tokens, prompt_ids=prompt.ids)

    def _generated(self, event: TokenEvent) -> _Piece:
        if event.token_id is None:
            return _Piece(event.text)
        if event.score is None:
            return _Piece(event.text, ids=(event.token_id,))
        token = PlacedToken(event.token_id, self._offset, event.score)
        self._offset += len(self._detokenizer.push(event.token_id))
        return _Piece(event.text, (token,), (event.token_id,))


class CompletionWriter:
    """Writes one answer of the completions endpoint; see AnswerWriter.

    Args:
        form: What it carries.
        prompts: Each with `form.n` choices, in this order.
    """

    def __init__(self, form: CompletionForm, prompts: Sequence[Prompt]) -> None:
        self._form = form
        self._choices = [_Choice(prompt, form) for prompt in prompts for _ in range(form.n)]
        self._n_prompt = sum(len(prompt.ids) for prompt in prompts)
        self._n_generated = 0
        self._n_cached: list[dict[int, int]] = [{} for _ in prompts]

    def begin(self) -> Iterator[Chunk]:
        """Nothing: there are no roles."""
        return iter(())

    def take(self, index: int, event: TokenEvent) -> Iterator[Chunk]:
        """The prompt before the first token, the token, and a closing chunk after the last one."""
        choice = self._choices[index]
        self._n_generated += event.n_tokens
        self._n_cached[index // self._form.n].setdefault(index, event.n_cached)
        for piece in choice.take(event):
            if self._is_told(piece):
                yield self._chunk([self._part(index, piece)])
        if choice.finish is not None:
            yield self._chunk([self._part(index, _Piece(), choice.finish)])

    def end(self) -> Iterator[Chunk]:
        """The counts, if they are asked for."""
        if self._form.usage_at_end:
            yield Chunk({**self._body([]), "usage": self._usage()})
        yield DONE

    def fail(self, error: ErrorBody) -> Iterator[Chunk]:
        """The error in place of a closing chunk."""
        yield Chunk(dict(error))
        yield DONE

    def body(self) -> Body:
        """The answer in one piece."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._body(choices), "usage": self._usage()}

    def _whole(self, index: int, choice: _Choice) -> dict[str, object]:
        part = self._part(index, choice.whole(), choice.finish)
        n_top = self._form.prompt_logprobs
        if n_top is not None:
            part["prompt_logprobs"] = prompt_logprobs(
                choice.prompt_scores, self._form.tokenizer, n_top
            )
        return part

    def _is_told(self, piece: _Piece) -> bool:
        """Whether there is anything in it that was asked for."""
        form = self._form
        return bool(
            piece.text
            or (form.logprobs is not None and piece.tokens)
            or (form.token_ids and (piece.ids or piece.prompt_ids))
        )

    def _part(
        self, index: int, piece: _Piece, finish: FinishReason | None = None
    ) -> dict[str, object]:
        part: dict[str, object] = {
            "text": piece.text,
            "index": index,
            "logprobs": self._logprobs(piece),
            "finish_reason": finish,
        }
        if self._form.token_ids:
            part["token_ids"] = list(piece.ids)
            if piece.prompt_ids:
                part["prompt_token_ids"] = list(piece.prompt_ids)
        return part

    def _logprobs(self, piece: _Piece) -> CompletionLogprobs | None:
        if self._form.logprobs is None or not piece.tokens:
            return None
        return completion_logprobs(piece.tokens, self._form.tokenizer, self._form.logprobs)

    def _chunk(self, choices: list[dict[str, object]]) -> Chunk:
        body = self._body(choices)
        if self._form.usage_at_end:
            body["usage"] = self._usage() if self._form.usage_always else None
        return Chunk(body)

    def _body(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return {**self._form.heading.of("text_completion"), "choices": choices}

    def _usage(self) -> Usage:
        # A prompt counts once, whatever its choices have of each other.
        n_cached = sum(min(choices.values(), default=0) for choices in self._n_cached)
        return usage(
            prompt_tokens=self._n_prompt,
            completion_tokens=self._n_generated,
            cached_tokens=n_cached,
        )
