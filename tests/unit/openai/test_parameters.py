from __future__ import annotations

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from meshnet.errors import UnsupportedParameter
from meshnet.openai.parameters import PARAMETERS, refuse_unsupported
from meshnet.openai.schema import ChatRequest

REFUSED = sorted(name for name, p in PARAMETERS.items() if p.handling == "refused")
OFF = [(name, value) for name in REFUSED for value in PARAMETERS[name].off]


def test_every_parameter_of_openais_document_is_in_the_table() -> None:
    """No parameter that the official client can send is unknown here."""
    assert set(CompletionCreateParamsBase.__annotations__) <= PARAMETERS.keys()


def test_the_used_parameters_are_the_requests_fields() -> None:
    """What the table calls used is what a ChatRequest holds, no more and no less."""
    used = {name for name, parameter in PARAMETERS.items() if parameter.handling == "used"}

    assert used == ChatRequest.model_fields.keys() - {"ignored_params"}


@pytest.mark.parametrize(("name", "value"), OFF)
def test_what_means_off_passes(name: str, value: object) -> None:
    """A value that asks for what happens anyway is accepted."""
    refuse_unsupported(name, value)


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_value_is_refused(name: str) -> None:
    """A known parameter that is not implemented is refused by its name, saying what is allowed."""
    with pytest.raises(UnsupportedParameter, match=f"{name}: .*; allowed: only ") as caught:
        refuse_unsupported(name, {"anything": "else"})

    assert caught.value.members["field"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", True),
        ("n", 2),
        ("n", 0),
        ("logprobs", 0),
        ("logprobs", True),
        ("frequency_penalty", False),
        ("presence_penalty", 0.5),
        ("stop", ""),
        ("stop", "\n"),
        ("tools", []),
        ("tool_choice", "auto"),
        ("logit_bias", {"1": 5}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("ignore_eos", True),
    ],
)
def test_what_only_resembles_off_is_refused(name: str, value: object) -> None:
    """True is not 1, an empty stop string is not an empty list, and n is 1 or nothing."""
    with pytest.raises(UnsupportedParameter):
        refuse_unsupported(name, value)


@pytest.mark.parametrize("name", ["user", "temperature", "invented"])
def test_other_parameters_are_not_this_checks_business(name: str) -> None:
    """What is used, has no effect or is unknown passes here."""
    refuse_unsupported(name, "anything")
