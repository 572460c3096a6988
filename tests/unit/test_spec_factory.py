"""``model.factory`` in a job file: checked before anything starts, and left as it is."""

from __future__ import annotations

import pickle
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.spec.errors import Problem, Source, SpecError
from orchestrator.spec.job import spec_data, spec_of
from parallel import model_factory
from parallel.config import FP8Config
from parallel.model_factory import FactoryError, load_factory
from parallel.model_plan import LayerPlan, ModelPlan
from parallel.precision.scope import PrecisionScope
from tests.unit.test_spec import GOOD

EXAMPLE_NAMES = {
    "torch": torch,
    "nn": nn,
    "partial": partial,
    "LayerPlan": LayerPlan,
    "ModelPlan": ModelPlan,
    "loss": lambda output, targets: output.mean(),
}
FACTORY = "tests.ranks.toy_model:make"


def data(**model: Any) -> dict[str, Any]:
    corpus = {"source": __file__, "pattern": "*.py"}
    return {**GOOD, "data": corpus, "model": {"num_layers": 3, **model}}


def problems(**model: Any) -> dict[str, Problem]:
    with pytest.raises(SpecError) as refused:
        spec_of(Source("job.yaml", data(**model), {}))
    return {problem.key: problem for problem in refused.value.problems}


def test_a_factory_with_options_is_accepted_and_its_spec_reads_back() -> None:
    options = {"width": 100, "nested": {"deep": [1, 2]}}
    spec = spec_of(Source("job.yaml", data(factory=FACTORY, options=options), {}))
    assert spec.model.options == options
    again = spec_of(Source("job.yaml", spec_data(spec), {}))
    assert again == spec


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("no.such.module:make", "importing no.such.module raised ModuleNotFoundError"),
        ("tests.ranks.toy_model:mak", "has no mak"),
        ("tests.ranks.toy_model:__doc__", "is of type str"),
        ("tests.ranks.toy_model:Block", "can't be called"),
        ("tests.ranks.toy_model.make", "is not written as package.module:function"),
    ],
)
def test_one_that_can_not_be_called_is_refused_with_what_to_do(factory: str, words: str) -> None:
    problem = problems(factory=factory)["model.factory"]
    assert words in problem.message
    assert factory in problem.value


def test_one_whose_import_fails_is_refused_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FactoryError, match="raised RuntimeError: no licence") as refused:
        load_factory("broken_model:make")
    assert "PYTHONPATH" in refused.value.remedy
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    sys.modules.pop("broken_model", None)


def test_the_example_of_the_contract_makes_a_model_that_runs() -> None:
    text = model_factory.__doc__ or ""
    start, end = text.index("    def make("), text.index("The contract:")
    names: dict[str, Any] = {**EXAMPLE_NAMES}
    exec(textwrap.dedent(text[start:end]), names)
    scope = PrecisionScope("fp8", FP8Config(), num_layers=6, built_in=False)
    plan = names["make"](options={"width": 64}, seq_len=8, seed=0, scope=scope)
    modules = [layer.build() for layer in plan.layers]
    x: Any = torch.arange(16).view(2, 8)
    for module in modules:
        x = module(x)
    assert x.shape == (2, 8, 256)
    assert len(scope.layers) == 12
    assert sum(layer.transformer for layer in plan.layers) == 6


def test_keys_that_nobody_would_read_are_refused() -> None:
    found = problems(factory=FACTORY, hidden_size=512, tie_embeddings=True)
    assert set(found) == {"model.hidden_size", "model.tie_embeddings"}
    assert "model.options" in found["model.hidden_size"].remedy
    assert set(problems(options={"width": 3}, num_heads=4)) == {"model.options"}


def test_checks_of_the_built_in_model_leave_a_users_alone() -> None:
    own = data(factory=FACTORY, options={"width": 100})
    own["fp8"] = {"high_precision_layers": {"names": ["layers.0.mix"]}}
    own["parallelism"] = {"tensor": 4}
    spec_of(Source("job.yaml", own, {}))
    own["parallelism"] = {"pipeline": 4}
    with pytest.raises(SpecError, match="4 pipeline stages for 3 layers"):
        spec_of(Source("job.yaml", own, {}))
