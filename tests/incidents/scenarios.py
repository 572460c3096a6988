"""One vocabulary of incidents: each drill kind with what it must lead to, and healthy jobs.

A scenario is run on a layout of two ranks (pipeline, data or tensor), on a model that learns a
small text in seconds, and judged by ``verdict``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monitoring.records import Incident
from orchestrator.recovery.resume import REPORT_LAG
from orchestrator.spec.completion import complete
from orchestrator.spec.job import JobSpec
from tests.incidents.local_ranks import Told

STEPS = 120
DRILL_STEP = 60
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "PP": {"pipeline": 2},
    "DP": {"data": 2},
    "TP": {"tensor": 2},
}
DOWN = "layers.1.mlp.down"
WORDS = ["def", "return", "self", "None", "import", "for", "in", "x", "y", "(", ")", ":"]
NEW = ["class", "yield", "lambda", "async", "await", "raise"]


@dataclass(frozen=True)
class Scenario:
    """A drill, and what is right."""

    name: str
    drill: dict[str, Any]
    kinds: frozenset[str]
    """Kinds of incidents, one of which must be the first."""
    answers: frozenset[str]
    """Actions, one of which must be the first answer."""
    suspect: str = ""
    """What one of the first incident's suspects begins with; empty: none is asked for."""
    delay: int = 0
    """Steps from the drill's first to the first incident, at most."""
    lost: int = 40
    """Steps done again, at most."""
    layouts: tuple[str, ...] = ("PP", "DP", "TP")
    sections: dict[str, Any] = field(default_factory=dict)


_BACK = frozenset({"rollback", "layer_fallback"})
_TRACE = frozenset({"layer_fallback", "early_fallback"})

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "weight_surge",
        {"kind": "weight_surge", "layer": 1, "factor": 64},
        frozenset({"amax_saturation", "amax_surge"}),
        frozenset({"layer_fallback"}),
        suspect=DOWN,
    ),
    Scenario(
        "amax_outlier/input",
        {"kind": "amax_outlier", "tensor": f"{DOWN}/input", "factor": 1e4},
        frozenset({"amax_surge", "amax_saturation", "grad_norm_spike", "loss_spike"}),
        _BACK,
        suspect=DOWN,
    ),
    Scenario(
        "amax_outlier/weight",
        {"kind": "amax_outlier", "tensor": f"{DOWN}/weight", "factor": 1e3},
        frozenset({"amax_surge", "amax_saturation", "grad_norm_spike", "loss_spike"}),
        _BACK,
        suspect=DOWN,
        delay=1,
    ),
    Scenario(
        "amax_outlier/grad_output",
        # Clamped in its step; then it holds the scale down for a history, and all else underflows.
        {"kind": "amax_outlier", "tensor": f"{DOWN}/grad_output", "factor": 1e8},
        frozenset({"grad_norm_spike", "amax_saturation", "underflow"}),
        _BACK | _TRACE,
        delay=12,
        sections={"fp8": {"amax_history_len": 32}},
    ),
    Scenario(
        "poisoned_batch/random",
        {"kind": "poisoned_batch", "tokens": "random"},
        frozenset({"loss_spike", "amax_saturation", "grad_norm_spike"}),
        frozenset({"rollback"}),
    ),
    Scenario(
        "poisoned_batch/repeated",
        {"kind": "poisoned_batch", "tokens": "repeated"},
        frozenset({"loss_spike", "amax_saturation", "grad_norm_spike"}),
        frozenset({"rollback"}),
    ),
    Scenario(
        "label_noise",
        {"kind": "label_noise", "share": 0.5, "steps": 8},
        frozenset({"loss_spike", "amax_saturation", "grad_norm_spike"}),
        _BACK,
        delay=2,
    ),
    Scenario(
        "lr_shock",
        {"kind": "lr_shock", "factor": 100, "steps": 16},
        frozenset({"loss_spike", "amax_saturation", "grad_norm_spike", "amax_surge"}),
        _BACK,
        delay=16,
    ),
    Scenario(
        "nonfinite_gradient/nan",
        {"kind": "nonfinite_gradient", "rank": 1},
        frozenset({"nonfinite"}),
        frozenset({"skip_step"}),
        lost=0,
    ),
    Scenario(
        "nonfinite_gradient/inf",
        {"kind": "nonfinite_gradient", "rank": 1, "value": "inf"},
        frozenset({"nonfinite"}),
        frozenset({"skip_step"}),
        lost=0,
    ),
    Scenario(
        "bit_flip",
        {"kind": "bit_flip", "parameter": f"{DOWN}.weight", "replica": 1},
        frozenset({"replica_disagreement"}),
        frozenset({"restart"}),
        suspect=DOWN,
        layouts=("DP",),
    ),
    Scenario(
        "frozen_scale",
        {"kind": "frozen_scale", "tensor": f"{DOWN}/input", "factor": 1.5, "steps": 20},
        frozenset({"frozen_scale"}),
        frozenset({"early_fallback"}),
        suspect=DOWN,
        delay=5,
        lost=0,
    ),
    Scenario(
        "swiglu_growth",
        {"kind": "swiglu_growth", "layer": 1, "factor": 1.25, "steps": 30},
        frozenset({"projected_overflow", "amax_surge"}),
        _TRACE,
        suspect="layers.1.mlp.",
        delay=16,
    ),
    Scenario(
        "kill_rank",
        {"kind": "kill_rank", "rank": 1},
        frozenset({"rank_died"}),
        frozenset({"restart"}),
    ),
)


@dataclass(frozen=True)
class Healthy:
    """A job in which nothing is wrong."""

    name: str
    stretches: tuple[dict[str, Any], ...]
    """What differs from the other jobs; each goes on where the one before ended."""
    answers: tuple[str, ...] = ()
    """What is done about it: nothing, but where no detector can know better."""


_CONSTANT = {"schedule": "constant", "steps": STEPS, "lr": 1e-3}

HEALTHY = (
    Healthy("plain", ({},)),
    Healthy("warm-up and decay", ({"training": {"warmup_steps": 40, "schedule": "linear"}},)),
    Healthy("a small noisy batch", ({"training": {"train_batch_size": 2}},)),
    Healthy("another seed", ({"data": {"shuffle_seed": 1}, "training": {"seed": 1}},)),
    Healthy(
        "the schedule starts again",
        (
            {
                "training": {"schedule": "linear", "lr": 1e-3},
                "drills": [{"kind": "lr_shock", "step": DRILL_STEP, "steps": 40, "factor": 3}],
            },
        ),
    ),
    Healthy(
        "a domain shift",
        (
            {
                "data": {"source": "near.py", "shuffle": False},
                "training": {"train_batch_size": 32, "seq_len": 16},
            },
        ),
    ),
    Healthy(
        # The loss is four times as high from one step to the next. Nothing is given up for it.
        "another language",
        ({"data": {"source": "far.py", "shuffle": False}},),
        ("rollback", "rollback", "rollback", "whole_bf16", "accept", "return_to_fp8"),
    ),
    *(
        Healthy(
            f"a batch of {before}, then of {after}",
            (
                {"training": _CONSTANT | {"train_batch_size": before, "steps": DRILL_STEP}},
                {"training": _CONSTANT | {"train_batch_size": after}},
            ),
        )
        for before, after in ((16, 4), (4, 16))
    ),
    Healthy("long", ({"training": {"steps": 7000}},)),
)
"""Jobs in which nothing is wrong. The return to FP8 and what follows a restart are in the
scenarios: nothing but that return may come after the answer."""


def job(folder: Path, layout: str, **sections: Any) -> JobSpec:
    """The spec of a small job; ``sections`` are merged into it."""
    texts = _texts(folder)
    values: dict[str, Any] = {
        "name": "incident",
        "slots_per_node": 2,
        "parallelism": LAYOUTS[layout],
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "ffn_size": 96},
        "data": {"source": "text.py"},
        "training": {"steps": STEPS, "seq_len": 32, "train_batch_size": 8, "lr": 2e-3},
        "fp8": {"amax_history_len": 8},
        "gradient_exchange": {"min_size": 1024},
        "detection": {"window": 24, "min_history": 12, "settle_steps": 4},
        "snapshots": {"every": 5, "keep": 8, "certify_after": 5},
        "checkpoint": {"every": 0},
        "recovery": {"calm_steps": 20},
        "wandb": {"mode": "disabled"},
    }
    for name, section in sections.items():
        known = values.get(name)
        values[name] = known | section if isinstance(known, dict) else section
    values["data"]["source"] = str(texts / values["data"]["source"])
    return complete(JobSpec.model_validate(values))


def _texts(folder: Path) -> Path:
    """Where the texts are: one, and two that go over to another domain half-way.

    Of the words of the near one 1 in 40 is new, of the far one half of them.
    """
    texts = folder / "texts"
    if not texts.exists():
        texts.mkdir(parents=True)
        draw = random.Random(0).choices
        (texts / "text.py").write_text(" ".join(draw(WORDS, k=60_000)))
        half = DRILL_STEP * 8 * 32
        first = " ".join(draw(WORDS, k=half))[:half]
        for name, new in (("near.py", 1 / 40), ("far.py", 1 / 2)):
            weights = [(1 - new) / len(WORDS)] * len(WORDS) + [new / len(NEW)] * len(NEW)
            (texts / name).write_text(first + " ".join(draw(WORDS + NEW, weights, k=half)))
    return texts


def rehearsal(folder: Path, scenario: Scenario, layout: str) -> JobSpec:
    """The job of a scenario, whose drill begins at ``DRILL_STEP``."""
    drill = {"step": DRILL_STEP, **scenario.drill}
    return job(folder, layout, drills=[drill], **scenario.sections)


@dataclass(frozen=True)
class Seen:
    """What became of a drill."""

    incident: Incident | None
    """The first; None: nothing was seen."""
    delay: int | None
    answers: tuple[str, ...]
    suspects: tuple[str, ...]
    lost: int
    """Steps done again."""
    final_loss: float
    state: str


def seen(told: Told) -> Seen:
    """Sums up a job with one drill."""
    incidents = [incident for action in told.actions for incident in action.incidents]
    first = incidents[0] if incidents else None
    return Seen(
        first,
        None if first is None else first.step - DRILL_STEP,
        tuple(action.kind for action in told.actions),
        () if first is None else tuple(suspect.layer for suspect in first.suspects),
        len(told.records) - len(told.kept),
        told.final_loss(),
        told.state,
    )


def wrongs(scenario: Scenario, found: Seen, undisturbed: float, spread: float) -> list[str]:
    """What is not as it must be, a sentence each; [] when all is."""
    if found.incident is None:
        return ["nothing was seen"]
    wrong = []
    if found.incident.kind not in scenario.kinds:
        wrong.append(f"first seen as {found.incident.kind}: {found.incident.message}")
    # A rank that dies takes along the records of the steps that it hadn't told yet.
    early = -REPORT_LAG if scenario.name == "kill_rank" else 0
    if not early <= (found.delay or 0) <= scenario.delay:
        wrong.append(f"seen after {found.delay} steps, at most {scenario.delay} are allowed")
    if found.answers[0] not in scenario.answers:
        wrong.append(f"answered by {', '.join(found.answers)}")
    # "none": of steps that were under way when the layers were told to leave FP8.
    if odd := sorted(set(found.answers[1:]) - {"return_to_fp8", "none"}):
        wrong.append(f"then came {', '.join(odd)}")
    if not any(layer.startswith(scenario.suspect) for layer in found.suspects or ("",)):
        wrong.append(f"suspects {', '.join(found.suspects) or 'nobody'}, not {scenario.suspect}")
    if found.lost > scenario.lost:
        wrong.append(f"{found.lost} steps were done again, at most {scenario.lost} are allowed")
    if found.state != "succeeded":
        wrong.append(f"the job {found.state}")
    if abs(found.final_loss - undisturbed) > spread:
        wanted = f"{undisturbed:.4f} ± {spread:.4f} as undisturbed"
        wrong.append(f"ends at a loss of {found.final_loss:.4f}, not {wanted}")
    return wrong
