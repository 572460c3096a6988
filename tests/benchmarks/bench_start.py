"""From submit to the end of the first step: cold, with standby workers, and torchrun's.

    python -m tests.benchmarks.bench_start [--rounds 3]

The demo's model and layout. cold: a running controller, no worker; standby: `octavo up
--standby 4`, its workers imported; torchrun: the plain script, from its command.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from orchestrator.spec.job import load_spec
from tests.benchmarks.sides import ROOT, cluster, under_octavo, under_torchrun

IMPORTS_S = 40.0
"""Seconds after which four standby workers on two cores have done their imports."""


def main() -> None:
    """Print a line a round, then medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    demo = load_spec(ROOT / "deploy/jobs/demo.yaml")
    training = demo.training.model_copy(update={"steps": 3, "warmup_steps": 0})
    spec = demo.model_copy(update={"training": training, "drills": ()})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            with cluster(Path(folder) / "home", slots=4) as client:
                cold = under_octavo(client, spec).first_step_s
            with cluster(Path(folder) / "home", slots=4, standby=4) as client:
                time.sleep(IMPORTS_S)
                warm = under_octavo(client, spec).first_step_s
            plain = under_torchrun(spec, Path(folder)).first_step_s
            rows.append((cold, warm, plain))
            print(f"cold {cold:.1f} s, standby {warm:.1f} s, torchrun {plain:.1f} s", flush=True)
    cold, warm, plain = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"submit to first step: cold {cold:.1f} s, standby {warm:.1f} s, torchrun {plain:.1f} s")
    print(f"cold / torchrun {cold / plain:.2f}, standby / torchrun {warm / plain:.2f}")


if __name__ == "__main__":
    main()
