"""The scope: who computes in what, what a step leaves behind, what a snapshot must hold."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from monitoring.amax import headroom_octaves
from monitoring.tensor_stats import TensorStats
from parallel.config import FP8Config, HighPrecisionLayers
from parallel.precision import kernels, recipes
from parallel.precision.layers import FORWARDS_UNTIL_REMINDED
from parallel.precision.linear import BF16Linear, Float8Linear
from parallel.precision.packed_state import PackedState
from parallel.precision.recipes import linear_names
from parallel.precision.scope import STATISTICS_COLUMNS, PrecisionScope
from tests.unit.precision_recipes import both_ways, every_recipe, every_variant, fp8_config

NAMES = ("layers.0.attn.qkv", "layers.0.mlp.down")
WIDTH = 32
UNCALIBRATED = STATISTICS_COLUMNS.index("uncalibrated")


class Stage:
    """Two linears in a row, their scope, and an update by hand."""

    def __init__(self, recipe: str = "delayed", **options: object) -> None:
        torch.manual_seed(2)
        if recipe == "delayed":
            options.setdefault("amax_history_len", 3)
        self.scope = PrecisionScope("fp8", fp8_config(recipe, **options), num_layers=1)
        self.linears = [self.scope.linear(name, WIDTH, WIDTH) for name in NAMES]

    def step(self, seed: int, *, micro_batches: int = 2, applied: bool = True) -> list[Tensor]:
        """Outputs and weight gradients of a step; each linear's weight moves a little."""
        generator = torch.Generator().manual_seed(seed)
        results = []
        for _ in range(micro_batches):
            spread = 10 ** (3 * torch.rand(WIDTH, generator=generator) - 2)
            x = (torch.randn(6, WIDTH, generator=generator) * spread).bfloat16().requires_grad_()
            y = self.linears[1](self.linears[0](x))
            y.backward((torch.randn(6, WIDTH, generator=generator) * spread * 1e-2).bfloat16())
            results += [y.detach(), x.grad]
        results += [linear.weight.grad for linear in self.linears]
        for linear in self.linears:
            if applied:
                with torch.no_grad():
                    linear.weight.sub_(linear.weight.grad.sign() * 2**-8)
            linear.weight.grad = None
        self.scope.finish_step(applied)
        return results

    def tensors(self) -> dict[str, Tensor]:
        weights = {str(i): linear.weight.detach() for i, linear in enumerate(self.linears)}
        return weights | self.scope.state_tensors()

    def copy(self) -> tuple[dict[str, Tensor], str]:
        tensors = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return tensors, json.dumps(self.scope.state_meta())

    def restore(self, copy: tuple[dict[str, Tensor], str]) -> None:
        tensors, meta = copy
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self.scope.load_meta(json.loads(meta))


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


class TestState:
    @every_recipe
    def test_copied_out_and_back_in_it_reproduces_outputs_and_gradients_to_the_bit(self, recipe):
        stage = Stage(recipe=recipe)
        for seed in range(3):
            stage.step(seed)
        copy = stage.copy()
        expected = [stage.step(seed) for seed in (3, 4, 5)]
        stage.scope.set_precision({NAMES[0]: "bf16"})
        stage.step(9)
        stage.restore(copy)
        assert stage.scope.precision() == dict.fromkeys(NAMES, "fp8")
        for seed, results in zip((3, 4, 5), expected, strict=True):
            assert_equal(stage.step(seed), results)

    def test_without_the_scaling_state_the_outputs_would_differ(self):
        stage = Stage()
        for seed in range(3):
            stage.step(seed)
        copy = stage.copy()
        expected = stage.step(3)
        stage.step(4)
        stage.restore(copy)
        stage.scope.state_tensors()["scale"].fill_(1.0)
        different = [torch.equal(a, b) for a, b in zip(stage.step(3), expected, strict=True)]
        assert not all(different)

    def test_the_live_tensors_keep_their_identity(self):
        stage = Stage()
        before = {name: tensor.data_ptr() for name, tensor in stage.scope.state_tensors().items()}
        stage.step(0)
        stage.scope.set_precision({NAMES[0]: "bf16"})
        after = {name: tensor.data_ptr() for name, tensor in stage.scope.state_tensors().items()}
        assert before == after
        assert set(before) == {"amax_history", "calibrated", "scale"}

    @pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
    def test_scales_of_a_tensors_own_amax_leave_nothing_to_keep(self, recipe):
        stage = Stage(recipe)
        stage.step(0)
        assert stage.scope.state_tensors() == {}

    def test_state_of_other_linears_is_refused(self):
        stage = Stage()
        with pytest.raises(ValueError, match="other linears"):
            stage.scope.load_meta({"precision": {"layers.7.mlp.down": "fp8"}})

    def test_a_skipped_step_leaves_scales_and_histories_untouched(self):
        stage = Stage()
        stage.step(0)
        before = {name: t.clone() for name, t in stage.scope.state_tensors().items()}
        stage.step(1, applied=False)
        for name, tensor in stage.scope.state_tensors().items():
            assert torch.equal(tensor, before[name])
        stage.step(1)
        changed = stage.scope.state_tensors()
        assert not torch.equal(changed["scale"], before["scale"])

    def test_scales_do_not_move_within_a_step(self):
        stage = Stage()
        stage.step(0)
        scale = stage.scope.state_tensors()["scale"]
        before = scale.clone()
        stage.linears[0](torch.full((4, WIDTH), 1e4).bfloat16())
        assert torch.equal(scale, before)


class TestPrecision:
    def test_a_layer_goes_to_bf16_and_returns_with_scales_warmed_meanwhile(self):
        stage, witness = Stage(), Stage()
        for seed in range(2):
            stage.step(seed), witness.step(seed)
        stage.scope.set_precision({NAMES[1]: "bf16"})
        assert stage.scope.precision() == {NAMES[0]: "fp8", NAMES[1]: "bf16"}
        in_bf16, in_fp8 = stage.step(2), witness.step(2)
        assert not torch.equal(in_bf16[0], in_fp8[0])
        scale_before = stage.scope.state_tensors()["scale"].clone()
        for seed in (20, 21, 22, 23):
            stage.step(seed)
        stage.scope.set_precision({NAMES[1]: "fp8"})
        assert not torch.equal(stage.scope.state_tensors()["scale"][3:], scale_before[3:])
        stage.scope.statistics()
        stage.step(24)
        _, statistics = stage.scope.statistics()
        saturated, count = statistics[3:, 2].sum(), statistics[3:, 5].sum()
        assert saturated < 0.01 * count

    @every_variant
    @pytest.mark.parametrize("growth", [10.0, 0.1, 1.0])
    def test_a_return_to_fp8_saturates_nothing_however_the_weights_moved_in_bf16(
        self, recipe, growth
    ):
        stage = Stage(recipe)
        for seed in range(3):
            stage.step(seed)
        stage.scope.set_precision(dict.fromkeys(NAMES, "bf16"))
        stage.step(3)
        with torch.no_grad():
            stage.linears[0].weight.mul_(growth)
        stage.scope.forget_weights()
        stage.step(4)
        in_bf16 = stage.step(4, applied=False)
        stage.scope.statistics()
        stage.scope.set_precision(dict.fromkeys(NAMES, "fp8"))
        back = stage.step(4)
        _, statistics = stage.scope.statistics()
        assert statistics[:, 2].tolist() == [0] * 6
        for mine, exact in zip(back, in_bf16, strict=True):
            error = (mine - exact).float().norm() / exact.float().norm()
            assert error < 0.25

    def test_a_weight_that_moved_right_before_the_return_does_not_saturate(self):
        stage = Stage()
        for seed in range(3):
            stage.step(seed)
        stage.scope.set_precision({NAMES[0]: "bf16"})
        stage.step(3)
        with torch.no_grad():
            stage.linears[0].weight.mul_(10)
        stage.scope.set_precision({NAMES[0]: "fp8"})
        stage.scope.statistics()
        stage.step(3)
        names, statistics = stage.scope.statistics()
        weight = names.index(f"{NAMES[0]}/weight")
        assert statistics[weight, 2] == 0
        assert statistics[weight, 0] * statistics[weight, 1] == pytest.approx(448.0, rel=0.01)

    def grown(self, stage: Stage, applied: bool) -> None:
        """A step whose inputs, and gradients, are 100 times what they were."""
        for linear in stage.linears:
            x = (torch.randn(16, WIDTH) * 100).bfloat16().requires_grad_()
            linear(x).backward((torch.randn(16, WIDTH) * 100).bfloat16())
        stage.scope.finish_step(applied)

    def test_a_return_waits_for_an_applied_step_and_then_saturates_nothing(self):
        stage, layer = Stage(), {NAMES[0]: "bf16"}
        for seed in range(2):
            stage.step(seed)
        stage.scope.set_precision(layer)
        self.grown(stage, applied=False)
        stage.scope.set_precision({NAMES[0]: "fp8"})
        assert stage.scope.precision() == {NAMES[0]: "bf16", NAMES[1]: "fp8"}
        self.grown(stage, applied=False)
        assert stage.scope.precision()[NAMES[0]] == "bf16"
        self.grown(stage, applied=True)
        assert stage.scope.precision()[NAMES[0]] == "fp8"
        stage.scope.statistics()
        self.grown(stage, applied=True)
        _, statistics = stage.scope.statistics()
        assert (statistics[:3, 2] <= 0.02 * statistics[:3, 5]).all()

    def test_what_was_ordered_is_carried_over_a_restore_and_granted_by_its_scales(self):
        stage = Stage()
        stage.step(0)
        copy = stage.copy()
        stage.scope.set_precision({NAMES[0]: "bf16"})
        before = stage.copy()
        stage.scope.set_precision({NAMES[0]: "fp8"})
        ordered = stage.scope.ordered()
        assert ordered == dict.fromkeys(NAMES, "fp8")
        stage.restore(before)
        assert stage.scope.ordered() == {NAMES[0]: "bf16", NAMES[1]: "fp8"}
        stage.scope.set_precision(ordered)
        assert stage.scope.precision() == {NAMES[0]: "bf16", NAMES[1]: "fp8"}
        stage.step(1)
        assert stage.scope.precision() == ordered
        stage.restore(copy)
        stage.scope.set_precision(ordered)
        assert stage.scope.precision() == ordered

    def test_a_waiting_return_is_called_off_by_another_order(self):
        stage = Stage()
        stage.step(0)
        for precision in ("bf16", "fp8", "bf16"):
            stage.scope.set_precision({NAMES[0]: precision})
        stage.step(1), stage.step(2)
        assert stage.scope.precision()[NAMES[0]] == "bf16"
        stage.scope.set_precision({NAMES[0]: "fp8"})
        assert stage.scope.precision()[NAMES[0]] == "fp8"

    @pytest.mark.parametrize("seen", ["nothing", "forward"])
    def test_a_step_without_this_layer_or_without_its_gradient_warms_nothing(self, seen):
        stage = Stage()
        stage.step(0)
        stage.scope.set_precision({NAMES[0]: "bf16"})
        stage.scope.set_precision({NAMES[0]: "fp8"})
        if seen == "forward":
            stage.linears[0](torch.ones(4, WIDTH).bfloat16())
        stage.scope.finish_step(applied=True)
        assert stage.scope.precision()[NAMES[0]] == "bf16"
        stage.step(1)
        assert stage.scope.precision()[NAMES[0]] == "fp8"

    def test_a_layer_that_gets_no_gradient_returns_without_one(self):
        stage = Stage()
        stage.step(0)
        stage.scope.set_precision({NAMES[0]: "bf16"})
        stage.scope.set_precision({NAMES[0]: "fp8"})
        stage.linears[0].requires_grad_(False)
        stage.linears[0](torch.ones(4, WIDTH).bfloat16())
        stage.scope.finish_step(applied=True)
        assert stage.scope.precision()[NAMES[0]] == "fp8"

    def test_a_restored_state_knows_who_waits(self):
        stage = Stage()
        stage.step(0)
        stage.scope.set_precision({NAMES[0]: "bf16"})
        stage.scope.set_precision({NAMES[0]: "fp8"})
        copy = stage.copy()
        stage.step(1)
        assert stage.scope.precision()[NAMES[0]] == "fp8"
        stage.restore(copy)
        assert stage.scope.precision()[NAMES[0]] == "bf16"
        stage.step(1)
        assert stage.scope.precision()[NAMES[0]] == "fp8"
        plain = Stage()
        plain.step(0)
        stage.restore(plain.copy())
        assert "returning" not in stage.scope.state_meta()

    @pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
    def test_without_history_a_return_waits_for_nothing(self, recipe):
        stage = Stage(recipe)
        for precision in ("bf16", "fp8"):
            stage.scope.set_precision({NAMES[0]: precision})
        assert stage.scope.precision()[NAMES[0]] == "fp8"

    def test_what_made_a_layer_leave_does_not_set_its_scales_when_it_is_back(self):
        stage, witness = (Stage(amax_history_len=64) for _ in range(2))
        for each in (stage, witness):
            each.step(0)
        surge = torch.full((4, WIDTH), 1e6).bfloat16()
        stage.linears[0](surge)
        stage.step(1)
        stage.scope.set_precision({NAMES[0]: "bf16"})
        witness.step(1)
        stage.step(2), witness.step(2)
        stage.scope.set_precision({NAMES[0]: "fp8"})
        scales = [each.scope.state_tensors()["scale"][0].item() for each in (stage, witness)]
        assert scales[0] >= scales[1] > 1

    @pytest.mark.parametrize("first", ["bf16", "fp8"])
    def test_a_restored_state_is_taken_as_it_is_without_calibration(self, first):
        stage = Stage()
        stage.step(0)
        stage.scope.set_precision({NAMES[0]: first})
        stage.step(1)
        copy = stage.copy()
        stage.scope.set_precision({NAMES[0]: "fp8" if first == "bf16" else "bf16"})
        stage.step(2)
        stage.restore(copy)
        for name, tensor in stage.scope.state_tensors().items():
            assert torch.equal(tensor, copy[0][name])

    def test_other_layers_are_not_changed(self):
        stage = Stage()
        stage.scope.set_precision({NAMES[0]: "bf16"})
        assert isinstance(stage.linears[1], Float8Linear)
        assert stage.linears[1].current == "fp8"

    def test_an_unknown_name_changes_nothing_and_offers_the_nearest(self):
        stage = Stage()
        with pytest.raises(ValueError, match=r"did you mean 'layers\.0\.mlp\.down'"):
            stage.scope.set_precision({NAMES[0]: "bf16", "layers.0.mlp.dwon": "bf16"})
        assert stage.scope.precision() == dict.fromkeys(NAMES, "fp8")

    def test_an_unknown_precision_is_refused(self):
        with pytest.raises(ValueError, match="expected 'fp8' or 'bf16'"):
            Stage().scope.set_precision({NAMES[0]: "fp16"})

    def test_a_bf16_job_has_plain_linears_and_nothing_to_switch(self):
        scope = PrecisionScope("bf16", FP8Config(), num_layers=1)
        layer = scope.linear(NAMES[0], WIDTH, WIDTH)
        assert type(layer) is BF16Linear
        assert (scope.layers, scope.fixed_layers) == ((), (NAMES[0],))
        scope.reduce_amax(None)
        scope.finish_step(applied=True)
        names, statistics = scope.statistics()
        assert (names, statistics.shape) == ((), (0, len(STATISTICS_COLUMNS)))
        assert scope.state_tensors() == {}
        scope.load_meta(scope.state_meta())
        with pytest.raises(ValueError, match="stays in BF16"):
            scope.set_precision({NAMES[0]: "fp8"})

    def test_high_precision_layers_are_the_first_the_last_and_the_named(self):
        kept = HighPrecisionLayers(first=1, last=1, names=("layers.2.mlp.*",))
        scope = PrecisionScope("fp8", FP8Config(high_precision_layers=kept), num_layers=5)
        for name in linear_names(5):
            scope.linear(name, WIDTH, WIDTH)
        assert scope.layers == tuple(
            name
            for name in linear_names(5)
            if name[7] in "123" and not name.startswith("layers.2.mlp")
        )
        assert set(scope.layers) | set(scope.fixed_layers) == set(linear_names(5))

    def test_a_pattern_that_matches_no_linear_is_an_error_with_the_nearest_name(self):
        kept = HighPrecisionLayers(names=("layers.1.mlp.dwn", "layers.*.attn.qkv"))
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.dwn.*did you mean 'layers.1.mlp"):
            PrecisionScope("fp8", FP8Config(high_precision_layers=kept), num_layers=2)

    @pytest.mark.parametrize(("recipe", "width"), [("delayed", 40), ("block", 40), ("mxfp8", 48)])
    def test_features_that_the_recipe_can_not_take_are_refused_when_the_linear_is_made(
        self, recipe, width
    ):
        scope = PrecisionScope("fp8", fp8_config(recipe), num_layers=1)
        with pytest.raises(
            ValueError, match=rf"{NAMES[0]}.*{width} outputs .*make them 32 or (48|64)"
        ):
            scope.linear(NAMES[0], 32, width)

    def test_linears_are_named_once_and_before_the_first_forward(self):
        stage = Stage()
        with pytest.raises(ValueError, match="registered already"):
            stage.scope.linear(NAMES[0], WIDTH, WIDTH)
        stage.step(0)
        with pytest.raises(ValueError, match="laid out"):
            stage.scope.linear("layers.0.mlp.gate_up", WIDTH, WIDTH)


class TestStatistics:
    def test_rows_are_named_by_layer_and_role_and_columns_hold_what_was_seen(self):
        stage = Stage()
        stage.step(0)
        names, first = stage.scope.statistics()
        assert names == tuple(
            f"{name}/{role}" for name in NAMES for role in ("input", "weight", "grad_output")
        )
        assert first.dtype == torch.float32
        assert first[:, 1].tolist() == [1.0] * 6
        tokens, weight = 2 * 6 * WIDTH, WIDTH * WIDTH
        assert first[:, 5].tolist() == [tokens, weight, tokens] * 2
        stage.step(1)
        _, second = stage.scope.statistics()
        fp8_max = torch.tensor([448.0, 448.0, 57344.0] * 2)
        assert torch.equal(second[:, 1], fp8_max / first[:, 0])
        assert second[:, 5].tolist() == [tokens, weight, tokens] * 2

    @every_variant
    @pytest.mark.parametrize("precision", ["fp8", "bf16"])
    def test_the_weight_is_counted_once_a_step_however_often_it_is_used(self, recipe, precision):
        stage = Stage(recipe)
        stage.step(0)
        stage.scope.set_precision(dict.fromkeys(NAMES, precision))
        stage.scope.statistics()
        for needs_grad in (False, True, False, True):
            x = torch.ones(4, WIDTH).bfloat16().requires_grad_(needs_grad)
            stage.linears[0](x)
        stage.step(1)
        _, statistics = stage.scope.statistics()
        assert statistics[[1, 4], 5].tolist() == [WIDTH**2, WIDTH**2]

    def test_a_surge_past_the_delayed_scale_is_seen_as_saturation(self):
        stage = Stage()
        for seed in range(3):
            stage.step(seed)
        stage.scope.statistics()
        with torch.no_grad():
            stage.linears[0].weight.mul_(64)
        stage.scope.forget_weights()
        stage.step(3)
        names, statistics = stage.scope.statistics()
        by_name = dict(zip(names, statistics.tolist(), strict=True))
        assert by_name[f"{NAMES[0]}/weight"][2] > 0.9 * WIDTH * WIDTH * 0.5
        assert by_name[f"{NAMES[1]}/input"][2] > 0
        assert by_name[f"{NAMES[0]}/input"][2] == 0

    def test_several_steps_add_up_until_they_are_taken(self):
        stage = Stage()
        stage.step(0), stage.step(1)
        _, both = stage.scope.statistics()
        _, none = stage.scope.statistics()
        assert both[:, 5].tolist() == [2 * 2 * 6 * WIDTH, 2 * WIDTH**2, 2 * 2 * 6 * WIDTH] * 2
        assert none.count_nonzero() == 0

    @pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
    @pytest.mark.parametrize("factor", [1e-20, 1.0, 37.0, 1e15])
    def test_the_scale_reported_is_the_largest_amaxs_with_less_than_an_octave_of_headroom(
        self, recipe, factor
    ):
        stage = Stage(recipe)
        with torch.no_grad():
            stage.linears[0].weight.mul_(factor)
        stage.step(0, applied=False)
        names, statistics = stage.scope.statistics()
        own = "E4M3" if recipe != "current" else "HYBRID"
        for name, (amax, scale, *_) in zip(names, statistics.tolist(), strict=True):
            room = headroom_octaves(name, TensorStats(amax, scale, 0, 0, 0), own)
            assert -1e-6 < room < (1e-6 if recipe == "current" else 1)

    def test_a_delayed_scale_is_uncalibrated_until_an_applied_step_made_it_even_where_it_is_one(
        self,
    ):
        # Its amax is the format's maximum, so that the scale made of it is 1 too.
        stage = Stage()
        with torch.no_grad():
            stage.linears[0].weight[0, 0] = 448.0
        told = []
        for seed, applied in enumerate((False, True, True)):
            weight = stage.linears[0].weight.detach().clone()
            stage.step(seed, applied=applied)
            with torch.no_grad():
                stage.linears[0].weight.copy_(weight)
            stage.scope.forget_weights()
            told.append(stage.scope.statistics()[1])
        assert [rows[:, UNCALIBRATED].tolist() for rows in told] == [[1] * 6, [1] * 6, [0] * 6]
        assert told[2][1, 1] == 1.0 and told[2][0, 1] != 1.0

    def test_whether_scales_are_calibrated_comes_back_with_a_snapshot(self):
        stage = Stage()
        start = stage.copy()
        stage.step(0)
        later = stage.copy()
        for copy, uncalibrated in ((start, 1), (later, 0)):
            stage.restore(copy)
            stage.step(1)
            assert stage.scope.statistics()[1][:, UNCALIBRATED].tolist() == [uncalibrated] * 6

    def test_an_amax_that_gives_no_scale_calibrates_nothing(self):
        stage = Stage()
        stage.linears[0](torch.full((4, WIDTH), torch.inf).bfloat16())
        stage.scope.finish_step(applied=True)
        stage.scope.statistics()
        stage.step(1)
        # Under max the Inf is in the history still; what didn't run has seen nothing either.
        uncalibrated = stage.scope.statistics()[1][:, UNCALIBRATED].tolist()
        assert uncalibrated == [1, 0, 1, 1, 1, 1]
        assert stage.scope.state_tensors()["scale"][0] == 1.0

    @pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
    def test_a_tensors_own_scale_is_calibrated_from_the_start_whatever_it_is(self, recipe):
        stage = Stage(recipe)
        with torch.no_grad():
            stage.linears[0].weight[0, 0] = 448.0
        stage.step(0)
        _, statistics = stage.scope.statistics()
        assert statistics[1, 1] == 1.0
        assert (statistics[:, UNCALIBRATED] == 0).all()

    @every_variant
    def test_the_scales_reported_are_the_same_in_c_and_without_it(self, recipe):
        # Magnitudes of every kind; each comes to an operand of each role.
        amax = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16).float()[::7]
        expanded, cpu = recipes.expand(fp8_config(recipe)), torch.device("cpu")
        reports = []
        for library in (kernels.load(), None):
            state = PackedState(expanded, 100, cpu, library)
            taken = []
            for some in amax.split(100):
                state.report[: 3 * len(some), 0] = some.repeat_interleave(3)
                taken.append(state.take_report()[: 3 * len(some), 1])
            reports.append(torch.cat(taken))
        assert torch.equal(reports[0].nan_to_num(-7), reports[1].nan_to_num(-7))
        assert reports[0].unique().numel() > 200 or recipe.startswith("delayed")

    def test_what_rolled_back_steps_showed_is_not_told_of_later_ones(self):
        stage = Stage()
        stage.step(0)
        copy = stage.copy()
        stage.scope.statistics()
        stage.linears[0](torch.full((4, WIDTH), 1e6).bfloat16())
        stage.step(1)
        stage.restore(copy)
        stage.step(1)
        _, statistics = stage.scope.statistics()
        assert statistics[0, 0] < 1e4

    def test_a_skipped_step_is_still_reported(self):
        stage = Stage()
        stage.step(0, applied=False)
        _, statistics = stage.scope.statistics()
        assert (statistics[:, 0] > 0).all()

    @both_ways
    @every_recipe
    def test_counters_can_be_left_out_but_never_amax(self, compiled, recipe):
        scope = PrecisionScope("fp8", fp8_config(recipe), num_layers=1, compiled=compiled)
        layer = scope.linear(NAMES[0], WIDTH, WIDTH)
        scope.collect(every_counter=False)
        layer(torch.full((4, WIDTH), 1e30).bfloat16())
        scope.finish_step(applied=True)
        _, (row, *_) = scope.statistics()
        assert row[0] > 9e29
        assert row[2:UNCALIBRATED].count_nonzero() == 0


class TestReminder:
    def forwards(self, recipe: str, caplog, *, training: bool = True, closed: bool = False) -> int:
        stage = Stage(recipe)
        if closed:
            stage.scope.finish_step(applied=True)
        stage.linears[0].train(training)
        with torch.no_grad():
            for _ in range(FORWARDS_UNTIL_REMINDED + 5):
                stage.linears[0](torch.ones(1, WIDTH).bfloat16())
        return sum("finish_step" in record.message for record in caplog.records)

    def test_delayed_scaling_without_a_finished_step_is_told_once(self, caplog):
        assert self.forwards("delayed", caplog) == 1
        assert "scales stay 1" in caplog.text

    @pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
    def test_recipes_without_history_need_none(self, recipe, caplog):
        assert self.forwards(recipe, caplog) == 0

    def test_evaluation_and_training_with_steps_are_not_reminded(self, caplog):
        assert self.forwards("delayed", caplog, training=False) == 0
        assert self.forwards("delayed", caplog, closed=True) == 0
