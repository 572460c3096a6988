"""A factory's model is made once before its job is taken, without memory and without risk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.spec import trial as spec_trial
from orchestrator.spec.errors import Finding, Problem, Source, SpecError
from orchestrator.spec.job import JobSpec, spec_of
from orchestrator.spec.trial import check_factory_model, trial
from tests.unit.test_spec import GOOD

TOY = "tests.ranks.toy_model:make"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial takes four seconds of processor time: on a busy machine more than its limit."""
    monkeypatch.setattr(spec_trial, "TRIAL_S", 120.0)


def spec(
    factory: str = TOY,
    *,
    num_layers: int = 2,
    names: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
    width: int = 64,
    **sections: Any,
) -> JobSpec:
    options = {"width": width, "depth": 2}
    data: dict[str, Any] = {
        **GOOD,
        "data": {"source": __file__},
        "parallelism": {},
        "model": {"factory": factory, "num_layers": num_layers, "options": options},
        "fp8": {"high_precision_layers": {"names": list(names)}},
        "gradient_exchange": {"high_precision_parameters": list(parameters)},
        **sections,
    }
    return spec_of(Source("job.yaml", data, {}))


def problem(wrong: JobSpec) -> Problem:
    with pytest.raises(SpecError) as refused:
        check_factory_model(wrong, "job.yaml")
    (only,) = refused.value.problems
    return only


def test_layers_that_the_factory_does_not_make_are_refused() -> None:
    told = problem(spec(num_layers=5))
    assert (told.file, told.key) == ("job.yaml", "model.factory")
    assert "made 2 layers with transformer=True, model.num_layers is 5" in told.message
    assert told.remedy == "set model.num_layers to 2"


def test_a_pattern_that_matches_none_of_its_linears_is_refused_and_one_that_does_is_not() -> None:
    told = problem(spec(names=("layers.0.*", "layers.7.*")))
    assert told.key == "fp8.high_precision_layers.names[1]"
    assert told.value == "'layers.7.*'"
    assert "matches none of the" in told.message
    assert "layers.0." in told.remedy
    check_factory_model(spec(names=("layers.0.*",)), "job.yaml")


def test_a_pattern_that_matches_none_of_its_parameters_is_refused_and_one_that_does_is_not() -> (
    None
):
    told = problem(spec(parameters=("ends.weight", "layers.*.mix.bias")))
    assert told.key == "gradient_exchange.high_precision_parameters[1]"
    assert "matches none of the" in told.message
    assert told.remedy.startswith("did you mean 'layers.")
    check_factory_model(spec(parameters=("ends.weight", "layers.1.norm.*")), "job.yaml")


def finding(wrong: JobSpec) -> Finding:
    """What the other process would tell, made in this one."""
    (only,) = trial(wrong)
    return only


def test_widths_that_fp8_does_not_take_are_refused_and_bf16_takes_them() -> None:
    told = finding(spec(width=40))
    assert told.path == ("model", "factory")
    assert "'layers.0.mix': 40 outputs are no multiple of 16" in told.message
    assert told.remedy == "make them 32 or 48, or keep the linear in BF16"
    assert not trial(spec(width=40, precision="bf16"))


def test_widths_that_tensor_ranks_can_not_share_are_refused() -> None:
    shared = {"parallelism": {"tensor": 2}, "slots_per_node": 2}
    assert not trial(spec(width=48, **shared))
    told = finding(spec(width=48, fp8={"recipe": "delayed"}, **(shared | _over(4))))
    assert "'layers.0.mlp.down': 24 inputs are no multiple of 16" in told.message
    told = finding(spec(width=48, **(shared | _over(5))))
    assert "'layers.0.mlp.gate_up': 192 outputs over 5 tensor ranks" in told.message
    assert "parallelism.tensor" in told.remedy
    assert not trial(spec(**(shared | {"precision": "bf16"})))


def _over(ranks: int) -> dict[str, Any]:
    return {"parallelism": {"tensor": ranks}, "slots_per_node": ranks}


FORGETFUL = """
from functools import partial
from torch import nn
from parallel.model_plan import LayerPlan, ModelPlan
from parallel.precision import convert
def make(*, options, seq_len, seed, scope):
    def block(i):
        module = nn.Sequential(nn.Linear(options["width"], options["width"]))
        if options["depth"] != seed:
            convert(module, scope, prefix=f"layers.{i}.")
        return module
    layers = [LayerPlan(f"layers.{i}", partial(block, i)) for i in range(2)]
    return ModelPlan(layers, lambda output, targets: output.mean())
"""


def test_a_model_of_which_nothing_would_compute_in_fp8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trial_forgetful.py").write_text(FORGETFUL)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = "trial_forgetful:make"
    unconverted = {**GOOD.get("training", {}), "seed": 2}
    nothing = "none of the linears of its model would compute in FP8"
    told = finding(spec(own, training=unconverted))
    assert (told.path, told.message) == (("model", "factory"), nothing)
    assert told.remedy.endswith("or set precision: bf16")
    assert not trial(spec(own, training=unconverted, precision="bf16"))
    # Linears that convert leaves for their width are none either, and those the spec keeps.
    assert nothing in finding(spec(own, width=72)).message
    assert "keeps 2 in BF16" in finding(spec(own, names=("layers.*",))).message
    assert not trial(spec(own, names=("layers.1.*",)))
    # Converted linears are whole on every tensor rank.
    alone = finding(spec(own, **_over(2)))
    assert alone.path == ("parallelism", "tensor")
    assert alone.remedy == "give scope.linear shard=, or make it 1"


def test_code_that_prints_or_can_not_run_here_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trial_loud.py").write_text(
        "print('[1, 2]')\nfrom tests.ranks.toy_model import make\n"
    )
    (tmp_path / "trial_apart.py").write_text(
        "import torch.distributed as dist\n"
        "def make(*, options, seq_len, seed, scope):\n    return dist.get_rank()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    check_factory_model(spec("trial_loud:make", names=("layers.1.*",)), "job.yaml")
    assert "num_layers to 2" in problem(spec("trial_loud:make", num_layers=4)).remedy
    check_factory_model(spec("trial_apart:make"), "job.yaml")
