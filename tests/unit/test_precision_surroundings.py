"""What a user's program has around the layers: it changes neither their numbers nor their state."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn

from parallel.precision.conversion import convert, scope_of
from parallel.precision.linear import Float8Linear, product
from parallel.precision.operand_statistics import OperandStatistics
from parallel.precision.quantizers import Factor
from parallel.precision.scope import PrecisionScope
from parallel.tensor import TensorGroup
from tests.unit.precision_recipes import both_ways, every_recipe, every_variant, fp8_config

NAME = "layers.0.mlp.down"
INPUTS, OUTPUTS = 64, 32
TWO_RANKS = TensorGroup(None, index=0, size=2)  # type: ignore[arg-type]


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


def make(recipe: str, compiled: bool = True) -> tuple[PrecisionScope, Float8Linear]:
    scope = PrecisionScope("fp8", fp8_config(recipe), num_layers=1, compiled=compiled)
    layer = scope.linear(NAME, INPUTS, OUTPUTS)
    assert isinstance(layer, Float8Linear)
    with torch.no_grad():
        layer.weight.copy_(drawn(OUTPUTS, INPUTS, seed=1) * 0.05)
    return scope, layer


def step(scope: PrecisionScope, layer: nn.Module, seed: int) -> list[Tensor]:
    x = drawn(16, INPUTS, seed=seed).bfloat16().requires_grad_()
    y = layer(x)
    layer.weight.grad = None
    y.backward(drawn(16, OUTPUTS, seed=seed + 100).bfloat16())
    scope.finish_step(applied=True)
    return [y.detach(), x.grad, layer.weight.grad]


def steps(recipe: str, compiled: bool = True) -> list[Tensor]:
    scope, layer = make(recipe, compiled)
    results = [tensor for seed in range(3) for tensor in step(scope, layer, seed)]
    return [*results, scope.statistics()[1], *scope.state_tensors().values()]


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@both_ways
@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_bit(compiled, recipe, dtype):
    expected = steps(recipe, compiled)
    with default_dtype(dtype):
        mine = steps(recipe, compiled)
    assert_equal(mine, expected)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_statistics_of_what_another_library_quantizes(recipe, dtype):
    reports = []
    for default in (torch.float32, dtype):
        with default_dtype(default):
            statistics = OperandStatistics(fp8_config(recipe), 1, torch.device("cpu"))
            row = statistics.rows(0)["input"]
            row.feed(statistics.amax, statistics.scale, 0)
            row.observe(drawn(8, INPUTS, seed=0).bfloat16(), quantized=True, counted=True)
            reports += [statistics.take(), statistics.empty()]
    assert all(report.dtype == torch.float32 for report in reports)
    assert torch.equal(reports[0].nan_to_num(-1), reports[2].nan_to_num(-1))


@every_recipe
def test_the_default_device_changes_no_bit(recipe):
    expected = steps(recipe)
    scope, layer = make(recipe)
    inputs = [drawn(16, INPUTS, seed=seed).bfloat16() for seed in range(3)]
    with torch.device("meta"):
        outputs = []
        for x in inputs:
            outputs.append(layer(x).detach())
            scope.finish_step(applied=True)
    assert torch.equal(outputs[0], expected[0])
    assert all(y.device.type == "cpu" for y in outputs)


class TestAutocast:
    @both_ways
    @every_variant
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_a_backward_inside_it_gives_the_gradients_of_one_outside(self, compiled, recipe, dtype):
        gradients = []
        for inside in (False, True):
            scope, layer = make(recipe, compiled)
            x = drawn(16, INPUTS, seed=3).requires_grad_()
            g = drawn(16, OUTPUTS, seed=4) * 1e-2
            with torch.autocast("cpu", dtype):
                y = layer(x)
                if inside:
                    y.backward(g.to(dtype))
            if not inside:
                y.backward(g.to(dtype))
            assert y.dtype == dtype
            scope.finish_step(applied=True)
            gradients.append([x.grad, layer.weight.grad, scope.statistics()[1]])
        assert_equal(*gradients)
        assert gradients[0][1].abs().max() > 0

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_a_layer_in_bf16_has_the_output_dtype_that_fp8_has(self, dtype):
        scope, layer = make("delayed")
        with torch.autocast("cpu", dtype):
            layer(drawn(16, INPUTS, seed=3)).sum().backward()
            scope.finish_step(applied=True)
            in_fp8 = layer(drawn(16, INPUTS, seed=3))
            scope.set_precision({NAME: "bf16"})
            in_bf16 = layer(drawn(16, INPUTS, seed=3))
        assert in_fp8.dtype == in_bf16.dtype == dtype

    def test_a_product_that_is_not_bf16_never_reaches_the_c_casts(self):
        _, layer = make("current")
        layer(drawn(16, INPUTS, seed=3).bfloat16())
        library = layer.operand("input").library
        assert library is not None
        one = torch.ones((), dtype=torch.float32)
        half = Factor(torch.ones(16, 16, dtype=torch.bfloat16), one)
        with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="float16"):
            product(half, half, library)


class TestReplacedWeights:
    """Each way must be seen without a word to the scope, at equal versions too."""

    def model(self, recipe: str) -> tuple[nn.Sequential, Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False))
        model[0].weight = nn.Parameter(drawn(OUTPUTS, INPUTS, seed=1))
        convert(model, fp8_config(recipe))
        x = drawn(16, INPUTS, seed=2)
        return model, x, model(x).detach()

    @every_recipe
    @pytest.mark.parametrize("precision", [True, False], ids=["train", "eval"])
    def test_a_parameter_put_in_its_place(self, recipe, precision):
        model, x, before = self.model(recipe)
        model.train(precision)
        model[0].weight = nn.Parameter(-drawn(OUTPUTS, INPUTS, seed=1))
        assert torch.equal(model(x), -before)

    @every_recipe
    def test_a_parameter_over_the_same_storage(self, recipe):
        model, x, before = self.model(recipe)
        other = nn.Parameter(model[0].weight.data)
        with torch.no_grad():
            model[0].weight.data.mul_(-1)
        model[0].weight = other
        assert torch.equal(model(x), -before)

    @every_recipe
    def test_a_state_dict_that_is_assigned(self, recipe):
        model, x, before = self.model(recipe)
        model.load_state_dict({"0.weight": -drawn(OUTPUTS, INPUTS, seed=1)}, assign=True)
        assert torch.equal(model(x), -before)

    @every_recipe
    def test_a_functional_call_and_the_call_after_it(self, recipe):
        model, x, before = self.model(recipe)
        other = {"0.weight": -drawn(OUTPUTS, INPUTS, seed=1)}
        assert torch.equal(torch.func.functional_call(model, other, (x,)), -before)
        assert torch.equal(model(x), before)

    @every_recipe
    def test_another_tensor_as_its_data_and_the_first_again(self, recipe):
        model, x, before = self.model(recipe)
        first = model[0].weight.data
        model[0].weight.data = -first
        assert torch.equal(model(x), -before)
        model[0].weight.data = first
        assert torch.equal(model(x), before)

    def test_data_freed_and_allocated_again_at_the_same_place(self):
        model, x, before = self.model("current")
        weight = model[0].weight
        seen = set()
        for _ in range(8):
            weight.data = torch.empty(0, dtype=torch.float32)
            weight.data = drawn(OUTPUTS, INPUTS, seed=1) * 2
            seen.add(weight.data_ptr())
            assert torch.equal(model(x), before * 2)
            weight.data = torch.empty(0, dtype=torch.float32)
            weight.data = drawn(OUTPUTS, INPUTS, seed=1)
            assert torch.equal(model(x), before)

    def test_a_view_of_the_same_memory_in_another_order(self):
        model = nn.Sequential(nn.Linear(32, 32, bias=False))
        convert(model, fp8_config("current"))
        x = drawn(4, 32, seed=2)
        model(x)
        model[0].weight.data = model[0].weight.data.t()
        mine = model(x)
        model[0].weight.data = model[0].weight.data.clone()
        assert torch.equal(model(x), mine)

    @every_recipe
    def test_a_parametrization_registered_after_the_conversion(self, recipe):
        class Negative(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return -weight

        model, x, before = self.model(recipe)
        nn.utils.parametrize.register_parametrization(model[0], "weight", Negative())
        assert torch.equal(model(x), -before)
        with torch.no_grad():
            model[0].parametrizations.weight.original.mul_(-1)
        assert torch.equal(model(x), before)
        model(x).sum().backward()
        assert model[0].parametrizations.weight.original.grad.abs().max() > 0

    @every_recipe
    def test_a_weight_that_is_an_inference_tensor_is_never_stale(self, recipe):
        model, x, before = self.model(recipe)
        with torch.inference_mode():
            model[0].weight = nn.Parameter(drawn(OUTPUTS, INPUTS, seed=1), requires_grad=False)
            assert torch.equal(model(x), before)
            model[0].weight.neg_()
            assert torch.equal(model(x), -before)


class TestInferenceMode:
    @both_ways
    @every_recipe
    @pytest.mark.parametrize("mode", ["train", "eval"])
    @pytest.mark.parametrize("before", [0, 1])
    def test_a_forward_in_it_leaves_training_as_it_was(self, compiled, recipe, mode, before):
        results = []
        for inferring in (False, True):
            scope, layer = make(recipe, compiled)
            for seed in range(before):
                step(scope, layer, seed)
            layer.train(mode == "train")
            context = torch.inference_mode() if inferring else torch.no_grad()
            with context:
                layer(drawn(16, INPUTS, seed=9).bfloat16())
            layer.train()
            trained = [t for seed in (3, 4) for t in step(scope, layer, seed)]
            layer.eval()
            with torch.no_grad():
                trained.append(layer(drawn(16, INPUTS, seed=9).bfloat16()))
            results.append([*trained, scope.statistics()[1]])
        assert_equal(*results)

    def test_a_gradient_of_an_evaluation_after_one_in_it(self):
        _, layer = make("block")
        layer.eval()
        with torch.inference_mode():
            layer(drawn(16, INPUTS, seed=9).bfloat16())
        x = drawn(16, INPUTS, seed=9).bfloat16().requires_grad_()
        layer(x).sum().backward()
        assert x.grad.abs().max() > 0

    def test_a_scope_asked_for_its_state_in_it_trains(self):
        scope, layer = make("delayed")
        with torch.inference_mode():
            scope.statistics(), scope.state_tensors()
        assert_equal(step(scope, layer, 0), step(*make("delayed"), 0))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_in_bf16_takes_the_inputs_that_fp8_takes(weight_dtype, dtype):
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, dtype=weight_dtype))
    scope = convert(model, fp8_config("delayed")).scope
    outputs = {}
    for precision in ("fp8", "bf16"):
        scope.set_precision({"0": precision})
        x = drawn(16, INPUTS, seed=2).to(dtype).requires_grad_()
        model.zero_grad()
        outputs[precision] = model(x)
        outputs[precision].sum().backward()
        scope.finish_step(applied=True)
        assert outputs[precision].dtype == x.grad.dtype == dtype
        assert model[0].weight.grad.dtype == model[0].bias.grad.dtype == weight_dtype
    assert torch.allclose(outputs["fp8"].float(), outputs["bf16"].float(), atol=0.2)


class TestCopies:
    """A copy has a scope of its own, with the state of when it was made."""

    def model(self, recipe: str, compiled: bool = True) -> tuple[nn.Sequential, PrecisionScope]:
        scope = PrecisionScope("fp8", fp8_config(recipe), num_layers=0, compiled=compiled)
        model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.SiLU(), nn.Linear(OUTPUTS, 16))
        convert(model, scope)
        return model, scope

    def trained(self, model: nn.Module, scope: PrecisionScope, seed: int) -> list[Tensor]:
        x = drawn(16, INPUTS, seed=seed).requires_grad_()
        y = model(x)
        model.zero_grad()
        y.backward(drawn(16, 16, seed=seed + 50))
        scope.finish_step(applied=True)
        state = [tensor.clone() for tensor in scope.state_tensors().values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        return [y.detach(), x.grad, *gradients, scope.statistics()[1], *state]

    @staticmethod
    def pickled(model: nn.Module) -> nn.Module:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    @both_ways
    @every_recipe
    @pytest.mark.parametrize("way", ["deepcopy", "pickle"])
    @pytest.mark.parametrize("before", [0, 2], ids=["new", "trained"])
    def test_a_copy_goes_on_as_the_first_would_and_each_for_itself(
        self, compiled, recipe, way, before
    ):
        model, scope = self.model(recipe, compiled)
        for seed in range(before):
            self.trained(model, scope, seed)
        other = copy.deepcopy(model) if way == "deepcopy" else self.pickled(model)
        mine = self.trained(model, scope, 7)
        assert scope_of(other) is not scope
        assert scope_of(other).layers == scope.layers
        assert_equal(self.trained(other, scope_of(other), 7), mine)
        self.trained(other, scope_of(other), 8)
        with torch.no_grad():
            other[0].weight.zero_()
        again = copy.deepcopy(model)
        assert_equal(self.trained(model, scope, 9), self.trained(again, scope_of(again), 9))
        assert not torch.equal(model[0].weight, other[0].weight)

    def test_a_copy_keeps_precision_and_what_is_counted(self):
        model, scope = self.model("current")
        self.trained(model, scope, 0)
        scope.set_precision({"2": "bf16"})
        scope.collect(every_counter=False)
        other = copy.deepcopy(model)
        scope.set_precision({"2": "fp8"})
        assert scope_of(other).precision() == {"0": "fp8", "2": "bf16"}
        assert other[2].current == "bf16"
        statistics = self.trained(other, scope_of(other), 1)[-1]
        assert statistics[:, 2:].count_nonzero() == 0

    @every_recipe
    def test_an_average_of_weights_is_evaluated_with_its_own(self, recipe):
        model, scope = self.model(recipe)
        average = torch.optim.swa_utils.AveragedModel(model)
        x = drawn(16, INPUTS, seed=3)
        average.eval()
        for seed in range(2):
            self.trained(model, scope, seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-1.5)
            average.update_parameters(model)
            plain = copy.deepcopy(average.module)
            with torch.no_grad():
                assert torch.equal(average(x), plain(x))

    def test_a_shallow_copy_computes_the_same(self):
        model, _ = self.model("current")
        x = drawn(16, INPUTS, seed=3)
        assert torch.equal(copy.copy(model[0])(x), model[0](x))

    def test_a_copy_within_a_step_has_what_was_seen_of_it(self):
        model, scope = self.model("delayed")
        model(drawn(16, INPUTS, seed=0)).sum().backward()
        other = copy.deepcopy(model)
        scope.finish_step(applied=True), scope_of(other).finish_step(applied=True)
        assert torch.equal(scope.statistics()[1], scope_of(other).statistics()[1])

    def test_a_module_without_fp8_linears_has_no_scope(self):
        with pytest.raises(ValueError, match="of 0 scopes"):
            scope_of(nn.Linear(16, 16))

    def test_what_tensor_ranks_share_is_refused_with_what_to_do(self):
        scope = PrecisionScope("fp8", fp8_config("current"), num_layers=1, tensor=TWO_RANKS)
        layer = scope.linear(NAME, INPUTS, OUTPUTS, shard="column")
        with pytest.raises(TypeError, match="load its state_dict"):
            copy.deepcopy(layer)
        with pytest.raises(TypeError, match="state_tensors"):
            copy.deepcopy(scope)


def test_a_linear_that_stays_in_bf16_takes_the_inputs_that_fp8_takes():
    scope = PrecisionScope("bf16", fp8_config("delayed"), num_layers=1)
    layer = scope.linear(NAME, INPUTS, OUTPUTS)
    x = drawn(16, INPUTS, seed=2).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.float32
    assert layer.weight.grad.dtype == torch.bfloat16
    assert torch.equal(y, x @ layer.weight.float().t())
