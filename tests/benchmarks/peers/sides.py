"""How each side of the rank-killed row is started, and how one sees that it has ended.

Promises: ``start`` returns soon, and all that it started carries the mark; every side trains the
job that it is given, saves its state each ``SAVE_EVERY`` steps unless its name says otherwise, and
begins with nothing saved.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.api.client import Client
from orchestrator.home.folder import Home
from orchestrator.spec.job import JobSpec, spec_data, spec_yaml
from tests.benchmarks.peers import recorded
from tests.benchmarks.peers.environments import (
    OURS,
    Environment,
    Unavailable,
    environment_of,
)
from tests.benchmarks.peers.jobs import SAVE_EVERY
from tests.benchmarks.peers.processes import ROOT, Program, environment
from tests.benchmarks.sides import COMMAND_S, RAY_TRAIN, free_port

SCRIPTS = ROOT / "tests/benchmarks/peers"
MAX_RESTARTS = "3"
OFTEN_POLLED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
"""Beside ``RAY_TRAIN``: it sees a worker's failure, and counts a checkpoint, at its polls: two
seconds apart by default, which would have it do more steps again than the others."""
HEARTBEAT_MS = 1000
"""How long torchft's lighthouse, as we would tune it, waits for a replica's heartbeats, which come
each 100 ms."""


class Running(Protocol):
    """A side's run."""

    def poll(self) -> int | None:
        """Exit code, of several programs the first that isn't 0; None while it runs."""
        ...

    def told(self) -> str:
        """The end of what it printed."""
        ...


@dataclass(frozen=True, slots=True)
class Side:
    """One thing that a user could take."""

    name: str
    how: str
    """How it is set up, for the table."""
    start: Callable[[JobSpec, Path, str], AbstractContextManager[Running]] = field(repr=False)
    """(job, empty folder, mark): starts it; left, it may still run. Steps go to ``steps_of``."""


def steps_of(folder: Path) -> Path:
    """Where a run's steps are recorded."""
    return folder / "steps"


@dataclass(frozen=True, slots=True)
class Programs:
    """Runs of programs that are over when the ``needed`` ones are."""

    needed: tuple[Program, ...]

    def poll(self) -> int | None:
        codes = [program.poll() for program in self.needed]
        bad = [code for code in codes if code]
        return bad[0] if bad else None if None in codes else 0

    def told(self) -> str:
        return "\n".join(program.tail() for program in self.needed)


def available(names: list[str], folder: Path) -> tuple[list[Side], list[Unavailable]]:
    """The sides of these names, and those that can't be had here. Raises KeyError for no side."""
    sides: list[Side] = []
    missing: list[Unavailable] = []
    for name in names:
        peer, make = SIDES[name]
        found = OURS if peer is None else environment_of(peer, folder)
        if isinstance(found, Unavailable):
            missing.append(Unavailable(name, found.reason))
        else:
            sides.append(make(found))
    return sides, missing


def _torchrun(name: str, how: str, options: tuple[str, ...]) -> Callable[[Environment], Side]:
    def of(own: Environment) -> Side:
        @contextlib.contextmanager
        def start(job: JobSpec, folder: Path, mark: str) -> Iterator[Running]:
            command = [
                *(own.command("torchrun"), "--standalone"),
                *("--nproc-per-node", str(job.slots_per_node), "--max-restarts", MAX_RESTARTS),
                *(str(SCRIPTS / "torchrun_train.py"), str(_written(job, folder))),
                *("--saved", str(folder / "saved"), "--every", str(SAVE_EVERY), *options),
            ]
            yield Programs((_program(command, folder, mark),))

        return Side(name, how, start)

    return of


def _deepspeed(own: Environment) -> Side:
    @contextlib.contextmanager
    def start(job: JobSpec, folder: Path, mark: str) -> Iterator[Running]:
        command = [
            *(own.command("deepspeed"), "--num_gpus", str(job.slots_per_node)),
            *("--master_port", str(free_port()), "--no_local_rank"),
            *(str(SCRIPTS / "torchrun_train.py"), str(_written(job, folder))),
            *("--saved", str(folder / "saved"), "--every", str(SAVE_EVERY)),
        ]
        yield Programs((_program(command, folder, mark, {"DS_ACCELERATOR": "cpu"}),))

    return Side("deepspeed", "its launcher, which starts nothing again", start)


def _ray_train(own: Environment) -> Side:
    @contextlib.contextmanager
    def start(job: JobSpec, folder: Path, mark: str) -> Iterator[Running]:
        command = [
            *(own.command("python"), str(SCRIPTS / "ray_train_driver.py")),
            *(str(_written(job, folder)), "--workers", str(job.slots_per_node)),
            *("--storage", str(folder / "saved"), "--every", str(SAVE_EVERY)),
        ]
        yield Programs((_program(command, folder, mark, {**RAY_TRAIN, **OFTEN_POLLED}),))

    return Side("ray_train", "TorchTrainer (V2), FailureConfig, polls each 0.1 s", start)


def _torchft(
    name: str, how: str, lighthouse: tuple[str, ...], options: tuple[str, ...] = ()
) -> Callable[[Environment], Side]:
    def of(own: Environment) -> Side:
        @contextlib.contextmanager
        def start(job: JobSpec, folder: Path, mark: str) -> Iterator[Running]:
            assert job.slots_per_node is not None
            port = free_port()
            serve = [own.command("torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
            _program([*serve, *lighthouse], folder, mark, name="lighthouse")
            spec = _written(job, folder)
            groups = []
            for group in range(job.slots_per_node):
                command = [
                    *(own.command("torchrun"), "--standalone", "--nproc-per-node", "1"),
                    *("--max-restarts", MAX_RESTARTS),
                    *(str(SCRIPTS / "torchft_train.py"), str(spec)),
                    *("--met", str(folder / "met"), *options),
                ]
                env = {
                    "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
                    "REPLICA_GROUP_ID": str(group),
                    "NUM_REPLICA_GROUPS": str(job.slots_per_node),
                }
                groups.append(_program(command, folder, mark, env, name=f"group-{group}"))
            yield Programs(tuple(groups))

        return Side(name, how, start)

    return of


@dataclass(frozen=True, slots=True)
class OctavoJob:
    """A job under the controller of this run alone."""

    client: Client
    job: str

    def poll(self) -> int | None:
        found = self.client.patiently(self.client.job, self.job)
        if not found["settled"]:
            return None
        return 0 if found["state"] == "succeeded" else 100

    def told(self) -> str:
        events = self.client.events(self.job)["events"][-15:]
        return "\n".join(str(event["message"]) for event in events)


def _octavo(name: str, how: str, every: int) -> Callable[[Environment], Side]:
    """``every``: steps from one snapshot in memory to the next."""

    def of(own: Environment) -> Side:
        @contextlib.contextmanager
        def start(job: JobSpec, folder: Path, mark: str) -> Iterator[Running]:
            slots = str(job.slots_per_node)
            home = ("--home", str(folder / "home"))
            env = environment(mark)
            up = [own.command("octavo"), "up", "--slots", slots, "--standby", slots, *home]
            given = with_snapshots(job, every).model_copy(
                update={"envs": {recorded.FOLDER: str(steps_of(folder))}}
            )
            with (folder / "log.txt").open("ab") as log:
                subprocess.run(up, check=True, stdout=log, stderr=log, env=env, timeout=COMMAND_S)
                try:
                    client = Client.of_home(Home(folder / "home"))
                    yield OctavoJob(client, str(client.submit(spec_data(given), "benchmark")["id"]))
                finally:
                    down = [own.command("octavo"), "down", *home]
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        subprocess.run(down, stdout=log, stderr=log, env=env, timeout=COMMAND_S)

        return Side(name, how, start)

    return of


def with_snapshots(job: JobSpec, every: int) -> JobSpec:
    """``job`` with one each ``every`` steps, as many kept as its ``certify_after`` needs."""
    keep = -(-job.snapshots.certify_after // every) + 2
    update = {"every": every, "keep": max(keep, job.snapshots.keep)}
    return job.model_copy(update={"snapshots": job.snapshots.model_copy(update=update)})


SIDES: Mapping[str, tuple[str | None, Callable[[Environment], Side]]] = {
    "octavo": (
        None,
        _octavo("octavo", f"up --standby, a snapshot each {SAVE_EVERY} steps", SAVE_EVERY),
    ),
    "octavo_each_step": (None, _octavo("octavo_each_step", "the same, one each step", 1)),
    "torchrun": (None, _torchrun("torchrun", "--standalone --max-restarts 3", ())),
    "torchrun_fresh": (
        None,
        _torchrun(
            "torchrun_fresh", "the same, a fresh store and a minute a restart", ("--fresh-store",)
        ),
    ),
    "deepspeed": (None, _deepspeed),
    "ray_train": ("ray_train", _ray_train),
    "torchft": (
        "torchft",
        _torchft(
            "torchft",
            f"a group a rank, min_replicas 1, heartbeat timeout {HEARTBEAT_MS} ms",
            (
                *("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
                *("--heartbeat_timeout_ms", str(HEARTBEAT_MS)),
            ),
        ),
    ),
    "torchft_readme": (
        "torchft",
        _torchft(
            "torchft_readme",
            "as its README has it: its DDP, heartbeat timeout 5 s",
            ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
            ("--ddp",),
        ),
    ),
}
"""By name: the peer whose environment it needs (None: Octavo's own), and how to make it."""


def _written(job: JobSpec, folder: Path) -> Path:
    file = folder / "job.yaml"
    file.write_text(spec_yaml(job))
    return file


def _program(
    command: list[str],
    folder: Path,
    mark: str,
    env: Mapping[str, str] | None = None,
    name: str = "log",
) -> Program:
    own = {recorded.FOLDER: str(steps_of(folder)), **(env or {})}
    return Program(command, mark, log=folder / f"{name}.txt", env=own)
