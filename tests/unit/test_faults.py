"""What drills do to a model's weights, operands and scales, on one rank without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.config import ModelConfig
from parallel.faults import Faults
from parallel.model_plan import ModelPlan, parameter_name
from parallel.precision.scope import PrecisionScope
from parallel.topology import Coordinate
from parallel.transformer import layer_plans, loss_fn
from tests.ranks.engine_runs import fp8_config

MODEL = ModelConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=2, ffn_size=96)
DOWN = "layers.1.mlp.down"
TOKENS = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))


class Model:
    """A tiny model whose steps change no weight."""

    def __init__(self, recipe: str = "delayed", data: int = 0, tensor: int = 0) -> None:
        self.scope = PrecisionScope("fp8", fp8_config(recipe), num_layers=2)
        plans = layer_plans(MODEL, seq_len=16, seed=1, scope=self.scope)
        self.module = nn.Sequential(*(plan.build() for plan in plans))
        self.parameters = {
            parameter_name(name, plans): parameter
            for name, parameter in self.module.named_parameters()
        }
        hooks: Any = None  # of the exchange, which there is none of
        self.faults = Faults(
            self.module,
            ModelPlan(plans, loss_fn),
            scope=self.scope,
            hooks=hooks,
            coordinate=Coordinate(0, data, tensor),
            linears=self.scope.layers,
            parameters=tuple(self.parameters),
        )

    def step(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """Loss, and amax and scale by operand."""
        loss = loss_fn(self.module(TOKENS[:, :-1]), TOKENS[:, 1:])
        loss.backward()
        self.scope.finish_step(applied=True)
        self.faults.after_step()
        names, table = self.scope.statistics()
        amax, scale = (dict(zip(names, column, strict=True)) for column in table.T[:2].tolist())
        return float(loss.detach()), amax, scale

    def copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def changed(self, before: dict[str, Tensor]) -> dict[str, int]:
        """How many values of which parameters differ."""
        counts = {n: int((p != before[n]).sum()) for n, p in self.parameters.items()}
        return {name: count for name, count in counts.items() if count}


def test_growth_of_a_channel_shows_in_the_input_of_down_and_not_in_the_loss() -> None:
    model = Model()
    for _ in range(3):
        loss, amax, _ = model.step()
    before = model.copy()
    for _ in range(8):
        model.faults.grow_channel(1, 2.0)
    # A row of up and a column of down; a power of two is exact.
    changed = model.changed(before)
    assert changed == {"layers.1.mlp.gate_up.weight": 64, f"{DOWN}.weight": 64}
    again, grown, _ = [model.step() for _ in range(3)][-1]
    assert again == pytest.approx(loss, rel=0.02)
    assert grown[f"{DOWN}/input"] > 16 * amax[f"{DOWN}/input"]
    untouched = [n for n in amax if n.startswith("layers.0") and "grad" not in n]
    assert all(grown[name] == amax[name] for name in untouched)


def test_growth_is_the_first_tensor_rank_s() -> None:
    model = Model(tensor=1)
    before = model.copy()
    model.faults.grow_channel(1, 2.0)
    assert model.changed(before) == {}


@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_an_outlier_stands_in_its_operand_for_one_step(role: str) -> None:
    model = Model("current")
    _, usual, _ = model.step()
    before = model.copy()
    model.faults.add_outlier(f"{DOWN}/{role}", 1000.0)
    _, seen, _ = model.step()
    assert seen[f"{DOWN}/{role}"] == pytest.approx(1000 * usual[f"{DOWN}/{role}"], rel=0.01)
    _, after, _ = model.step()
    assert after == usual
    assert model.changed(before) == {}


def test_an_outlier_of_an_activation_is_the_first_replica_s() -> None:
    model = Model("current", data=1)
    _, usual, _ = model.step()
    model.faults.add_outlier(f"{DOWN}/input", 1000.0)
    assert model.step()[1] == usual


def test_an_outlier_of_a_weight_stays() -> None:
    model = Model("current", data=1)
    _, usual, _ = model.step()
    before = model.copy()
    model.faults.add_outlier(f"{DOWN}/weight", 1000.0)
    assert model.changed(before) == {f"{DOWN}.weight": 1}
    for _ in range(2):
        _, seen, _ = model.step()
        assert seen[f"{DOWN}/weight"] == pytest.approx(1000 * usual[f"{DOWN}/weight"], rel=0.01)


@pytest.mark.parametrize("bit", [0, 6, 14, 15])
def test_a_bit_flips_in_one_value_on_one_replica(bit: int) -> None:
    name = f"{DOWN}.weight"
    for data, tensor, flips in ((1, 0, 1), (0, 0, 0), (1, 1, 0)):
        model = Model(data=data, tensor=tensor)
        before = model.copy()
        model.faults.flip_bit(name, replica=1, bit=bit)
        assert model.changed(before) == ({name: 1} if flips else {})
        if flips:
            old, new = (
                int(p.view(torch.int16).view(-1)[0]) & 0xFFFF
                for p in (before[name], model.parameters[name].detach())
            )
            assert old ^ new == 1 << bit


def test_a_scale_stands_still_until_it_is_let_go() -> None:
    model = Model()
    tensor, other = f"{DOWN}/input", f"{DOWN}/weight"
    for _ in range(3):
        _, _, scale = model.step()
    model.faults.freeze_scale(tensor, 8.0)
    model.faults.surge_mlp(1, 3.0)
    frozen = [model.step()[2] for _ in range(4)]
    assert [s[tensor] for s in frozen] == [8.0 * scale[tensor]] * 4
    assert frozen[-1][other] < scale[other] / 2, "another scale stood still too"
    model.faults.thaw_scale(tensor)
    model.step()
    assert model.step()[2][tensor] < scale[tensor]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda f: f.add_outlier("layers.1.mlp.dwn/input", 9.0), "did you mean 'layers.1.mlp.down"),
        (lambda f: f.add_outlier("layers.1.mlp.down/inputs", 9.0), "no FP8 linear"),
        (lambda f: f.freeze_scale("layers.7.mlp.down/input", 1.0), "no FP8 linear"),
        (lambda f: f.grow_channel(2, 2.0), "the model has 2"),
        (lambda f: f.surge_mlp(-1, 2.0), "the model has 2"),
        (
            lambda f: f.flip_bit("layers.1.mlp.down", 0, 6),
            "did you mean 'layers.1.mlp.down.weight'",
        ),
    ],
)
def test_what_the_model_has_no_place_for_is_refused(
    fault: Callable[[Faults], None], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        fault(Model().faults)


def test_a_recipe_without_delayed_scales_has_none_to_freeze() -> None:
    with pytest.raises(ValueError, match="isn't delayed"):
        Model("current").faults.freeze_scale(f"{DOWN}/input", 1.0)
