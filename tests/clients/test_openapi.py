"""Whatever our own OpenAPI document allows, and what it does not: never a 5xx, no other status."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.clients.mesh import Mesh

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,  # a fault is found again
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_operation(fake: Mesh, subtests: pytest.Subtests, mode: GenerationMode) -> None:
    """Each answer has a documented status and type, and is no fault of ours.

    By hand, since schemathesis' own plugin does not know pytest 9.2.
    """
    document = schemathesis.openapi.from_url(f"{fake.url}/openapi.json")
    for found in document.get_all_operations():
        operation = found.ok()
        if mode.is_negative and not operation.body.items:
            continue  # nothing can be wrong with it
        with subtests.test(operation=operation.label):
            _probe(operation, mode, fake.model)


def _probe(operation: APIOperation, mode: GenerationMode, model: str) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @EXAMPLES
    def call(case: Case) -> None:
        if mode.is_positive and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = model  # else almost all are 404
        case.call_and_validate(checks=CHECKS)

    call()
