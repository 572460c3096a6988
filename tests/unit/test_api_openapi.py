"""The OpenAPI description: complete, with examples that are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator

from orchestrator.api.problems import MEDIA_TYPE, Kind

OPEN = ("/healthz",)
"""Paths that want no token."""


@pytest.fixture
def described(api: TestClient) -> dict[str, Any]:
    return dict(api.get("/openapi.json").json())


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def bodies(operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every JSON body that it takes or gives."""
    for holder in (operation.get("requestBody", {}), *operation["responses"].values()):
        for form, content in holder.get("content", {}).items():
            if "json" in form:
                yield content


def of_reference(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself; of one that may be null the other side."""
    for option in schema.get("anyOf", ()):
        if "$ref" in option:
            schema = option
    if "$ref" not in schema:
        return schema
    return dict(described["components"]["schemas"][schema["$ref"].rpartition("/")[2]])


def test_every_operation_says_what_it_is_for_its_errors_and_its_role(
    described: dict[str, Any],
) -> None:
    tags = {tag["name"] for tag in described["tags"]}
    for path, method, operation in operations(described):
        assert operation["tags"][0] in tags and operation["description"], path
        if path in OPEN:
            assert "security" not in operation
            continue
        assert {"401", "403", "422", "429", "503"} <= set(operation["responses"]), path
        if "{job}" in path:
            assert {"404", "409"} <= set(operation["responses"]), path
        if method == "post":
            assert {"413", "415"} <= set(operation["responses"]), path
        (security,) = operation["security"]
        reads = method == "get" and not path.startswith("/v1/tokens")
        assert ("read" in security["bearer"]) == reads, path
    assert described["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def test_every_request_and_answer_has_examples_and_they_are_right(
    described: dict[str, Any],
) -> None:
    looked_at = 0
    for path, method, operation in operations(described):
        for content in bodies(operation):
            schema = of_reference(described, content["schema"])
            examples = [e["value"] for e in content.get("examples", {}).values()]
            examples += schema.get("examples", [])
            assert examples, (path, method, content)
            whole = {**content["schema"], "components": described["components"]}
            for example in examples:
                Draft202012Validator(whole).validate(example)
                looked_at += 1
    assert looked_at > 100


def test_what_is_no_json_has_an_example_too(described: dict[str, Any]) -> None:
    forms = {
        form: content.get("example", "")
        for _, _, operation in operations(described)
        for form, content in operation["responses"].get("200", {}).get("content", {}).items()
        if "json" not in form
    }
    assert set(forms) == {"text/event-stream", "text/plain"} and all(forms.values())


def test_every_field_of_a_request_that_a_name_does_not_tell_is_described(
    described: dict[str, Any],
) -> None:
    schemas = described["components"]["schemas"]
    for name, field in (
        ("Submission", "key"),
        ("RollbackRequest", "skip"),
        ("PrecisionRequest", "layers"),
        ("QuarantineRequest", "seconds"),
        ("RotationRequest", "overlap_s"),
        ("TokenRequest", "name"),
    ):
        assert schemas[name]["properties"][field]["description"], (name, field)


def test_errors_are_told_as_problems_with_an_example_of_each_kind(
    described: dict[str, Any],
) -> None:
    kinds: set[str] = set()
    for path, _, operation in operations(described):
        for status, answer in operation["responses"].items():
            if status.startswith("2"):
                continue
            assert list(answer["content"]) == [MEDIA_TYPE], path
            kinds |= {
                e["value"]["type"] for e in answer["content"][MEDIA_TYPE]["examples"].values()
            }
    # These two can come of any path that is none of the above.
    unrouted = {Kind.METHOD_NOT_ALLOWED.type}
    assert kinds | unrouted == {kind.type for kind in Kind}
