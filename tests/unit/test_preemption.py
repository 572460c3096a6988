"""A less important job gives way: when it is asked, what stays its own, how it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.preemption import REFUSED_REST_S
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, next_state
from orchestrator.nodes.sight import Sight
from orchestrator.placement.quarantine import Quarantine
from orchestrator.recovery.controls import Control, ControlAnswer
from tests.unit.control_plane import ControlPlane, running, spares, tell, where


def test_the_lower_job_is_asked_once_and_goes_back_into_the_queue(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4)
    low = running(plane, "low", notifications={"webhook": "https://example.com/hook"})
    high = plane.submit("high", resources={"priority": 5})
    plane.steps(3)
    (row,) = plane.store.controls.of(low)
    control = row.control
    assert (control.kind, control.by, row.state) == ("preempt", "the queue", "accepted")
    assert control.reason == f"{high} has priority 5, this job 0"
    assert plane.supervisors.asked[-1] == (low, [control])
    assert plane.store.job(high).reason.endswith(f"waits for {low} to give nodes back")
    told = EventDraft("ended", plane.now, "Back into the queue.", {})
    tell(plane, low, events=(told,), transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(low)
    assert plane.store.controls.of(low)[0].state == "applied"
    assert plane.store.webhooks.due(plane.now, 600.0) == []
    plane.steps(3)
    assert (plane.state(low), plane.state(high)) == ("queued", "starting")
    tell(plane, high, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    plane.supervisors.done.add(high)
    plane.steps(3)
    assert [(r.job, r.attempt) for r in plane.supervisors.started] == [
        (low, 1),
        (high, 1),
        (low, 2),
    ]


def test_a_pause_that_a_person_asked_for_meanwhile_holds(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4)
    low = running(plane, "low")
    plane.submit("high", resources={"priority": 5})
    plane.steps(2)
    plane.store.controls.ask(low, Control("p", "pause", "alice", plane.now))
    tell(plane, low, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(low)
    plane.steps(4)
    assert plane.state(low) == "paused"
    assert {row.control.kind: row.state for row in plane.store.controls.of(low)} == {
        "preempt": "applied",
        "pause": "applied",
    }


def test_a_job_that_cannot_go_is_not_asked_again_in_that_attempt(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4)
    low = running(plane, "low")
    plane.submit("high", resources={"priority": 5})
    plane.steps(2)
    key = plane.store.controls.of(low)[0].control.key
    tell(plane, low, answers=(ControlAnswer(key, "refused", "no disk", 3),))
    plane.steps(3)
    assert len(plane.store.controls.of(low)) == 1
    assert plane.state(low) == "running"
    # Its refusal began another attempt; asked again in each, it would never train.
    plane.controller.next_attempt(low, 1, "training goes on")
    plane.steps(3)
    assert len(plane.store.controls.of(low)) == 1
    plane.now += REFUSED_REST_S
    plane.steps(2)
    assert len(plane.store.controls.of(low)) == 2


@pytest.mark.parametrize(
    ("low", "high"),
    [({}, {}), ({"preemptible": False}, {"priority": 5}), ({"priority": 5}, {"priority": 5})],
)
def test_equals_and_the_unpreemptible_keep_their_nodes(
    tmp_path: Path, low: dict[str, Any], high: dict[str, Any]
) -> None:
    plane = ControlPlane(tmp_path, 4)
    job = running(plane, "low", resources=low)
    plane.submit("high", resources=high)
    plane.steps(3)
    assert plane.store.controls.of(job) == []


def test_nobody_is_preempted_for_nodes_that_are_coming_back_anyway(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    ending, low = running(plane, "ending"), running(plane, "low")
    tell(plane, ending, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    high = plane.submit("high", resources={"priority": 5})
    plane.steps(2)
    assert plane.store.controls.of(low) == []
    assert plane.store.job(high).reason.endswith(f"waits for {ending} to give nodes back")


@pytest.mark.parametrize("gone", ["cancelled", "has others", "can never fit"])
def test_its_nodes_stay_its_own_where_the_higher_one_no_longer_waits_for_them(
    tmp_path: Path, gone: str
) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    low, busy = running(plane, "low", by="alice"), running(plane, "busy", by="dave")
    third = plane.submit("third", by="bob")
    wide = 2 if gone == "can never fit" else 1
    high = plane.submit("high", by="carol", num_nodes=wide, resources={"priority": 5})
    plane.steps(2)
    asked = {job for job in (low, busy) if plane.store.controls.of(job)}
    assert asked == ({low, busy} if wide == 2 else {busy})
    stops, stays = (busy, low)
    if gone == "cancelled":
        plane.controller.cancel(high, "not needed")
    elif gone == "has others":
        tell(plane, stays, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
        plane.supervisors.done.add(stays)
        plane.steps(3)
        assert plane.state(high) == "starting"
    else:
        plane.groups.dead.add(where(plane, stays)[0])
    tell(plane, stops, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(stops)
    plane.steps(3)
    assert (plane.state(stops), plane.state(third)) == ("starting", "queued")
    assert plane.supervisors.started[-1].job == stops


def test_its_nodes_go_back_only_with_all_others_that_the_higher_one_needs(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    goes, stays = running(plane, "goes", by="alice"), running(plane, "stays", by="dave")
    third = plane.submit("third", by="bob")
    high = plane.submit("high", by="carol", num_nodes=2, resources={"priority": 5})
    plane.steps(2)
    tell(plane, goes, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(goes)
    plane.steps(3)
    assert (plane.state(goes), where(plane, goes)) == ("queued", ["node0"])
    key = plane.store.controls.of(stays)[0].control.key
    tell(plane, stays, answers=(ControlAnswer(key, "refused", "no disk", 3),))
    plane.steps(3)
    states = [plane.state(job) for job in (goes, stays, third, high)]
    assert states == ["starting", "running", "queued", "queued"]
    assert plane.supervisors.started[-1].job == goes


def test_of_two_that_stopped_at_once_only_the_one_that_is_needed_goes(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    both = [running(plane, name, by=name) for name in ("one", "other")]
    third = plane.submit("third", by="bob")
    high = plane.submit("high", by="carol", resources={"priority": 5})
    for job in both:
        tell(plane, job, transition=(JobState.QUEUED, Cause.PREEMPTED))
        plane.supervisors.done.add(job)
    plane.steps(4)
    assert (plane.state(high), plane.state(third)) == ("starting", "queued")
    assert sorted(plane.state(job) for job in both) == ["queued", "starting"]


def test_spares_of_a_less_important_job_go_before_its_ranks(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    low = running(plane, "low", resources={"spares": 1})
    assert spares(plane, low) == ["node1"]
    same = plane.submit("same")
    plane.steps(2)
    assert plane.state(same) == "queued" and spares(plane, low) == ["node1"]
    high = plane.submit("high", resources={"priority": 5})
    plane.steps(3)
    assert (where(plane, high), where(plane, low)) == (["node1"], ["node0"])
    assert (plane.state(low), spares(plane, low)) == ("running", [])
    assert plane.store.controls.of(low) == []
    assert plane.told(low, "spares_given_up") == [
        f"Its spares, 10.0.0.2 (node1), go to {high}, which has a higher priority."
    ]


def test_no_more_spares_are_taken_than_are_needed(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, *[4] * 8)
    old = running(plane, "old", resources={"spares": 2})
    young = running(plane, "young", resources={"spares": 2})
    middle = running(plane, "middle", resources={"priority": 3, "spares": 1})
    had = spares(plane, young)
    assert [len(spares(plane, job)) for job in (old, young, middle)] == [2, 2, 1]
    high = plane.submit("high", resources={"priority": 5})
    plane.steps(1)
    assert plane.store.job(high).reason.endswith(f"; takes spares of {young}")
    assert [len(spares(plane, job)) for job in (old, young, middle)] == [2, 1, 1]
    (told,) = plane.told(young, "spares_given_up")
    assert told.startswith("Some of its spares, 10.0.0.") and had[0] in told
    plane.steps(2)
    assert plane.state(high) == "starting"
    wide = plane.submit("wide", num_nodes=4, resources={"priority": 4})
    plane.steps(1)
    assert [len(spares(plane, job)) for job in (old, young, middle)] == [0, 0, 0]
    plane.steps(2)
    assert plane.state(wide) == "starting"


def test_a_job_that_lost_a_node_gets_one_of_a_less_important_job(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    high = running(plane, "high", num_nodes=2, resources={"priority": 5})
    low = running(plane, "low")
    plane.groups.dead.add("node1")
    plane.supervisors.done.add(high)
    plane.steps(4)
    (row,) = plane.store.controls.of(low)
    assert row.control.kind == "preempt"
    assert plane.store.job(high).reason.endswith(f"waits for {low} to give nodes back")
    tell(plane, low, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(low)
    plane.steps(4)
    assert where(plane, high) == ["node0", "node2"]
    assert plane.supervisors.started[-1].job == high and plane.state(low) == "queued"


@pytest.mark.parametrize("supervisor", ["gone", "not yet looked at"])
def test_a_restarted_controller_knows_who_waits_for_the_nodes_of_one_that_made_room(
    tmp_path: Path, supervisor: str
) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    low = running(plane, "low")
    high = running(plane, "high", resources={"priority": 5})
    plane.groups.dead.add(where(plane, high)[0])
    tell(plane, high, transition=(JobState.RECOVERING, Cause.RANK_LOST))
    plane.supervisors.alive.pop(high)
    plane.steps(2)
    assert list(plane.store.controls.open()) == [low]
    tell(plane, low, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(low)
    plane.controller = plane.new_controller()
    if supervisor == "not yet looked at":
        plane.supervisors.done.add(high)
    plane.steps(3)
    assert (where(plane, high), plane.state(low)) == (["node0"], "queued")


def test_a_job_that_starts_on_a_node_quarantined_meanwhile_waits_for_none(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    low = running(plane, "low", by="alice")
    high = plane.submit("high", by="bob", resources={"priority": 5})
    plane.steps(2)
    (node,) = where(plane, high)
    until = plane.now + 3600.0
    case = Quarantine(node, "", "preflight", "matmul", "", "other", plane.now, until)
    plane.store.nodes.quarantine(case, [])
    same = plane.submit("same", by="carol")
    tell(plane, low, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(low)
    plane.steps(4)
    assert [plane.state(job) for job in (low, high, same)] == ["starting", "starting", "queued"]


@pytest.mark.parametrize("which", ["has all its nodes", "is no more important"])
def test_no_place_is_looked_for_where_a_starting_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    low = running(plane, "low")
    all_there = which == "has all its nodes"
    other = running(plane, "other", resources={"priority": 5 if all_there else 0})
    tell(plane, other, transition=(JobState.RECOVERING, Cause.RANK_LOST))
    if not all_there:
        plane.groups.dead.add(where(plane, other)[0])
    looked: list[str] = []
    mended = Sight.mended
    monkeypatch.setattr(Sight, "mended", lambda s, row: looked.append(row.id) or mended(s, row))
    tell(plane, low, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(low)
    plane.steps(2)
    assert (plane.state(low), looked) == ("starting", [])


def test_it_ends_a_job_that_waits_for_lost_nodes_without_its_ranks(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    low = running(plane, "low", num_nodes=2)
    plane.groups.dead.add("node1")
    plane.supervisors.done.add(low)
    plane.steps(3)
    assert plane.state(low) == "recovering"
    high = plane.submit("high", resources={"priority": 5})
    plane.steps(5)
    assert (plane.state(low), plane.state(high)) == ("queued", "starting")


@pytest.mark.parametrize("ended", [Cause.STEPS_DONE, Cause.PAUSE_ASKED])
def test_one_that_ends_as_it_is_about_to_be_asked_is_no_error_of_anybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Cause
) -> None:
    plane = ControlPlane(tmp_path, 4)
    low = running(plane, "low")
    high = plane.submit("high", resources={"priority": 5})
    ask = plane.store.controls.ask

    def meanwhile(job: str, control: Control, attempt: int) -> object:
        monkeypatch.undo()
        after = next_state(JobState.RUNNING, ended)
        tell(plane, low, transition=(after, ended))
        plane.supervisors.done.add(low)
        return ask(job, control, attempt)

    monkeypatch.setattr(plane.store.controls, "ask", meanwhile)
    plane.steps(4)
    assert plane.told(low, "controller_error") == plane.told(high, "controller_error") == []
    assert plane.state(high) == "starting"
