"""How what an attempt shows of its nodes is taken in: at once, wholly, and no oftener than it is
news."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from launch.preflight import Failure
from orchestrator.events import EventDraft
from orchestrator.placement import docket
from orchestrator.store import nodes as node_records
from tests.unit.control_plane import ControlPlane, tell
from tests.unit.test_preflight_blame import left_out

HANGS = Failure("no answer for 20 s (preflight.timeout_s)", False, "answer")
NO_DRIVER = Failure("device: no driver", False, "device")


def failing(plane: ControlPlane, **why: Failure) -> EventDraft:
    """Preflight's word on nodes."""
    failed = {node: asdict(failure) for node, failure in why.items()}
    return EventDraft("preflight_failed", plane.now, "Preflight failed.", {"failed": failed})


def all_fail(folder: Path, count: int) -> tuple[ControlPlane, str]:
    """A job on so many nodes that all have failed a check."""
    folder.mkdir(exist_ok=True)
    plane = ControlPlane(folder, *[4] * count)
    training = {"train_batch_size": 2 * count * 4, "train_micro_batch_size_per_gpu": 1}
    job = plane.submit(num_nodes=count, training=training)
    plane.steps(2)
    tell(plane, job, events=(failing(plane, **{f"node{i}": HANGS for i in range(count)}),))
    return plane, job


def settle(plane: ControlPlane, job: str) -> None:
    plane.controller.desk.settling.settle(plane.store.job(job), plane.now)


@contextmanager
def statements() -> Iterator[list[str]]:
    """What is asked of databases meanwhile."""
    seen: list[str] = []

    def asked(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", asked)
    try:
        yield seen
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", asked)


def test_the_store_is_read_once_and_nodes_are_compared_once_however_many_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: dict[int, int] = {}
    barrings: list[int] = []
    true_barring = docket.barring

    def barring(entries: Any, nodes: Any, *rest: Any) -> Any:
        barrings.append(len(nodes))
        return true_barring(entries, nodes, *rest)

    monkeypatch.setattr(docket, "barring", barring)
    for count in (4, 16):
        plane, job = all_fail(tmp_path / str(count), count)
        barrings.clear()
        with statements() as seen:
            settle(plane, job)
        assert barrings == [count] and len(left_out(plane)) == count
        reads[count] = sum(not asked.startswith("INSERT") for asked in seen)
    assert reads[4] == reads[16]


def test_one_transaction_stores_what_was_shown_and_all_that_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, job = all_fail(tmp_path, 4)
    true_add, added = node_records.add_event, []

    def dies(*arguments: Any) -> None:
        added.append(arguments)
        if len(added) == 3:
            raise RuntimeError("the controller is killed")
        true_add(*arguments)

    monkeypatch.setattr(node_records, "add_event", dies)
    with pytest.raises(RuntimeError):
        settle(plane, job)
    assert left_out(plane) == {} and plane.told(job, "node_quarantined") == []
    settle(plane, job)
    assert len(left_out(plane)) == len(plane.told(job, "node_quarantined")) == 4
    assert len(plane.told(job, "nodes_alike")) == 1


def test_a_job_that_waits_asks_ray_and_the_records_no_more_than_whether_there_is_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, job = all_fail(tmp_path, 4)
    for _ in range(2):  # what it tells itself is looked at once
        settle(plane, job)
    row = plane.store.job(job)
    with monkeypatch.context() as patch:
        patch.setattr(plane.groups, "capacities", lambda: pytest.fail("Ray was asked"))
        with statements() as seen:
            plane.controller.desk.settling.settle(row, plane.now)
    assert all("max(" in asked for asked in seen if asked.startswith("SELECT"))
    # A controller that restarts looks once, and finds all of it stored.
    plane.controller = plane.new_controller()
    settle(plane, job)
    assert len(plane.told(job, "node_quarantined")) == 4


def test_what_is_told_later_in_the_attempt_is_taken_in_as_well(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    job = plane.submit()
    plane.steps(2)
    for _ in range(2):
        settle(plane, job)
    assert left_out(plane) == {}
    tell(plane, job, events=(failing(plane, node0=NO_DRIVER),))
    settle(plane, job)
    assert left_out(plane) == {"node0": "preflight"}


def test_what_one_accusation_costs_counts_for_the_next_of_the_same_attempt(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    job = plane.submit(num_nodes=3, training={"train_batch_size": 24})
    plane.steps(2)
    reasons = (NO_DRIVER, Failure("its clock is +9.0 s off", False, "clock_ahead"), HANGS)
    tell(plane, job, events=(failing(plane, **{f"node{i}": r for i, r in enumerate(reasons)}),))
    settle(plane, job)
    # The last one is the only node that is left, and stays in use for others.
    assert left_out(plane) == {"node0": "preflight", "node1": "preflight", "node2": "unfit"}
