"""Bodies and job files that would break what is behind the API: refused, and each with why.

Each case was a failure (500), or a submission that never came back and held the controller up.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from orchestrator.api.body import MOST_DEPTH, wrong_with
from tests.unit.control_plane import ControlPlane
from tests.unit.test_api import is_problem


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", ""),
        (b"no json", ""),
        (b'{"a": [1, -9007199254740991, 1.5e300, null, true, "\\ud83d\\ude00"]}', ""),
        (b"[" * MOST_DEPTH + b"]" * MOST_DEPTH, ""),
        (b"[" * 70 + b"]" * 70, "deeper than 64 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "too deep"),
        (b'{"a": 9007199254740992}', "body.a: is a whole number beyond 9007199254740991"),
        (b'{"a": ["x\\u0000"]}', "body.a.0: has a null character"),
        (b'{"a\\u0000": 1}', "body: a key has a null character"),
        (b'{"a": "\\ud800"}', "body.a: has half a character"),
        (b'{"\\udfff": 1}', "half a character"),
    ],
)
def test_a_body_is_one_that_everything_behind_can_hold(body: bytes, says: str) -> None:
    told = wrong_with(body)
    assert says in told if says else told == ""


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"model": {"hidden_size": 2**53 - 1}}, "model.hidden_size"),
        ({"model": {"num_heads": 2**53 - 1}}, "model.num_heads"),
        ({"num_nodes": 2**53 - 1}, "num_nodes"),
        ({"slots_per_node": 2**53 - 1}, "slots_per_node"),
        ({"parallelism": {"tensor": 2**53 - 1}}, "parallelism.tensor"),
        ({"training": {"train_batch_size": 2**53 - 1}}, "training.train_batch_size"),
        ({"data": {"source": "x" * 5000}}, "data.source"),
        ({"data": {"source": "python-stdlib", "pattern": "**/" * 40 + "*"}}, "data.source"),
        ({"data": {"source": "python-stdlib", "pattern": "a**b"}}, "data.source"),
        ({"data": {"source": "python-stdlib", "pattern": ""}}, "data.source"),
        ({"data": {"source": "python-stdlib", "pattern": "/etc/*"}}, "data.source"),
        ({"checkpoint": {"resume_from": "x" * 5000}}, "checkpoint.resume_from"),
    ],
)
def test_a_job_file_with_a_value_beyond_all_there_is_is_refused_at_its_key(
    api: TestClient, plane: ControlPlane, section: dict[str, Any], key: str
) -> None:
    small = plane.jobs_dir.parent / "text.txt"
    small.write_text("x" * 4096)
    spec = {"name": "toy", "slots_per_node": 1, "data": {"source": str(small)}, **section}
    answer = api.post("/v1/jobs:validate", json={"spec": spec})
    assert answer.status_code == 422 and is_problem(answer), json.dumps(section)[:80]
    assert key in [problem["key"] for problem in answer.json()["problems"]]


def test_a_quarantine_for_no_reason_that_can_be_shown_is_kept_as_such(
    api: TestClient, plane: ControlPlane
) -> None:
    path = "/v1/nodes/10.0.0.1/quarantine"
    asked = api.post(path, json={"reason": "\x1b\x83"})
    assert asked.status_code == 200
    assert asked.json()["quarantine"]["reason"] == "No reason given."
