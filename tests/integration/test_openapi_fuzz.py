"""Every operation of the OpenAPI document, with data made from the document: no 500, and answers as documented."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.service import POLICY, Service, service_fixture

service = service_fixture()

EXAMPLES = 15
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]


def aim(case: Case, here: bool) -> Case:
    """Let about half of the cases name things that exist, so that they get past the first look-up."""
    if here and case.path_parameters and "policy" in case.path_parameters:
        case.path_parameters["policy"] = POLICY
    if isinstance(case.body, dict) and "messages" in case.body:
        case.body["max_tokens"] = case.body["max_completion_tokens"] = 1
        if here:
            case.body["model"] = POLICY
    return case


def fuzz(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, headers: dict[str, str]) -> None:
    """Send what the document allows, or (negative) what it does not; raises on an answer that breaks a check."""

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode), here=st.booleans())
    def send(case: Case, here: bool) -> None:
        response = aim(case, here).call(headers=headers)
        case.validate_response(response, checks=CHECKS)

    send()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "not allowed"])
@pytest.mark.parametrize("role", ["client", "admin"])
def test_no_operation_breaks(service: Service, role: str, mode: GenerationMode) -> None:
    """Whatever is sent with either key, the answer is no server error and has the documented shape."""
    headers = {"Authorization": f"Bearer {service.admin_key if role == 'admin' else service.client_key}"}
    schema = schemathesis.openapi.from_url(f"{service.base_url}/openapi/openapi.json", headers=headers)
    seen = len(service.log_text)
    failures: dict[str, BaseException] = {}
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 20
    for operation in operations:
        try:
            fuzz(operation, mode, headers)
        except Unsatisfiable:  # this operation takes nothing that could be wrong
            assert mode is GenerationMode.NEGATIVE, operation.label
        except BaseExceptionGroup as group:
            failures[operation.label] = group
        except schemathesis.checks.Failure as failure:
            failures[operation.label] = failure
    assert not failures, "\n\n".join(f"{label}: {describe(failure)}" for label, failure in failures.items())
    assert "Traceback" not in service.log_text[seen:]
    assert service.anonymous.get("/health/ready").status_code == 200


def describe(failure: BaseException) -> str:
    parts = failure.exceptions if isinstance(failure, BaseExceptionGroup) else [failure]
    return "\n".join(str(part)[:1500] for part in parts)
