"""What ``bench_control_plane`` measures, each part in a process of its own: JSON on stdout.

python -m tests.benchmarks.control_plane_parts PART FOLDER SIZE
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from launch.commands import Assignment, Command, RankReport, SnapshotReport
from launch.rank_group import RankEnd, Seat
from launch.relay import Relay
from launch.report_tree import junctions
from launch.snapshots import SnapshotKey
from launch.stacks import Stack
from launch.step_part import Sent
from monitoring.amax import COLUMNS, encode
from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank
from orchestrator.api.app import create_app
from orchestrator.api.client import Client
from orchestrator.controller.controller import Controller
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import Acknowledgement, JobHistory, SupervisorBatch
from orchestrator.spec.job import JobSpec
from orchestrator.store.database import Store
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.record_merger import RecordMerger, merge_reports, record_of
from orchestrator.supervision.stragglers import Stragglers
from orchestrator.supervision.supervision import Supervision
from orchestrator.supervision.supervisor import run_log
from tests.benchmarks.bench_control_plane import took
from tests.unit.control_plane import TOKEN, ControlPlane
from tests.unit.healthy_runs import SCALING
from tests.unit.scripted_job import ScriptedController, spec

SUBMISSIONS = 200
LOOKS = 50
PASSES = 20
RESTARTS = 3
TENSORS = 1_002
NODE = 8
"""Ranks on a node."""


class Plane(ControlPlane):
    """On the clock of this machine."""

    def new_controller(self) -> Controller:
        return Controller(self.store, self.groups, self.supervisors, self.jobs_dir)

    def again(self) -> float:
        """Seconds of a start on what is on disk, to the end of the first pass."""
        url = f"sqlite:///{self.jobs_dir.parent}/store.db"
        self.store.close()
        gc.collect()
        began = time.perf_counter()
        self.store = Store(url)
        self.controller = self.new_controller()
        self.controller.step(time.time())
        return time.perf_counter() - began


# -- jobs that wait


def queue(folder: Path, size: int) -> dict[str, Any]:
    """``size`` jobs, a few of which run, for as many as a tenth users."""
    plane = Plane(folder, *(4 for _ in range(max(1, min(16, size // 2)))))
    first = plane.submit("load")
    template = plane.store.job(first).spec
    users = max(1, size // 10)
    for number in range(1, size):
        name = f"load{number}"
        plane.store.add_job(
            f"{name}-{number:06x}",
            template.model_copy(update={"name": name}),
            str(plane.jobs_dir),
            "load.yaml",
            time.time(),
            by=f"user{number % users}",
        )
    for _ in range(2 * len(plane.groups.total) + 2):
        plane.controller.step(time.time())
    server = uvicorn.Server(
        uvicorn.Config(create_app(plane.controller, TOKEN), port=0, log_config=None, lifespan="off")
    )
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    stop = threading.Event()
    loop = threading.Thread(target=plane.controller.run, args=(stop,), daemon=True)
    loop.start()
    command = [sys.executable, "-m", "tests.benchmarks.control_plane_parts", "client", str(folder)]
    done = subprocess.run([*command, str(port)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    stop.set()
    loop.join()
    server.should_exit = True
    step = lambda: plane.controller.step(time.time())  # noqa: E731
    step()
    found["pass that changes nothing"] = [took(step) for _ in range(PASSES)]
    after = []
    for number in range(PASSES):
        plane.submit(f"late{number}")
        after.append(took(step))
    found["pass after a submission"] = after
    found["controller restart, to the end of its first pass"] = [
        plane.again() for _ in range(RESTARTS)
    ]
    return found


def client(folder: Path, port: int) -> dict[str, Any]:
    """What a client of the API sees."""
    url = f"http://127.0.0.1:{port}"
    octavo = Client(url, TOKEN)
    text = {"data": {"source": str(folder / "text.txt")}, "slots_per_node": 4}
    some = octavo.jobs()
    newest = some[-1]["id"]
    get = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120)

    def page(**parameters: Any) -> Any:
        return get.get("/v1/jobs", params=parameters).raise_for_status().json()

    def submit(number: int) -> None:
        octavo.submit({"name": f"new{number}", **text}, "new.yaml", by=f"user{number % 5}")

    before = some[max(0, len(some) - 101)]["id"]
    words = itertools.cycle(job["id"] for job in some[:: max(1, len(some) // 50)])
    return {
        "submit over HTTP": [took(lambda n=n: submit(n)) for n in range(SUBMISSIONS)],
        "a page of the list": [took(lambda: page(limit=100)) for _ in range(LOOKS)],
        "the newest page": [took(lambda: page(limit=100, after=before)) for _ in range(LOOKS)],
        "all pages": [took(octavo.jobs) for _ in range(3)],
        "status by id": [took(lambda: octavo.job(next(words))) for _ in range(LOOKS)],
        "status by name": [took(lambda n=n: octavo.job(f"new{n}")) for n in range(LOOKS)],
        "status by a beginning": [took(lambda: octavo.job(newest[:-2])) for _ in range(LOOKS)],
        "scrape of /metrics": [
            took(lambda: get.get("/metrics").raise_for_status()) for _ in range(3)
        ],
    }


# -- jobs that run


def running(folder: Path, size: int) -> dict[str, Any]:
    """``size`` jobs, each of which reports steps of a hundred tensors."""
    plane = Plane(folder, *(4 for _ in range(size)))
    first = plane.submit("runs", key="template")
    template = plane.store.job(first).spec
    for number in range(1, size):
        plane.store.add_job(
            f"runs-{number:06x}", template, str(plane.jobs_dir), "runs.yaml", time.time()
        )
    jobs = [row.id for row in plane.store.jobs()]
    while any(job not in plane.supervisors.alive for job in jobs):
        plane.controller.step(time.time())
    for job in jobs:
        transition = (JobState.RUNNING, Cause.FIRST_STEP)
        assert plane.controller.report(job, 1, SupervisorBatch(1, transition=transition)).accepted
    bank = DetectorBank(DetectionConfig(), scaling=SCALING)
    for step in range(60):
        bank.observe(merge_reports(reports_of(step, 1, 102)))
    state = bank.state_dict()
    row = merge_reports(reports_of(0, 1, 102)).to_json()
    sequence = itertools.count(2)
    latencies: list[float] = []
    rounds: list[float] = []
    with ThreadPoolExecutor(32) as supervisors:
        for number in range(max(5, 200 // size)):
            mark = next(sequence)
            saved = state if number % 5 == 4 else None
            batch = SupervisorBatch(mark, steps=({**row, "step": number},), detector_state=saved)

            def tell(job: str, batch: SupervisorBatch = batch) -> float:
                began = time.perf_counter()
                assert plane.controller.report(job, 1, batch).accepted
                return time.perf_counter() - began

            began = time.perf_counter()
            latencies += supervisors.map(tell, jobs)
            rounds.append(time.perf_counter() - began)
    passes = []
    for _ in range(PASSES):
        batch = SupervisorBatch(next(sequence), steps=({**row, "step": 99},))
        for job in jobs:
            assert plane.controller.report(job, 1, batch).accepted
        passes.append(took(lambda: plane.controller.step(time.time())))
        if sum(passes) > 20:
            break
    told = f"detector state {len(json.dumps(state)):,} bytes; {size / min(rounds):.0f} batches/s"
    return {
        "batch of a step stored": latencies,
        "a round: a step of every job": rounds,
        "pass over running jobs": passes,
        "told": told,
    }


# -- ranks


def reports_of(step: int, world: int, tensors: int = TENSORS, stages: int = 1) -> list[RankReport]:
    """One healthy step of all ranks, tensors spread over the pipeline's stages."""
    chance = np.random.default_rng(step)
    each = tensors // stages
    found = []
    of_stage = max(1, world // stages)
    for rank in range(world):
        stage = rank // of_stage
        names = _names(stage, each)
        stats = np.zeros((each, len(COLUMNS)), np.float32)
        stats[:, :6] = [4.0, 100.0, 0.0, 3.0, 0.0, 65536.0]
        stats[:, 0] *= chance.lognormal(0, 0.1, each)
        # A scale follows what it scales; one that stands still would be an incident.
        stats[:, 1] = 300.0 / stats[:, 0]
        found.append(
            RankReport(
                attempt=1,
                timeline=0,
                rank=rank,
                step=step,
                time=float(step),
                batch=step,
                loss=3.0 + 0.01 * chance.random(),
                grad_norm=1.0 + 0.01 * chance.random(),
                lr=1e-3,
                tokens=4096,
                step_time_s=0.1,
                skipped=False,
                nonfinite_parameters=(),
                nonfinite_loss=False,
                comm={
                    "bytes": 1e6,
                    "uncompressed_bytes": 2e6,
                    "seconds": 0.01 * chance.random(),
                    "relative_error": 0.026,
                    "wire_bits": 8.0,
                },
                stats=encode(stats),
                stats_names=names,
                high_precision_layers=(f"layers.{stage}.attn.out",),
                drills=(),
                command=0,
                checksums=b"\7" * 16 * 70 if step % 10 == 0 else b"",
                checksum_names=_parameters(stage) if step % 10 == 0 else (),
                replicas=tuple(range(stage * of_stage + rank % NODE, (stage + 1) * of_stage, NODE)),
                compute_s=0.09 + 0.001 * chance.random(),
            )
        )
    return found


_KNOWN: dict[tuple[int, int], tuple[str, ...]] = {}


def _names(stage: int, count: int) -> tuple[str, ...]:
    key = (stage, count)
    if key not in _KNOWN:
        roles = ("input", "weight", "grad_output")
        _KNOWN[key] = tuple(
            f"layers.{stage}.{i // 3}.mlp.down/{roles[i % 3]}" for i in range(count)
        )
    return _KNOWN[key]


def _parameters(stage: int) -> tuple[str, ...]:
    return tuple(f"layers.{stage}.{i}.weight" for i in range(70))


def telemetry(folder: Path, world: int) -> dict[str, Any]:
    """Merging the reports of a step, at one place and by a tree. Processor time of each place."""
    stages = min(16, max(1, world // NODE))
    job = spec(parallelism={"pipeline": 1}, slots_per_node=2)
    limits = DetectionConfig()
    flat_s: list[float] = []
    root_s: list[float] = []
    most_s: list[float] = []
    run = job.model_copy(
        update={"parallelism": job.parallelism.model_copy(update={"pipeline": stages})}
    )
    watch, other = Stragglers(run, limits, world), Stragglers(run, limits, world)
    flat, root = RecordMerger(1, 0, world), RecordMerger(1, 0, world)
    sizes = 0
    for step in range(5, 5 + (6 if world > 2000 else 30)):
        sent = [pickle.dumps([report]) for report in reports_of(step, world, TENSORS, stages)]
        gc.collect()
        began = time.thread_time()
        record = None
        for message in sent:
            for one in pickle.loads(message):
                if (whole := flat.add(one)) is not None:
                    record = record_of(whole)
                    watch.add(whole)
        flat_s.append(time.thread_time() - began)
        level, seconds = _up(sent)
        most_s.append(max(seconds))
        sizes = sum(map(len, level))
        began = time.thread_time()
        again = None
        for message in level:
            for one in pickle.loads(message):
                if (whole := root.add(one)) is not None:
                    again = record_of(whole)
                    other.add(whole)
        root_s.append(time.thread_time() - began)
        assert record is not None and again is not None
        assert json.dumps(record.to_json()) == json.dumps(again.to_json()), "the tree differs"
    return {
        "a step's reports, each rank on its own, at the supervisor": flat_s,
        "the same by a tree, at the supervisor": root_s,
        "at the node that merges most": most_s,
        "told": f"{sum(map(len, sent)):,} bytes a step flat, {sizes:,} at the top of the tree",
    }


def _up(sent: Sequence[bytes]) -> tuple[list[bytes], list[float]]:
    """A step of all ranks through the relays that their job would have: what reaches the
    supervisor, and each relay's seconds."""
    nodes = [len(sent[i : i + NODE]) for i in range(0, len(sent), NODE)]
    places = junctions(nodes)
    heard: dict[int | None, list[bytes]] = {
        number: list(sent[number * NODE :][:NODE]) for number in range(len(nodes))
    }
    seconds = []
    for number, place in enumerate(places):
        began = time.thread_time()
        passed_on = asyncio.run(_passed_on(heard.pop(number), place.ranks))
        seconds.append(time.thread_time() - began)
        heard.setdefault(place.above, []).extend(passed_on)
    return heard[None], seconds


async def _passed_on(heard: Sequence[bytes], ranks: int) -> list[bytes]:
    """What one relay sends up of a step that it is sent by several at once."""
    messages: list[bytes] = []

    async def forward(batch: Sequence[Sent]) -> None:
        messages.append(pickle.dumps(list(batch)))

    relay = Relay()
    await relay.begin(1, ranks, forward)
    await asyncio.gather(*(relay.take(1, pickle.loads(message)) for message in heard))
    return messages


class Ranks:
    """A group whose ranks only report."""

    def start(self, seats: Sequence[Seat]) -> None: ...

    def ready(self) -> bool:
        return True

    def master(self) -> tuple[str, int]:
        return ("127.0.0.1", 29500)

    def run(self, assignments: Sequence[Assignment]) -> None: ...

    def ended(self) -> tuple[RankEnd, ...]:
        return ()

    def post(self, command: Command) -> None: ...

    def kill(self) -> None: ...

    def fill_standby(self, spares: Sequence[Seat] = ()) -> None: ...

    def copies(self) -> list[SnapshotKey]:
        return []

    def silent(self) -> Sequence[str]:
        return ()

    def stacks(self) -> dict[int, Stack]:
        return {}

    def settle(self, replicas: int) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class Elsewhere(ScriptedController):
    """A controller in another process: what it is told is pickled, as Ray does."""

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        pickle.dumps(batch)
        return Acknowledgement(True)


def supervisor(folder: Path, steps: int, *, wandb: bool = False) -> dict[str, Any]:
    """Processor time of a supervisor's process at 10 steps a second of 8 ranks, as a share of a
    core, a value each hundred steps after the first two hundred; ``wandb``: with a run of it,
    offline, whose own process isn't counted."""
    job: JobSpec = spec(
        slots_per_node=8, training={"steps": 10 * steps}, snapshots={"every": 10, "keep": 4}
    )
    controller = Elsewhere(job, folder)
    resume = controller.resume()
    log = run_log(resume, JobHistory()) if wandb else None
    now = 0.0
    supervision = Supervision(resume, controller, Ranks(), clock=lambda: now, run_log=log)
    while supervision.phase is not Phase.TRAINING:
        supervision.step()
    shares = []
    for mark in _messages(steps):
        if isinstance(mark, int):
            began = time.process_time()
            continue
        if isinstance(mark, str):
            shares.append((time.process_time() - began) / 100 * 10)
            continue
        for message in mark:
            supervision.deliver(pickle.loads(message))
            now += 0.1 / 8
            supervision.step()
    supervision.close()
    if log is not None:
        log.finish()
    return {"share": shares[2:]}


def with_wandb(folder: Path, steps: int) -> dict[str, Any]:
    """``supervisor`` with W&B."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    return supervisor(folder, steps, wandb=True)


def _messages(steps: int) -> Iterator[list[bytes] | int | str]:
    """What ranks send in a hundred steps, made beforehand: its beginning, the steps, its end."""
    for first in range(0, steps, 100):
        sent = []
        for step in range(first, first + 100):
            some: list[list[Any]] = [[report] for report in reports_of(step, 8, TENSORS, 2)]
            if step % 10 == 0:
                for rank, own in enumerate(some):
                    for tier in ("ring", "memory"):
                        own.append(SnapshotReport(1, 0, rank, step, tier, 10, "d"))
            sent.append([pickle.dumps(one) for one in some])
        gc.collect()
        yield first
        yield from sent
        yield "end"


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "queue": queue,
    "client": client,
    "running": running,
    "telemetry": telemetry,
    "supervisor": supervisor,
    "with_wandb": with_wandb,
}


if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
