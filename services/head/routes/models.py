"""The models that are served."""

from __future__ import annotations

from fastapi import APIRouter

from meshnet.openai.models import ModelCard, ModelList, model_card, model_list
from services.head.openapi import errors
from services.head.routes.request import HeadDep
from services.head.served_model import ServedModel

models = APIRouter(prefix="/v1")


@models.get("/models", responses=errors(401))
@models.head("/models", include_in_schema=False)
async def list_models(head: HeadDep) -> ModelList:
    """All of them."""
    return model_list([_card(model) for model in head.models.values()])


@models.get("/models/{model:path}", responses=errors(401, 404))
@models.head("/models/{model:path}", include_in_schema=False)
async def retrieve_model(model: str, head: HeadDep) -> ModelCard:
    """One of them."""
    return _card(head.model(model))


def _card(model: ServedModel) -> ModelCard:
    return model_card(
        model.name, created=model.created, max_model_len=model.tokenizer.max_positions or 0
    )
