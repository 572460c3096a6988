"""A step inside Octavo with everything on, against the plain script under torchrun.

    python -m tests.benchmarks.bench_overhead [--rounds 3] [--steps 240] [--layouts 2x2 1x1]

The demo's model without its drill: telemetry every step, snapshots, detectors, store, W&B
offline and standby workers on one side, nothing of that on the other. The sides take turns;
each round gives a ratio of medians. Both must show the same losses to the bit.

A layout is pipeline x data. On two cores the demo's 2x2 leaves no core free: all that Octavo
does beside training takes its time from a rank, which is the worst that can be. 1x1 leaves it a
core, as a node does whose ranks compute on devices.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from orchestrator.spec.job import JobSpec, load_spec
from tests.benchmarks.sides import ROOT, cluster, under_octavo, under_torchrun


def main() -> None:
    """Print a line a round, then the median ratio."""
    compare_layouts(_compare, rounds=3)


def compare_layouts(compare: Callable[[str, int, int], None], rounds: int) -> None:
    """``compare(layout, rounds, steps)`` for each layout that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--layouts", nargs="+", default=["2x2", "1x1"], metavar="PxD")
    arguments = parser.parse_args()
    for layout in arguments.layouts:
        compare(layout, arguments.rounds, arguments.steps)


def on_layout(layout: str, steps: int) -> JobSpec:
    """The demo on another layout, with as many sequences a replica."""
    pipeline, data = (int(degree) for degree in layout.split("x"))
    demo = load_spec(ROOT / "deploy/jobs/demo.yaml")
    assert demo.training.train_batch_size is not None and demo.parallelism.data is not None
    batch = demo.training.train_batch_size // demo.parallelism.data * data
    degrees = {"pipeline": pipeline, "data": data}
    return demo.model_copy(
        update={
            "slots_per_node": pipeline * data,
            "parallelism": demo.parallelism.model_copy(update=degrees),
            "training": demo.training.model_copy(
                update={"steps": steps, "train_batch_size": batch}
            ),
            "drills": (),
        }
    )


def _compare(layout: str, rounds: int, steps: int) -> None:
    spec = on_layout(layout, steps)
    assert spec.slots_per_node is not None
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            with cluster(Path(folder) / "home", slots=spec.slots_per_node) as client:
                ours = under_octavo(client, spec)
            plain = under_torchrun(spec, Path(folder))
            ratios.append(ours.step_s / plain.step_s)
            same = "equal to the bit" if ours.losses == plain.losses else "DIFFERENT"
            print(
                f"{layout}: octavo {1000 * ours.step_s:.1f} ms, torchrun "
                f"{1000 * plain.step_s:.1f} ms a step: {ratios[-1]:.3f}; losses {same}",
                flush=True,
            )
    print(
        f"{layout}: step, octavo / torchrun: median {statistics.median(ratios):.3f} "
        f"of {len(ratios)}"
    )


if __name__ == "__main__":
    main()
