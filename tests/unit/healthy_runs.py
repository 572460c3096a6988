"""Synthetic healthy runs of every kind that detectors must keep silent on, of any length.

The numbers are those of real runs of the demo: inputs that grow by five octaves in warm-up and by
two in sixteen steps later on, gradients whose amax jumps by octaves, scales by the rule of
delayed scaling.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from monitoring.amax import FORMAT_MAX, TensorScaling
from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorColumns

HealthyKind = Literal["warm_up", "restarts", "domain_shift", "batch_size", "heavy_tails"]
HEALTHY_KINDS: tuple[HealthyKind, ...] = get_args(HealthyKind)
HISTORY = 16
SCALING = TensorScaling(history=HISTORY)
LAYERS = ("layers.0.mlp.down", "layers.1.attn.qkv")
LEVELS = {"input": 1.0, "weight": -3.5, "grad_output": -13.0}
"""log2(amax)."""
NOISE = {"input": 0.1, "weight": 0.01, "grad_output": 0.35}


def healthy_run(
    kind: HealthyKind, steps: int, seed: int, layers: Sequence[str] = LAYERS
) -> Iterator[StepRecord]:
    """The records of ``steps`` steps, one after the other."""
    rng = np.random.default_rng([HEALTHY_KINDS.index(kind), seed])
    warm_up = 300 if kind == "warm_up" else 20
    cycle = 500 if kind == "restarts" else steps
    names = [(layer, role) for layer in layers for role in LEVELS]
    labels = tuple(f"{layer}/{role}" for layer, role in names)
    roles = np.array([role for _, role in names])
    level = np.array([LEVELS[role] for _, role in names])
    noise = np.array([NOISE[role] for _, role in names])
    limits = np.array([FORMAT_MAX["HYBRID"][role] for _, role in names])
    inputs, gradients = roles == "input", roles == "grad_output"
    past: deque[np.typing.NDArray[np.float64]] = deque(maxlen=HISTORY)
    domain, decay, spread, growing = 0.0, 0.995, 0.02, np.zeros(len(names))
    for step in range(steps):
        into = step % cycle
        lr = 3e-3 * min(1.0, (into + 1) / warm_up) * (0.1 + 0.9 * (1 - into / cycle))
        loss = 2.0 + 3.5 * (1.0 + step / 30) ** -0.8
        if kind == "restarts" and step >= cycle:
            loss *= 1 + 0.08 * (1 - math.exp(-into / 15)) * math.exp(-into / 150)
        if kind == "domain_shift" and step and step % 701 == 0:
            domain += math.log(rng.uniform(0.8, 1.2))
            decay = rng.choice([0.98, 0.995, 1.0])
        if kind == "batch_size" and step % 400 == 0:
            spread = float(rng.choice([0.01, 0.02, 0.04, 0.06]))
        domain *= decay
        shock = 0.03 * rng.standard_t(3) if kind == "heavy_tails" else spread * rng.normal()
        jump = np.where(gradients, 0.4 * rng.standard_t(3, len(names)), 0.0)
        if step < 36 and step >= 6:
            level[inputs] += np.linspace(0.16, 0.02, inputs.sum())
        if step and step % 997 == 80:
            # One input finds a level two octaves higher, as the last layers' do in the demo.
            growing = np.zeros(len(names))
            growing[int(rng.choice(np.flatnonzero(inputs)))] = 0.13
        if step % 997 == 95:
            level, growing = level - 0.3 * growing, np.zeros(len(names))
        level = level + growing + np.where(inputs | gradients, 0.002 * rng.normal(), 1e-4)
        shifted = np.where(gradients, 1.5 * domain, domain)
        amax = np.exp2(level + shifted + noise * rng.normal(size=len(names)) + jump)
        scale = limits / np.max(past, axis=0) if past else np.ones(len(names))
        over = np.fmax(np.log2(amax * scale / limits), 0.0)
        yield StepRecord(
            attempt=1,
            timeline=0,
            step=step,
            time=1.8e9 + 0.2 * step,
            batch=step,
            loss=loss * math.exp(domain + min(shock, 0.2)),
            grad_norm=(0.5 + 4.0 * 0.5 ** (step / 15)) * math.exp(0.25 * rng.normal() + domain),
            lr=lr,
            tokens=2048,
            step_time_s=0.2,
            tensors=TensorColumns(
                labels,
                amax=amax,
                scale=scale,
                saturated_pct=np.minimum(0.05 * over, 0.5),
                underflow_pct=rng.uniform(0.0, 0.5, len(names)),
                nonfinite=np.zeros(len(names), dtype=np.int64),
                sqnr_db=np.full(len(names), np.nan),
                calibrated=np.full(len(names), step > 0),
            ),
        )
        past.append(amax)
