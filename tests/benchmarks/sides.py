"""The sides of a comparison: a job under Octavo, and the same training by a plain script under
torchrun, DeepSpeed's launcher and Ray Train.

Promises: a run is bounded, and one that fails or hangs raises SideError; nothing that a side
started is left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.api.client import Client
from orchestrator.api.client_errors import ClientError
from orchestrator.home.folder import Home
from orchestrator.spec.job import JobSpec, spec_data, spec_yaml
from tests.benchmarks.peers.environments import Environment
from tests.benchmarks.peers.processes import (
    ROOT,
    SideError,
    end_all,
    environment,
    new_mark,
    run_to_end,
)

BIN = Path(sys.executable).parent
POLL_S = 2.0
LIMIT_S = 1800.0
"""Of one training."""
COMMAND_S = 180.0
"""Of `octavo up`, `octavo down`, `ray start`."""
CANCEL_S = 180.0
"""That a job that hangs has to be cancelled in, before the next one is submitted all the same."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training, either side."""

    first_step_s: float
    """From the command to the end of the first step."""
    step_s: float
    """Mean seconds between the ends of successive steps, in the second half of the run: what is
    done each tenth or hundredth step counts as what it takes."""
    losses: tuple[float, ...]
    gaps: tuple[float, ...] = ()
    """Seconds between the ends of successive steps, in the second half of the run."""
    settled: tuple[float, float] = (float("nan"), float("nan"))
    """First and last end of a step in the second half, seconds since the epoch."""
    job: str = ""
    """Id of the job; empty under torchrun."""


@contextlib.contextmanager
def cluster(home: Path, slots: int, standby: int = 0) -> Iterator[Client]:
    """`octavo up` with a home of its own, and `octavo down`; what is left then is ended. Raises
    SideError."""
    options = ["--home", str(home)]
    mark = new_mark()
    try:
        octavo, env = str(BIN / "octavo"), environment(mark)
        slots_and_standby = ["--slots", str(slots), "--standby", str(standby)]
        _done([octavo, "up", *slots_and_standby, *options], env)
        try:
            yield Client.of_home(Home(home))
        finally:
            _done([octavo, "down", *options], env)
    finally:
        end_all(mark)


def _done(command: Sequence[str], env: Mapping[str, str], log: Path | None = None) -> None:
    """Run a command that starts or ends what others use, to its end. Raises SideError."""
    told = " ".join([Path(command[0]).name, command[1]])
    with contextlib.ExitStack() as stack:
        out = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
        err = None if log is None else out
        try:
            subprocess.run(command, check=True, stdout=out, stderr=err, env=env, timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            raise SideError(f"{told} was not over after {COMMAND_S:.0f} s", hung=True) from None
        except subprocess.CalledProcessError as error:
            raise SideError(f"{told} exited {error.returncode}") from None


def under_octavo(client: Client, spec: JobSpec) -> Run:
    """Submit, wait for the end, and read the steps back. Raises SideError."""
    began = time.time()
    job = str(client.submit(spec_data(spec), "benchmark")["id"])
    # Nobody follows the job while it is measured: reading back costs the controller.
    while not client.job(job)["settled"]:
        if time.time() - began > LIMIT_S:
            _give_up(client, job)
            raise SideError(f"{job} was not over after {LIMIT_S:.0f} s", hung=True)
        time.sleep(POLL_S)
    times, losses, after = [], [], 0
    while (page := client.steps(job, after, tensors=False))["steps"]:
        times += [float(row["time"]) for row in page["steps"]]
        losses += [float(row["loss"]) for row in page["steps"]]
        after = page["next"]
    state = client.job(job)["state"]
    if state != "succeeded":
        raise SideError(f"{job} ended as {state}")
    return replace(run_of(began, times, losses, spec.training.steps), job=job)


def _give_up(client: Client, job: str) -> None:
    """Have a job that hangs leave its nodes to the next run, if it can."""
    with contextlib.suppress(ClientError):
        client.cancel(job, "the benchmark's time is over")
        end = time.monotonic() + CANCEL_S
        while not client.job(job)["settled"] and time.monotonic() < end:
            time.sleep(POLL_S)


def under_torchrun(spec: JobSpec, folder: Path) -> Run:
    """The same under torchrun, from its command to its end. Raises SideError."""
    launcher = [str(BIN / "torchrun"), "--nproc-per-node", str(spec.slots_per_node)]
    return _plain([*launcher, "--master-port", str(free_port())], spec, folder)


def under_deepspeed(spec: JobSpec, folder: Path) -> Run:
    """The same under DeepSpeed's launcher, as its "Getting Started" has it for one node. Raises
    SideError."""
    launcher = [str(BIN / "deepspeed"), "--num_gpus", str(spec.slots_per_node)]
    launcher += ["--master_port", str(free_port()), "--no_local_rank"]
    return _plain(launcher, spec, folder, {"DS_ACCELERATOR": "cpu"})


@dataclass(frozen=True, slots=True)
class RunningRay:
    """A Ray that drivers may join."""

    address: str
    token: str


def under_ray_train(
    spec: JobSpec, folder: Path, peer: Environment, joined: RunningRay | None = None
) -> Run:
    """The same loop as a TorchTrainer's training function, from ``fit()``. Raises SideError.

    ``joined``: a Ray that runs already; None: the driver's own.
    """
    file, out = _files(spec, folder)
    driver = str(ROOT / "tests/benchmarks/peers/ray_train_driver.py")
    command = [peer.command("python"), driver, str(file), "--workers", str(spec.slots_per_node)]
    command += ["--storage", str(folder / "storage"), "--every", "0", "--out", str(out)]
    env = RAY_TRAIN
    if joined is not None:
        command += ["--address", joined.address]
        env = {**env, **_token(joined.token)}
    run_to_end(command, folder / "log.txt", LIMIT_S, env)
    told = json.loads(out.read_text())
    times, losses = ([row[of] for row in told["rows"]] for of in (0, 1))
    return run_of(told["began"], times, losses, spec.training.steps)


RAY_TRAIN = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "DS_ACCELERATOR": "cpu",
}
"""Environment of Ray Train's driver."""


@contextlib.contextmanager
def ray_of(peer: Environment, folder: Path, slots: int) -> Iterator[RunningRay]:
    """A Ray of the peer's own for drivers to join, as a cluster would be there."""
    mark = new_mark()
    port = free_port()
    command = [peer.command("ray"), "start", "--head", "--port", str(port), "--num-cpus"]
    command += [str(slots + 1), "--include-dashboard", "false", "--disable-usage-stats"]
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:
        command += ["--temp-dir", temporary]
        try:
            env = environment(mark, {**RAY_TRAIN, **_token(mark)})
            _done(command, env, folder / "ray.txt")
            yield RunningRay(f"127.0.0.1:{port}", mark)
        finally:
            end_all(mark)


def _token(token: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def _plain(
    launcher: list[str], spec: JobSpec, folder: Path, env: dict[str, str] | None = None
) -> Run:
    file, out = _files(spec, folder)
    script = str(ROOT / "tests/benchmarks/plain_deepspeed.py")
    began = time.time()
    run_to_end([*launcher, script, str(file), "--out", str(out)], folder / "log.txt", LIMIT_S, env)
    rows = json.loads(out.read_text())
    times, losses = ([row[of] for row in rows] for of in (0, 1))
    return run_of(began, times, losses, spec.training.steps)


def _files(spec: JobSpec, folder: Path) -> tuple[Path, Path]:
    """The job for a plain script, and where it is to write its steps."""
    file, out = folder / "plain.yaml", folder / "plain.json"
    file.write_text(spec_yaml(spec))
    # What an earlier run wrote is none of the next one's.
    out.unlink(missing_ok=True)
    return file, out


def run_of(began: float, times: Sequence[float], losses: Sequence[float], steps: int) -> Run:
    """The run of ``steps`` steps that ended at ``times``. Raises SideError where there are others:
    a run that did steps again, or was started again, is not the one that is measured."""
    if len(times) != steps:
        raise SideError(f"{len(times)} steps were told of {steps}: it wasn't undisturbed")
    # The first half is the job's start: caches fill, and standby workers import beside it.
    settled = times[len(times) // 2 :]
    gaps = [b - a for a, b in itertools.pairwise(settled)]
    step_s = statistics.fmean(gaps) if gaps else float("nan")
    ends = (settled[0], settled[-1])
    return Run(times[0] - began, step_s, tuple(losses), tuple(gaps), ends)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
