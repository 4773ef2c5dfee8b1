"""`GET /v1/models` and `/v1/models/{id}`, and the check that a request names a served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from meshnet.errors import ModelNotFound


class ModelCard(TypedDict):
    """One served model. `created` is in seconds since 1970; `max_model_len` in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["meshnet"]
    max_model_len: int


class ModelList(TypedDict):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


def model_card(model: str, *, created: int, max_model_len: int) -> ModelCard:
    """The card of one model."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "meshnet",
        "max_model_len": max_model_len,
    }


def model_list(cards: Sequence[ModelCard]) -> ModelList:
    """The body of `GET /v1/models`."""
    return {"object": "list", "data": list(cards)}


def require_served(model: str, served: Sequence[str]) -> None:
    """Let the request pass if `model` is served.

    Raises:
        ModelNotFound: It is not; the text and `allowed` list the ids that are.
    """
    if model not in served:
        raise ModelNotFound(
            f"The model {model[:100]!r} does not exist; allowed: {', '.join(served)}",
            field="model",
            allowed=list(served),
        )
