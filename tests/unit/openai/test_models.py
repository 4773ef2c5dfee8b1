from __future__ import annotations

import pytest

from meshnet.errors import ModelNotFound
from meshnet.openai.models import model_card, model_list, require_served


def test_a_card_has_the_keys_clients_read() -> None:
    """A model card has OpenAI's four keys and the context's length."""
    assert model_card("org/m", created=5, max_model_len=2048) == {
        "id": "org/m",
        "object": "model",
        "created": 5,
        "owned_by": "meshnet",
        "max_model_len": 2048,
    }


def test_the_list_holds_the_cards() -> None:
    """The list of models is an object of type list."""
    card = model_card("m", created=5, max_model_len=2048)

    assert model_list([card]) == {"object": "list", "data": [card]}


def test_a_served_model_passes() -> None:
    """A request for a served model goes on."""
    require_served("m", ["other", "m"])


def test_another_model_is_not_found_and_the_served_ones_are_listed() -> None:
    """An unknown model's error lists the served ids and repeats little of the name."""
    with pytest.raises(ModelNotFound, match="does not exist; allowed: a, b") as caught:
        require_served("x" * 1000, ["a", "b"])

    assert caught.value.members == {"field": "model", "allowed": ["a", "b"]}
    assert caught.value.message.count("x") < 110
