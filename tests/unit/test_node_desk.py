"""Nodes pass by pass: replaced, left out, kept ready, asked for, given to whom they are due."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from launch.keeper import Keeper
from launch.preflight import Failure, Verdict
from monitoring.records import Incident
from orchestrator.actions import Action
from orchestrator.cli.main import call
from orchestrator.controller.supervisors import LastWords
from orchestrator.controller.tending import NoNodesError
from orchestrator.events import EventDraft
from orchestrator.home.folder import Home
from orchestrator.lifecycle import Cause, JobState
from orchestrator.nodes.desk import FILL_EVERY_S, RECONCILE_EVERY_S, UNWILLING_S
from orchestrator.nodes.roll import NodeNotFoundError
from orchestrator.placement.accusation import Accusation
from orchestrator.placement.placement import told_node
from orchestrator.spec.config import QuarantineConfig
from orchestrator.store.database import Store
from orchestrator.store.errors import StoreUnavailableError
from orchestrator.supervision.preflight_gate import told as preflight_told
from tests.unit.control_plane import ControlPlane, running, spares, tell, where


@pytest.fixture
def wide(tmp_path: Path) -> ControlPlane:
    """Four nodes with four slots each."""
    return ControlPlane(tmp_path, 4, 4, 4, 4)


def incident(plane: ControlPlane, job: str, kind: str, *ranks: int, **evidence: float) -> Incident:
    row = plane.store.job(job)
    return Incident(
        kind=kind,  # type: ignore[arg-type]
        detector="supervisor",
        attempt=row.attempt,
        timeline=0,
        step=5,
        onset_step=5,
        time=plane.now,
        message=f"{kind} of ranks {ranks}.",
        evidence=evidence,
        ranks=ranks,
    )


def struck(plane: ControlPlane, job: str, kind: str, *ranks: int, **evidence: float) -> list[str]:
    """An incident ends the attempt; where the next one's ranks are."""
    seen = incident(plane, job, kind, *ranks, **evidence)
    row = plane.store.job(job)
    action = Action(
        "restart", row.attempt, 0, 5, plane.now, "Restart.", incidents=(seen,), in_place=False
    )
    plane.now += 1
    moved = (JobState.RECOVERING, Cause.RANK_LOST)
    tell(plane, job, incidents=(seen.to_json(),), actions=(action,), transition=moved)
    plane.controller.next_attempt(job, row.attempt, "Restart.")
    return where(plane, job)


def test_the_attempt_after_an_outvoted_replica_runs_elsewhere_and_the_node_is_left_out(
    wide: ControlPlane,
) -> None:
    job = running(wide, num_nodes=3, parallelism={})
    assert where(wide, job) == ["node0", "node1", "node2"]
    after = struck(wide, job, "replica_disagreement", 5, outvoted=1.0)
    assert after == ["node0", "node3", "node2"]
    assert wide.told(job, "node_replaced") == [
        "Node 10.0.0.2 (node1) is quarantined; its ranks move to node 10.0.0.4 (node3)."
    ]
    (told,) = wide.told(job, "node_quarantined")
    assert told.startswith("Node 10.0.0.2 (node1) is quarantined for 1 d: Replica_disagreement of")
    # Its keeper holds the newest state until the job trains elsewhere.
    wide.steps()
    assert {s.node_id for s in wide.groups.held[job].values()} == {*after, "node1"}
    tell(wide, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))
    wide.steps()
    assert {s.node_id for s in wide.groups.held[job].values()} == {*after}
    # Nobody else is given it either, and what is left out is told.
    other = wide.submit("other")
    wide.steps(2)
    row = wide.store.job(other)
    assert row.state is JobState.QUEUED
    assert "free now: 0, 0, 0 CPU slots; left out: 10.0.0.2 (node1) (Replica" in row.reason
    wide.now += 86400.0
    wide.steps(2)
    assert where(wide, other) == ["node1"]


def test_a_quarantine_outlives_the_controller_and_the_machines_restart(
    wide: ControlPlane, tmp_path: Path
) -> None:
    job = running(wide, num_nodes=3, parallelism={})
    struck(wide, job, "replica_disagreement", 5, outvoted=1.0)
    wide.store.close()
    wide.store = Store(f"sqlite:///{tmp_path}/store.db")
    wide.controller = wide.new_controller()
    # Its Ray node has another id now, and the address that it had.
    wide.groups.renamed["node1"] = "again"
    (entry,) = [v for v in wide.controller.roll.view(wide.now) if v.quarantine]
    assert (entry.node_id, entry.address) == ("again", "10.0.0.2")
    other = wide.submit("other")
    wide.steps(2)
    assert where(wide, other) == []


def test_the_same_word_twice_counts_once(wide: ControlPlane) -> None:
    job = running(wide, num_nodes=2)
    for _ in range(2):
        struck(wide, job, "rank_died", 1)
    row = wide.store.job(job)
    seen = incident(wide, job, "rank_died", 1)
    tell(wide, job, incidents=(seen.to_json(),))
    for _ in range(4):
        wide.controller.desk.settling.settle(row, wide.now)
    (third,) = wide.told(job, "node_quarantined")
    assert "Ranks on it were lost 3 times" in third
    assert wide.controller.next_attempt(job, row.attempt, "again").nodes[0].node_id == "node2"


def test_who_takes_the_place_of_an_accused_node_is_not_accused_of_its_faults(
    wide: ControlPlane,
) -> None:
    job = running(wide, num_nodes=3, parallelism={})
    seen = incident(wide, job, "replica_disagreement", 5, outvoted=1.0)
    tell(wide, job, incidents=(seen.to_json(),), transition=(JobState.RECOVERING, Cause.RANK_LOST))
    # The next attempt could not begin, and not at the second time either.
    for _ in range(3):
        assert wide.controller.desk.mend(wide.store.job(job), wide.now) == ""
        assert where(wide, job) == ["node0", "node3", "node2"]
    # Nor where the job ends before it begins.
    wide.controller.desk.settling.settle(wide.store.job(job), wide.now)
    (told,) = wide.told(job, "node_quarantined")
    assert "(node1)" in told


def test_where_no_other_node_is_free_the_job_goes_on_and_says_so_or_waits(
    tmp_path: Path,
) -> None:
    for policy, goes_on in (("continue", True), ("wait", False)):
        (tmp_path / policy).mkdir()
        plane = ControlPlane(tmp_path / policy, 4, 4, 4)
        job = running(plane, num_nodes=2, recovery={"no_other_node": policy})
        busy = running(plane, "busy")
        attempt = plane.store.job(job).attempt
        if goes_on:
            assert struck(plane, job, "replica_disagreement", 1, outvoted=1.0) == [
                "node0",
                "node1",
            ]
            (told,) = plane.told(job, "node_kept")
            assert told.startswith(
                "Node 10.0.0.1 (node0) is quarantined, and no other is free: the job goes on "
                "there (recovery.no_other_node: continue). Replica"
            )
            continue
        with pytest.raises(NoNodesError, match="needs 1 other node with 4 CPU slots"):
            struck(plane, job, "replica_disagreement", 1, outvoted=1.0)
        plane.supervisors.words = LastWords("NoNodesError: it needs nodes", raised=True)
        plane.supervisors.done.add(job)
        plane.steps(3)
        row = plane.store.job(job)
        assert (row.state.word, row.attempt) == ("recovering", attempt)
        assert "left out: 10.0.0.1 (node0)" in row.reason
        # Waiting for nodes is nobody's loss: the ladder was not asked again.
        assert len(plane.store.past.actions(job)) == 1
        tell(plane, busy, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
        plane.supervisors.done.add(busy)
        plane.steps(4)
        assert where(plane, job) == ["node2", "node1"]
        assert plane.supervisors.started[-1].attempt == attempt + 1


def test_the_only_node_stays_in_use_and_the_job_says_so(plane: ControlPlane) -> None:
    job = running(plane)
    assert struck(plane, job, "replica_disagreement", 1, outvoted=1.0) == ["node0"]
    assert plane.told(job, "node_quarantined") == []
    (told,) = plane.told(job, "node_kept")
    assert told.startswith(
        "Node 10.0.0.1 (node0) is not quarantined: no other node has room for its ranks, so it "
        "stays in use (replica_disagreement of"
    )


def test_a_lost_nodes_ranks_move_to_the_spare_at_once_and_another_spare_is_found(
    wide: ControlPlane,
) -> None:
    job = running(wide, num_nodes=2, resources={"spares": 1})
    assert (where(wide, job), spares(wide, job)) == (["node0", "node1"], ["node2"])
    assert [s.node_id for s in wide.supervisors.started[0].spares] == ["node2"]
    taken = wide.groups.takes
    wide.groups.dead.add("node0")
    resume = wide.controller.next_attempt(job, 1, "rank lost")
    assert [s.node_id for s in resume.nodes] == ["node2", "node1"]
    assert wide.groups.takes == taken, "a spare is there already"
    assert wide.told(job, "node_replaced") == [
        "Node 10.0.0.1 (node0) is lost; its ranks move to the spare 10.0.0.3 (node2)."
    ]
    wide.steps(2, seconds=FILL_EVERY_S)
    assert spares(wide, job) == ["node3"]
    ((told, (seat,)),) = wide.supervisors.spares_told
    assert (told, seat.node_id) == (job, "node3")
    assert wide.told(job, "spare_taken") == ["Node 10.0.0.4 (node3) stands ready as a spare."]
    tell(wide, job, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    wide.supervisors.done.add(job)
    wide.steps()
    assert wide.groups.held == {}


def test_a_spare_that_dies_is_replaced_without_touching_the_ranks(wide: ControlPlane) -> None:
    job = running(wide, num_nodes=2, resources={"spares": 1})
    wide.groups.dead.add("node2")
    wide.steps(2, seconds=FILL_EVERY_S)
    assert (where(wide, job), spares(wide, job)) == (["node0", "node1"], ["node3"])
    assert wide.store.job(job).attempt == 1


def test_a_node_that_failed_its_checks_is_left_out_and_the_next_one_tried(
    wide: ControlPlane,
) -> None:
    job = wide.submit(num_nodes=2)
    wide.steps(2)
    verdict = Verdict({"node1": Failure("its clock is +90 s off", False)}, 0.2, 2)
    notice = preflight_told(verdict, {"node1": "10.0.0.2"})
    event = EventDraft(notice.kind, wide.now, notice.message, notice.detail)
    tell(wide, job, events=(event,))
    resume = wide.controller.next_attempt(job, 1, notice.message)
    assert [s.node_id for s in resume.nodes] == ["node0", "node2"]
    assert wide.told(job, "node_quarantined") == [
        "Node 10.0.0.2 (node1) is quarantined for 15 min: Its clock is +90 s off."
    ]
    assert wide.store.job(job).state is JobState.STARTING


def test_a_node_that_grants_nothing_is_passed_over_for_a_while(wide: ControlPlane) -> None:
    wide.groups.unwilling.add("node0")
    job = wide.submit()
    wide.steps()
    assert wide.store.job(job).reason == (
        "needs 1 node with 4 CPU slots; Ray didn't grant 10.0.0.1 (node0) yet"
    )
    wide.steps()
    assert where(wide, job) == ["node1"]
    wide.groups.unwilling.clear()
    wide.now += UNWILLING_S
    other = wide.submit("other")
    wide.steps()
    assert where(wide, other) == ["node0"]


def test_the_autoscaler_is_asked_while_nodes_are_short_and_told_when_they_are_not(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, fixed=False)
    first = running(plane, "first")
    assert plane.groups.wishes == [[]]
    second = plane.submit("second", num_nodes=2)
    plane.steps(3)
    assert plane.groups.wishes[1:] == [[{"CPU": 4.0}] * 3]
    plane.groups.total |= {"node1": 4, "node2": 4}
    plane.steps(3)
    assert where(plane, second) == ["node1", "node2"]
    assert plane.groups.wishes[2:] == [[]]
    # A lost node is asked for too.
    plane.groups.dead.add("node0")
    plane.supervisors.done.add(first)
    plane.steps(3)
    assert plane.groups.wishes[3:] == [[{"CPU": 4.0}] * 3]


def test_users_take_turns(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4)
    jobs = [plane.submit(f"a{i}", by="ann") for i in range(3)]
    jobs += [plane.submit("b0", by="bob")]
    for _ in jobs:
        plane.steps(3)
        (job,) = plane.supervisors.alive
        tell(plane, job, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
        plane.supervisors.done.add(job)
        plane.steps(2)
    assert [r.job for r in plane.supervisors.started] == [jobs[0], jobs[3], jobs[1], jobs[2]]


class Killed(BaseException):
    """Whoever runs this dies here."""


class TestWhatNoRecordKnows:
    """Nodes that were granted before their record was written are in nobody's way for long."""

    def killed_in(self, plane: ControlPlane, method: str, error: BaseException) -> None:
        whole = getattr(plane.store, method)

        def dies(*_: Any, **__: Any) -> None:
            setattr(plane.store, method, whole)
            raise error

        setattr(plane.store, method, dies)

    def dies_without_a_word(
        self, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, passes: int
    ) -> None:
        """Killed with -9: nothing of it runs any more."""
        with monkeypatch.context() as gone:
            gone.setattr(plane.groups, "give_back", lambda job, seats: None)
            with pytest.raises(Killed):
                plane.steps(passes)
        plane.controller = plane.new_controller()

    def test_a_controller_that_is_killed_before_it_stored_a_grant_leaks_no_node(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = ControlPlane(tmp_path, 4)
        job = plane.submit("mine")
        self.killed_in(plane, "grant", Killed())
        self.dies_without_a_word(plane, monkeypatch, 2)
        assert plane.groups.held[job] and plane.state(job) == "queued"
        plane.steps(3)
        assert plane.state(job) == "starting"

    def test_nor_one_whose_job_is_cancelled_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = ControlPlane(tmp_path, 4)
        job = plane.submit("mine")
        self.killed_in(plane, "grant", Killed())
        self.dies_without_a_word(plane, monkeypatch, 2)
        plane.controller.cancel(job, "no more")
        other = plane.submit("other")
        plane.steps(3)
        assert plane.state(other) == "starting"

    def test_a_store_that_refuses_the_record_gives_the_nodes_back_at_once(
        self, tmp_path: Path
    ) -> None:
        plane = ControlPlane(tmp_path, 4)
        job = plane.submit("mine")
        self.killed_in(plane, "grant", StoreUnavailableError("locked"))
        plane.steps(1)
        assert not plane.groups.held.get(job)
        plane.steps(2)
        assert plane.state(job) == "starting"

    def test_a_seat_that_was_to_replace_a_lost_one_is_taken_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        job = running(plane, "mine")
        plane.groups.dead.add("node0")
        plane.supervisors.done.add(job)
        plane.groups.keepers[job] = {1: Keeper()}
        self.killed_in(plane, "replace_nodes", Killed())
        self.dies_without_a_word(plane, monkeypatch, 4)
        assert {s.node_id for s in plane.groups.held[job].values()} == {"node0", "node1"}
        plane.steps(4)
        assert where(plane, job) == ["node1"]

    def test_what_a_record_knows_stays(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        jobs = [running(plane, "low", resources={"spares": 1})]
        before = {job: dict(seats) for job, seats in plane.groups.held.items()}
        plane.controller = plane.new_controller()
        plane.now += 10 * RECONCILE_EVERY_S
        plane.steps(3)
        assert plane.groups.held == before and plane.state(jobs[0]) == "running"


class TestByHand:
    def test_a_node_is_left_out_until_it_is_released_and_its_job_is_told(
        self, plane: ControlPlane, api: TestClient
    ) -> None:
        job = running(plane)
        body = {"reason": "fan is broken", "by": "ann", "seconds": None}
        shown = api.post("/v1/nodes/10.0.0.1/quarantine", json=body).json()
        assert shown["quarantine"]["reason"] == "Fan is broken."
        assert plane.told(job, "node_quarantined") == [
            "Node 10.0.0.1 (node0) is quarantined by ann until it is released: Fan is broken."
        ]
        assert plane.state(job) == "running"
        (node,) = api.get("/v1/nodes").json()["nodes"]
        assert node["held_by"] == [{"job": job, "slots": 4, "spare": False}]
        assert node["quarantine"]["until"] is None
        assert api.post("/v1/nodes/node0/release").json()["quarantine"] is None
        again = api.post("/v1/nodes/node0/release")
        assert again.status_code == 404 and "is not quarantined" in again.json()["error"]

    def test_a_node_that_is_not_there_or_not_the_only_one_is_told(self, wide: ControlPlane) -> None:
        roll = wide.controller.roll
        with pytest.raises(NodeNotFoundError, match=r"no node 'node9'; there are 10\.0\.0\.1"):
            roll.quarantine("node9", "x", "me", None, wide.now)
        with pytest.raises(NodeNotFoundError, match="'node' could be node0, node1, node2, node3"):
            roll.quarantine("node", "x", "me", None, wide.now)

    def test_a_quarantined_node_that_is_gone_is_shown(self, wide: ControlPlane) -> None:
        roll = wide.controller.roll
        roll.quarantine("node2", "x", "me", 50.0, wide.now)
        wide.groups.dead.add("node2")
        (gone,) = [v for v in roll.view(wide.now) if not v.alive]
        assert (gone.node_id, gone.address) == ("node2", "10.0.0.3")
        assert roll.release("10.0.0.3", "me", wide.now).quarantine is None
        assert all(v.alive for v in roll.view(wide.now))

    def test_the_command_shows_quarantines_and_releases(
        self, home: Home, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert call(["nodes", "quarantine", "10.0.0.1", "--reason", "hot", "--for", "2h"]) == 0
        assert "10.0.0.1 quarantined by " in capsys.readouterr().out
        assert call(["nodes"]) == 0
        header, line = capsys.readouterr().out.splitlines()
        assert header.split() == ["NODE", "ID", "FREE", "HELD", "BY", "STATE"]
        assert "4/4 CPU" in line and line.endswith(": Hot.")
        assert call(["nodes", "-o", "json"]) == 0
        (node,) = json.loads(capsys.readouterr().out)
        assert node["quarantine"]["kind"] == "by_hand"
        assert call(["nodes", "release", "node0"]) == 0
        assert capsys.readouterr().out == "10.0.0.1 ready\n"
        assert call(["nodes", "release", "elsewhere"]) == 102
        assert "`octavo nodes` shows the nodes" in capsys.readouterr().err
        assert call(["nodes", "quarantine", "node0", "--reason", "x", "--for", "soon"]) == 2


def test_an_older_store_gets_what_it_lacks(tmp_path: Path, plane: ControlPlane) -> None:
    import sqlalchemy as sa

    url = f"sqlite:///{tmp_path}/old.db"
    store = Store(url)
    engine = sa.create_engine(url)
    with engine.begin() as db:
        db.execute(sa.text("DROP TABLE quarantines"))
        for index in ("submitted", "by_submitted", "by_granted"):
            db.execute(sa.text(f"DROP INDEX ix_jobs_{index}"))
        for column in ("submitted_by", "granted_at"):
            db.execute(sa.text(f"ALTER TABLE jobs DROP COLUMN {column}"))
        db.execute(sa.text('ALTER TABLE accusations DROP COLUMN "check"'))
    store.close()
    again = Store(url)
    spec = plane.store.job(plane.submit()).spec
    again.add_job("a-1", spec, "/a", "a.yaml", 1.0, by="ann", key="k")
    assert again.job("a-1").submitted_by == "ann"
    assert again.nodes.in_force(plane.now) == []
    case = Accusation("n0", "", "a-1", 1, "preflight", "Wrong.", 1.0, check="matmul")
    ((told, _),) = again.nodes.accuse("a-1", [case], QuarantineConfig(), [], 1.0)
    assert told == case
    with engine.begin() as db:
        assert db.execute(sa.text('SELECT "check" FROM accusations')).scalars().all() == ["matmul"]
    indexes = {found["name"] for found in sa.inspect(engine).get_indexes("jobs")}
    assert {"ix_jobs_by_submitted", "ix_jobs_submitted", "ix_jobs_by_granted"} <= indexes


def test_a_node_is_named_by_address_and_the_beginning_of_its_id(plane: ControlPlane) -> None:
    (node,) = plane.groups.capacities()
    assert told_node(node) == "10.0.0.1 (node0)"


def test_a_keeper_that_dies_while_the_job_trains_is_started_again_and_told_once(
    plane: ControlPlane,
) -> None:
    job = plane.submit("toy")
    plane.steps(2)
    plane.steps(20)
    assert plane.told(job, "keeper_started") == []
    plane.groups.without_keeper.add((job, 0))
    plane.steps(1)
    assert not plane.groups.without_keeper, "in the pass that finds it"
    plane.steps(30)
    (told,) = plane.told(job, "keeper_started")
    assert told.startswith("The keeper of snapshots on 10.0.0.1 (node0) died and was started again")
