"""A wall clock that is set while Octavo runs: what people read follows it, nothing else does.

Clocks are moved by hand: the benches' ``now`` passes, ``set_by`` is what the wall clock was set by.
"""

from __future__ import annotations

import copy
import json
import pickle
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from launch.rank_group import RankEnd
from orchestrator.controller.preemption import REFUSED_REST_S
from orchestrator.controller.supervisors import SILENCE_S, Presence, RaySupervisors
from orchestrator.controller.tending import CANCEL_GRACE_S
from orchestrator.events import EventDraft
from orchestrator.instant import Instant
from orchestrator.lifecycle import Cause, JobState
from orchestrator.nodes.desk import FILL_EVERY_S, KEEPERS_EVERY_S, UNWILLING_S
from orchestrator.placement.accusation import Accusation
from orchestrator.placement.docket import Dismissed
from orchestrator.placement.placement import NodeCapacity
from orchestrator.placement.quarantine import Quarantine
from orchestrator.recovery.controls import ControlAnswer
from orchestrator.spec.config import QuarantineConfig
from orchestrator.store.nodes import AHEAD_FOR_S
from orchestrator.supervision import notices
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.stop_time import END_TIMEOUT_S
from tests.unit.control_plane import ControlPlane, running, spares, tell
from tests.unit.scripted_job import Bench, Make, Script
from tests.unit.test_preflight_blame import Supervised, go, left_out, of, off

YEAR = 365 * 86400.0
SET = pytest.mark.parametrize("by", [120.0, -3600.0, 3600.0, -YEAR, YEAR])
"""By a time service, or by a person."""


class TestInstant:
    @SET
    def test_between_two_the_steady_clock_counts(self, by: float) -> None:
        before, after = Instant(1000.0, 5.0), Instant(1000.0 + by + 3.0, 8.0)
        assert after - before == 3.0
        assert before < after and before <= after and after > before and after >= before
        assert min(after, before) is before
        assert before + 2.0 < after < before + 4.0
        assert before - 2.0 < after - 4.0 < before

    def test_with_another_time_the_wall_clock_counts(self) -> None:
        now = Instant(1000.0, 5.0)
        assert now - 990.0 == 10.0
        assert 1010.0 - now == 10.0
        assert 990.0 < now < 1010.0

    def test_what_is_stored_sent_or_copied_is_a_plain_number(self) -> None:
        now = Instant(1000.5, 5.0)
        assert json.dumps({"time": now}) == '{"time": 1000.5}'
        assert type(pickle.loads(pickle.dumps(now))) is float
        assert type(copy.deepcopy(now)) is float
        assert f"{now:.1f} {now}" == "1000.5 1000.5"
        with sqlite3.connect(":memory:") as db:
            assert db.execute("select ?, typeof(?)", (now, now)).fetchone() == (1000.5, "real")

    def test_now_is_by_this_machines_clocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = Instant.now()
        wall = time.time()
        monkeypatch.setattr(time, "time", lambda: wall + YEAR)
        after = Instant.now()
        assert float(after) - float(before) > YEAR / 2
        assert 0.0 <= after - before < YEAR / 2


class TestSupervision:
    @SET
    def test_a_healthy_job_goes_on(self, bench: Make, by: float) -> None:
        job = bench()
        job.train(30)
        job.set_by = by
        job.step()
        job.train(30)
        assert job.settled().kinds() == []
        assert job.controller.attempt == 1

    @SET
    def test_a_job_that_starts_goes_on(self, bench: Make, by: float) -> None:
        job = bench()
        job.ranks.importing = True
        job.step()
        job.set_by = by
        job.step()
        job.ranks.importing = False
        job.train(3)
        assert job.settled().kinds() == []

    @SET
    def test_a_hang_is_seen_as_early_as_ever(self, bench: Make, by: float) -> None:
        job = bench()
        job.train(30)
        limit = job.supervision.attempt.step_limit_s()
        job.set_by = by
        job.step(limit - 1.0)
        assert job.settled().kinds() == []
        job.step(2.0)
        assert job.settled().kinds() == ["restart"]

    @SET
    def test_a_stop_has_its_time_and_no_more(self, bench: Make, by: float) -> None:
        job = bench(script=Script(nbytes=10**9))
        job.train(30)
        job.supervision.ask_stop("cancelled")
        job.step()
        assert job.supervision.phase is Phase.STOPPING
        job.set_by = by
        job.step(1.0)
        assert job.supervision.phase is Phase.STOPPING
        job.step(END_TIMEOUT_S)
        assert job.supervision.phase is Phase.OVER

    @SET
    def test_the_news_that_explains_an_error_is_waited_for_as_long_as_ever(
        self, bench: Make, by: float
    ) -> None:
        job = bench()
        job.train(10)
        job.ranks.ends[0] = RankEnd(0, "raised", error="ValueError()", cause=ValueError())
        job.step(0.0)
        job.set_by = by
        job.step(0.1)
        assert job.controller.attempt == 1
        job.step(1.0)
        assert job.controller.attempt == 2

    def test_what_is_told_has_the_clocks_time_as_a_plain_number(self, bench: Make) -> None:
        job = bench()
        job.train(10)
        job.set_by = 3600.0
        job.ranks.lose(1)
        job.step()
        job.train(10)
        told = job.settled()
        assert told.event("incident").time == pytest.approx(job.now + 3600.0, abs=10.0)
        view = job.supervision._journal.view(JobState.RUNNING)
        rows = [*view.events, *view.incidents, *view.actions]
        assert {type(row["time"]) for row in rows} == {float}

    @SET
    def test_the_clock_of_a_supervision_is_one_that_may_be_set(
        self, bench: Make, monkeypatch: pytest.MonkeyPatch, by: float
    ) -> None:
        monkeypatch.setattr(Bench, "clock", staticmethod(Instant.now))
        job = bench()
        job.train(30)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + by)
        job.step()
        job.train(3)
        assert job.settled().kinds() == []


class TestController:
    @SET
    def test_a_last_checkpoint_has_the_time_that_its_supervisor_asked_for(
        self, plane: ControlPlane, by: float
    ) -> None:
        job = running(plane)
        plane.controller.cancel(job, "enough")
        plane.steps(2)
        told = EventDraft(notices.STOPPING, plane.clock(), "stopping", {"given_s": 600.0})
        tell(plane, job, events=(told,))
        plane.steps(2)
        plane.set_by = by
        plane.steps(59, 10.0)
        assert plane.state(job) == "cancelling"
        assert job in plane.supervisors.alive

    @SET
    def test_a_cancel_ends_a_supervisor_that_hangs(self, plane: ControlPlane, by: float) -> None:
        job = running(plane)
        plane.controller.cancel(job, "enough")
        plane.steps(2)
        plane.set_by = by
        plane.steps(1)
        assert plane.state(job) == "cancelling"
        plane.steps(1, CANCEL_GRACE_S)
        assert plane.state(job) == "cancelled"

    @SET
    def test_a_dead_spare_and_a_dead_keeper_are_replaced(self, tmp_path: Path, by: float) -> None:
        plane = ControlPlane(tmp_path, 4, 4, 4)
        plane.now = 2 * YEAR
        job = running(plane, resources={"spares": 1})
        plane.steps(20)
        plane.set_by = by
        (dead,) = spares(plane, job)
        plane.groups.dead.add(dead)
        plane.groups.without_keeper.add((job, 0))
        plane.steps(2, max(FILL_EVERY_S, KEEPERS_EVERY_S))
        assert len(spares(plane, job)) == 1
        assert spares(plane, job) != [dead]
        assert not plane.groups.without_keeper

    @SET
    def test_a_node_that_was_not_granted_is_tried_again(
        self, plane: ControlPlane, by: float
    ) -> None:
        plane.groups.unwilling.add("node0")
        job = plane.submit()
        plane.steps(2)
        assert plane.state(job) == "queued"
        plane.groups.unwilling.clear()
        plane.set_by = by
        plane.steps(2)
        assert plane.state(job) == "queued"
        plane.steps(2, UNWILLING_S)
        assert plane.state(job) == "starting"

    @SET
    def test_a_supervisor_that_is_asked_is_lost_when_it_was_silent_for_long(
        self, monkeypatch: pytest.MonkeyPatch, by: float
    ) -> None:
        answered = ["ping"]
        monkeypatch.setattr(ray, "wait", lambda refs, timeout: (answered, []))
        monkeypatch.setattr(ray, "get", lambda reference: True)
        actor = SimpleNamespace(ping=SimpleNamespace(remote=lambda: "ping"))
        monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
        supervisors = RaySupervisors(object)
        asked = Instant(YEAR, 0.0)
        assert supervisors.look("job", asked) is Presence.WORKING
        answered.clear()
        assert supervisors.look("job", asked) is Presence.WORKING
        set_by = Instant(YEAR + by, 0.5)
        assert supervisors.look("job", set_by) is Presence.WORKING
        assert supervisors.look("job", set_by + SILENCE_S) is Presence.DONE

    @pytest.mark.parametrize("by", [-3600.0, -YEAR])
    def test_a_job_that_could_not_make_room_is_asked_again(
        self, plane: ControlPlane, by: float
    ) -> None:
        low = running(plane, "low")
        plane.submit("high", resources={"priority": 5})
        plane.steps(2)
        key = plane.store.controls.of(low)[0].control.key
        tell(plane, low, answers=(ControlAnswer(key, "refused", "no disk", 3),))
        plane.controller.next_attempt(low, 1, "training goes on")
        plane.set_by = by
        plane.steps(2, REFUSED_REST_S)
        assert len(plane.store.controls.of(low)) == 2

    @SET
    def test_the_clock_of_a_controller_is_one_that_may_be_set(
        self, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, by: float
    ) -> None:
        monkeypatch.setattr(ControlPlane, "clock", staticmethod(Instant.now))
        plane.controller = plane.new_controller()
        job = running(plane)
        plane.controller.cancel(job, "enough")
        plane.steps(2)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + by)
        plane.steps(2)
        assert plane.state(job) == "cancelling"


class TestQuarantines:
    @pytest.mark.parametrize("ahead", [3600.0, YEAR])
    def test_one_of_a_fast_clock_ends_within_its_length_once_the_clock_is_mended(
        self, tmp_path: Path, ahead: float
    ) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        plane.set_by = ahead
        job = Supervised(plane, plane.submit(num_nodes=2), off(-ahead))
        while not left_out(plane):
            go(plane, job, passes=1)
        go(plane, job, passes=3)
        (told,) = plane.told(job.job, "nodes_alike")
        assert "clock of the controller's machine" in told
        plane.set_by, job.found = 0.0, of({})
        began = plane.now
        go(plane, job, passes=5)
        go(plane, job, passes=1, seconds=AHEAD_FOR_S)
        assert left_out(plane)
        go(plane, job, passes=2, seconds=QuarantineConfig().unfit_s)
        assert not left_out(plane)
        go(plane, job, passes=4)
        assert job.alive is not None
        assert job.alive.phase is Phase.TRAINING
        assert plane.now - began < AHEAD_FOR_S + QuarantineConfig().unfit_s * 2.1

    def test_one_by_hand_does_too_or_lasts_until_it_is_released(self, plane: ControlPlane) -> None:
        plane.set_by = YEAR
        plane.controller.roll.quarantine("node0", "RAM", "alice", 600.0, plane.clock())
        plane.set_by = 0.0
        plane.steps(1)
        plane.steps(1, AHEAD_FOR_S)
        assert left_out(plane)
        plane.steps(1, 601.0)
        assert not left_out(plane)
        plane.set_by = YEAR
        plane.controller.roll.quarantine("node0", "RAM", "alice", None, plane.clock())
        plane.set_by = 0.0
        plane.steps(5, 3600.0)
        assert left_out(plane)
        plane.controller.roll.release("node0", "alice", plane.clock())
        assert not left_out(plane)

    def test_a_clock_that_is_slow_until_it_is_set_ends_none(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        job = running(plane)
        now = float(plane.clock())
        entry = Quarantine("node1", "", "corruption", "outvoted", "", job, now, now + 7 * 86400.0)
        plane.store.nodes.quarantine(entry, [])
        plane.set_by = -864_000.0
        plane.steps(5, AHEAD_FOR_S / 10)
        plane.set_by = 0.0
        plane.steps(5, AHEAD_FOR_S)
        assert left_out(plane) == {"node1": "corruption"}

    def test_two_that_begin_at_once_are_released_each_for_its_own_job(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        one, other = running(plane, "one"), running(plane, "other")
        now = float(plane.clock())
        for job in (one, other):
            entry = Quarantine("node1", "", "unfit", "disk", "", job, now, now + 600.0)
            plane.store.nodes.quarantine(entry, [])
        tell(plane, one, transition=(JobState.PAUSED, Cause.BUDGET_SPENT))
        plane.supervisors.done.add(one)
        plane.steps(3)
        plane.controller.resume(one, "the disk is empty again")
        assert [q.job for q in plane.store.nodes.in_force(plane.clock())] == [other]

    def test_what_a_fast_clock_saw_is_past_an_hour_after_it_was_mended(
        self, plane: ControlPlane
    ) -> None:
        job = running(plane)
        nodes = plane.store.nodes
        config = QuarantineConfig()

        def lost(attempt: int) -> object:
            now = float(plane.clock())
            told = Accusation("node0", "", job, attempt, "ranks_lost", "rank 0 died", now)
            there = [NodeCapacity(name, {"CPU": 2}, {"CPU": 2}) for name in ("node0", "node1")]
            ((_, found),) = nodes.accuse(job, [told], config, there, now)
            return found

        plane.set_by = YEAR
        for attempt in range(1, config.ranks_lost):
            assert isinstance(lost(attempt), Dismissed)
        plane.set_by = 0.0
        plane.steps(1)
        plane.steps(1, AHEAD_FOR_S)
        # They are of the last hour, as they were then.
        plane.now += 10.0
        assert isinstance(lost(config.ranks_lost), Quarantine)
        plane.now += config.window_s + config.ranks_lost_s
        assert isinstance(lost(config.ranks_lost + 1), Dismissed)
