"""A job that the ladder paused and a person resumed is not paused again for what went before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.actions import Asked
from orchestrator.recovery.fresh_start import since_fresh_start
from orchestrator.recovery.policy import Restorable
from orchestrator.spec.config import RecoveryConfig
from tests.unit.recovery_cases import LAYERS, act, history, incident
from tests.unit.scripted_job import Make, Script

SPENT = RecoveryConfig(max_rollbacks=0, max_layer_fallbacks=0, max_lr_cuts=0, max_restarts=0)
ONCE = RecoveryConfig(max_rollbacks=1, max_lr_cuts=0)


def test_budgets_and_recurrence_begin_anew_after_the_ladder_gave_up() -> None:
    bf16 = dict.fromkeys(LAYERS, "bf16")
    first = act(history(), incident("loss_spike", 61, 58), policy=ONCE)
    assert first.kind == "rollback"
    hist = history(actions=(first,), precision=bf16)
    pause = act(hist, incident("loss_spike", 61, 58), policy=ONCE)
    assert pause.kind == "pause"
    again = history(80, actions=(first, pause), precision=bf16)
    assert act(again, incident("loss_spike", 80), policy=ONCE).kind == "rollback"


def test_restarts_begin_anew_too() -> None:
    policy = RecoveryConfig(max_restarts=1)
    first = act(history(), incident("rank_died", 61), policy=policy)
    pause = act(history(62, actions=(first,)), incident("rank_died", 62), policy=policy)
    assert (first.kind, pause.kind) == ("restart", "pause")
    again = history(63, actions=(first, pause))
    assert act(again, incident("rank_died", 63), policy=policy).kind == "restart"


@pytest.mark.parametrize("kind", ["pause", "fail"])
def test_it_is_the_newest_time_that_counts(kind: str) -> None:
    actions = [act(history(s), incident("nonfinite", s)) for s in range(4)]
    gave_up = replace(actions[0], kind=kind)  # type: ignore[arg-type]
    told = since_fresh_start([actions[0], gave_up, actions[1], gave_up, actions[2]])
    assert list(told) == [actions[2]]
    assert list(since_fresh_start(actions)) == actions


def test_a_pause_that_a_person_asked_for_renews_nothing() -> None:
    first = act(history(), incident("loss_spike", 61, 58))
    asked = replace(first, kind="pause", incidents=(), asked=Asked("ada", "k"))
    assert list(since_fresh_start([first, asked])) == [first, asked]


def test_a_pause_leaves_out_the_batches_of_the_steps_that_it_undoes() -> None:
    pause = act(
        history(precision=dict.fromkeys(LAYERS, "bf16")),
        incident("loss_spike", 61, 58),
        policy=SPENT,
    )
    assert (pause.kind, pause.to_step, pause.in_place) == ("pause", 50, True)
    assert pause.skip_batches == (58, 59, 60, 61)
    assert "skips batches 58-61" in pause.reason


def test_without_a_snapshot_a_pause_says_from_where_on_the_state_is_bad() -> None:
    hist = history(restorable=(Restorable(60, 0, True),))
    pause = act(hist, incident("loss_spike", 61, 58), policy=SPENT)
    assert (pause.kind, pause.to_step, pause.in_place) == ("pause", 58, False)
    assert pause.skip_batches == (58, 59, 60, 61)


def test_a_pause_for_lost_ranks_undoes_nothing() -> None:
    pause = act(history(), incident("rank_died", 61), policy=SPENT)
    assert (pause.kind, pause.to_step, pause.skip_batches) == ("pause", None, ())


def test_a_pause_for_replicas_that_differ_keeps_the_batches() -> None:
    pause = act(history(), incident("replica_disagreement", 61, 58), policy=SPENT)
    assert (pause.kind, pause.to_step, pause.skip_batches) == ("pause", 50, ())


def test_a_resumed_job_goes_on_without_what_made_the_ladder_give_up(bench: Make) -> None:
    # Batch 22 is bad, and no rung may do anything about it.
    policy = {
        "max_rollbacks": 0,
        "max_layer_fallbacks": 0,
        "max_lr_cuts": 0,
        "max_whole_fallbacks": 0,
    }
    job = bench(Script(spike=lambda step, batch: batch == 22), recovery=policy)
    job.train(24)
    assert job.settled().kinds() == ["pause"]
    assert job.controller.states[-1] == ("paused", "BUDGET_SPENT")
    job.take_over(job.controller.next_attempt("scripted-000001", 1, "resumed by ada"))
    job.step()
    first = job.ranks.attempts[-1][0]
    assert first.ledger == (22,)
    job.train(40)
    assert job.settled().kinds() == ["pause"], "nothing is left of the trouble"


def test_a_pause_without_a_snapshot_leaves_no_checkpoint_of_the_bad_state(
    bench: Make, tmp_path: Path
) -> None:
    policy = {"max_restarts": 0}
    job = bench(Script(spike=lambda step, batch: batch == 22), recovery=policy)
    job.step()
    keep = job.supervision.deliver
    job.ranks.deliver = lambda told: keep([r for r in told if getattr(r, "tier", "") != "ring"])
    job.train(24)
    assert job.settled().kinds() == ["pause"]
    assert job.controller.states[-1] == ("paused", "BUDGET_SPENT") and job.ranks.closed
    assert not job.ranks.commands, "what is on disk before step 22 is what a resume starts from"
