"""Step records with troubles of known onset, and healthy ones, for ``bench_detection``.

Synthetic ones are made of ``tests/unit/monitoring_traces`` (a byte model that learns); each is
there for several seeds and, where a rule may still be filling its window, early in training
too. Real ones are recorded from short jobs whose drills fire at a known step, with every limit of
detection out of reach, so that the trouble unfolds undisturbed: what a rule would have met.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorStats
from tests.unit.healthy_runs import HEALTHY_KINDS, healthy_run
from tests.unit.monitoring_traces import MAXIMUM, healthy_trace, surged

LATE, EARLY = 300, 50
"""Onsets: with every rule's window full, and with most still filling."""
AFTER = 100
"""Steps recorded from the onset on; a rule that has not struck by then has missed it."""
SEEDS = (0, 1, 2)
HISTORY = 16
TENSOR = "layers.2.mlp.down/input"
LAYERS = tuple(
    f"layers.{i}.{part}" for i in range(3) for part in ("attn.out", "mlp.gate_up", "mlp.down")
)
STEPS = 400


@dataclass(frozen=True)
class Trace:
    """Records, and where their trouble begins."""

    case: str
    onset: int | None
    """First step that the trouble touches; None: there is none."""
    records: Sequence[StepRecord]
    loss_moves: int | None = None
    """First step at which the loss itself shows it, where that is later."""
    twin: Sequence[StepRecord] = ()
    """The same records without the trouble: what strikes there too has not seen it."""


Touch = Callable[[StepRecord, int], StepRecord]
"""(healthy record, steps since the onset) → what the trouble makes of it."""


def under_delayed_scaling(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The records with the scales that delayed scaling makes of their amaxs, as in real runs."""
    past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
    scaled = []
    for record in records:
        tensors = {}
        for name, stats in record.tensors.items():
            limit = MAXIMUM[name.rsplit("/", 1)[1]]
            seen = past[name]
            scale = limit / max(seen) if seen else 1.0
            over = max(0.0, math.log2(stats.amax * scale / limit))
            tensors[name] = replace(
                stats, scale=scale, saturated_pct=min(0.05 * over, 0.5), calibrated=bool(seen)
            )
            seen.append(stats.amax)
        scaled.append(replace(record, tensors=tensors))
    return scaled


def _loss(factor: Callable[[int], float]) -> Touch:
    return lambda record, since: replace(record, loss=record.loss * factor(since))


def _tensor(record: StepRecord, **changes: float) -> StepRecord:
    stats = replace(record.tensors[TENSOR], **changes)  # type: ignore[arg-type]
    return replace(record, tensors={**record.tensors, TENSOR: stats})


def _grown(record: StepRecord, octaves: float, *, follows: bool) -> StepRecord:
    """One tensor's amax ``octaves`` up; its delayed scale ``follows``, or is stuck."""
    old: TensorStats = record.tensors[TENSOR]
    scale = old.scale / 2.0**octaves if follows else STUCK_SCALE
    over = max(0.0, math.log2(old.amax * 2.0**octaves * scale / MAXIMUM["input"]))
    return _tensor(
        record, amax=old.amax * 2.0**octaves, scale=scale, saturated_pct=min(90.0, 12.0 * over)
    )


def _outlier_growth(record: StepRecord, since: int) -> StepRecord:
    """SwiGLU outliers: an octave every eight steps, the scale behind it; the loss follows late."""
    moved = _grown(record, since / 8, follows=True)
    return replace(moved, loss=moved.loss * 1.02 ** max(0, since - LOSS_LAG))


STUCK_SCALE = MAXIMUM["input"] / 5.0
"""Of a healthy tensor's amax, which is 4 to 5."""
LOSS_LAG = 40
"""Steps that the loss stays behind the amax in gradual growth."""

TROUBLES: dict[str, tuple[Touch, tuple[int, ...]]] = {
    "loss × 4, lasting": (_loss(lambda since: 4.0), (LATE, EARLY)),
    "loss × 2, decaying over 20 steps": (
        _loss(lambda since: 1 + math.exp(-since / 20)),
        (LATE, EARLY),
    ),
    "loss × 1.5, one step": (_loss(lambda since: 1.5 if since == 0 else 1.0), (LATE,)),
    "slow divergence, 1 % a step": (_loss(lambda since: 1.01**since), (LATE, EARLY)),
    "plateau, 35 % up within 30 steps": (
        _loss(lambda since: 1 + 0.35 * min(1.0, since / 30)),
        (LATE,),
    ),
    "gradient norm × 30, one step": (
        lambda record, since: replace(
            record, grad_norm=record.grad_norm * (30 if not since else 1)
        ),
        (LATE, EARLY),
    ),
    "loss and norm NaN, one step": (
        lambda record, since: (
            replace(record, loss=math.nan, grad_norm=math.nan, skipped=True, nonfinite_ranks=(0,))
            if since == 0
            else record
        ),
        (LATE, EARLY),
    ),
    "weights of one layer × 64": (
        lambda record, since: surged(record, octaves=6.0),
        (LATE, EARLY),
    ),
    "one tensor's amax × 16, scale behind": (
        lambda record, since: _grown(record, 4.0, follows=since > 0) if since < 2 else record,
        (LATE,),
    ),
    "scale frozen, amax grows 10 % a step": (
        lambda record, since: _grown(record, 0.1375 * since, follows=False),
        (LATE,),
    ),
    "60 % of a tensor underflows": (
        lambda record, since: _tensor(record, underflow_pct=60.0),
        (LATE,),
    ),
    "outliers grow, the loss 40 steps later": (_outlier_growth, (LATE,)),
}


def troubled() -> Iterator[Trace]:
    """Every trouble, at its onsets, for every seed."""
    twins = {
        (onset, seed): under_delayed_scaling(healthy_trace(onset + AFTER, seed=seed, layers=LAYERS))
        for onset in (LATE, EARLY)
        for seed in SEEDS
    }
    for case, (touch, onsets) in TROUBLES.items():
        for onset in onsets:
            for seed in SEEDS:
                healthy = twins[onset, seed]
                records = [r if r.step < onset else touch(r, r.step - onset) for r in healthy]
                named = f"{case}, early" if onset == EARLY else case
                moves = onset + LOSS_LAG if touch is _outlier_growth else None
                yield Trace(named, onset, records, moves, healthy)


def _steps(steps: int, **kind: Any) -> list[StepRecord]:
    return under_delayed_scaling(healthy_trace(steps, layers=LAYERS, **kind))


def healthy(steps: int) -> Iterator[Trace]:
    """Controls that nothing may strike on, some ``steps`` each."""
    yield Trace("steady", None, _steps(steps, seed=10))
    yield Trace("noisy small batches", None, _steps(steps, seed=11, noise=0.06))
    fast = _steps(steps, seed=12, start=11.0, half_life=6.0)
    yield Trace("fast fall from a high loss", None, fast)
    shifting = _steps(steps, seed=13)
    rng = np.random.default_rng(13)
    levels = np.repeat(rng.uniform(0.88, 1.14, steps // 200 + 1), 200)[:steps]
    shifted = [replace(r, loss=r.loss * f) for r, f in zip(shifting, levels.tolist(), strict=True)]
    yield Trace("domains of the data change", None, shifted)
    batches = _steps(steps, seed=14)
    grown = _steps(steps, seed=15, noise=0.05)
    sizes = [a if (a.step // 300) % 2 == 0 else b for a, b in zip(batches, grown, strict=True)]
    yield Trace("batch size changes", None, sizes)
    tails = _steps(steps, seed=16, noise=0.0)
    shocks = np.exp(np.clip(0.02 * rng.standard_t(3, steps), -0.2, 0.2)).tolist()
    norms = np.exp(np.clip(0.2 * rng.standard_t(3, steps), -1.2, 1.2)).tolist()
    heavy = [
        replace(r, loss=r.loss * a, grad_norm=r.grad_norm * b)
        for r, a, b in zip(tails, shocks, norms, strict=True)
    ]
    yield Trace("heavy tails", None, heavy)
    for kind in HEALTHY_KINDS:
        told = kind.replace("_", " ")
        yield Trace(f"as the demo: {told}", None, list(healthy_run(kind, steps, seed=20)))


# Real ones.

SMALL: dict[str, Any] = {
    "num_nodes": 1,
    "slots_per_node": 2,
    "parallelism": {"data": 2},
    "model": {"hidden_size": 64, "num_layers": 3, "num_heads": 4},
    "training": {
        "steps": STEPS,
        "seq_len": 64,
        "train_batch_size": 16,
        "lr": 3.0e-3,
        "warmup_steps": 20,
    },
    "fp8": {"recipe": "delayed", "amax_history_len": 16},
    "checkpoint": {"every": 0},
    "resources": {"standby": False},
    "wandb": {"mode": "disabled"},
}
DRILL_STEP = 200


def _surge(factor: float) -> dict[str, Any]:
    drill = {"kind": "weight_surge", "step": DRILL_STEP, "layer": 1, "factor": factor}
    return {"drills": [drill]}


JOBS: dict[str, dict[str, Any]] = {
    "surge3": _surge(3.0),
    "surge8": _surge(8.0),
    "surge64": _surge(64.0),
    "nan": {"drills": [{"kind": "nonfinite_gradient", "step": DRILL_STEP, "rank": 1}]},
    "healthy0": {"training": {**SMALL["training"], "steps": 1500}},
}
"""What is recorded: a name → what differs from ``SMALL``."""
WORDS = {
    "surge3": "real: MLP weights of a layer × 3",
    "surge8": "real: MLP weights of a layer × 8",
    "surge64": "real: MLP weights of a layer × 64",
    "nan": "real: a NaN gradient on one rank",
    "healthy0": "real: healthy",
}


def recorded(folder: Path) -> Iterator[Trace]:
    """The real traces kept in ``folder``; those that aren't there are recorded first."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in JOBS if not _file(folder, name).exists()]
    if missing:
        _record(folder, missing)
    for name, words in WORDS.items():
        with gzip.open(_file(folder, name), "rt") as kept:
            records = [StepRecord.from_json(row) for row in json.load(kept)]
        yield Trace(words, DRILL_STEP if "drills" in JOBS[name] else None, records)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json.gz"


def _record(folder: Path, names: Sequence[str]) -> None:
    """Run the jobs one after the other on this machine, and keep what their stores hold."""
    from orchestrator.replay.job_trace import trace_of_client
    from orchestrator.spec.errors import Source
    from orchestrator.spec.job import spec_data, spec_of
    from tests.benchmarks.sides import cluster

    with cluster(folder / "home", SMALL["slots_per_node"]) as client:
        for name in names:
            data = {"name": name, **SMALL, "detection": out_of_reach(), **JOBS[name]}
            spec = spec_of(Source(f"{name}.yaml", data, {}))
            job = client.submit(spec_data(spec), f"{name}.yaml")["id"]
            for _ in client.follow_events(job):
                pass
            state = client.job(job)["state"]
            if state != "succeeded":
                raise RuntimeError(f"{job} {state}; nothing is recorded of it")
            rows = [record.to_json() for record in trace_of_client(client, job).steps]
            with gzip.open(_file(folder, name), "wt") as kept:
                json.dump(rows, kept)


def out_of_reach() -> dict[str, Any]:
    """A ``detection`` section that lets every finite trouble unfold."""
    from monitoring.config import MOST, DetectionConfig

    limits = ("sigmas", "ratio", "rise", "octaves", "patience", "error", "scale_steps")
    section: dict[str, Any] = {}
    for name, field in DetectionConfig.model_fields.items():
        if name.endswith("_pct"):
            section[name] = 100.0
        elif name.endswith(limits):
            most, _ = MOST.get(name, (10**9, ""))
            section[name] = most if field.annotation is int else 1e9
        elif name.endswith("_horizon"):
            section[name] = 1
    return section
