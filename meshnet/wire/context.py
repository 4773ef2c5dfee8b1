"""The sampling context behind a step's tensor: JSON, both directions of the translation."""

from __future__ import annotations

from pydantic import ValidationError

from meshnet.errors import InvalidRequest
from meshnet.generation import NO_CONTEXT, SamplingContext

_FIELD = "body"


def render_context(context: SamplingContext) -> bytes:
    """The context as it is sent: nothing at all where it is empty."""
    return b"" if context.is_empty else context.model_dump_json(exclude_defaults=True).encode()


def parse_context(data: bytes, *, vocab_size: int, n_tokens: int) -> SamplingContext:
    """Read a context.

    Args:
        data: What follows the tensor.
        vocab_size: Every token id lies in [0, vocab_size).
        n_tokens: Tokens of the step; no more can have a next one.

    Raises:
        InvalidRequest: It is malformed, does not fit the step or the model, or leaves no token to
            pick.
    """
    if not data:
        return NO_CONTEXT
    try:
        context = SamplingContext.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            # Cut, since a member's name is input too.
            f"sampling context: {path[:100] or 'all of it'}: {first['msg'][:200]}",
            field=_FIELD,
            allowed="a JSON object with the members of docs/wire-protocol.md",
        ) from error
    _check_ids(context, vocab_size)
    _check_next(context, n_tokens)
    _check_choice(context, vocab_size)
    return context


def _check_ids(context: SamplingContext, vocab_size: int) -> None:
    for name in ("prompt_ids", "generated_ids", "logit_bias", "banned_ids", "next_ids"):
        largest = max(getattr(context, name), default=0)
        if largest >= vocab_size:
            raise InvalidRequest(
                f"sampling context: {name}: token id {largest} is not in the vocabulary",
                field=_FIELD,
                value=largest,
                allowed=f"0 to {vocab_size - 1}",
            )


def _check_next(context: SamplingContext, n_tokens: int) -> None:
    if len(context.next_ids) > n_tokens:
        raise InvalidRequest(
            f"sampling context: next_ids: {len(context.next_ids)} are too many",
            field=_FIELD,
            value=len(context.next_ids),
            allowed=f"at most {n_tokens}, the step's tokens",
        )


def _check_choice(context: SamplingContext, vocab_size: int) -> None:
    """A token must be left to pick: found out in the step, it would cost the session's state."""
    n_bytes = (vocab_size + 7) // 8
    left = bytearray(b"\xff" * n_bytes if context.allowed is None else context.allowed[:n_bytes])
    if len(left) == n_bytes:
        left[-1] &= 0xFF >> (-vocab_size % 8)  # bits behind the vocabulary are no tokens
    for token_id in context.banned_ids:
        if token_id // 8 < len(left):
            left[token_id // 8] &= ~(1 << token_id % 8)
    if not any(left):
        raise InvalidRequest(
            "sampling context: no token is left to pick",
            field=_FIELD,
            allowed="at least one in `allowed` that is not in `banned_ids`",
        )
