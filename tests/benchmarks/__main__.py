"""`make bench`: every benchmark, one after the other, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

BENCHMARKS = (
    "bench_overhead",
    "bench_recovery",
    "bench_snapshots",
    "bench_checkpoints",
    "bench_telemetry",
    "bench_detection",
    "bench_start",
    "bench_rank_killed",
    "bench_api",
    "bench_fp8_linear",
    "bench_exchange",
    "bench_exchange_casts",
    "bench_exchange_error",
    "bench_curves",
    "bench_fidelity",
    "bench_parity",
    "bench_detectors",
    "bench_plan",
)


def main() -> int:
    """Run all; the number of those that failed."""
    failed = 0
    for name in BENCHMARKS:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"tests.benchmarks.{name}"]
        failed += (
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode != 0
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
