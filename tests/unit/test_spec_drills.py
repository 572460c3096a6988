"""Drills that a job has no place for are refused before a node is taken, each at its key."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.spec.errors import Problem, Source, SpecError
from orchestrator.spec.job import spec_of

JOB: dict[str, Any] = {
    "name": "rehearsal",
    "slots_per_node": 2,
    "model": {"num_layers": 2},
    "training": {"steps": 100, "train_batch_size": 8},
    "fp8": {"high_precision_layers": {"names": ["layers.0.attn.out"]}},
}
OUTLIER = {"kind": "amax_outlier", "step": 9, "tensor": "layers.1.mlp.down/input"}
FLIP = {"kind": "bit_flip", "step": 20, "parameter": "layers.1.mlp.down.weight"}
FROZEN = {"kind": "frozen_scale", "step": 9, "tensor": "layers.1.mlp.down/weight"}
NOISE = {"kind": "label_noise", "step": 9}
GROWTH = {"kind": "swiglu_growth", "step": 9, "layer": 1}
EVERY = [
    {"kind": "weight_surge", "step": 9, "layer": 1, "factor": 64},
    OUTLIER,
    {"kind": "poisoned_batch", "step": 9, "batches": 3, "tokens": "repeated", "token": 65},
    {**NOISE, "steps": 9, "share": 0.25},
    {"kind": "lr_shock", "step": 9, "steps": 3, "factor": 100},
    {"kind": "nonfinite_gradient", "step": 9, "rank": 1, "value": "inf"},
    FLIP,
    FROZEN,
    GROWTH,
    {"kind": "kill_rank", "step": 9, "rank": 1},
]


def problems(*drills: dict[str, Any], **sections: Any) -> list[Problem]:
    with pytest.raises(SpecError) as refused:
        spec_of(Source("f", {**JOB, "drills": list(drills), **sections}, {}), check_data=False)
    return list(refused.value.problems)


def test_every_kind_is_taken_where_it_has_a_place() -> None:
    spec = spec_of(Source("f", {**JOB, "drills": EVERY}, {}), check_data=False)
    assert [drill.kind for drill in spec.drills] == [drill["kind"] for drill in EVERY]


@pytest.mark.parametrize(
    ("drill", "sections", "key", "says"),
    [
        ({**NOISE, "step": 100}, {}, "step", "make it at most 99"),
        ({**NOISE, "step": 90, "steps": 11}, {}, "steps", "make it at most 10"),
        ({"kind": "poisoned_batch", "step": 99, "batches": 2}, {}, "batches", "make it at most 1"),
        ({**NOISE, "share": 1.5}, {}, "share", "1"),
        ({**NOISE, "kind": "label_nois"}, {}, "kind", "did you mean 'label_noise'?"),
        ({**NOISE, "shar": 0.5}, {}, "shar", "did you mean 'share'?"),
        ({**GROWTH, "layer": 2}, {}, "layer", "make it at most 1"),
        ({**OUTLIER, "tensor": "layers.1.mlp.dwn/input"}, {}, "tensor", "layers.1.mlp.down/input"),
        ({**OUTLIER, "tensor": "layers.1.mlp.down"}, {}, "tensor", "layers.1.mlp.down/"),
        ({**OUTLIER, "tensor": "layers.0.attn.out/input"}, {}, "tensor", "stays in BF16"),
        (OUTLIER, {"precision": "bf16"}, "tensor", "set precision: fp8"),
        (FROZEN, {"fp8": {"recipe": "current"}}, "kind", "set fp8.recipe: delayed"),
        ({**FLIP, "parameter": "layers.1.mlp.down"}, {}, "parameter", "layers.1.mlp.down.weight"),
        ({**FLIP, "replica": 2}, {}, "replica", "make it at most 1"),
        (FLIP, {"parallelism": {"pipeline": 2}}, "kind", "make parallelism.data at least 2"),
        ({**FLIP, "step": 17}, {}, "step", "make it 20"),
        ({**FLIP, "step": 3}, {}, "step", "make it 10"),
        (FLIP, {"replica_check_every": 0}, "kind", "leave replica_check_every out"),
        ({"kind": "nonfinite_gradient", "step": 9, "rank": 2}, {}, "rank", "make it at most 1"),
        ({"kind": "nonfinite_gradient", "step": 9, "value": "-inf"}, {}, "value", "inf, nan"),
    ],
)
def test_one_without_a_place_is_refused_with_the_remedy(
    drill: dict[str, Any], sections: dict[str, Any], key: str, says: str
) -> None:
    (problem,) = problems(drill, **sections)
    assert problem.key == f"drills[0].{key}"
    assert says in str(problem)


def test_one_that_is_wrong_in_itself_hides_no_other() -> None:
    found = problems({**NOISE, "share": 2}, {**GROWTH, "layer": 7}, {**FLIP, "replica": 5})
    assert {p.key for p in found} == {"drills[0].share", "drills[1].layer", "drills[2].replica"}


def test_a_user_s_own_linears_are_known_to_the_ranks_alone() -> None:
    model = {"num_layers": 2, "factory": "own:model"}
    own = {**OUTLIER, "tensor": "blocks.0.fc/input"}
    flip = {**FLIP, "parameter": "blocks.0.fc.weight"}
    data = {**JOB, "fp8": {}, "model": model, "drills": [own, flip]}
    assert len(spec_of(Source("f", data, {}), check_data=False).drills) == 2
    (problem,) = problems({**own, "tensor": "blocks.0.fc"}, fp8={}, model=model)
    assert problem.key == "drills[0].tensor"
