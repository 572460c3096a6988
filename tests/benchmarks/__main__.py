"""`make bench`: every benchmark, one after the other, each in a process of its own; at the end one
table of all their rows (``tests.benchmarks.results``), and the same as files.

    python -m tests.benchmarks [--out runs/bench] [NAME…]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.results import markdown, read, write_table

BENCHMARKS = (
    "bench_overhead",
    "bench_recovery",
    "bench_snapshots",
    "bench_checkpoints",
    "bench_saving",
    "bench_telemetry",
    "bench_detection",
    "bench_start",
    "bench_rank_killed",
    "bench_instability",
    "bench_api",
    "bench_fp8_linear",
    "bench_fp8_step",
    "bench_exchange",
    "bench_hooks",
    "bench_exchange_casts",
    "bench_exchange_error",
    "bench_curves",
    "bench_fidelity",
    "bench_parity",
    "bench_detectors",
    "bench_plan",
    "bench_control_plane",
    "bench_goodput",
)


def main() -> int:
    """Run all, or those that are named; the number of those that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    asked = parser.parse_args()
    failed = 0
    for name in asked.names or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--out", str(asked.out)]
        failed += (
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode != 0
        )
    reports = read(asked.out)
    if reports:
        write_table(reports, asked.out)
        print(f"\n{markdown(reports)}\n\n{asked.out}/bench.md, bench.json")
    return failed


if __name__ == "__main__":
    sys.exit(main())
