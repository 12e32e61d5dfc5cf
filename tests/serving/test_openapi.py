"""Requests made from the served OpenAPI document: whatever it allows gets an answer it describes, never a server error."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serving import Running

from server.openapi import document

API = schemathesis.openapi.from_dict(document())
OPERATIONS = [result.ok() for result in API.get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_described_requests(server: Running, fuzzed: Counter[str], operation: Any) -> None:
    @settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and case.body.get("max_tokens") is None:
            case.body["max_tokens"] = 2
        fuzzed["HTTP requests made from the document"] += 1
        case.call_and_validate(base_url=server.url, excluded_checks=[positive_data_acceptance])  # ranges are not in the schema

    run()


def test_document(server: Running) -> None:
    served = server.http.get("/openapi.json").json()
    assert set(served["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/ready"}
    assert "temperature" in served["components"]["schemas"]["ChatRequest"]["properties"]
