"""The two sides of a comparison: a job under Octavo, and the plain script under torchrun."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.api.client import Client
from orchestrator.home.folder import Home
from orchestrator.spec.job import JobSpec, spec_data, spec_yaml

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Run:
    """One training, either side."""

    first_step_s: float
    """From the command to the end of the first step."""
    step_s: float
    """Median seconds between the ends of successive steps, in the second half of the run."""
    losses: tuple[float, ...]
    gaps: tuple[float, ...] = ()
    """Seconds between the ends of successive steps, in the second half of the run."""
    job: str = ""
    """Id of the job; empty under torchrun."""


@contextlib.contextmanager
def cluster(home: Path, slots: int, standby: int = 0) -> Iterator[Client]:
    """`octavo up` with a home of its own, and `octavo down`."""
    options = ["--home", str(home)]
    up = [str(BIN / "octavo"), "up", "--slots", str(slots), "--standby", str(standby), *options]
    subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
    try:
        yield Client.of_home(Home(home))
    finally:
        down = [str(BIN / "octavo"), "down", *options]
        subprocess.run(down, check=True, stdout=subprocess.DEVNULL)


def under_octavo(client: Client, spec: JobSpec) -> Run:
    """Submit, wait for the end, and read the steps back."""
    began = time.time()
    job = str(client.submit(spec_data(spec), "benchmark")["id"])
    # Nobody follows the job while it is measured: reading back costs the controller.
    while not client.job(job)["settled"]:
        time.sleep(POLL_S)
    times, losses, after = [], [], 0
    while (page := client.steps(job, after, tensors=False))["steps"]:
        times += [float(row["time"]) for row in page["steps"]]
        losses += [float(row["loss"]) for row in page["steps"]]
        after = page["next"]
    state = client.job(job)["state"]
    if state != "succeeded":
        raise RuntimeError(f"{job} ended as {state}")
    return replace(_run(began, times, losses), job=job)


def under_torchrun(spec: JobSpec, folder: Path) -> Run:
    """The same under torchrun, from its command to its end."""
    file, out = folder / "plain.yaml", folder / "plain.json"
    file.write_text(spec_yaml(spec))
    assert spec.slots_per_node is not None
    command = [
        *(str(BIN / "torchrun"), "--nproc-per-node", str(spec.slots_per_node)),
        *("--master-port", str(_free_port())),
        *(str(ROOT / "tests/benchmarks/plain_deepspeed.py"), str(file), "--out", str(out)),
    ]
    began = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    rows = json.loads(out.read_text())
    return _run(began, [row[0] for row in rows], [row[1] for row in rows])


def _run(began: float, times: list[float], losses: list[float]) -> Run:
    # The first half is the job's start: caches fill, and standby workers import beside it.
    settled = times[len(times) // 2 :]
    gaps = [b - a for a, b in itertools.pairwise(settled)]
    step_s = statistics.median(gaps) if gaps else float("nan")
    return Run(times[0] - began, step_s, tuple(losses), tuple(gaps))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
