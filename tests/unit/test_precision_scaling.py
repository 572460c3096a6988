"""Scales against a step-by-step model of Transformer Engine's rules, one tensor at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.precision import kernels, recipes
from parallel.precision.formats import E4M3, E5M2
from parallel.precision.per_tensor import CurrentQuantizer
from parallel.precision.quantizers import StateRow
from parallel.precision.scaling import (
    FLOAT32_MAX,
    amax_to_scale,
    scale_with_room,
    tensor_to_amax,
    update_delayed_,
)

AMAX = st.one_of(
    st.just(0.0),
    st.just(math.inf),
    st.just(math.nan),
    st.floats(min_value=2.0**-149, max_value=2.0**127, width=32),
    st.floats(min_value=2.0**-10, max_value=1000, width=32),
)


FACTOR = 0.75


def divide(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(a) / np.float32(b))


class DelayedModel:
    """One tensor's delayed scaling, written from the rules, with plain numbers."""

    def __init__(self, length: int, fp8_max: float, margin: int, algorithm: str) -> None:
        self.history = [0.0] * length
        self.scale = 1.0
        self.target = fp8_max / 2**margin
        self.algorithm = algorithm

    def averaged(self, seen: float) -> float:
        """Newest first, each update weighing FACTOR times the one before it, or the newest."""
        newest_first = [seen, *reversed(self.history[1:])]
        updates = [(age, a) for age, a in enumerate(newest_first) if a > 0]
        if any(math.isinf(a) for _, a in updates):
            return math.inf
        weights = sum(FACTOR**age for age, _ in updates)
        mean = sum(FACTOR**age * a for age, a in updates) / weights if updates else 0.0
        return max(float(np.float32(mean)), 0.0 if math.isnan(seen) else seen)

    def step(self, seen: float) -> None:
        if seen == 0:
            return
        rows = [seen, *self.history[1:]]
        if self.algorithm == "most_recent":
            amax = seen
        elif self.algorithm == "ema":
            amax = self.averaged(seen)
        else:
            amax = max((row for row in rows if not math.isnan(row)), default=0.0)
        if math.isfinite(amax) and amax > 0:
            scale = divide(self.target, amax)
            self.scale = FLOAT32_MAX if math.isinf(scale) else scale
        if len(rows) > 1:
            self.history = [0.0, *rows[2:], rows[0]]


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from(["max", "most_recent", "ema"]),
    st.integers(0, 3),
    st.lists(st.tuples(AMAX, AMAX), min_size=1, max_size=12),
)
def test_delayed_scaling_follows_the_model_step_for_step(length, algorithm, margin, steps):
    maxima = (E4M3.max, E5M2.max)
    models = [DelayedModel(length, fp8_max, margin, algorithm) for fp8_max in maxima]
    history, scale = torch.zeros(length, 2), torch.ones(2)
    for seen in steps:
        history[0] = torch.tensor(seen)
        options = {"margin": margin, "algorithm": algorithm, "ema_factor": FACTOR}
        update_delayed_(history, scale, torch.tensor(maxima), **options)
        for model, amax in zip(models, seen, strict=True):
            model.step(amax)
        # Sums of doubles may differ in their last place, and then in FP32's, rarely.
        within = 2e-7 if algorithm == "ema" else 0
        assert scale.tolist() == pytest.approx([m.scale for m in models], rel=within, abs=0)
        expected = np.array([model.history for model in models], dtype=np.float32).T
        np.testing.assert_array_equal(history.numpy(), expected)


def history_after(amaxes: list[float], length: int, **options: object) -> tuple[list, float]:
    history, scale = torch.zeros(length, 1), torch.ones(1)
    for amax in amaxes:
        history[0] = amax
        update_delayed_(history, scale, torch.tensor([448.0]), **options)
    return history[:, 0].tolist(), scale.item()


class TestDelayed:
    def test_a_value_counts_for_as_many_updates_as_the_history_is_long(self):
        scales = [history_after([8.0, 1.0, 1.0, 1.0][:n], 3)[1] for n in (1, 2, 3, 4)]
        assert scales == [56.0, 56.0, 56.0, 448.0]

    def test_a_history_of_one_keeps_nothing(self):
        assert history_after([8.0], 1) == ([0.0], 56.0)
        assert history_after([8.0, 1.0], 1) == ([0.0], 448.0)

    def test_a_tensor_that_did_not_run_keeps_history_and_scale(self):
        assert history_after([8.0, 2.0, 0.0], 4) == history_after([8.0, 2.0], 4)

    def test_one_infinity_freezes_the_scale_until_it_leaves_the_window(self):
        scales = [history_after([8.0, math.inf, 1.0, 1.0, 1.0][:n], 3)[1] for n in range(1, 6)]
        assert scales == [56.0, 56.0, 56.0, 56.0, 448.0]

    def test_a_nan_is_left_out_of_the_maximum(self):
        assert history_after([8.0, math.nan], 3)[1] == 56.0
        assert history_after([math.nan], 3)[1] == 1.0

    def test_ema_rises_at_once_and_sinks_by_its_factor(self):
        seen = [1.0, 8.0, 1.0, 1.0]
        options = {"algorithm": "ema", "ema_factor": 0.5}
        amaxes = [448.0 / history_after(seen[:n], 8, **options)[1] for n in (1, 2, 3, 4)]
        weights = np.array([1, 0.5, 0.25, 0.125])
        third = np.dot(weights[:3], [1, 8, 1]) / weights[:3].sum()
        fourth = np.dot(weights, [1, 1, 8, 1]) / weights.sum()
        assert amaxes == pytest.approx([1.0, 8.0, third, fourth])

    def test_an_amax_too_small_for_the_quotient_gives_the_largest_float(self):
        assert history_after([1e-38], 2)[1] == FLOAT32_MAX

    def test_margin_halves_the_scale_once_an_octave(self):
        assert history_after([8.0], 2, margin=3)[1] == 7.0


@settings(deadline=None)
@given(AMAX, st.sampled_from([0.0, 2.0**-20, 1.0]), st.booleans(), st.sampled_from([E4M3, E5M2]))
def test_current_scaling_follows_its_rules_bit_for_bit(amax, epsilon, power_of_two, format):
    largest = float(torch.finfo(torch.bfloat16).max)
    effective = epsilon if amax < epsilon else amax
    if effective == 0 or not math.isfinite(effective):
        expected = 1.0
    else:
        expected = divide(format.max, effective)
        expected = largest if math.isinf(expected) else expected
    if power_of_two:
        expected = 2.0 ** (math.frexp(expected)[1] - 1)
    options = {"epsilon": epsilon, "power_of_two": power_of_two}
    got = amax_to_scale(torch.tensor(amax), format.max, **options)
    assert got.item() == expected


POSITIVE = st.floats(min_value=2.0**-100, max_value=2.0**100, width=32)


@settings(deadline=None)
@given(POSITIVE, POSITIVE, st.integers(0, 3), st.booleans())
def test_room_is_made_by_the_smaller_scale_or_where_nothing_was_seen_by_the_fresh_one(
    scale, amax, margin, warmed
):
    fresh = divide(448.0 / 2**margin, amax)
    (made,) = scale_with_room(
        torch.tensor([scale]),
        torch.tensor([amax]),
        torch.tensor([448.0]),
        margin=margin,
        warmed=torch.tensor([warmed]),
    ).tolist()
    assert made == (min(scale, fresh) if warmed else fresh)


@pytest.mark.parametrize("warmed", [True, False])
@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_an_amax_that_says_nothing_leaves_the_scale(warmed, amax):
    made = scale_with_room(
        torch.tensor([3.0]),
        torch.tensor([amax]),
        torch.tensor([448.0]),
        margin=0,
        warmed=torch.tensor([warmed]),
    )
    assert made.tolist() == [3.0]


@pytest.mark.parametrize("way", ["compiled", "plain"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("amax", [0.0, 1e-39, 1e-37, 0.3, 7.0, 1e38, math.inf, math.nan])
def test_a_quantized_tensor_uses_the_scale_of_its_own_amax(way, power_of_two, amax):
    recipe = recipes.Recipe("current", "E4M3", "E5M2", power_of_two=power_of_two)
    library = kernels.load() if way == "compiled" else None
    counters = torch.zeros(4, dtype=torch.int64)
    row = StateRow(torch.zeros(()), torch.ones(()), counters)
    quantizer = CurrentQuantizer("input", E4M3, recipe, row, library)
    x = torch.tensor([amax, amax / 3]).bfloat16()
    quantized = quantizer.quantize(x, "none")
    expected = amax_to_scale(tensor_to_amax(x), 448.0, power_of_two=power_of_two)
    assert row.scale.item() == expected.item()
    assert quantized.rows.scale_inv.item() == divide(1.0, expected.item())
