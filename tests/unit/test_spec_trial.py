"""A factory's model is made once before its job is taken, without memory and without risk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.spec import JobSpec, spec_of
from orchestrator.spec_errors import Problem, Source, SpecError
from orchestrator.spec_trial import check_factory_model
from tests.unit.test_spec import GOOD

TOY = "tests.ranks.toy_model:make"


def spec(
    factory: str = TOY,
    *,
    num_layers: int = 2,
    names: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
) -> JobSpec:
    options = {"width": 64, "depth": 2}
    data: dict[str, Any] = {
        **GOOD,
        "data": {"source": __file__},
        "parallelism": {},
        "model": {"factory": factory, "num_layers": num_layers, "options": options},
        "fp8": {"high_precision_layers": {"names": list(names)}},
        "gradient_exchange": {"high_precision_parameters": list(parameters)},
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
