"""Numerics that the benchmarks compare: what differs between them, and what their rows say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from parallel.precision.linear import BF16Linear
from tests.benchmarks.bench_fp8_step import rows_of as step_rows
from tests.benchmarks.bench_parity import rows_of, seeds_of
from tests.benchmarks.numerics import (
    ALL,
    BF16,
    CONTROL,
    EMULATION,
    RECIPES,
    TORCHAO_RECIPES,
    available,
    run_of,
    take_over,
)
from tests.benchmarks.peers import torchao_linears


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    linear = BF16Linear(64, 96, dtype=torch.bfloat16, device=torch.device("cpu"))
    with torch.no_grad():
        linear.weight.normal_(generator=generator)
    return nn.Sequential(linear)


@pytest.mark.parametrize("name", [EMULATION, *TORCHAO_RECIPES])
def test_an_emulation_rounds_and_trains_the_models_own_parameters(name: str):
    if name in TORCHAO_RECIPES and torchao_linears.why_not():
        pytest.skip(torchao_linears.why_not())
    plain, emulated = model(), model()
    take_over(emulated, name)
    assert [n for n, _ in emulated.named_parameters()] == ["0.weight"]
    generator = torch.Generator().manual_seed(1)
    gradient = (torch.randn(32, 96, generator=generator) * torch.rand(96)).bfloat16()
    x = torch.randn(32, 64, generator=generator).bfloat16()
    for each in (plain, emulated):
        each(x).backward(gradient)
    exact, rounded = plain[0].weight.grad, emulated[0].weight.grad
    error = float((rounded.float() - exact.float()).norm() / exact.float().norm())
    # Rounding to FP8 is seen, but where torchao keeps the weight's gradient in BF16.
    assert error < 0.15 and (error > 0.01) is not name.endswith("gw_hp")
    off = float((emulated(x) - plain(x)).float().norm() / plain(x).float().norm())
    assert 0.01 < off < 0.15


def test_what_the_run_itself_says_is_left_alone():
    for name in (BF16, CONTROL, *RECIPES):
        module = model()
        take_over(module, name)
        assert "forward" not in vars(module[0])


def test_runs_differ_by_the_linears_alone_and_the_control_by_its_sums():
    runs = {name: run_of(name, 5, 30) for name in ALL}
    assert {run.training.seed for run in runs.values()} == {5}
    batches = {
        run.training.train_micro_batch_size_per_gpu * run.training.gradient_accumulation_steps
        for run in runs.values()
    }
    assert batches == {32}
    micro = {name: run.training.train_micro_batch_size_per_gpu for name, run in runs.items()}
    assert [name for name in ALL if micro[name] != micro[BF16]] == [CONTROL]
    assert [name for name in ALL if runs[name].precision == "fp8"] == list(RECIPES)


def test_a_recipe_that_torchao_doesnt_have_is_refused():
    with pytest.raises(KeyError, match="tensorwise"):
        torchao_linears.take_over(model(), "delayed")


def test_without_torchao_its_recipes_are_told_and_the_others_run(monkeypatch):
    monkeypatch.setattr(torchao_linears, "why_not", lambda: "it isn't there")
    found, missing = available([BF16, "current", "torchao rowwise", BF16])
    assert found == (BF16, "current") and missing == {"torchao rowwise": "it isn't there"}


def test_a_run_that_failed_is_counted_and_its_seed_left_out_of_the_gap():
    finals = {(BF16, 0, 9): 2.0, (BF16, 1, 9): 2.0, ("current", 0, 9): 2.02}
    failed = {("current", 1, 9): "ranks [0] silent for 9 s"}
    loss, gap = rows_of("current", [0, 1], 9, finals, failed)
    assert (loss.n, loss.hangs, loss.failures) == (1, 1, 0)
    assert gap.median == pytest.approx(1.0) and gap.met is False
    (only,) = rows_of(BF16, [0, 1], 9, finals, failed)
    assert only.n == 2 and only.aim is None


def test_a_step_that_cant_be_made_is_a_row_with_its_error():
    rows = step_rows({BF16: [1.0, 2.0], "current": [2.0, 3.0]}, {"torchao mxfp8": "no such kernel"})
    assert [row.median for row in rows[:2]] == [1.5, 1.75]
    assert math.isnan(rows[2].median)
    assert (rows[2].failures, rows[2].note) == (1, "no such kernel")


def test_emulations_run_with_as_many_seeds_as_they_are_given() -> None:
    assert seeds_of("delayed", [3, 4, 5], 1) == [3, 4, 5]
    assert seeds_of("emulation", [3, 4, 5], 1) == [3]
    assert seeds_of("torchao rowwise", [3, 4, 5], 2) == [3, 4]
