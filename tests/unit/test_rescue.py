"""What only the nodes' memory holds when a job comes to rest is on disk before they go back."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import keeper as keepers
from launch.attempt_folder import open_attempt
from launch.checkpoints import commit_checkpoint, list_checkpoints, read_rank_file, write_rank_file
from launch.digests import digest_of
from launch.keeper import Keeper
from launch.snapshots import MismatchedSnapshotError, MissingSnapshotError, SnapshotKey
from launch.state_header import LAYOUT, META_KEY
from orchestrator.actions import Action
from orchestrator.controller.supervisors import LastWords
from orchestrator.controller.tending import NoNodesError
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.nodes import rescue
from orchestrator.nodes.rescue import _Look
from orchestrator.protocol import SupervisorBatch
from orchestrator.recovery.controls import Control
from orchestrator.saved import checkpoint_shelf
from orchestrator.supervision.supervisor import written_since
from tests.unit.control_plane import ControlPlane
from tests.unit.test_store import step

WORLD = 4


def state(rank: int, step: int, degrees: Sequence[int] = (2, 2, 1)) -> bytes:
    """A packed state without tensors."""
    meta = {"rank": rank, "step": step, LAYOUT: {"degrees": list(degrees)}}
    text = json.dumps({"__metadata__": {META_KEY: json.dumps(meta)}}).encode()
    return len(text).to_bytes(8, "little") + text


class RestingJob:
    """A job of four ranks whose steps are recorded and whose ranks are gone."""

    def __init__(self, plane: ControlPlane, recorded: int = 18, **changes: Any) -> None:
        self.plane = plane
        self.id = plane.submit("toy", **changes)
        plane.steps(2)
        steps = tuple(step(number) for number in range(recorded + 1))
        self._tell(1, Cause.FIRST_STEP, JobState.RUNNING, steps=steps)
        self.folder = Path(plane.store.job(self.id).job_dir)

    def hold(self, step: int, ranks: Sequence[int] = range(WORLD), **of: Any) -> None:
        """Two seats hold a copy of each of these ranks."""
        held = self.plane.groups.keepers.setdefault(self.id, {0: Keeper(), 1: Keeper()})
        for keeper in held.values():
            for rank in ranks:
                self.put(keeper, rank, step, **of)

    def put(
        self,
        keeper: Keeper,
        rank: int,
        step: int,
        degrees: Sequence[int] = (2, 2, 1),
        attempt: int = 1,
    ) -> None:
        payload = state(rank, step, degrees)
        keeper.put(SnapshotKey(self.id, attempt, 0, rank, step), payload, digest_of(payload))

    def write(self, step: int) -> None:
        """A checkpoint that the ranks made."""
        open_attempt(self.folder, 1)
        for rank in range(WORLD):
            payload = state(rank, step)
            key = SnapshotKey(self.id, 1, 0, rank, step)
            write_rank_file(self.folder, key, payload, digest_of(payload))
        commit_checkpoint(self.folder, step, 1, range(WORLD))

    def end(self, word: JobState = JobState.PAUSED, *actions: Action, attempt: int = 1) -> None:
        """Its supervisor says so, and is gone."""
        causes = {JobState.PAUSED: Cause.BUDGET_SPENT, JobState.FAILED: Cause.ERROR}
        causes[JobState.SUCCEEDED] = Cause.STEPS_DONE
        sequence = 2 if attempt == 1 else 1
        self._tell(sequence, causes[word], word, attempt=attempt, actions=actions)
        self.plane.supervisors.done.add(self.id)
        self.rest()

    def rest(self) -> None:
        """Until its nodes are back."""
        for _ in range(20):
            self.plane.steps()
            for thread in threading.enumerate():
                if thread.name == f"rescue {self.id}":
                    thread.join(20)
            if not self.plane.store.job(self.id).placement_group:
                return
        raise AssertionError("the nodes never came back")

    def on_disk(self) -> list[int]:
        return [checkpoint.step for checkpoint in list_checkpoints(self.folder)]

    def _tell(
        self, sequence: int, cause: Cause, state: JobState, attempt: int = 1, **told: Any
    ) -> None:
        batch = SupervisorBatch(sequence, transition=(state, cause), **told)
        assert self.plane.controller.report(self.id, attempt, batch).accepted


@pytest.mark.parametrize("word", [JobState.PAUSED, JobState.FAILED])
def test_the_newest_step_that_every_rank_has_a_copy_of_becomes_a_checkpoint(
    plane: ControlPlane, word: JobState
) -> None:
    job = RestingJob(plane)
    job.write(10)
    job.hold(10)
    job.hold(15)
    job.hold(20, ranks=range(WORLD - 1))
    job.end(word)
    assert max(job.on_disk()) == 15
    for rank in range(WORLD):
        found = read_rank_file(job.folder / "checkpoints/step-00000015", rank, 15)
        assert bytes(found.payload) == state(rank, 15)
    told = plane.told(job.id, "checkpoint_written")
    assert told == [
        "Checkpoint of step 15 written from the nodes' memory: no rank was left that could have "
        "written its last state."
    ]
    assert job.id not in plane.groups.held
    # The next attempt's W&B run tells of it, and no run after that.
    past = plane.store.past.history(job.id)
    assert written_since(past) == [15]
    begun = {"kind": "attempt_started", "time": 0.0, "message": "", "detail": {}}
    assert written_since(replace(past, events=(*past.events, begun))) == []
    # What its supervisor left when it ended knew nothing of that.
    summary = json.loads((job.folder / "summary.json").read_text())
    assert (summary["checkpoint_step"], summary["state"]) == (15, word.word)
    assert summary["steps"] == 19 and (job.folder / "report.html").stat().st_size > 1000


def test_each_rank_is_written_once_and_both_seats_have_their_share(plane: ControlPlane) -> None:
    job = RestingJob(plane)
    job.hold(15)
    orders = []
    write = plane.groups.write_copies
    plane.groups.write_copies = lambda order: orders.append(order) or write(order)  # type: ignore[func-returns-value, method-assign]
    job.end()
    (order,) = orders
    assert [len(keys) for keys in order.keys.values()] == [2, 2]
    ranks = sorted(key.rank for keys in order.keys.values() for key in keys)
    assert ranks == [0, 1, 2, 3]


def test_what_disk_has_already_is_not_written_again(plane: ControlPlane) -> None:
    job = RestingJob(plane)
    job.hold(10)
    job.hold(15)
    job.write(15)
    job.end()
    assert job.on_disk() == [15] and not plane.told(job.id, "checkpoint_written")


def test_a_state_that_was_gone_back_from_is_not_kept(plane: ControlPlane) -> None:
    job = RestingJob(plane)
    job.hold(10)
    job.hold(15)
    job.end(
        JobState.PAUSED,
        Action("pause", attempt=1, timeline=0, step=18, time=9.0, reason="spent", to_step=10),
    )
    assert job.on_disk() == [10]


def test_a_job_that_succeeded_has_written_what_it_was_for(plane: ControlPlane) -> None:
    job = RestingJob(plane)
    job.hold(15)
    job.end(JobState.SUCCEEDED)
    assert job.on_disk() == []


def test_copies_of_more_ranks_than_the_last_attempt_had_are_written_with_all_of_them(
    plane: ControlPlane,
) -> None:
    job = RestingJob(plane)
    job.write(10)
    job.hold(15, ranks=range(8), degrees=(2, 4, 1))
    job.end()
    newest = max(list_checkpoints(job.folder), key=lambda checkpoint: checkpoint.step)
    assert (newest.step, set(newest.files)) == (15, set(range(8)))
    assert newest.run["parallelism"]["data"] == 4 and not plane.told(job.id, "checkpoint_failed")


def test_copies_of_more_ranks_of_which_some_are_lost_leave_the_disk_as_it_was(
    plane: ControlPlane,
) -> None:
    job = RestingJob(plane)
    job.write(10)
    job.hold(15, degrees=(2, 4, 1))
    job.end()
    assert job.on_disk() == [10]


def test_what_a_smaller_attempt_trained_anew_is_not_passed_by(plane: ControlPlane) -> None:
    job = RestingJob(plane)
    job.hold(15, ranks=range(8), degrees=(2, 4, 1))
    plane.controller.next_attempt(job.id, 1, "a node died")
    # It went back to the seed, on fewer nodes; a keeper that it has none of its ranks on knows
    # nothing of that.
    own = plane.groups.keepers[job.id][2] = Keeper()
    for rank in range(WORLD):
        job.put(own, rank, 5, attempt=2)
    job.end(attempt=2)
    assert job.on_disk() == [5]


def test_where_the_newest_copy_is_damaged_the_one_before_it_is_kept(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = RestingJob(plane)
    job.hold(10)
    job.hold(15)
    whole = keepers.Keeper.get

    def get(self: Keeper, key: SnapshotKey) -> Any:
        if key.step == 15 and key.rank == 2:
            raise MissingSnapshotError(2, 15, "memory", "flipped")
        return whole(self, key)

    monkeypatch.setattr(keepers.Keeper, "get", get)
    job.end()
    assert job.on_disk() == [10]
    assert len(plane.told(job.id, "checkpoint_failed")) == 1


def test_a_disk_that_fails_is_told_and_the_nodes_go_back_all_the_same(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.nodes.rescue.STORAGE_S", 0.0)
    job = RestingJob(plane)
    job.hold(15)
    (job.folder / "checkpoints").write_text("a file")
    job.end()
    (told,) = plane.told(job.id, "checkpoint_failed")
    assert "step 15" in told and job.id not in plane.groups.held


def test_a_storage_that_comes_back_meanwhile_is_waited_for(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
    job = RestingJob(plane)
    job.hold(15)
    away = job.folder / "checkpoints"
    away.write_text("no folder is here")
    copies = plane.groups.copies
    looks = []

    def back_at_the_third(of: str) -> Any:
        looks.append(of)
        if len(looks) == 3:
            away.unlink()
        return copies(of)

    plane.groups.copies = back_at_the_third  # type: ignore[method-assign]
    job.end()
    assert job.on_disk() == [15] and not plane.told(job.id, "checkpoint_failed")


def test_a_storage_that_lets_no_call_return_holds_no_nodes_for_ever(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "STORAGE_S", 0.2)
    monkeypatch.setattr(rescue, "TOLD_AFTER_S", 0.05)
    monkeypatch.setattr(rescue, "patience_s", lambda nbytes: 0.1)
    back = threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        back.wait()
        return []

    monkeypatch.setattr(checkpoint_shelf, "list_checkpoints", hangs)
    job = RestingJob(plane)
    job.hold(15)
    plane.store.change(job.id, Cause.BUDGET_SPENT, "3 attempts in a row", plane.now)
    plane.supervisors.kill(job.id)
    while job.id in plane.groups.held:
        plane.steps()
    assert len(plane.told(job.id, "rescue")) == 1
    (why,) = plane.told(job.id, "checkpoint_failed")
    assert "step 15" in why and "its storage lets no call return" in why
    # Once it does, nobody waits for it any more, and nothing else is told.
    back.set()
    for thread in threading.enumerate():
        if thread.name == f"rescue {job.id}":
            thread.join(20)
    assert plane.told(job.id, "checkpoint_failed") == [why]


def test_a_write_has_its_time_though_its_copies_were_not_found_at_the_first_look() -> None:
    look = _Look.of({})
    assert look.given_s < 2 * rescue.STORAGE_S + 100
    began = look.since
    look.writes(7200.0)
    assert look.given_s == rescue.STORAGE_S + 7200.0 and look.since >= began


@pytest.mark.parametrize("times", [1, 3])
def test_keepers_that_take_their_time_to_say_what_they_hold_are_waited_for(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
    job = RestingJob(plane)
    job.hold(15)
    plane.groups.mute = times
    job.end()
    assert job.on_disk() == [15]


def test_keepers_that_never_say_so_hold_no_nodes_for_ever(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.nodes.rescue.STORAGE_S", 0.05)
    monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
    job = RestingJob(plane)
    job.hold(15)
    plane.groups.mute = 1_000_000
    job.end()
    assert job.on_disk() == [] and job.id not in plane.groups.held


def test_what_failed_is_told_though_the_keepers_die_while_the_storage_is_waited_for(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
    job = RestingJob(plane)
    job.hold(15)
    (job.folder / "checkpoints").write_text("no folder is here")
    whole, looks = plane.groups.copies, []
    plane.groups.copies = lambda of: {} if looks else looks.append(of) or whole(of)  # type: ignore[func-returns-value, method-assign]
    job.end()
    (told,) = plane.told(job.id, "checkpoint_failed")
    assert "step 15" in told


def test_a_controller_that_is_killed_meanwhile_leaves_it_to_the_next_one(
    plane: ControlPlane,
) -> None:
    job = RestingJob(plane)
    job.hold(15)
    begun, written = threading.Event(), threading.Event()
    write = plane.groups.write_copies

    def never(order: Any) -> Mapping[int, str]:
        begun.set()
        written.wait(60)
        return dict.fromkeys(range(WORLD), "the controller is gone")

    plane.groups.write_copies = never  # type: ignore[method-assign, assignment]
    batch = SupervisorBatch(2, transition=(JobState.PAUSED, Cause.BUDGET_SPENT))
    assert plane.controller.report(job.id, 1, batch).accepted
    plane.supervisors.done.add(job.id)
    plane.steps(3)
    assert begun.wait(60) and plane.store.job(job.id).placement_group
    plane.groups.write_copies = write  # type: ignore[method-assign]
    plane.controller = plane.new_controller()
    plane.steps()
    written.set()
    job.rest()
    assert job.on_disk() == [15]


def test_a_keeper_writes_nothing_that_it_does_not_hold_or_that_is_of_other_ranks(
    tmp_path: Path,
) -> None:
    held, payload = Keeper(), state(0, 5)
    key = SnapshotKey("job", 1, 0, 0, 5)
    held.put(key, payload, digest_of(payload))
    open_attempt(tmp_path, 3)
    with pytest.raises(MissingSnapshotError):
        held.write(SnapshotKey("job", 1, 0, 0, 6), tmp_path, 3, 2, WORLD)
    with pytest.raises(MismatchedSnapshotError):
        held.write(key, tmp_path, 3, 2, WORLD + 1)
    held.write(key, tmp_path, 3, 2, WORLD)
    (written,) = (tmp_path / "checkpoints/.attempt-3/step-00000005-timeline-2").glob(
        "*.safetensors"
    )
    assert written.read_bytes() == payload


class ShrinkingJob(RestingJob):
    """Of eight ranks on two nodes, of which one has died; the other holds the copies of all."""

    def __init__(self, folder: Path) -> None:
        elastic = {"num_nodes": 2, "resources": {"min_nodes": 1}}
        super().__init__(ControlPlane(folder, 4, 4), **elastic)
        self.plane.groups.keepers[self.id] = {0: Keeper()}
        self.hold(15, ranks=range(8), degrees=(2, 4, 1))
        self.plane.groups.dead.add("node1")

    def loses_ranks(self) -> None:
        """Its supervisor asks for the next attempt."""
        self._tell(2, Cause.RANK_LOST, JobState.RECOVERING)
        with pytest.raises(NoNodesError, match="memory holds is on disk") as refused:
            self.plane.controller.next_attempt(self.id, 1, "a node died")
        self.plane.supervisors.words = LastWords(f"NoNodesError: {refused.value}", raised=True)
        self.plane.supervisors.done.add(self.id)

    def passes(self, count: int = 4) -> None:
        for _ in range(count):
            self.plane.steps()
            for thread in threading.enumerate():
                if thread.name == f"rescue {self.id}":
                    thread.join(20)


class TestBeforeFewerRanks:
    def test_what_memory_holds_of_all_ranks_is_on_disk_first(self, tmp_path: Path) -> None:
        job = ShrinkingJob(tmp_path)
        job.loses_ranks()
        job.passes()
        assert job.on_disk() == [15]
        again = job.plane.supervisors.started[-1]
        assert (again.attempt, len(again.nodes), again.spec.parallelism.data) == (2, 1, 2)
        assert not (job.folder / "summary.json").exists(), "it isn't at its end"
        # What came of it is not what comes of its end.
        job.hold(18, attempt=2)
        job.plane.controller.cancel(job.id, "by alice")
        job.plane.supervisors.kill(job.id)
        job.rest()
        assert max(job.on_disk()) == 18

    def test_a_disk_that_fails_holds_it_up_for_a_bounded_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rescue, "STORAGE_S", 0.05)
        monkeypatch.setattr(rescue, "AGAIN_S", 0.01)
        job = ShrinkingJob(tmp_path)
        (job.folder / "checkpoints").write_text("a file")
        job.loses_ranks()
        job.passes()
        assert len(job.plane.told(job.id, "checkpoint_failed")) == 1
        assert job.plane.supervisors.started[-1].attempt == 2

    def test_a_keeper_that_is_busy_as_it_is_asked_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rescue, "AGAIN_S", 0.01)
        job = ShrinkingJob(tmp_path)
        job.plane.groups.mute = 3
        job.loses_ranks()
        job.passes()
        assert job.on_disk() == [15] and job.plane.supervisors.started[-1].attempt == 2

    def test_a_person_who_stops_it_meanwhile_is_heard(self, tmp_path: Path) -> None:
        job, back = ShrinkingJob(tmp_path), threading.Event()
        write = job.plane.groups.write_copies
        job.plane.groups.write_copies = lambda order: back.wait(60) and write(order)  # type: ignore[method-assign, assignment, return-value]
        job.loses_ranks()
        job.plane.steps(4)
        job.plane.store.controls.ask(job.id, Control("p", "pause", "alice", job.plane.now))
        job.plane.steps(2)
        assert job.plane.state(job.id) == "paused"
        back.set()
        job.rest()
        assert job.on_disk() == [15] and len(job.plane.supervisors.started) == 1

    @pytest.mark.parametrize("lacks", ["a rank", "a newer step"])
    def test_nobody_waits_for_what_memory_does_not_hold(self, tmp_path: Path, lacks: str) -> None:
        job = ShrinkingJob(tmp_path)
        if lacks == "a rank":
            job.plane.groups.keepers[job.id][0].retain(job.id, range(7))
        else:
            written = EventDraft("checkpoint_written", 1.0, "written", {"step": 15})
            job.plane.store.note(job.id, written)
        assert job.plane.controller.next_attempt(job.id, 1, "a node died").attempt == 2
