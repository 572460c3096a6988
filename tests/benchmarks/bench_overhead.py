"""A step inside Octavo with everything on, against the plain script under torchrun.

    python -m tests.benchmarks.bench_overhead [--rounds 3] [--steps 240]

The demo's model and layout, without its drill: telemetry every step, snapshots, detectors,
store, W&B offline and standby workers on one side, nothing of that on the other. The sides
take turns; each round gives a ratio of medians. Both must show the same losses to the bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from orchestrator.spec import load_spec
from tests.benchmarks.sides import ROOT, cluster, under_octavo, under_torchrun


def main() -> None:
    """Print a line a round, then the median ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    arguments = parser.parse_args()
    demo = load_spec(ROOT / "deploy/jobs/demo.yaml")
    training = demo.training.model_copy(update={"steps": arguments.steps})
    spec = demo.model_copy(update={"training": training, "drills": ()})
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            with cluster(Path(folder) / "home", slots=4) as client:
                ours = under_octavo(client, spec)
            plain = under_torchrun(spec, Path(folder))
            ratios.append(ours.step_s / plain.step_s)
            same = "equal to the bit" if ours.losses == plain.losses else "DIFFERENT"
            print(
                f"octavo {1000 * ours.step_s:.1f} ms, torchrun {1000 * plain.step_s:.1f} ms a "
                f"step: {ratios[-1]:.3f}; losses {same}",
                flush=True,
            )
    print(f"step, octavo / torchrun: median {statistics.median(ratios):.3f} of {len(ratios)}")


if __name__ == "__main__":
    main()
