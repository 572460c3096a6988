"""Any module's linears in FP8: what is swapped, what is left and why, what stays as it was."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from torch import Tensor, nn

from parallel.config import FP8Config, HighPrecisionLayers
from parallel.precision.conversion import Conversion, convert, scope_of
from parallel.precision.linear import Float8Linear
from parallel.precision.scope import PrecisionScope
from tests.unit.precision_recipes import every_recipe, every_variant, fp8_config

WIDTH = 64


class Model(nn.Module):
    """Embedding, two blocks with biases, a head tied to the embedding; a user's own code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * self.gate(x).sigmoid()
        return self.head(x)


TOKENS = torch.arange(48).view(4, 12)
LINEARS = ("blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2")


def test_linears_are_swapped_or_left_with_a_reason():
    model = Model()
    conversion = convert(model, fp8_config("current"), filter=lambda name, _: name != "blocks.1.2")
    assert conversion.converted == LINEARS[:3]
    assert conversion.left == {
        "blocks.1.2": "the filter leaves it out",
        "gate": "1 outputs are no multiple of 16, which current needs",
        "head": "its weight is shared by embed and head",
    }
    kinds = {name: type(model.get_submodule(name)) for name in LINEARS}
    assert kinds == dict(zip(LINEARS, [Float8Linear] * 3 + [nn.Linear], strict=True))
    assert conversion.scope.layers == LINEARS[:3]


@every_recipe
def test_parameters_stay_the_same_tensors_under_the_same_names(recipe):
    model = Model()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    convert(model, fp8_config(recipe))
    after = dict(model.named_parameters())
    assert list(model.state_dict()) == keys
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


@every_variant
def test_a_converted_model_trains_as_the_plain_one_does(recipe):
    plain = Model()
    mine = copy.deepcopy(plain)
    conversion = convert(mine, fp8_config(recipe))
    losses: dict[str, list[float]] = {"plain": [], "fp8": []}
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(48, (8, 16), generator=generator)
    for name, model in (("plain", plain), ("fp8", mine)):
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(20):
            loss = nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), (tokens + 1).flatten() % 48
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if name == "fp8":
                conversion.scope.finish_step(applied=True)
            losses[name].append(loss.item())
    assert losses["fp8"][-1] < 0.5 * losses["fp8"][0]
    assert losses["fp8"][-1] == pytest.approx(losses["plain"][-1], rel=0.1)
    assert losses["fp8"] != losses["plain"]


def test_linears_that_a_scope_keeps_in_bf16_are_known_to_it():
    kept = HighPrecisionLayers(first=1, names=("layers.1.0",))
    config = fp8_config("delayed", high_precision_layers=kept)
    scope = PrecisionScope("fp8", config, num_layers=2, built_in=False)
    for i in range(2):
        convert(Model().blocks[i], scope, prefix=f"layers.{i}.")
    assert scope.layers == ("layers.1.2",)
    assert scope.fixed_layers == ("layers.0.0", "layers.0.2", "layers.1.0")
    with pytest.raises(ValueError, match=r"'layers\.0\.0' is registered already"):
        convert(Model().blocks[0], scope, prefix="layers.0.")


def test_a_scope_of_another_library_is_refused():
    with pytest.raises(TypeError, match=r"not Other's: set fp8\.backend: native in the spec"):
        convert(Model(), type("Other", (), {})())


def test_saved_with_its_scaling_state_a_model_goes_on_to_the_bit():
    def made() -> tuple[Model, Conversion, torch.optim.Optimizer]:
        torch.manual_seed(2)
        model = Model()
        conversion = convert(model, fp8_config("delayed", amax_history_len=4))
        return model, conversion, torch.optim.Adam(model.parameters(), 3e-3)

    def losses(run: tuple[Model, Conversion, torch.optim.Optimizer], steps: range) -> list[float]:
        model, conversion, optimizer = run
        found = []
        for step in steps:
            tokens = torch.randint(48, (8, 16), generator=torch.Generator().manual_seed(step))
            following = (tokens + 1) % 48
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            conversion.scope.finish_step(applied=True)
            found.append(loss.item())
        return found

    first, again, without = made(), made(), made()
    losses(first, range(6))
    model, conversion, optimizer = first
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    tensors = {name: t.clone() for name, t in conversion.scope.state_tensors().items()}
    meta = json.loads(json.dumps(conversion.scope.state_meta()))
    expected = losses(first, range(6, 10))
    for run in (again, without):
        run[0].load_state_dict(saved[0])
        run[2].load_state_dict(copy.deepcopy(saved[1]))
    scope = again[1].scope
    for name, tensor in scope.state_tensors().items():
        tensor.copy_(tensors[name])
    scope.load_meta(meta)
    assert losses(again, range(6, 10)) == expected
    assert losses(without, range(6, 10)) != expected


@every_variant
def test_a_bias_is_added_in_bf16_and_its_gradient_is_of_the_unquantized_one(recipe):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
    x = torch.randn(32, WIDTH).bfloat16()
    bias = model[0].bias.detach().clone()
    with torch.no_grad():
        model[0].bias.zero_()
    convert(model, fp8_config(recipe))
    without = model(x).detach()
    with torch.no_grad():
        model[0].bias.copy_(bias)
    y = model(x)
    assert torch.equal(y, without + bias)
    g = torch.randn_like(y) * 1e-7
    y.backward(g)
    assert torch.equal(model[0].bias.grad, g.float().sum(0).bfloat16())


def test_a_weight_that_the_optimizer_changed_is_quantized_anew_without_being_told():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))
    convert(model, fp8_config("current"))
    x = torch.randn(4, WIDTH).bfloat16()
    before = model(x)
    with torch.no_grad():
        model[0].weight.mul_(-1)
    assert torch.equal(model(x), -before)


@pytest.mark.parametrize("copied", [False, True], ids=["first", "copy"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_what_a_fused_optimizer_did_is_seen_though_autograd_does_not_count_it(kind, copied):
    model = Model()
    convert(model, fp8_config("current"))
    model = copy.deepcopy(model) if copied else model
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True)
    before = model(TOKENS)
    before.sum().backward()
    optimizer.step()
    after = model(TOKENS)
    scope_of(model).forget_weights()
    assert torch.equal(after, model(TOKENS))
    assert not torch.equal(after, before)


def test_torch_compile_runs_a_converted_model_to_the_same_bits():
    eager, compiled = Model(), Model()
    scopes = [convert(model, fp8_config("delayed")).scope for model in (eager, compiled)]
    run = torch.compile(compiled, backend="eager")
    for _ in range(2):
        for call, scope in zip((eager, run), scopes, strict=True):
            call(TOKENS).square().sum().backward()
            scope.finish_step(applied=True)
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for name, tensor in scopes[0].state_tensors().items():
        assert torch.equal(tensor, scopes[1].state_tensors()[name])


def test_a_transform_of_torch_func_is_refused_with_what_to_do():
    model = Model()
    convert(model, fp8_config("current"))

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (TOKENS,)).square().sum()

    with pytest.raises(
        RuntimeError, match=r"FP8 linear 'blocks.0.0'.*torch\.func.*use backward\(\)"
    ):
        torch.func.grad(loss)(dict(model.named_parameters()))


def test_a_module_in_two_places_is_converted_once_for_both():
    inner = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleDict({"a": inner, "b": nn.Sequential(inner), "c": inner})
    conversion = convert(model, fp8_config("block"))
    assert conversion.converted == ("a",)
    assert isinstance(model["a"], Float8Linear)
    assert model["a"] is model["b"][0] is model["c"]


def test_what_may_compute_otherwise_is_left_alone():
    class Cosine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.normalize(x))

    hooked = nn.Linear(WIDTH, WIDTH)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    model = nn.ModuleDict(
        {
            "cosine": Cosine(WIDTH, WIDTH),
            "hooked": hooked,
            "attention": nn.MultiheadAttention(WIDTH, 4),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        }
    )
    left = dict(convert(model, fp8_config("current")).left)
    assert left.keys() == {"cosine", "hooked", "attention.out_proj", "normed"}
    assert "hooks" in left.pop("hooked")
    assert all("may compute otherwise" in reason for reason in left.values())


def _doubled(linear: nn.Linear) -> None:
    plain = linear.forward
    linear.forward = lambda x: 2 * plain(x)


NOT_PLAIN = {
    "forward": (_doubled, "its forward was replaced"),
    "extra_repr": (lambda m: setattr(m, "extra_repr", lambda: "mine"), "extra_repr was replaced"),
    "compile": (lambda m: m.compile(backend="eager"), "was replaced"),
    "buffer": (lambda m: m.register_buffer("mask", torch.ones(3)), "more than .* mask"),
    "parameter": (lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(1))), "gain"),
    "child": (lambda m: m.add_module("adapter", nn.Identity()), "adapter"),
    "forward hook": (lambda m: m.register_forward_hook(lambda *a: None), "hooks"),
    "forward pre-hook": (lambda m: m.register_forward_pre_hook(lambda *a: None), "hooks"),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda *a: None), "hooks"),
    "backward pre-hook": (lambda m: m.register_full_backward_pre_hook(lambda *a: None), "hooks"),
    "state dict hook": (lambda m: m.register_state_dict_post_hook(lambda *a: None), "hooks"),
    "state dict pre-hook": (lambda m: m.register_state_dict_pre_hook(lambda *a: None), "hooks"),
    "load hook": (lambda m: m.register_load_state_dict_pre_hook(lambda *a: None), "hooks"),
    "load post-hook": (lambda m: m.register_load_state_dict_post_hook(lambda *a: None), "hooks"),
    "our attribute": (lambda m: setattr(m, "current", 3), "current have another meaning"),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_a_linear_with_more_than_a_plain_one_has_is_left_with_the_reason(what):
    change, reason = NOT_PLAIN[what]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    change(model[0])
    conversion = convert(model, fp8_config("current"))
    assert conversion.converted == ("1",)
    assert re.search(reason, conversion.left["0"])
    assert type(model[0]) is nn.Linear


def test_attributes_that_a_program_set_are_carried_over():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0].INIT_SCALE = 0.5
    model[0].weight.tag = "decayed"
    convert(model, fp8_config("current"))
    assert isinstance(model[0], Float8Linear)
    assert (model[0].INIT_SCALE, model[0].weight.tag) == (0.5, "decayed")


def test_an_encoder_layer_that_computes_with_weights_in_evaluation_keeps_its_linears():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(WIDTH, WIDTH))
    conversion = convert(model, fp8_config("current"))
    assert conversion.converted == ("1",)
    inside = {n: r for n, r in conversion.left.items() if n.endswith(("linear1", "linear2"))}
    assert len(inside) == 2
    assert all("itself in evaluation" in reason for reason in inside.values())


def test_converted_linears_that_the_model_never_calls_are_told():
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called = nn.Linear(WIDTH, WIDTH)
            self.passed_by = nn.Linear(WIDTH, WIDTH)
            self.__dict__["alias"] = self.passed_by

        def forward(self, x: Tensor) -> Tensor:
            return self.alias(self.called(x))

    model = Aliased()
    conversion = convert(nn.Sequential(model), fp8_config("current"))
    assert conversion.never_ran() == ("0.called", "0.passed_by")
    model(torch.zeros(4, WIDTH))
    assert conversion.never_ran() == ("0.passed_by",)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_inputs_are_rounded_to_bf16_first(recipe, dtype):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    convert(model, fp8_config(recipe))
    x = torch.randn(16, WIDTH).to(dtype)
    assert torch.equal(model(x), model(x.bfloat16()).to(dtype))


def test_linears_named_as_those_of_octavos_own_layers_are_swapped_too():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])})
    conversion = convert(model, fp8_config("current"))
    assert conversion.converted == ("layers.0", "layers.1", "layers.2")
    assert conversion.left == {}


def test_patterns_keep_linears_and_one_that_matches_nothing_is_an_error():
    kept = HighPrecisionLayers(names=("blocks.0.*",))
    conversion = convert(Model(), FP8Config(high_precision_layers=kept))
    assert conversion.converted == LINEARS[2:]
    model = Model()
    wrong = HighPrecisionLayers(names=("block.0.*",))
    with pytest.raises(ValueError, match=r"matches no linear; did you mean 'blocks.0.\d'"):
        convert(model, FP8Config(high_precision_layers=wrong))
    with pytest.raises(ValueError, match="name its linears in names"):
        convert(model, FP8Config(high_precision_layers=HighPrecisionLayers(first=1)))
    assert all(type(model.get_submodule(name)) is nn.Linear for name in LINEARS)


def test_a_linear_itself_is_refused_and_a_second_conversion_changes_nothing():
    with pytest.raises(ValueError, match="convert the module around it"):
        convert(nn.Linear(WIDTH, WIDTH), FP8Config())
    model = Model()
    convert(model, FP8Config())
    again = convert(model, FP8Config())
    assert again.converted == ()
    assert again.left["blocks.0.0"] == "it is an FP8 linear already"


@every_variant
def test_under_autocast_the_output_is_its_dtype_and_the_products_are_the_same(recipe):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    convert(model, fp8_config(recipe))
    x = torch.randn(32, WIDTH, requires_grad=True)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, dtype = model(x), plain(x).dtype
    assert (expected.dtype, y.dtype) == (torch.float32, dtype)
    assert torch.equal(y, expected.to(dtype))
    y.float().sum().backward()
    assert x.grad.dtype == model[0].weight.grad.dtype == torch.float32


class TestWithAScope:
    def test_layers_of_several_modules_share_one_scope_under_their_prefixes(self):
        scope = PrecisionScope("fp8", FP8Config(recipe="mxfp8"), num_layers=2)
        for index in range(2):
            convert(Model().blocks[index], scope, prefix=f"layers.{index}.")
        assert scope.layers == ("layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2")
        scope.set_precision({"layers.1.2": "bf16"})
        assert scope.precision()["layers.1.2"] == "bf16"

    def test_what_the_job_keeps_in_bf16_is_left(self):
        kept = FP8Config(high_precision_layers=HighPrecisionLayers(first=1))
        scope = PrecisionScope("fp8", kept, num_layers=2)
        first = convert(Model().blocks[0], scope, prefix="layers.0.")
        assert first.left == dict.fromkeys(["0", "2"], "the job keeps it in BF16")
        bf16 = PrecisionScope("bf16", FP8Config(), num_layers=2)
        assert convert(Model(), bf16).converted == ()

    def test_another_device_than_the_scopes_is_an_error(self):
        scope = PrecisionScope("fp8", FP8Config(), num_layers=2, device="meta")
        model = Model()
        with pytest.raises(ValueError, match="is on cpu, the scope meta"):
            convert(model, scope)
        assert all(type(model.get_submodule(name)) is nn.Linear for name in LINEARS)
