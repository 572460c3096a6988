"""What all detectors together cost a step, and how often they cry wolf on healthy runs.

    python -m tests.benchmarks.bench_detectors [--tensors 1000] [--steps 300] [--healthy 20000]
        [--out DIR]

Cost: the whole bank's ``observe`` on a record of a thousand tensors, once every detector has its
history; the aim is a millisecond. False alarms: synthetic healthy runs of every kind
(``tests.unit.healthy_runs``), ``--healthy`` steps of them in all; the aim is none.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank
from monitoring.records import Incident
from tests.benchmarks.results import add_arguments, at_most, measured, report
from tests.unit.healthy_runs import HEALTHY_KINDS, SCALING, HealthyKind, healthy_run

RUN = 2000
"""Steps of a healthy run."""
ROLES = 3
"""Tensors a layer."""
AIM_S = at_most(1e-3)
"""Of ``observe``, a step."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of this thread."""

    tensors: int
    observe: tuple[float, ...]
    """Of each step that had full histories."""
    save: float
    """Of ``state_dict`` and its JSON, at a step where it is stored."""
    state_bytes: int


def cost(tensors: int, steps: int, config: DetectionConfig) -> Cost:
    """Of a bank that sees ``steps`` records beyond those that fill its histories."""
    layers = [f"layers.{i}.mlp.down" for i in range(-(-tensors // ROLES))]
    bank = DetectorBank(config, scaling=SCALING)
    seen = []
    for record in healthy_run("heavy_tails", 2 * config.window + steps, 0, layers):
        start = time.thread_time()
        bank.observe(record)
        seen.append(1e3 * (time.thread_time() - start))
    start = time.thread_time()
    stored = json.dumps(bank.state_dict())
    save = 1e3 * (time.thread_time() - start)
    return Cost(ROLES * len(layers), tuple(seen[-steps:]), save, len(stored))


def false_alarms(
    kind: HealthyKind, steps: int, config: DetectionConfig, seeds: Sequence[int]
) -> list[Incident]:
    """All that the detectors report of healthy runs of one kind, ``steps`` each."""
    found = []
    for seed in seeds:
        bank = DetectorBank(config, scaling=SCALING)
        for record in healthy_run(kind, steps, seed):
            found += bank.observe(record)
    return found


def main() -> int:
    """Print the table; 1 if there was a false alarm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--healthy", type=int, default=20_000)
    add_arguments(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    config = DetectionConfig(exchange_error=0.04)

    found = cost(arguments.tensors, arguments.steps, config)
    setting = f"{found.tensors:,} tensors"
    stored = f"{found.state_bytes / 1024:.0f} KiB"
    rows = [
        measured(
            "all detectors, a step", setting, [1e-3 * t for t in found.observe], "s", aim=AIM_S
        ),
        measured("their state made ready to store", setting, [1e-3 * found.save], "s", note=stored),
    ]
    seeds = range(max(1, round(arguments.healthy / RUN / len(HEALTHY_KINDS))))
    alarms: list[Incident] = []
    for kind in HEALTHY_KINDS:
        incidents = false_alarms(kind, RUN, config, seeds)
        alarms += incidents
        setting = f"healthy run: {kind.replace('_', ' ')}, {RUN * len(seeds):,} steps"
        rows.append(measured("false alarms", setting, [len(incidents)], "", aim=at_most(0)))
    for incident in alarms:
        print(f"step {incident.step}: {incident.message}")
    report("bench_detectors", rows, arguments.out, seconds=time.monotonic() - began)
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
