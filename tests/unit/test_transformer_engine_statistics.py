"""What the Transformer Engine adapter tells of its tensors, as the native scope would."""

from __future__ import annotations

import pytest
import torch

from parallel.precision.recipes import ROLES
from parallel.precision.scaling import amax_to_scale
from parallel.precision.scope import STATISTICS_COLUMNS, PrecisionScope
from tests.unit.transformer_engine_layer import (
    HIDDEN,
    LINEARS,
    RECIPES,
    TOKENS,
    Layer,
    inputs,
    scope_of,
    state_of,
    train_step,
)

AMAX, SCALE, SATURATED, UNDERFLOWED, NONFINITE, COUNT = map(
    STATISTICS_COLUMNS.index,
    ("amax", "scale", "saturated", "underflowed", "nonfinite", "count"),
)


def test_delayed_reports_the_largest_amax_of_the_micro_batches_and_the_steps_scale(te):
    scope = scope_of(RECIPES["delayed"])
    layer = Layer(scope)
    train_step(scope, layer, 0)
    scope.statistics()
    scales = state_of(scope)[f"{LINEARS[0]}/forward.scale"]
    train_step(scope, layer, 1, micro_batches=3)
    names, table = scope.statistics()
    assert names[:3] == tuple(f"{LINEARS[0]}/{r}" for r in ("input", "weight", "grad_output"))
    assert len(names) == 3 * len(LINEARS)
    weight = max(p.abs().max() for n, p in layer.named_parameters() if n == "out.weight")
    assert table[names.index(f"{LINEARS[1]}/weight"), AMAX] == weight
    seen = [
        torch.nn.functional.rms_norm(inputs(1, m)[0], (HIDDEN,), eps=1e-5).abs().max().float()
        for m in range(3)
    ]
    assert table[0, AMAX] == max(seen)
    assert table[0, SCALE] == scales[0]
    assert (table[:, COUNT] == 0).all() and table[:, [SATURATED, UNDERFLOWED]].isnan().all()


def test_delayed_tells_of_the_first_step_that_its_scales_were_not_calibrated(te):
    scope = scope_of(RECIPES["delayed"])
    layer = Layer(scope)
    with torch.no_grad():
        weight = next(p for n, p in layer.named_parameters() if n == "out.weight")
        weight[0, 0] = 448.0  # whose scale is 1
    told = []
    for step in range(2):
        train_step(scope, layer, step)
        names, table = scope.statistics()
        told.append(table[:, STATISTICS_COLUMNS.index("uncalibrated")].tolist())
    assert told == [[1] * len(names), [0] * len(names)]
    assert table[names.index(f"{LINEARS[1]}/weight"), SCALE] == 1.0


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_recipes_without_state_report_on_sampled_steps_alone(te, recipe):
    config = RECIPES[recipe]
    scope = scope_of(config)
    layer = Layer(scope)
    train_step(scope, layer, 0)
    names, table = scope.statistics()
    assert names == () and table.shape == (0, len(STATISTICS_COLUMNS))
    scope.collect(True)
    train_step(scope, layer, 1)
    names, table = scope.statistics()
    row = table[names.index(f"{LINEARS[1]}/weight")]
    amax = next(p for n, p in layer.named_parameters() if n == "out.weight").abs().max().float()
    assert row[AMAX] == amax
    assert row[SCALE] == amax_to_scale(amax, 448.0, power_of_two=recipe != "current")
    assert (table[:, AMAX] > 0).all()
    scope.collect(False)
    train_step(scope, layer, 2)
    assert scope.statistics()[0] == ()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_sampled_statistics_of_a_linear_are_the_native_ones(te, recipe):
    scopes = [
        scope_of(RECIPES[recipe]),
        PrecisionScope("fp8", RECIPES[recipe], num_layers=1, compiled=False),
    ]
    linears = [scope.linear(LINEARS[1], HIDDEN, HIDDEN) for scope in scopes]
    with torch.no_grad():
        linears[1].weight.copy_(linears[0].weight)
    found = torch.zeros(6)
    for step, size in enumerate((1.0, 100.0, 1e-6, 1e-7)):
        tables = []
        for scope, linear in zip(scopes, linears, strict=True):
            scope.collect(True)
            train_step(scope, linear, step, size=size, grad_size=size)
            names, table = scope.statistics()
            assert names == tuple(f"{LINEARS[1]}/{r}" for r in ROLES)
            tables.append(table[:, [AMAX, SCALE, SATURATED, UNDERFLOWED, NONFINITE, COUNT]])
        assert torch.equal(*tables)
        found += tables[0].sum(0)
    if recipe == "delayed":
        assert found[2] > 0 and found[3] > 0


def test_nonfinite_values_are_counted(te):
    scope = scope_of(RECIPES["current"])
    layer = Layer(scope)
    scope.collect(True)
    train_step(scope, layer, 0, size=float("nan"), applied=False)
    names, table = scope.statistics()
    assert table[names.index(f"{LINEARS[1]}/input"), NONFINITE] == HIDDEN * TOKENS


def test_a_restored_state_drops_what_undone_steps_showed(te):
    scope = scope_of(RECIPES["delayed"])
    layer = Layer(scope)
    scope.collect(True)
    saved, meta = state_of(scope), scope.state_meta()
    train_step(scope, layer, 0, size=1e4, grad_size=1e4)
    for name, tensor in scope.state_tensors().items():
        tensor.copy_(saved[name])
    scope.load_meta(meta)
    train_step(scope, layer, 1)
    names, table = scope.statistics()
    row = table[names.index(f"{LINEARS[3]}/grad_output")]
    assert row[AMAX] == inputs(1, 0)[1].abs().max().float()
    assert row[COUNT] == HIDDEN * TOKENS


def test_evaluation_is_not_looked_at(te):
    scope = scope_of(RECIPES["current"])
    layer = Layer(scope).eval()
    scope.collect(True)
    with torch.no_grad(), scope.micro_batch():
        layer(inputs(0, 0)[0])
    assert scope.statistics()[0] == ()
