"""Synthetic step records: a byte model that learns, and the troubles it can meet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank
from monitoring.job_view import JobView
from monitoring.records import Incident, StepRecord
from monitoring.tensor_stats import TensorStats

LAYERS = tuple(
    f"layers.{i}.{part}"
    for i in range(4)
    for part in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
)
ROLES = ("input", "weight", "grad_output")
MAXIMUM = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def loss_at(step: float, start: float = 5.5, end: float = 2.4, half_life: float = 25.0) -> float:
    """Noise-free loss in nats: from ``start`` to near ``end`` within a hundred steps."""
    return end + (start - end) * 0.5 ** (step / half_life)


def healthy_tensors(
    step: int, rng: np.random.Generator, layers: Sequence[str] = LAYERS
) -> dict[str, TensorStats]:
    """Statistics under delayed scaling: step 0 has scale 1, later ones a scale of the past."""
    tensors = {}
    for layer in layers:
        for role in ROLES:
            usual = {"input": 4.0, "weight": 0.1, "grad_output": 1e-4}[role]
            amax = usual * float(np.exp(rng.normal(0.0, 0.1)))
            scale = 1.0 if step == 0 else MAXIMUM[role] / (1.3 * usual)
            tensors[f"{layer}/{role}"] = TensorStats(
                amax, scale, 0.002, 0.1, 0, calibrated=step > 0
            )
    return tensors


def healthy_trace(
    steps: int,
    *,
    seed: int = 0,
    noise: float = 0.02,
    start: float = 5.5,
    end: float = 2.4,
    half_life: float = 25.0,
    layers: Sequence[str] = LAYERS,
    attempt: int = 1,
    timeline: int = 0,
    first: int = 0,
) -> list[StepRecord]:
    """A run without trouble; noise is the deviation of log(loss)."""
    rng = np.random.default_rng(seed)
    records = []
    for step in range(first, steps):
        lr = 3e-4 * min(1.0, (step + 1) / 20)
        norm = (0.6 + 2.0 * 0.5 ** (step / 15)) * math.exp(rng.normal(0.0, 0.15))
        records.append(
            StepRecord(
                attempt=attempt,
                timeline=timeline,
                step=step,
                time=1_800_000_000.0 + 0.2 * step,
                batch=step,
                loss=loss_at(step, start, end, half_life) * math.exp(rng.normal(0.0, noise)),
                grad_norm=norm,
                lr=lr,
                tokens=2048,
                step_time_s=0.2 * math.exp(rng.normal(0.0, 0.05)),
                comm={"bytes": 1e6, "uncompressed_bytes": 2e6, "relative_error": 0.02},
                tensors=healthy_tensors(step, rng, layers),
            )
        )
    return records


def with_loss(record: StepRecord, factor: float) -> StepRecord:
    return dataclasses.replace(record, loss=record.loss * factor)


def with_norm(record: StepRecord, factor: float) -> StepRecord:
    return dataclasses.replace(record, grad_norm=record.grad_norm * factor)


def surged(record: StepRecord, layer: str = "layers.2.mlp", octaves: float = 6.0) -> StepRecord:
    """The record of a step whose ``layer`` had its MLP weights multiplied by 2**octaves.

    Weights of gate_up and down leap, the input of down by more; the gradients of the layers
    below follow.
    """
    tensors = dict(record.tensors)

    def leap(name: str, by: float, pct: float) -> None:
        old = tensors[name]
        tensors[name] = TensorStats(old.amax * 2.0**by, old.scale, pct, 0.0, 0)

    leap(f"{layer}.gate_up/weight", octaves, 62.0)
    leap(f"{layer}.down/weight", octaves, 61.0)
    leap(f"{layer}.down/input", 2 * octaves, 88.0)
    number = int(layer.split(".")[1])
    for below in range(number):
        for part in ("attn.out", "mlp.down"):
            leap(f"layers.{below}.{part}/grad_output", octaves + 1, 15.0)
    return dataclasses.replace(record, tensors=tensors, loss=record.loss * 2.5)


FALLEN = ("layers.2.mlp.down", "layers.2.mlp.gate_up")


def recovered_view(state: str = "succeeded") -> JobView:
    """A job of 240 steps whose layer 2 surges at step 90, seen by the real detectors.

    Two more steps run before the ranks go back to 80 with the layer in BF16; it returns to
    FP8 at 150. Step 200 has a non-finite gradient and is skipped.
    """
    base = healthy_trace(240)
    bank = DetectorBank(DetectionConfig())
    doomed = [surged(r, octaves=5.0 + 0.3 * (r.step - 90)) for r in base[90:93]]
    steps: list[StepRecord] = [*base[:90], *doomed]
    incidents: list[Incident] = [i for r in steps for i in bank.observe(r)]
    away = 3.0
    for record in base[80:]:
        changes: dict[str, object] = {"timeline": 1, "time": record.time + away}
        changes["batch"] = record.batch + 13
        if record.step < 150:
            changes["high_precision_layers"] = FALLEN
        if record.step == 200:
            changes |= {
                "skipped": True,
                "grad_norm": math.nan,
                "nonfinite_ranks": (1,),
                "nonfinite_parameters": ("layers.1.mlp.down.weight",),
            }
        steps.append(dataclasses.replace(record, **changes))  # type: ignore[arg-type]
        incidents += bank.observe(steps[-1])
    surge = [i.to_json() for i in incidents if i.step == 90]
    broken = [i.to_json() for i in incidents if i.step == 200]
    fallback = {
        "kind": "layer_fallback",
        "attempt": 1,
        "timeline": 0,
        "step": 92,
        "time": base[90].time + 0.05,
        "reason": "layers.2.mlp.down and layers.2.mlp.gate_up moved first in FP8.",
        "incidents": surge,
        "to_step": 80,
        "in_place": True,
        "skip_batches": list(range(80, 93)),
        "precision": dict.fromkeys(FALLEN, "bf16"),
        "lr_scale": None,
        "passed_over": [
            {"rung": "skip_step", "why": "answers non-finite steps only, not loss_spike"},
            {"rung": "rollback", "why": "other batches do not cure layers that moved in FP8"},
        ],
    }
    back = {
        "kind": "return_to_fp8",
        "attempt": 1,
        "timeline": 1,
        "step": 150,
        "time": base[150].time + away,
        "reason": "layers.2.mlp.down, layers.2.mlp.gate_up back to FP8 after 60 healthy steps.",
        "incidents": [],
        "to_step": None,
        "precision": dict.fromkeys(FALLEN, "fp8"),
    }
    skip = {
        "kind": "skip_step",
        "attempt": 1,
        "timeline": 1,
        "step": 200,
        "time": base[200].time + away,
        "reason": "The update of step 200 was left out.",
        "incidents": broken,
        "to_step": None,
    }
    return JobView(
        job="demo-4f2a9c",
        state=state,
        spec={"name": "demo", "training": {"steps": 240, "lr": 3e-3}, "fp8": {"format": "HYBRID"}},
        steps=tuple(steps),
        incidents=(*surge, *broken),
        actions=(fallback, back, skip),
        events=(
            {"kind": "attempt_started", "time": base[0].time, "message": "Attempt 1 started."},
            {"kind": "rolled_back", "time": base[92].time, "message": "Rolled back to step 80."},
        ),
    )


def eventful_view() -> JobView:
    """``recovered_view`` with what surrounds it: the queue, a start, then a rank that dies at step
    210, a restart from 200, and a pause that a person ended."""
    view = recovered_view()
    begun = view.steps[0].time - view.steps[0].step_time_s
    died = view.steps[-30].time
    steps = [*view.steps[:-29]]
    again = [r for r in view.steps if r.timeline == 1 and r.step >= 200]
    for record in again:
        later = 14.0 if record.step < 225 else 31.0
        steps.append(dataclasses.replace(record, attempt=2, time=record.time + later))
    death = {
        "kind": "rank_died", "detector": "supervisor", "attempt": 1, "timeline": 1, "step": 211,
        "onset_step": 211, "time": died + 0.4, "message": "Rank 2 died in step 211: SIGKILL.",
        "evidence": {}, "suspects": [], "ranks": [2],
    }  # fmt: skip
    restart = {
        "kind": "restart", "attempt": 1, "timeline": 1, "step": 210, "time": died + 0.5,
        "reason": "End the survivors and start again from the newest copy.", "incidents": [death],
        "to_step": None, "in_place": False, "skip_batches": [], "precision": {},
        "passed_over": [{"rung": "rollback", "why": "a rank is gone, and its memory with it"}],
    }  # fmt: skip
    paused = again[24].time + 14.5

    def state(time: float, to: str) -> dict[str, object]:
        return {"kind": "state", "time": time, "message": to, "detail": {"to": to}}

    def started(time: float, attempt: int, step: int, tier: str) -> dict[str, object]:
        detail = {
            "attempt": attempt, "ranks": 4, "step": step, "tier": tier, "backend": "native",
            "backend_reason": "Transformer Engine needs a CUDA device and the job runs on CPU",
            "environment": {"python": "3.11.9", "torch": "2.13.0", "cpus": "8"},
        }  # fmt: skip
        return {"kind": "attempt_started", "time": time, "message": "", "detail": detail}

    events = [
        {"kind": "submitted", "time": begun - 9.0, "message": "submitted", "detail": {}},
        state(begun - 7.0, "starting"),
        started(begun - 5.0, 1, 0, "seed"),
        state(begun, "running"),
        *view.events,
        started(died + 8.0, 2, 200, "memory"),
        state(paused, "paused"),
        state(paused + 8.0, "queued"),
        state(paused + 9.0, "starting"),
        state(again[25].time + 31.0, "running"),
        state(again[-1].time + 31.5, "succeeded"),
    ]
    spec = {
        **view.spec,
        "num_nodes": 2,
        "parallelism": {"pipeline": 2, "tensor": 1, "data": 2, "zero_stage": 1},
    }
    return dataclasses.replace(
        view,
        spec=spec,
        steps=tuple(steps),
        incidents=(*view.incidents, death),
        actions=(*view.actions, restart),
        events=tuple(events),
    )
