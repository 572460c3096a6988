"""Which short jobs rehearse a job's recovery, and what became of each. Pure: no clock, no I/O.

One drill a run, beside one run without any: what answers a drill (layers in BF16, batches left
out, budgets spent) changes what the next would meet, and a trouble that recurs within
``recovery.horizon`` climbs the ladder. Only in a run of its own does a drill show what it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import TypeAdapter

from launch.drills.config import Drill, KillRank
from monitoring.job_view import split_timelines
from monitoring.records import Incident, StepRecord
from orchestrator.actions import Action
from orchestrator.recovery.resume import REPORT_LAG
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.config import NotificationsConfig
from orchestrator.spec.drills import check_drills
from orchestrator.spec.job import JobSpec
from parallel.precision.recipes import is_high_precision

KINDS: tuple[str, ...] = tuple(
    get_args(kind.model_fields["kind"].annotation)[0] for kind in get_args(get_args(Drill)[0])
)
"""All kinds of drills, in the order of the spec's."""

ROOM = 80
"""Steps from a drill's first to the job's last: the longest one lasts half of them."""
FINAL_STEPS = 10
"""Steps whose mean is the final loss."""

_ADAPTER: TypeAdapter[Drill] = TypeAdapter(Drill)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One job to run."""

    kind: str
    """Of its drill; empty: the one without."""
    spec: JobSpec

    @property
    def step(self) -> int:
        """The drill's first."""
        return self.spec.drills[0].step


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A kind that this job has no place for."""

    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a drill."""

    kind: str
    step: int
    """Before which it began."""
    what: str
    """It, in words."""
    caught: bool
    seen: Incident | None
    """The first incident from its step on."""
    answers: tuple[Action, ...]
    lost: int
    """Steps done again."""
    state: str
    final_loss: float | None
    undisturbed: float | None

    def to_json(self) -> dict[str, Any]:
        seen = self.seen
        return {
            "kind": self.kind,
            "step": self.step,
            "what": self.what,
            "caught": self.caught,
            "after_steps": None if seen is None else seen.step - self.step,
            "incident": None if seen is None else seen.to_json(),
            "actions": [action.to_json() for action in self.answers],
            "steps_lost": self.lost,
            "state": self.state,
            "final_loss": self.final_loss,
            "undisturbed_loss": self.undisturbed,
        }


def first_step(spec: JobSpec) -> int:
    """Step of every drill: baselines are trusted, and replicas are compared."""
    limits = spec.detection
    due = max(limits.window, limits.min_history) + limits.settle_steps
    every = max(1, spec.replica_check_every)
    return -(-due // every) * every


def least_steps(spec: JobSpec) -> int:
    """Steps that a rehearsal takes at least."""
    return first_step(spec) + ROOM


def plan(spec: JobSpec, kinds: Sequence[str], steps: int) -> tuple[list[Rehearsal], list[LeftOut]]:
    """The jobs, the undisturbed one first, and the kinds of ``kinds`` without a place here.

    ``spec`` is completed; ``steps`` at least ``least_steps``.
    """
    short = short_copy(spec, steps)
    jobs, left_out = [Rehearsal("", short)], []
    for kind in kinds:
        drill = _ADAPTER.validate_python({"kind": kind, **_details(spec, kind)})
        name = f"drill-{kind.replace('_', '-')}"
        disturbed = short.model_copy(update={"drills": (drill,), "name": name})
        found = list(check_drills(disturbed, set()))
        if found:
            left_out.append(LeftOut(kind, found[0].message))
        else:
            jobs.append(Rehearsal(kind, disturbed))
    return jobs, left_out


def short_copy(spec: JobSpec, steps: int) -> JobSpec:
    """``spec`` with ``steps`` steps, without drills, and as if nobody were watching.

    Its schedule is as long as it; snapshots come as often as so few steps need.
    """
    drill = first_step(spec)
    kept = spec.snapshots
    every = min(kept.every, max(1, drill // 4))
    certify_after = min(kept.certify_after, (kept.keep - 1) * every)
    training = {"steps": steps, "warmup_steps": min(spec.training.warmup_steps, drill // 2)}
    sections = {
        "training": spec.training.model_copy(update=training),
        "snapshots": kept.model_copy(update={"every": every, "certify_after": certify_after}),
        "checkpoint": spec.checkpoint.model_copy(update={"storage_path": None, "every": 0}),
        "wandb": spec.wandb.model_copy(update={"mode": "disabled"}),
        "notifications": NotificationsConfig(),
        "drills": (),
        "name": "undisturbed",
    }
    return spec.model_copy(update=sections)


def _details(spec: JobSpec, kind: str) -> dict[str, Any]:
    """A drill of ``kind`` as a practitioner would place it: in the middle, and hard to miss."""
    layer = _layer(spec)
    down = f"layers.{layer}.mlp.down"
    last = spec.num_nodes * slots_per_node(spec) - 1
    own: dict[str, dict[str, Any]] = {
        "weight_surge": {"layer": layer, "factor": 64},
        "amax_outlier": {"tensor": f"{down}/input", "factor": 1e4},
        "label_noise": {"share": 0.5, "steps": 8},
        "lr_shock": {"factor": 100, "steps": 16},
        "nonfinite_gradient": {"rank": last, "value": "inf"},
        "bit_flip": {"parameter": f"{down}.weight", "replica": 1},
        "frozen_scale": {"tensor": f"{down}/input", "factor": 8, "steps": 20},
        "swiglu_growth": {"layer": layer, "factor": 1.25, "steps": 40},
        "kill_rank": {"rank": last},
    }
    return {"step": first_step(spec), **own.get(kind, {})}


def _layer(spec: JobSpec) -> int:
    """The middle layer of those whose MLP computes in FP8."""
    count = spec.model.num_layers
    kept = spec.fp8.high_precision_layers
    able = [i for i in range(count) if not is_high_precision(f"layers.{i}.mlp.down", kept, count)]
    return able[len(able) // 2] if able else count // 2


def outcome(
    rehearsal: Rehearsal,
    steps: Iterable[StepRecord],
    incidents: Sequence[Incident],
    actions: Sequence[Action],
    state: str,
    undisturbed: float | None,
) -> Outcome:
    """What became of a drill, from all that is stored of its job.

    It is caught when an incident was seen from its step on and answered by an action.
    """
    (drill,) = rehearsal.spec.drills
    records = list(steps)
    # A rank that is killed takes along the records of the steps that it hadn't told yet.
    kills = isinstance(drill, KillRank)
    since = drill.step - REPORT_LAG if kills else drill.step
    seen = next(
        (i for i in incidents if i.step >= since and (i.kind == "rank_died" or not kills)), None
    )
    answers = tuple(
        action for action in actions if seen and action.incidents and action.step >= seen.step
    )
    values = drill.model_dump(exclude={"kind", "step"})
    kept, _ = split_timelines(records)
    return Outcome(
        kind=drill.kind,
        step=drill.step,
        what=", ".join(f"{key} {value}" for key, value in values.items()),
        caught=seen is not None and bool(answers),
        seen=seen,
        answers=answers,
        lost=len(records) - len(kept),
        state=state,
        final_loss=final_loss(kept),
        undisturbed=undisturbed,
    )


def final_loss(records: Sequence[StepRecord]) -> float | None:
    """Mean of the last steps that led to the end; None without any."""
    kept, _ = split_timelines(records)
    losses = [record.loss for record in kept[-FINAL_STEPS:]]
    return sum(losses) / len(losses) if losses else None
