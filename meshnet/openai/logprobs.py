"""Scores of tokens in the shapes of OpenAI's two endpoints, and of the prompt's extension."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from meshnet.generation import TokenScore


class TokenTexts(Protocol):
    """What single tokens are as text; see ChatTokenizer."""

    def token_text(self, token_id: int) -> str:
        """The token alone; U+FFFD where it holds a part of a character."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The very bytes it stands for."""
        ...


class TopLogprob(TypedDict):
    """One token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """`choices[].logprobs` of the chat endpoint."""

    content: list[TokenLogprob]
    refusal: None


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of a choice, where it begins in the text, and its score, which the first has not.

    The text is the whole one: a token that a stop string cuts off begins where it would.
    """

    token_id: int
    offset: int
    score: TokenScore | None


class CompletionLogprobs(TypedDict):
    """`choices[].logprobs` of the completions endpoint: one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(scores: Iterable[TokenScore], texts: TokenTexts, n_top: int) -> ChatLogprobs:
    """The scores of some tokens of an answer, each with its `n_top` likeliest alternatives."""
    return {"content": [_token_logprob(score, texts, n_top) for score in scores], "refusal": None}


def _token_logprob(score: TokenScore, texts: TokenTexts, n_top: int) -> TokenLogprob:
    return {
        **_top_logprob(score.token_id, score.logprob, texts),
        "top_logprobs": [_top_logprob(token_id, p, texts) for token_id, p in score.top[:n_top]],
    }


def _top_logprob(token_id: int, logprob: float, texts: TokenTexts) -> TopLogprob:
    return {
        "token": texts.token_text(token_id),
        "logprob": logprob,
        "bytes": list(texts.token_bytes(token_id)),
    }


def completion_logprobs(
    tokens: Sequence[PlacedToken], texts: TokenTexts, n_top: int
) -> CompletionLogprobs:
    """The scores of some tokens of a choice, each with its `n_top` likeliest alternatives."""
    scores = [token.score for token in tokens]
    return {
        "tokens": [texts.token_text(token.token_id) for token in tokens],
        "token_logprobs": [score and score.logprob for score in scores],
        "top_logprobs": [score and _top_by_text(score, texts, n_top) for score in scores],
        "text_offset": [token.offset for token in tokens],
    }


def _top_by_text(score: TokenScore, texts: TokenTexts, n_top: int) -> dict[str, float]:
    """The `n_top` likeliest and the token itself by their texts, the likeliest first.

    Two tokens may have one text: the likelier one's number stands, so that the largest number is
    that of the likeliest token.
    """
    top: dict[str, float] = {}
    for token_id, logprob in (*score.top[:n_top], (score.token_id, score.logprob)):
        text = texts.token_text(token_id)
        top[text] = max(logprob, top.get(text, logprob))
    return top


def prompt_logprobs(
    scores: Sequence[TokenScore], texts: TokenTexts, n_top: int
) -> list[Mapping[str, Mapping[str, object]] | None]:
    """One entry for each token of the prompt, by token id; None for the first (vLLM's shape)."""
    return [None, *(_by_id(score, texts, n_top) for score in scores)]


def _by_id(score: TokenScore, texts: TokenTexts, n_top: int) -> dict[str, Mapping[str, object]]:
    pairs = dict([*score.top[:n_top], (score.token_id, score.logprob)])
    return {
        str(token_id): {"logprob": logprob, "decoded_token": texts.token_text(token_id)}
        for token_id, logprob in pairs.items()
    }
