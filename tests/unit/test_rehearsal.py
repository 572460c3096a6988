"""Which short jobs ``octavo drill`` runs of a spec, what it refuses, and how it judges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monitoring.records import Incident, StepRecord, Suspect
from orchestrator.actions import Action
from orchestrator.cli.drill import planned, table
from orchestrator.cli.show import CommandError
from orchestrator.replay.rehearsal import KINDS, Rehearsal, first_step, least_steps, outcome, plan
from orchestrator.spec.checks import check_spec
from orchestrator.spec.completion import complete
from orchestrator.spec.job import JobSpec

LAYER = "layers.1.mlp.down"


def spec(**sections: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "mine",
        "slots_per_node": 2,
        "model": {"num_layers": 3},
        "training": {"steps": 50_000, "warmup_steps": 2000, "train_batch_size": 8},
        "checkpoint": {"storage_path": "/shared/jobs", "every": 200},
        "snapshots": {"every": 500},
        "drills": [{"kind": "kill_rank", "step": 9}],
        "notifications": {"webhook": "https://example.com/octavo"},
    }
    return complete(JobSpec.model_validate(values | sections))


def test_every_kind_is_rehearsed_in_a_run_of_its_own_beside_an_undisturbed_one() -> None:
    jobs, left_out = plan(spec(), KINDS, 160)
    assert not left_out
    assert [job.kind for job in jobs] == ["", *KINDS]
    assert [len(job.spec.drills) for job in jobs] == [0] + [1] * len(KINDS)
    for job in jobs:
        assert check_spec(job.spec, set(), check_data=False) == []
        assert job.spec.training.steps == 160
        # Neither its storage, nor its W&B run, nor whoever is called.
        assert job.spec.checkpoint.storage_path is None
        assert job.spec.wandb.mode == "disabled" and not job.spec.notifications.wanted("paused")


def test_the_drill_comes_once_baselines_are_trusted_and_replicas_compared() -> None:
    job = spec(detection={"window": 30, "min_history": 12, "settle_steps": 4})
    assert first_step(job) == 40 and least_steps(job) == 120
    jobs, _ = plan(job, ["bit_flip"], 120)
    assert jobs[1].step == 40
    assert jobs[1].spec.snapshots.every == 10
    assert jobs[1].spec.training.warmup_steps <= 20


def test_kinds_without_a_place_are_left_out_with_the_reason() -> None:
    pipeline = spec(parallelism={"pipeline": 2}, precision="bf16")
    jobs, left_out = plan(pipeline, KINDS, 160)
    whys = {kind.kind: kind.why for kind in left_out}
    assert set(whys) == {"amax_outlier", "frozen_scale", "bit_flip"}
    assert "one replica" in whys["bit_flip"] and "BF16" in whys["amax_outlier"]
    assert len(jobs) == 1 + len(KINDS) - 3


def test_drills_are_placed_in_a_layer_that_computes_in_fp8() -> None:
    kept = spec(fp8={"high_precision_layers": {"first": 1, "names": ["layers.1.*"]}})
    jobs, left_out = plan(kept, ["amax_outlier", "swiglu_growth"], 160)
    assert not left_out
    assert [getattr(job.spec.drills[0], "layer", None) for job in jobs[1:]] == [None, 2]
    assert jobs[1].spec.drills[0].model_dump()["tensor"] == "layers.2.mlp.down/input"


@pytest.mark.parametrize(
    ("kinds", "steps", "says"),
    [
        (["weight_sruge"], None, "did you mean 'weight_surge'?"),
        ([], 100, "make it at least 160"),
        (["bit_flip"], None, "one replica"),
    ],
)
def test_what_cannot_be_rehearsed_as_asked_is_refused(
    kinds: list[str], steps: int | None, says: str
) -> None:
    with pytest.raises(CommandError) as refused:
        planned(spec(parallelism={"pipeline": 2}), kinds, steps)
    assert refused.value.code == 2
    assert says in f"{refused.value.message} {refused.value.remedy}"


def record(step: int, timeline: int = 0, loss: float = 2.0) -> StepRecord:
    return StepRecord(
        attempt=1,
        timeline=timeline,
        step=step,
        time=float(step),
        batch=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens=1,
        step_time_s=0.1,
    )


def surge() -> Rehearsal:
    return plan(spec(), ["weight_surge"], 160)[0][1]


def incident(step: int) -> Incident:
    return Incident(
        kind="amax_saturation",
        detector="amax_saturation",
        attempt=1,
        timeline=0,
        step=step,
        onset_step=step,
        time=0.0,
        message="saturated",
        suspects=(Suspect(LAYER, "input", {}),),
    )


def action(step: int, *incidents: Incident) -> Action:
    return Action(
        kind="layer_fallback",
        attempt=1,
        timeline=0,
        step=step,
        time=0.0,
        reason="so",
        incidents=incidents,
    )


def test_a_drill_that_was_answered_is_caught_with_what_it_cost() -> None:
    job = surge()
    at = job.step
    steps = [record(step) for step in range(at + 2)]
    steps += [record(step, 1, 1.5) for step in range(at - 5, 160)]
    seen = incident(at + 1)
    found = outcome(job, steps, [seen], [action(at + 1, seen)], "succeeded", 1.4)
    assert found.caught and found.lost == 7 and found.final_loss == pytest.approx(1.5)
    told = found.to_json()
    assert (told["after_steps"], told["steps_lost"]) == (1, 7)
    head, line, last = table([found])
    assert line.split()[:5] == ["weight_surge", str(at), "1", "amax_saturation", LAYER]
    assert len(head.split("  ")) > 4 and last == "all 1 were caught"


@pytest.mark.parametrize("early", [True, False])
def test_a_drill_that_nobody_saw_is_not_caught_by_what_came_before_it(early: bool) -> None:
    job = surge()
    before = incident(job.step - 3)
    seen = [before] if early else []
    actions = [action(before.step, before)] if early else []
    found = outcome(job, [record(step) for step in range(160)], seen, actions, "succeeded", 1.4)
    assert not found.caught and found.seen is None
    assert list(table([found]))[-1] == "not caught: weight_surge"


def test_a_killed_rank_is_seen_in_the_step_before() -> None:
    (_, job), _ = plan(spec(), ["kill_rank"], 160)
    died = replace(incident(job.step - 1), kind="rank_died")
    found = outcome(job, [record(0)], [died], [action(died.step, died)], "succeeded", None)
    assert found.caught
