"""The part of the matrix that every change passes: a node is lost in mid-run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.rows import ROWS
from tests.hosts.faults.runs import run_rows

STEPS = 60


@pytest.mark.usefixtures("_hosts_work")
@pytest.mark.timeout(400)
def test_a_job_goes_on_without_its_killed_node_and_no_bit_is_different() -> None:
    # A short job: here it is not asked whether its idle workers were ready.
    short = {"training": {"steps": STEPS}}
    rows = [(replace(row, changes=short), 1) for row in ROWS if row.name == "node_killed"]
    outcomes: list[Outcome] = []
    run_rows(rows, print, outcomes.append)
    (outcome,) = outcomes
    assert outcome.ok, outcome
    assert outcome.attempts == 2 and outcome.compared == STEPS
    # A snapshot is made every five steps, and one may be on its way to the partner.
    assert outcome.steps_lost <= 10
