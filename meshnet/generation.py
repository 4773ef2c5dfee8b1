"""What a generation asks for and what it yields; no tensors, no HTTP."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainSerializer

FinishReason = Literal["stop", "length"]

MAX_TOP_LOGPROBS: Final = 20
"""The most alternatives of one token that a tail tells."""
MAX_LOGIT_BIAS: Final = 1024
"""The most tokens that one request can favour or disfavour."""
_MAX_MASK_BYTES: Final = 2**20
"""For a vocabulary of 8 million tokens; what inflates to more is not inflated any further."""


def _inflated(value: object) -> object:
    """A mask as JSON carries it, zlib in base64; bytes are one already."""
    if not isinstance(value, str):
        return value
    inflate = zlib.decompressobj()
    try:
        mask = inflate.decompress(base64.b64decode(value, validate=True), _MAX_MASK_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"no zlib in base64: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise ValueError(f"zlib that is cut short, goes on, or makes over {_MAX_MASK_BYTES} bytes")
    return mask


def _deflated(mask: bytes) -> str:
    return base64.b64encode(zlib.compress(mask, level=1)).decode()


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], FailFast()]  # an error for each of many would take long
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
LogProb = Annotated[float, Field(allow_inf_nan=False)]


def is_allowed(mask: bytes, token_id: int) -> bool:
    """Whether a mask, a bit a token, the lowest bit first, has the token; none past its end."""
    byte, bit = divmod(token_id, 8)
    return byte < len(mask) and bool(mask[byte] >> bit & 1)


class Sampling(BaseModel):
    """How the tail picks a token. Travels as JSON in `X-Meshnet-Sampling`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=0.0, ge=0.0, le=2.0, allow_inf_nan=False)
    """0 is greedy; so is anything under 1e-5, where a softmax would overflow."""
    top_p: float = Field(default=1.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Keep the most likely tokens whose probabilities reach this sum, never fewer than one."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Keep tokens at least so likely, as a share of the most likely one's probability."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    """Taken off a token's logit for each time that it was generated."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    """Taken off a token's logit once it was generated."""
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10.0, allow_inf_nan=False)
    """Divides the logits of tokens of prompt and answer; negative ones are multiplied."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """How many alternatives are told beside the token's own log probability; None tells neither."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        """Whether the pick depends on the tokens so far."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)


class SamplingContext(BaseModel):
    """What the tail's answer depends on besides hidden states and `Sampling`.

    It is sent whole with each step, so that the tail keeps nothing between steps and a tail that
    takes over needs nothing told (ADR 0016). Travels as JSON behind the tensor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_ids: TokenIds = ()
    """The prompt's tokens, each once, where `repetition_penalty` needs them."""
    generated_ids: TokenIds = ()
    """The answer's tokens so far, where a penalty needs them."""
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_LOGIT_BIAS)] = {}
    """Added to the logits."""
    banned_ids: TokenIds = ()
    """Not to be picked."""
    allowed: Annotated[
        bytes | None,
        BeforeValidator(_inflated),
        PlainSerializer(_deflated, when_used="json-unless-none"),
    ] = None
    """What a grammar lets come next, see `is_allowed`; None is everything."""
    next_ids: TokenIds = ()
    """The tokens that come after each position of this step, as far as known: each is scored."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return self == NO_CONTEXT

    def scoring(self, next_ids: Sequence[int]) -> SamplingContext:
        """The same, with the step's own tokens to be scored."""
        return self.model_copy(update={"next_ids": tuple(next_ids)})


NO_CONTEXT: Final = SamplingContext()
"""Logits and parameters are all that the answer depends on."""


class TokenScore(BaseModel):
    """One token's natural log probability, before penalties, bias and grammar, at temperature 1.

    `top` are the likeliest tokens there, most likely first, with theirs. Minus infinity is told as
    -9999.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    token_id: TokenId
    logprob: LogProb
    top: tuple[tuple[TokenId, LogProb], ...] = ()


def uniform(seed: int, position: int) -> float:
    """The draw for the token at `position`: a number in [0, 1).

    A pure function of its arguments, so that a recovery, a retry or the company a request has in a
    batch never changes a draw (law 10: no global generator).
    """
    message = f"{seed}:{position}".encode()
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: 64 could round up to 1


class Constraint(Protocol):
    """Follows one answer and knows what may come next in it; see meshnet.grammar.compiler."""

    def allowed(self) -> bytes:
        """The next token's mask, see `is_allowed`; at least one token is.

        Raises:
            InvalidRequest: The grammar is too costly to follow.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on with this token, which was allowed and ends nothing."""
        ...


class Grammar(Protocol):
    """What an answer must look like; one grammar serves many answers."""

    def new_constraint(self) -> Constraint:
        """One for each answer."""
        ...


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an answer ends.

    Where a grammar says what comes next, it says when the answer ends too: then the model's end
    tokens always end it, and no token is kept from coming for being early.

    Attributes:
        strings: The answer ends before the first of these in the text behind the first
            `min_tokens` tokens; see StopStrings.
        token_ids: Each of them ends the answer, as the model's own end tokens do.
        min_tokens: No token of `token_ids`, and no end token, before so many others.
        ignore_end: The model's own end tokens do not end the answer.
        keep_string: Leave the string that ended the answer in its text.
    """

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_end: bool = False
    keep_string: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation.

    Attributes:
        prompt_ids: At least one.
        max_tokens: The most tokens to generate; 0 is for scores of the prompt alone.
        sampling: How tokens are picked.
        stopping: When the answer ends, besides at `max_tokens`.
        logit_bias: Added to the logits of these tokens, at most `MAX_LOGIT_BIAS` of them.
        grammar: What the answer must look like.
        score_prompt: Whether the prompt's tokens are scored too; `sampling.top_logprobs` is set.
        skip_special_tokens: Whether control tokens are left out of the text.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stopping: Stopping = Stopping()
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    grammar: Grammar | None = None
    score_prompt: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token, or the end.

    Attributes:
        text: What became printable with it: "" while a character is incomplete or may belong to a
            stop string, and for an end token.
        token_id: None from a tail that knows text only, and where nothing was to be generated.
        finish_reason: The last event of a generation has one, and no other.
        score: The token's, where `sampling.top_logprobs` is set.
        prompt_scores: In the first event, if asked for: of each token of the prompt but the first.
        n_tokens: 0 where nothing was to be generated; then there is this one event.
        n_cached: In the first event: tokens of the prompt that were not computed for it.
    """

    text: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    score: TokenScore | None = None
    prompt_scores: Sequence[TokenScore] = ()
    n_tokens: int = 1
    n_cached: int = 0
