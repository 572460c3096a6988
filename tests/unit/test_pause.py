"""A pause, and whatever else stops a job: what is kept of it, and what it waits for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from launch.commands import CopyFailed, Stop
from launch.snapshots import SnapshotKey
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.stop_time import LEAST_STOP_S
from tests.unit.scripted_job import Make, Script
from tests.unit.test_controls import answers, control, precision


class TestPause:
    def test_it_leaves_a_checkpoint_and_the_job_paused(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.supervision.ask([control("pause", reason="maintenance")])
        job.step()
        order = job.ranks.commands[-1].order
        assert isinstance(order, Stop) and order.checkpoint
        job.ranks.train()
        job.step()
        job.step()
        assert job.supervision.phase is Phase.OVER
        assert job.settled().states[-1] == ("paused", "PAUSE_ASKED")
        assert job.controller.event("ended").message == (
            "Asked by alice: pause with a checkpoint (maintenance)."
        )
        resumed = job.controller.next_attempt("scripted-000001", 1, "resumed")
        job.take_over(resumed)
        job.train(2)
        restore = job.ranks.attempts[-1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (12, "disk")

    def test_a_state_that_no_disk_takes_is_not_given_up(self, bench: Make) -> None:
        job = bench(Script(disk_full=True))
        job.train(12)
        job.supervision.ask([control("pause")])
        job.step()
        job.ranks.train()
        job.step()
        job.step()
        state, message, _ = answers(job)["k1"]
        assert state == "refused" and "could not be kept, so training goes on" in message
        assert job.controller.kinds() == ["pause", "restart"]
        job.train(3)
        restore = job.ranks.attempts[-1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (10, "memory")
        assert job.settled().states[-1][0] == "running"

    def test_ranks_that_do_not_stop_in_time_go_on_from_memory_too(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.supervision.ask([control("pause")])
        job.step()
        job.step(LEAST_STOP_S + 1)
        assert "no word of the ranks in the 45 s" in answers(job)["k1"][1]
        assert job.controller.kinds() == ["pause", "restart"]

    @pytest.mark.parametrize("kind", ["pause", "preempt"])
    @pytest.mark.parametrize("importing", [False, True])
    def test_without_ranks_that_train_it_is_done_at_once_and_left_to_the_keepers(
        self, bench: Make, kind: Any, importing: bool
    ) -> None:
        job = bench()
        job.train(12)
        job.ranks.importing = importing
        job.ranks.lose(0)
        job.step()
        job.supervision.ask([control(kind)])
        job.step()
        asked = {"pause": ("paused", "PAUSE_ASKED"), "preempt": ("queued", "PREEMPTED")}
        assert job.settled().states[-1] == asked[kind]
        assert SnapshotKey("scripted-000001", 1, 0, 0, 10) in job.ranks.copies()

    def test_it_does_not_queue_behind_what_waits_for_ranks_that_train(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.ranks.importing = True
        job.ranks.lose(0)
        job.step()
        job.supervision.ask([precision("bf16", "layers.*"), control("pause", "k2")])
        job.step()
        assert job.settled().states[-1] == ("paused", "PAUSE_ASKED")

    def test_what_a_storage_that_fails_would_not_take_is_waited_for(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.supervision.deliver([CopyFailed(1, 0, 1, 10, "disk", "No space left on device")])
        job.step()
        job.ranks.lose(0)
        job.step()
        job.supervision.ask([control("pause")])
        job.step()
        assert job.supervision.phase is Phase.TRAINING, "the copy in memory would be lost"

    @pytest.mark.parametrize("decided", [False, True])
    def test_what_is_to_end_an_attempt_for_more_nodes_ends_no_later_one(
        self, bench: Make, decided: bool
    ) -> None:
        job = bench()
        job.train(12)
        grow = replace(control("preempt", "grow-1"), by="the queue", attempt=1)
        if decided:
            job.supervision.ask([grow])
            job.step()
            assert job.controller.kinds() == ["pause"]
            job.take_over(job.controller.next_attempt("scripted-000001", 1, "supervisor lost"))
        else:
            # Its ranks are gone as it is asked.
            job.ranks.lose(0)
        job.supervision.ask([grow])
        for _ in range(4):
            job.train(1)
        told = job.settled()
        assert job.controller.attempt == 2 and told.states[-1][0] == "running"
        assert answers(job)["grow-1"][:2] == (
            "refused",
            "attempt 1 is over, and attempt 2 began on the nodes that were there",
        )

    def test_a_new_supervisor_does_not_take_a_full_disk_for_one_that_works(
        self, bench: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = bench()
        job.train(12)
        job.ranks.lose(0)
        job.step()
        full = SimpleNamespace(free=100)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: full)
        job.supervision.ask([control("pause")])
        job.step()
        assert job.supervision.phase is Phase.TRAINING, "the copy in memory would be lost"

    def test_before_anything_was_trained_it_is_done_at_once(self, bench: Make) -> None:
        job = bench()
        job.ranks.importing = True
        job.supervision.ask([control("pause")])
        job.step()
        assert job.settled().states == [("paused", "PAUSE_ASKED")]
