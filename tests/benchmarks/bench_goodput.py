"""Goodput under published fault rates: Octavo against a restart from disk, by simulation.

    python -m tests.benchmarks.bench_goodput [--seeds 5] [--days 54] [--out DIR]

Faults: ``tests.benchmarks.fault_trace`` (Llama 3 405B's causes at its own rate, and at the two
rates of Kokolis et al.). The job: what `octavo plan` foretells of it (step, state a rank, copies).
Answers: ``tests.benchmarks.goodput_simulation``, through ``orchestrator.recovery.policy``. Recovery
times: ``orchestrator.planning.intervals.RecoveryTimes``, measured on three hosts of this machine,
not at this size, so that the table has them tenfold too, and both sides with starts of five
minutes. The restart from disk has the checkpoint interval that is best for it. Fails where the
interval that `octavo plan` advises is more than 0.2 points of ETTR from the best of the simulation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.planning.estimate import Hardware, estimate
from orchestrator.planning.intervals import Setting, advice, best_checkpoints, setting_of
from orchestrator.spec.errors import Source
from orchestrator.spec.job import JobSpec, spec_of
from tests.benchmarks.fault_trace import LLAMA3_MTTF_S, trace
from tests.benchmarks.goodput_simulation import FromDisk, Octavo, Outcome, World, simulate
from tests.benchmarks.results import Result, add_arguments, at_most, measured, report

NEAR = 0.2
"""Points of ETTR that the advised interval may fall short of the best."""
FACTORS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
"""Of the advised interval, that the simulation tries."""
LONG_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """A job and the rate of its faults."""

    name: str
    spec: JobSpec
    setting: Setting
    nodes: int


def case(name: str, preset: str, nodes: int, mttf_s: float, parallelism: dict[str, Any]) -> Case:
    """As `octavo plan` sees it, with faults each ``mttf_s``."""
    data = {
        "name": "simulated",
        "num_nodes": nodes,
        "gpus_per_node": 8,
        "model": {"preset": preset},
        "parallelism": {"zero_stage": 1, **parallelism},
        "data": {"source": "python-stdlib"},
        "training": {"steps": 1_000_000, "seq_len": 8192, "train_batch_size": nodes},
    }
    spec = spec_of(Source(name, data, {}), check_data=False)
    found = estimate(spec, Hardware.of(spec))
    return Case(name, spec, replace(setting_of(spec, found), mttf_s=mttf_s), nodes)


def cases() -> list[Case]:
    """The three published rates."""
    big = {"tensor": 8, "pipeline": 16}
    return [
        case("Llama 3's 405B, 16,384 GPUs", "llama-405b", 2048, LLAMA3_MTTF_S, big),
        case("405B, 16,384 GPUs", "llama-405b", 2048, 1.8 * 3600, big),
        case("70B, 1,024 GPUs", "llama-70b", 128, 7.9 * 3600, {"tensor": 8, "pipeline": 4}),
    ]


def with_intervals(spec: JobSpec, snapshots: int, checkpoints: int) -> JobSpec:
    """The spec with these."""
    return spec.model_copy(
        update={
            "snapshots": spec.snapshots.model_copy(update={"every": snapshots}),
            "checkpoint": spec.checkpoint.model_copy(update={"every": checkpoints}),
        }
    )


def octavo(of: Case, setting: Setting, spec: JobSpec, world: World, seed: int) -> Outcome:
    """One run under one trace."""
    faults = trace(world.seconds, setting.mttf_s, of.nodes, seed)
    return simulate(Octavo(setting, spec, world), world, faults)


def disk(of: Case, setting: Setting, checkpoints: int, world: World, seed: int) -> Outcome:
    """The restart from disk under the same trace, but for what it doesn't notice."""
    faults = trace(world.seconds, setting.mttf_s, of.nodes, seed)
    noticed = [fault for fault in faults if fault.takes != "corruption"]
    return simulate(FromDisk(setting, checkpoints, world), world, noticed)


def main() -> int:
    """Print the table; the number of cases whose advised interval is not near the best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=float, default=54.0)
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    rows: list[Result] = []
    for of in cases():
        rows += rows_of(of, World(86400 * asked.days), range(asked.seeds))
    report("bench_goodput", rows, asked.out, seconds=time.monotonic() - began)
    return sum(row.met is False for row in rows)


def rows_of(of: Case, world: World, seeds: range) -> list[Result]:
    """All rows of one job."""
    times = of.setting.times
    tenfold = replace(times, rank_s=10 * times.rank_s, node_s=10 * times.node_s)
    slow = replace(tenfold, start_s=LONG_START_S)
    rows: list[Result] = []
    for told, used in (
        ("recoveries as measured", times),
        (f"tenfold, starts of {LONG_START_S:.0f} s", slow),
    ):
        setting = replace(of.setting, times=used)
        best = advice(setting, of.spec.snapshots.every, of.spec.checkpoint.every)
        snapshots, checkpoints = best.snapshots, best.checkpoints
        spec = with_intervals(of.spec, snapshots, checkpoints)
        where = f"{of.name}, a fault each {setting.mttf_s / 3600:.3g} h, {told}"
        runs = [octavo(of, setting, spec, world, seed) for seed in seeds]
        intervals = f"snapshots each {snapshots} steps, checkpoints each {checkpoints}"
        mine = [100 * run.ettr for run in runs]
        rows.append(
            measured("ETTR", where, mine, "%", note=f"{intervals}; seed 0: {runs[0].told()}")
        )
        plain = [octavo(of, setting, of.spec, world, seed) for seed in seeds]
        default = f"snapshots each {of.spec.snapshots.every}, checkpoints each"
        default = f"{default} {of.spec.checkpoint.every}: the spec's defaults"
        rows.append(measured("ETTR", where, [100 * r.ettr for r in plain], "%", note=default))
        longest = best_checkpoints(replace(setting, partners=False), 0)
        others = [disk(of, setting, longest, world, seed) for seed in seeds]
        theirs = [100 * run.ettr for run in others]
        note = f"checkpoints each {longest} steps, the best for it"
        rows.append(measured("ETTR", where, theirs, "%", side="restart from disk", note=note))
        rows.append(best_found(of, setting, world, seeds, snapshots, checkpoints, where))
        foretold = 100 * best.ettr
        away = [abs(foretold - value) for value in mine]
        rows.append(measured("formula of octavo plan, away from the simulation", where, away, "%"))
    return rows


def best_found(
    of: Case, setting: Setting, world: World, seeds: range, every: int, seldom: int, where: str
) -> Result:
    """How much more ETTR the best of the intervals around the advised one has."""
    tried: dict[int, list[float]] = {}
    for factor in FACTORS:
        steps = max(1, round(factor * every))
        if steps not in tried:
            spec = with_intervals(of.spec, steps, seldom)
            tried[steps] = [100 * octavo(of, setting, spec, world, seed).ettr for seed in seeds]
    best = max(tried, key=lambda steps: statistics.median(tried[steps]))
    short = [b - a for a, b in zip(tried[every], tried[best], strict=True)]
    return measured(
        "ETTR that the advised snapshot interval falls short of the best",
        where,
        short,
        "%",
        aim=at_most(NEAR),
        note=f"advised {every}, best of {len(tried)} in the simulation {best}",
    )


if __name__ == "__main__":
    sys.exit(main())
