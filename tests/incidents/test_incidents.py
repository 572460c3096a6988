"""Drills on real ranks: seen in time, the right suspect, the right answer, and a loss as good.

CI runs the kinds in ``IN_CI``, on two replicas; ``OCTAVO_INCIDENTS=all`` (``make incidents``) every
kind on every layout, and the healthy jobs that must stay silent.
"""

from __future__ import annotations

import os

import pytest

from tests.incidents.runs import Runs
from tests.incidents.scenarios import HEALTHY, LAYOUTS, SCENARIOS, Healthy, Scenario

ALL = os.environ.get("OCTAVO_INCIDENTS") == "all"
IN_CI = {("bit_flip", "DP"), ("swiglu_growth", "DP"), ("poisoned_batch/random", "DP")}
HEALTHY_IN_CI = {("another language", "PP")}
CASES = [(s, layout) for s in SCENARIOS for layout in s.layouts if ALL or (s.name, layout) in IN_CI]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("incidents"), seeds=3 if ALL else 1)


@pytest.mark.parametrize(
    ("scenario", "layout"), CASES, ids=lambda case: getattr(case, "name", case)
)
def test_a_drill_is_seen_and_answered_as_it_must_be(
    runs: Runs, scenario: Scenario, layout: str
) -> None:
    _, wrong = runs.rehearse(scenario, layout)
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize(
    ("healthy", "layout"),
    [
        (healthy, layout)
        for healthy in HEALTHY
        for layout in LAYOUTS
        if ALL or (healthy.name, layout) in HEALTHY_IN_CI
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_a_healthy_job_is_left_alone(runs: Runs, healthy: Healthy, layout: str) -> None:
    _, wrong = runs.stay_healthy(healthy, layout)
    assert not wrong, wrong[0]
