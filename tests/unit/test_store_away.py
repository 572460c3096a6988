"""What is given time while the store is away is given it from when it begins, not from before."""

from __future__ import annotations

import pytest

from launch.commands import Command, Report
from launch.preflight import Verdict
from orchestrator.recovery.controls import Control
from orchestrator.spec.completion import complete
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.preflight_gate import PreflightGate
from orchestrator.supervision.supervision import NODE_BLAME_S
from tests.unit.scripted_job import Make, Script


def spikes_at(batch: int) -> Script:
    return Script(spike=lambda _, b: b == batch)


def test_ranks_that_go_back_in_place_have_a_whole_steps_time_from_their_order_on(
    bench: Make,
) -> None:
    job = bench(spikes_at(30))
    job.train(30)
    job.store_away(70.0)
    job.train(1)
    assert job.controller.kinds() == ["rollback"] and job.controller.down == 0
    job.step()
    job.train(5)
    assert job.settled().kinds() == ["rollback"] and job.controller.attempt == 1


def test_ranks_that_never_go_back_are_still_taken_to_hang(bench: Make) -> None:
    job = bench(spikes_at(30))
    job.train(30)
    job.store_away(70.0)
    job.train(1)
    job.step(61.0)
    assert job.settled().kinds() == ["rollback", "restart"]


def test_the_next_attempt_has_its_whole_time_for_the_first_step(bench: Make) -> None:
    job = bench()
    job.train(12)
    job.store_away(310.0)
    job.ranks.lose(0)
    job.step()
    assert job.controller.kinds() == ["restart"] and job.controller.down == 0
    job.step()
    job.train(5)
    assert job.settled().kinds() == ["restart"] and job.controller.attempt == 2


def test_its_nodes_have_the_whole_time_for_their_preflight(bench: Make) -> None:
    began: list[float] = []

    class Passes:
        def verdict(self, now: float) -> Verdict | None:
            return Verdict({}, 0.0, 1)

    def begin(*arguments: object) -> Passes:
        began.append(arguments[-2])  # type: ignore[arg-type]
        return Passes()

    job = bench()
    job.train(12)
    job.close()
    job.ranks.closed = False
    job.gate = PreflightGate(complete(job.controller.spec), begin)
    job.take_over(job.controller.next_attempt("scripted-000001", 1, "lost"))
    job.store_away(70.0)
    job.supervision.ask([Control("k1", "rollback", "alice", job.now, "", to_step=5)])
    job.step()
    assert job.controller.kinds() == ["rollback"] and job.controller.attempt == 3
    assert began == [job.now]


@pytest.mark.parametrize("kind", ["pause", "preempt"])
def test_a_stop_has_its_whole_time(bench: Make, kind: str) -> None:
    job = bench()
    job.train(12)
    job.store_away(50.0)
    job.supervision.ask([Control("k1", kind, "alice", job.now, "")])  # type: ignore[arg-type]
    job.step()
    assert job.supervision.phase is Phase.STOPPING and job.controller.down == 0
    job.step(30.0)
    job.ranks.train()
    job.step()
    assert job.settled().kinds() == ["pause"] and job.supervision.phase is Phase.OVER
    assert job.controller.states[-1][0] == {"pause": "paused", "preempt": "queued"}[kind]


def test_a_cancelled_job_has_it_too(bench: Make) -> None:
    job = bench(spikes_at(30))
    job.train(30)
    job.store_away(50.0)
    job.ranks.train()
    # Read before the stop is turned to, in the same pass.
    job.supervision.ask_stop("cancelled by a user")
    job.step()
    assert job.controller.kinds() == ["rollback"]
    job.step(30.0)
    assert job.supervision.phase is Phase.STOPPING
    job.ranks.train()
    job.step()
    assert "without a checkpoint" not in job.settled().event("ended").message


def test_errors_that_a_lost_peer_would_explain_wait_for_its_news(bench: Make) -> None:
    job = bench(spikes_at(30))
    job.train(30)
    job.store_away(70.0)
    job.ranks.train()
    job.ranks.fail(0, ConnectionError("connection closed by peer"))
    job.step()
    job.step(NODE_BLAME_S - 0.1)
    assert job.controller.attempt == 1
    job.ranks.lose(1)
    job.step(0.0)
    assert job.settled().kinds() == ["rollback", "restart"]
    assert job.controller.actions[-1].incidents[0].ranks == (1,)


def test_last_reports_of_ranks_that_are_done_have_their_time(bench: Make) -> None:
    job = bench(training={"steps": 12})
    job.train(11)
    late: list[Report] = []

    def end(_: Command) -> None:
        job.ranks.deliver = late.extend
        job.ranks.train()
        job.ranks.finish()

    job.ranks.on_post = end
    job.store_away(30.0)
    job.supervision.ask([Control("k1", "exchange", "alice", job.now, "", to="bf16")])
    job.step()
    job.step()
    assert job.supervision.phase is Phase.TRAINING
    job.supervision.deliver(late)
    job.step()
    assert job.settled().states[-1] == ("succeeded", "STEPS_DONE")
    assert [step["step"] for step in job.controller.steps] == list(range(12))


def test_a_disk_that_is_away_at_the_start_takes_no_time_from_the_ranks(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench()
    choose = job.supervision._job.starts.choose

    def slow(*arguments: object) -> object:
        job.now += 310.0
        return choose(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(job.supervision._job.starts, "choose", slow)
    job.step()
    assert job.supervision.phase is Phase.TRAINING
    job.step()
    job.train(3)
    assert job.settled().kinds() == [] and job.controller.attempt == 1
