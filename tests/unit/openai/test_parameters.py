from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from meshnet.errors import InvalidRequest, UnsupportedParameter
from meshnet.openai.chat_request import ChatRequest, parse_chat_request
from meshnet.openai.completion_request import CompletionRequest, parse_completion_request
from meshnet.openai.fields import RequestFields
from meshnet.openai.parameters import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    RESPONSES,
    TOKENIZE,
    Parameter,
    refuse_unsupported,
)
from meshnet.openai.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize_request,
    parse_tokenize_request,
)


@dataclass(frozen=True)
class Endpoint:
    table: Mapping[str, Parameter]
    kind: type[RequestFields]
    parse: Callable[..., RequestFields]
    least: Mapping[str, object]
    """The shortest right request."""

    def request(self, strict: bool = False, /, **fields: object) -> RequestFields:
        return self.parse(json.dumps({**self.least, **fields}).encode(), strict=strict)

    def names(self, handling: str) -> list[str]:
        return [name for name, p in self.table.items() if p.handling == handling]


ENDPOINTS = {
    "chat": Endpoint(
        CHAT,
        ChatRequest,
        parse_chat_request,
        {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    ),
    "completions": Endpoint(
        COMPLETIONS, CompletionRequest, parse_completion_request, {"model": "m", "prompt": "hello"}
    ),
    "tokenize": Endpoint(TOKENIZE, TokenizeRequest, parse_tokenize_request, {"prompt": "hello"}),
    "detokenize": Endpoint(
        DETOKENIZE, DetokenizeRequest, parse_detokenize_request, {"tokens": [1]}
    ),
}
TABLES = {"chat": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "tokenize": TOKENIZE}
REFUSED = [
    (endpoint, name)
    for endpoint, table in TABLES.items()
    for name, parameter in table.items()
    if parameter.handling == "refused"
]
OFF = [(endpoint, name, off) for endpoint, name in REFUSED for off in TABLES[endpoint][name].off]

each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)


@pytest.mark.parametrize(("table", "theirs"), [(CHAT, ChatParams), (COMPLETIONS, CompletionParams)])
def test_every_parameter_of_openais_document_is_in_the_table(
    table: Mapping[str, Parameter], theirs: type[ChatParams] | type[CompletionParams]
) -> None:
    """No parameter that the official client can send is unknown here."""
    assert set(theirs.__annotations__) <= table.keys()


@each_endpoint
def test_the_used_parameters_are_the_requests_fields(endpoint: Endpoint) -> None:
    """What a table calls used is what its request holds, no more and no less."""
    assert {*endpoint.names("used")} == endpoint.kind.model_fields.keys() - {"ignored_params"}


@each_endpoint
def test_null_is_absent_for_every_parameter(endpoint: Endpoint) -> None:
    """A request whose optional fields are all null is the request without them, strict or not."""
    nulls = dict.fromkeys(endpoint.table.keys() - endpoint.least.keys())

    assert endpoint.request(**nulls) == endpoint.request()
    assert endpoint.request(True, **nulls) == endpoint.request()


@each_endpoint
def test_what_is_needed_is_missed(endpoint: Endpoint) -> None:
    """Without one of the least request's fields, or with null there, its name is in the error."""
    for name in endpoint.least:
        with pytest.raises(InvalidRequest, match=f"^{name}: is missing") as caught:
            endpoint.request(**{name: None})
        assert caught.value.members["field"] == name


@each_endpoint
def test_no_ops_are_accepted(endpoint: Endpoint) -> None:
    """Whatever a no-op holds, the request is the one without it, and it is not called ignored."""
    no_ops = {name: {"any": ["thing", 1]} for name in endpoint.names("no_op")}

    assert endpoint.request(True, **no_ops) == endpoint.request()


@each_endpoint
def test_strays_are_listed_or_refused(endpoint: Endpoint) -> None:
    """A misspelt parameter is listed, and refused by the strict switch."""
    assert endpoint.request(temperatur=1, max_token=3).ignored_params == ("temperatur", "max_token")
    with pytest.raises(InvalidRequest, match=r"^temperatur: there is no such parameter"):
        endpoint.request(True, temperatur=1)


@each_endpoint
@pytest.mark.parametrize("body", [b"[]", b"", b'{"model": NaN}', b"null", b'"x"'])
def test_what_is_no_json_object_is_refused(endpoint: Endpoint, body: bytes) -> None:
    """A body that is no JSON object is the client's fault at every endpoint."""
    with pytest.raises(InvalidRequest, match=r"^the body is not "):
        endpoint.parse(body)


@each_endpoint
def test_every_wrong_type_is_refused(endpoint: Endpoint) -> None:
    """No used parameter takes an object of strays for a value, but for those that are objects."""
    objects = {"chat_template_kwargs", "stream_options"}
    for name in endpoint.names("used"):
        if name in objects:
            continue
        with pytest.raises(InvalidRequest) as caught:
            endpoint.request(**{name: {"stray": 1}})
        assert str(caught.value.members["field"]).startswith(name)
        assert caught.value.message.startswith(name)


@each_endpoint
@pytest.mark.parametrize(
    "value", [["x" * 10_000], {"x" * 10_000: "x" * 10_000}, {"type": "x" * 10_000}]
)
def test_no_error_copies_its_input(endpoint: Endpoint, value: object) -> None:
    """However long a wrong value, the error repeats at most 100 characters of it."""
    for name in endpoint.names("used"):
        with suppress(InvalidRequest):
            endpoint.request(**{name: value})
            continue
        with pytest.raises(InvalidRequest) as caught:
            endpoint.request(**{name: value})
        assert caught.value.message.count("x") < 200, name


@pytest.mark.parametrize(
    "name",
    ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema"],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_other_servers_constraints_are_refused(endpoint: str, name: str) -> None:
    """A constraint by another name is never dropped in silence."""
    with pytest.raises(UnsupportedParameter, match=f"^{name}: ") as caught:
        ENDPOINTS[endpoint].request(**{name: {"type": "object"}})

    assert "`response_format` takes its place" in caught.value.message


@pytest.mark.parametrize(("endpoint", "name", "value"), OFF)
def test_what_means_off_passes(endpoint: str, name: str, value: object) -> None:
    """A value that asks for what happens anyway is accepted."""
    refuse_unsupported(name, value, TABLES[endpoint])


@pytest.mark.parametrize(("endpoint", "name"), REFUSED)
def test_any_other_value_is_refused(endpoint: str, name: str) -> None:
    """A known parameter that is not implemented is refused by its name, saying what is allowed."""
    with pytest.raises(UnsupportedParameter, match=f"^{name}: .*; allowed: only ") as caught:
        refuse_unsupported(name, {"anything": "else"}, TABLES[endpoint])

    assert caught.value.members["field"] == name


@pytest.mark.parametrize(
    ("endpoint", "name", "value"),
    [
        ("completions", "best_of", True),
        ("completions", "best_of", 2),
        ("completions", "best_of", 0),
        ("completions", "suffix", " "),
        ("chat", "function_call", "auto"),
        ("chat", "modalities", ["text", "audio"]),
        ("chat", "modalities", []),
        ("responses", "background", 0),
        ("responses", "n", True),
    ],
)
def test_what_only_resembles_off_is_refused(endpoint: str, name: str, value: object) -> None:
    """True is not 1, 0 is not false, and a space is not nothing."""
    with pytest.raises(UnsupportedParameter):
        refuse_unsupported(name, value, TABLES[endpoint])


@pytest.mark.parametrize("name", ["user", "temperature", "invented"])
def test_other_parameters_are_not_this_checks_business(name: str) -> None:
    """What is used, has no effect or is unknown passes here."""
    refuse_unsupported(name, "anything", CHAT)
