"""Whom preflight's failures are laid to: a node, or what nodes have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.keeper import Keeper
from launch.preflight import Answer, Demand, Failure, Limits, Probe, Verdict, judge
from launch.rank_group import Seat
from orchestrator.controller.supervisors import LastWords
from orchestrator.controller.tending import NoNodesError
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.preflight_gate import PreflightGate
from orchestrator.supervision.supervision import Supervision
from tests.unit.control_plane import ControlPlane, tell, where
from tests.unit.scripted_job import ScriptedRanks

HUNG = Failure("no answer for 20 s (preflight.timeout_s)", False, "answer")
BROKEN = Failure("device: torch sees no CUDA device: look at the driver", False, "device")
Found = Callable[[str, Demand, Limits], Failure | None]


class Workers(ScriptedRanks):
    """Of any number of nodes."""

    def start(self, seats: Sequence[Seat]) -> None:
        self.running = False


@dataclass
class Checks:
    """Done at once."""

    said: Verdict

    def verdict(self, now: float) -> Verdict | None:
        return self.said


def off(seconds: float) -> Found:
    """Nodes that agree with each other, and whose clocks are so far off the controller's."""

    def found(node: str, demand: Demand, limits: Limits) -> Failure | None:
        probe = Probe(100.0 + seconds, 1, 10**12, 10**15, 0, "cpu")
        return judge(Answer(probe, 99.9, 100.1), demand, limits)

    return found


def of(failures: dict[str, Failure]) -> Found:
    """Failures by node; the others pass."""
    return lambda node, demand, limits: failures.get(node)


class Supervised:
    """A job with a real supervision, whose nodes are checked as ``found`` says."""

    def __init__(self, plane: ControlPlane, job: str, found: Found) -> None:
        self.plane, self.job, self.found = plane, job, found
        self.ranks = Workers()
        self.alive: Supervision | None = None

    def begin(
        self,
        seats: Sequence[Seat],
        newcomers: set[str],
        demand: Demand,
        limits: Limits,
        now: float,
        timeout_s: float,
    ) -> Checks:
        told = {n: self.found(n, demand, limits) for n in sorted(newcomers)}
        failed = {node: failure for node, failure in told.items() if failure is not None}
        return Checks(Verdict(failed, 0.2, len(seats)))

    def turn(self) -> None:
        """A pass of its supervisor, if it has one."""
        plane = self.plane
        if self.alive is None and self.job in plane.supervisors.alive:
            resume = plane.supervisors.alive[self.job]
            gate = PreflightGate(resume.spec, self.begin)
            self.alive = Supervision(
                resume, plane.controller, self.ranks, clock=plane.clock, gate=gate
            )
        if self.alive is None:
            return
        try:
            self.alive.step()
        except NoNodesError as error:
            plane.supervisors.words = LastWords(f"NoNodesError: {error}", raised=True)
        else:
            if self.alive.phase is not Phase.OVER:
                return
        plane.supervisors.done.add(self.job)
        self.alive.close()
        self.alive = None


def go(plane: ControlPlane, *jobs: Supervised, passes: int = 12, seconds: float = 0.5) -> None:
    for _ in range(passes):
        plane.steps(1, seconds)
        for job in jobs:
            job.turn()


def left_out(plane: ControlPlane) -> dict[str, str]:
    """Nodes that are quarantined now, and for what."""
    views = plane.controller.roll.view(plane.clock())
    return {v.node_id: v.quarantine.kind for v in views if v.quarantine is not None}


def attempts(plane: ControlPlane, job: str) -> int:
    return plane.store.job(job).attempt


def test_the_heads_clock_costs_the_cluster_no_node_and_ends_the_job_with_what_to_look_at(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4, 4, 4, 4)
    job = plane.submit("toy", num_nodes=2)
    go(plane, Supervised(plane, job, off(9.7)))
    row = plane.store.job(job)
    assert (row.state.word, row.attempt) == ("paused", 3)
    assert (ended := plane.told(job, "ended")[-1]).startswith(
        "Paused for a person, 3 attempts in a row ended without a new step "
        "(recovery.max_attempts_without_progress = 3): Preflight failed on 10.0.0."
    )
    assert "its clock is +9.6 s off the controller's" in ended
    assert set(left_out(plane).values()) == {"unfit"}
    first, *_ = plane.told(job, "nodes_alike")
    assert first == (
        "Preflight failed alike on 2 nodes, which is hardly their fault: they are left out for "
        f"{job} alone. Look at the clock of the controller's machine."
    )
    assert len(plane.told(job, "nodes_alike")) == 3
    innocent = plane.submit("innocent", by="bob", num_nodes=6)
    plane.steps(3)
    assert plane.state(innocent) == "starting"


def test_a_job_whose_checks_hang_on_node_after_node_gives_back_the_node_it_cost(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4, 4)
    job = plane.submit("toy")
    hangs = Supervised(plane, job, of({f"node{i}": HUNG for i in range(4)}))
    while attempts(plane, job) < 2:
        go(plane, hangs, passes=1)
    assert left_out(plane) == {"node0": "preflight"}
    go(plane, hangs)
    assert plane.state(job) == "paused"
    assert left_out(plane) == {"node1": "unfit", "node2": "unfit"}
    (released,) = plane.told(job, "node_released")
    assert released.startswith("Node 10.0.0.1 (node0) is released by the controller, for other")
    told = plane.told(job, "nodes_alike")[0]
    assert told.endswith("the network between the controller's machine and the nodes.")
    # As if it had never been: what node0 is accused of next is its first.
    other = plane.submit("other", by="bob")
    go(plane, Supervised(plane, other, of({"node0": BROKEN})))
    assert (
        "Node 10.0.0.1 (node0) is quarantined for 15 min"
        in plane.told(other, "node_quarantined")[0]
    )


def test_a_job_that_fails_on_node_after_node_holds_no_more_than_it_asks_for(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4, 4)
    job = plane.submit("toy", num_nodes=2, recovery={"max_attempts_without_progress": 2})
    plane.groups.keepers[job] = {seat: Keeper() for seat in range(4)}
    hangs = Supervised(plane, job, of({f"node{i}": HUNG for i in range(4)}))
    while attempts(plane, job) < 2:
        go(plane, hangs, passes=1)
    assert {seat.node_id for seat in plane.groups.held[job].values()} == {"node2", "node3"}


def test_one_bad_node_is_left_out_for_all_and_the_job_goes_on_without_it(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4, 4)
    job = plane.submit("toy", num_nodes=3)
    good = Supervised(plane, job, of({"node1": BROKEN}))
    go(plane, good)
    assert left_out(plane) == {"node1": "preflight"}
    assert (attempts(plane, job), good.ranks.running) == (2, True)
    assert plane.told(job, "nodes_alike") == []


def test_a_node_that_fails_the_last_attempt_is_left_out_as_well(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    job = plane.submit("toy", num_nodes=2, recovery={"max_attempts_without_progress": 1})
    go(plane, Supervised(plane, job, of({"node1": BROKEN})))
    assert plane.state(job) == "paused"
    assert left_out(plane) == {"node1": "preflight"}


def test_where_all_nodes_failed_they_are_tried_again_by_and_by_until_a_person_is_called(
    tmp_path: Path,
) -> None:
    for slots in ((4,), (4, 4)):
        folder = tmp_path / str(len(slots))
        folder.mkdir()
        plane = ControlPlane(folder, *slots)
        job = plane.submit("toy", num_nodes=len(slots))
        failing = Supervised(plane, job, of({"node0": HUNG, "node1": HUNG}))
        go(plane, failing, passes=6)
        assert plane.state(job) == "recovering"
        assert "left out: 10.0.0.1 (node0) (No answer for 20 s" in plane.store.job(job).reason
        # Nobody else pays for it.
        other = plane.submit("other", by="bob")
        assert plane.controller.desk.sight(plane.now).barred(other) == {}
        plane.controller.cancel(other, "no more")
        go(plane, failing, passes=20, seconds=30.0)
        assert (plane.state(job), attempts(plane, job)) == ("paused", 3)


def test_a_storage_that_was_full_keeps_no_job_waiting_once_it_is_resumed(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    job = plane.submit("toy", num_nodes=2)
    full = Failure("0.1 GB free for /shared/jobs, and a checkpoint takes 98 GB", True, "disk")
    filled = Supervised(plane, job, of({"node0": full, "node1": full}))
    for _ in range(40):
        if plane.state(job) != "paused":
            go(plane, filled, passes=1, seconds=30.0)
    assert (plane.state(job), attempts(plane, job)) == ("paused", 3)
    assert "0.1 GB free" in plane.store.job(job).reason
    (sent,) = [e for e in plane.store.past.events(job) if e["kind"] == "ended"]
    assert "max_attempts_without_progress" in sent["message"]
    # A person frees it while the nodes are still left out, for the job alone.
    go(plane, filled, passes=2)
    assert left_out(plane) == {"node0": "unfit", "node1": "unfit"}
    filled.found = of({})
    plane.controller.resume(job, "resumed by ada")
    assert left_out(plane) == {}
    go(plane, filled, passes=4)
    assert attempts(plane, job) == 4 and filled.alive is not None
    assert filled.alive.phase is Phase.TRAINING


def test_whoever_resumes_at_once_need_not_wait_for_nodes_that_the_last_attempt_failed_on(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    job = plane.submit("toy", num_nodes=2)
    full = Failure("0.1 GB free for /shared/jobs, and a checkpoint takes 98 GB", True, "disk")
    filled = Supervised(plane, job, of({"node0": full, "node1": full}))
    while plane.state(job) != "paused":
        plane.steps(1, 30.0)
        if plane.state(job) != "paused":
            filled.turn()
    # Its supervisor writes the report, and the nodes are the job's until it has.
    assert plane.store.job(job).nodes and job in plane.supervisors.alive
    filled.found = of({})
    plane.controller.resume(job, "resumed by ada, who made room")
    assert left_out(plane) == {}
    go(plane, filled, passes=8)
    assert left_out(plane) == {}
    assert attempts(plane, job) == 4 and filled.alive is not None
    assert filled.alive.phase is Phase.TRAINING


def test_jobs_of_one_node_each_do_not_add_up_to_the_cluster(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4, 4, 4, 4)
    jobs = [Supervised(plane, plane.submit(f"toy{i}"), off(-60.0)) for i in range(6)]
    go(plane, *jobs, passes=30)
    assert "preflight" not in left_out(plane).values()
    assert any(plane.told(job.job, "nodes_alike") for job in jobs)


def test_what_all_nodes_failed_at_once_is_held_against_none_of_them_afterwards(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, *[4] * 8)
    batches = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1}
    job = plane.submit("toy", num_nodes=4, training=batches)
    plane.steps(2)
    hung = asdict(Failure("no answer for 20 s (preflight.timeout_s)", False, "answer"))
    failed = dict.fromkeys(where(plane, job), hung)
    told = EventDraft("preflight_failed", plane.now, "Failed.", {"failed": failed})
    tell(plane, job, events=(told,), transition=(JobState.RECOVERING, Cause.RANK_LOST))
    plane.controller.next_attempt(job, 1, "preflight failed")
    plane.now += 60
    tell(plane, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))
    plane.steps(2)
    assert set(left_out(plane).values()) <= {"unfit"}, "the network was away, for all of them"
    third = plane.submit("third", by="eve", num_nodes=2)
    plane.steps(3)
    assert plane.state(third) == "starting"
