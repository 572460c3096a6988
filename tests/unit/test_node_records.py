"""What the store keeps of nodes: what is held against them, and for how long it is known."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import sqlalchemy as sa

from orchestrator.placement.accusation import Accusation, AccusationKind
from orchestrator.placement.quarantine import Quarantine
from orchestrator.spec.config import QuarantineConfig
from orchestrator.store.tables import quarantines
from tests.unit.control_plane import ControlPlane
from tests.unit.test_preflight_blame import left_out

CONFIG = QuarantineConfig()
MANY = 1100
"""Rows that came since: more than are worth reading one by one in each pass."""


@pytest.fixture
def plane(tmp_path: Path) -> ControlPlane:
    return ControlPlane(tmp_path, 4, 4)


def accuse(
    plane: ControlPlane, job: str, node: int, kind: AccusationKind = "corruption", attempt: int = 1
) -> object:
    case = Accusation(
        f"node{node}", f"10.0.0.{node + 1}", job, attempt, kind, "It is bad", plane.now
    )
    nodes = plane.groups.capacities()
    ((_, found),) = plane.store.nodes.accuse(job, [case], CONFIG, nodes, plane.now)
    return found


def many(plane: ControlPlane, entry: Quarantine) -> None:
    """Store it so many times."""
    with sa.create_engine(f"sqlite:///{plane.jobs_dir.parent}/store.db").begin() as db:
        db.execute(sa.insert(quarantines), [asdict(entry)] * MANY)


def much_happens(plane: ControlPlane) -> None:
    """Jobs can't run on nodes, which are tried again and again: rows that were in force once."""
    many(plane, Quarantine("x", "", "unfit", "Full.", "", "", plane.now, plane.now + 120.0))
    plane.now += 120.0


def test_a_quarantine_is_in_force_until_it_ends_however_many_came_after_it(
    plane: ControlPlane,
) -> None:
    job, other = plane.submit(), plane.submit("other", by="bob")
    entry = accuse(plane, job, 0)
    assert isinstance(entry, Quarantine) and entry.until == plane.now + CONFIG.corruption_s
    much_happens(plane)
    assert plane.controller.desk.sight(plane.now).barred(other).keys() == {"node0"}
    assert left_out(plane) == {"node0": "corruption"}
    plane.steps(2)
    assert {seat.node_id for seat in plane.store.job(job).nodes} == {"node1"}
    plane.controller.roll.release("node0", "ada", plane.now)
    assert left_out(plane) == {}


def test_a_node_that_comes_back_is_known_however_much_happened_since(plane: ControlPlane) -> None:
    job = plane.submit()
    accuse(plane, job, 0)
    plane.now += CONFIG.corruption_s
    much_happens(plane)
    again = accuse(plane, job, 0, attempt=2)
    assert isinstance(again, Quarantine) and again.until == plane.now + 2 * CONFIG.corruption_s


def test_what_is_read_of_quarantines_does_not_grow_with_their_number(plane: ControlPlane) -> None:
    accuse(plane, plane.submit(), 0)
    much_happens(plane)
    (entry,) = plane.store.nodes.in_force(plane.now)
    assert entry.node_id == "node0"


def test_nodes_that_a_job_could_not_run_on_are_tried_at_once_after_a_resume_however_many_were(
    plane: ControlPlane,
) -> None:
    job = plane.submit()
    plane.controller.cancel(job, "by ada")
    accuse(plane, job, 0, "unfit")
    many(plane, Quarantine("x", "", "by_hand", "Bad.", "ada", "", plane.now, None))
    assert plane.controller.desk.sight(plane.now).barred(job)
    plane.controller.resume(job, "by ada")
    assert not plane.controller.desk.sight(plane.now).barred(job)
