"""The rules of others act as their sources say: what is clipped, multiplied by 0, raised."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.back_on_curve import Executed
from tests.benchmarks.bench_instability import FAULTS, SIDES, Case, Run, called, from_json, table
from tests.benchmarks.bench_instability import to_json as run_json
from tests.benchmarks.peers.stability_rules import RULES, Raised, SkipStepAdamW, Stopped

NUMBERS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameter(gradient: list[float]) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


def test_a_step_multiplied_by_one_is_adamw_and_by_zero_none() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.arange(1.0, 5.0)) for _ in range(2))
    skip, adamw = SkipStepAdamW([ours], **NUMBERS), torch.optim.AdamW([theirs], **NUMBERS)
    for turn in range(6):
        gradient = torch.randn(4) * 10.0**turn
        ours.grad = gradient.clone()
        skip.factor = 0.0 if turn == 3 else 1.0
        skip.step()
        if turn != 3:
            theirs.grad = gradient.clone()
            adamw.step()
        torch.testing.assert_close(ours, theirs)


def test_zero_times_a_nan_is_a_nan_in_the_weights() -> None:
    spoilt = parameter([math.nan, 1.0])
    skip = SkipStepAdamW([spoilt], **NUMBERS)
    skip.factor = 0.0
    skip.step()
    assert math.isnan(spoilt.detach()[0]) and spoilt.detach()[1] == 1.0


def test_skip_step_skips_an_outlier_above_and_takes_one_below(tmp_path: Path) -> None:
    rule = RULES["olmo"](300, tmp_path)
    factors = []
    for step in range(100):
        loss = {80: 9.0, 90: 0.1}.get(step, 2.0 + 0.01 * (step % 5))
        rule.clip([parameter([0.5, 0.1 * (step % 3)])], loss)
        factors.append(rule.factor)
    assert [step for step, factor in enumerate(factors) if factor == 0.0] == [80]


def test_skip_step_raises_for_a_loss_of_nan_when_metrics_are_collected(tmp_path: Path) -> None:
    rule = RULES["olmo"](300, tmp_path)
    rule.after(1, 1, math.nan)
    with pytest.raises(Raised):
        rule.after(4, 4, 2.0)


def test_zclip_clips_a_spike_to_less_than_the_steady_limit(tmp_path: Path) -> None:
    zclip, plain = RULES["zclip"](300, tmp_path), RULES["clipping"](300, tmp_path)
    for step in range(40):
        usual = parameter([0.2 + 0.01 * (step % 4)])
        zclip.clip([usual], 2.0)
        assert usual.grad is not None and usual.grad[0] == pytest.approx(0.215, abs=0.016)
    spikes = parameter([30.0]), parameter([30.0])
    assert zclip.clip([spikes[0]], 2.0) == plain.clip([spikes[1]], 2.0) == 30.0
    assert spikes[0].grad is not None and spikes[1].grad is not None
    assert spikes[0].grad[0] < 0.3 < 0.99 < spikes[1].grad[0]


def test_lightnings_spike_raises_and_two_batches_are_left_out_from_then_on(tmp_path: Path) -> None:
    for spiked, excluded in ((12, {11, 12}), (30, {11, 12, 29, 30})):
        rule = RULES["lightning"](300, tmp_path)
        for step in range(spiked):
            rule.after(step, step, 2.0)
        with pytest.raises(Raised):
            rule.after(spiked, spiked, 6.1)
        assert set(json.loads((tmp_path / "skip_batches.json").read_text())) == excluded
    assert RULES["lightning"](300, tmp_path).excluded == {11, 12, 29, 30}


def test_llm_foundry_stops_at_the_fifth_high_loss_and_raises_for_nan(tmp_path: Path) -> None:
    rule = RULES["llm_foundry"](300, tmp_path)
    for step in range(100):
        rule.after(step, step, 2.0)
    for step in range(100, 104):
        rule.after(step, step, 9.0)
    with pytest.raises(Stopped):
        rule.after(104, 104, 9.0)
    with pytest.raises(Raised):
        rule.clip([parameter([1.0])], math.nan)


def test_a_norm_of_nan_raises_for_torchrun(tmp_path: Path) -> None:
    rule = RULES["torchrun"](300, tmp_path)
    assert rule.clip([parameter([3.0])], 2.0) == 3.0
    with pytest.raises(Raised):
        rule.clip([parameter([math.nan])], 2.0)


# Their runs, as the table tells them.

STEPS, ONSET = 100, 50


def done(*, high: int = 0, height: float = 0.0, until: int = STEPS) -> Run:
    """Losses of 2, ``high`` of them from the fault on ``height`` above that."""
    losses = [2.0 + (height if ONSET <= step < ONSET + high else 0.0) for step in range(until)]
    executed = tuple(Executed(step, loss, float(step)) for step, loss in enumerate(losses))
    return Run(executed, "finished" if until == STEPS else "person", "a reason" * (until != STEPS))


def test_runs_that_did_not_come_back_are_failures_and_say_whom_they_need() -> None:
    nan = done(high=STEPS - ONSET, height=math.nan)
    runs = {
        ("octavo", None, 0): done(),
        ("zclip", None, 0): done(),
        ("torchrun", None, 0): done(),
        ("octavo", "surge", 0): done(high=2, height=5.0),
        ("zclip", "surge", 0): nan,
        ("torchrun", "surge", 0): done(until=60),
    }
    numbers = {"steps": STEPS, "onset": ONSET, "every": 20}
    rows = list(table(runs, ("octavo", "zclip", "torchrun"), ("surge",), (0,), numbers))
    back = {row.side: row for row in rows if "back on the undisturbed" in row.name}
    assert (back["octavo"].median, back["octavo"].failures) == (2, 0)
    assert back["octavo"].note == "no person"
    assert back["zclip"].failures == back["torchrun"].failures == 1
    assert "a loss of NaN" in back["zclip"].note and "a reason" in back["torchrun"].note
    final = {row.side: row for row in rows if "final loss" in row.name}
    assert final["octavo"].median == 0.0 and final["zclip"].failures == 1
    assert [row.n for row in rows if "done again" in row.name] == [1, 0, 0]
    needed = {row.side: row.median for row in rows if "a person is needed" in row.name}
    assert needed == {"octavo": 0, "zclip": 1, "torchrun": 1}
    hung = Run((), "hung", "not over in time; it ends:\na line")
    assert called([runs["octavo", "surge", 0], hung]) == "hung: not over in time; it ends:"


def test_a_run_is_read_back_as_it_was_kept() -> None:
    kept = json.loads(json.dumps(run_json(done(high=2, height=3.0, until=70))))
    assert from_json(kept) == done(high=2, height=3.0, until=70)


def test_each_case_has_a_row_of_its_own_and_a_job_with_its_fault() -> None:
    cases = [Case(side, fault, 0, 300, 175, 50) for side in SIDES for fault in (None, *FAULTS)]
    assert len({case.key for case in cases}) == len(cases)
    for case in cases[:5]:
        drills = case.spec().drills
        assert [drill.step for drill in drills] == ([] if case.fault is None else [175])
