"""A supervised job whose ranks are processes of this machine: all that recovery is, without Ray.

    told = run_job(spec, folder=folder)

The supervision, the detectors, the ladder and the loop of each rank are the real ones; the
controller is the tests' storing one. Ranks are forked from a process that has done the imports,
snapshots are held by a keeper in a process of its own. Promises: every process it started has
ended when it returns.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from launch.commands import Assignment, Command, RankResult, Report
from launch.keeper import Keeper
from launch.rank_group import RankEnd, Seat
from launch.snapshots import SnapshotKey, StoredSnapshot
from launch.stacks import Stack, stacks_of
from monitoring.job_view import split_timelines
from monitoring.records import StepRecord
from orchestrator.actions import Action
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import ResumeState
from orchestrator.spec.job import JobSpec
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.supervision import Supervision
from tests.ranks.launch_ranks import PRELOAD, free_port
from tests.unit.scripted_job import ScriptedController

PASS_S = 0.05
JOB = "scripted-000001"


class _Keepers(BaseManager):
    """The process that holds the snapshots."""


_Keepers.register("Keeper", Keeper)


class _KeeperStore:
    """The keeper as ranks see it; what crosses to it are bytes."""

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy

    def put(self, key: SnapshotKey, payload: Any, digest: str, *, replicated: bool = False) -> None:
        self._proxy.put(key, bytes(payload), digest, replicated=replicated)

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        found: StoredSnapshot | None = self._proxy.get(key)
        return found


@dataclass
class _Rank:
    process: BaseProcess
    pipe: Connection
    end: RankEnd | None = None


class LocalRanks:
    """``launch.rank_group.RankGroup`` over processes."""

    def __init__(self, keep: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, "launch.training"])
        self._keepers = _Keepers(ctx=self._context)
        self._keepers.start()
        self._keeper: Any = self._keepers.Keeper(keep)  # type: ignore[attr-defined]
        self._ranks: list[_Rank] = []
        self.deliver: Callable[[Sequence[Report]], None] = lambda reports: None
        self.wake: Callable[[], None] = lambda: None

    def start(self, seats: Sequence[Seat]) -> None:
        self._ranks = []

    def ready(self) -> bool:
        return True

    def master(self) -> tuple[str, int]:
        return ("127.0.0.1", free_port())

    def run(self, assignments: Sequence[Assignment]) -> None:
        for assignment in assignments:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_rank_main, args=(theirs, assignment, self._keeper), daemon=True
            )
            process.start()
            theirs.close()
            rank = _Rank(process, ours)
            self._ranks.append(rank)
            threading.Thread(target=self._read, args=(assignment.rank, rank), daemon=True).start()

    def _read(self, number: int, rank: _Rank) -> None:
        """What a rank tells, until its process is gone."""
        while rank.end is None:
            try:
                kind, what = rank.pipe.recv()
            except (EOFError, OSError):
                rank.end = RankEnd(number, "lost", error="the process is gone")
                break
            if kind == "reports":
                self.deliver(what)
            elif kind == "done":
                rank.end = RankEnd(number, "done", what)
            else:
                error, text = what
                rank.end = RankEnd(number, "raised", error=text, cause=error)
        self.wake()

    def ended(self) -> tuple[RankEnd, ...]:
        return tuple(rank.end for rank in self._ranks if rank.end is not None)

    def post(self, command: Command) -> None:
        for rank in reversed(self._ranks):
            if rank.end is None:
                try:
                    rank.pipe.send(command)
                except OSError:
                    continue  # it shows in ``ended``

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()

    def fill_standby(self, spares: Sequence[Seat] = ()) -> None:
        """Nothing: a forked rank is there at once."""

    def copies(self) -> list[SnapshotKey]:
        keys: list[SnapshotKey] = self._keeper.keys(JOB)
        return keys

    def silent(self) -> Sequence[str]:
        return ()

    def stacks(self) -> dict[int, Stack]:
        pids = [rank.process.pid or 0 for rank in self._ranks]
        return dict(enumerate(stacks_of(pids, [""] * len(pids)).values()))

    def settle(self, replicas: int) -> None:
        """Nothing: one keeper has all."""

    def memory(self) -> dict[str, int]:
        return {"keeper": self._keeper.inventory(JOB).total_nbytes}

    def close(self) -> None:
        self.kill()
        self._keepers.shutdown()


def _rank_main(pipe: Connection, assignment: Assignment, keeper: Any) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    import torch

    from launch.mailbox import Mailbox
    from launch.stores import only
    from launch.training import TrainingLoop

    torch.set_num_threads(1)
    mailbox = Mailbox(assignment.attempt)
    sending = threading.Lock()

    def tell(kind: str, what: Any) -> None:
        with sending:
            pipe.send((kind, what))

    def listen() -> None:
        while True:
            try:
                mailbox.post(pipe.recv())
            except (EOFError, OSError):
                return

    threading.Thread(target=listen, daemon=True).start()
    try:
        loop = TrainingLoop(
            assignment,
            mailbox,
            lambda batch: tell("reports", list(batch)),
            only(_KeeperStore(keeper)),
        )
        result: RankResult = loop.run()
        tell("done", result)
    except Exception as error:
        traceback.print_exc()
        tell("raised", (error, f"{type(error).__name__}: {error}"))


class _Controller(ScriptedController):
    """Stores; its attempts get as many slots as the job asks for."""

    def resume(self) -> ResumeState:
        slots = self.spec.slots_per_node or 1
        drills = {d for step in self.steps for d in step["drills"]}
        return replace(
            super().resume(),
            nodes=(NodeSlot("00" * 28, "127.0.0.1", 0, slots),),
            fired_drills=tuple(sorted(drills)),
        )


@dataclass(frozen=True)
class Told:
    """What a job told until its end."""

    records: tuple[StepRecord, ...]
    """All, in the order in which they were stored."""
    actions: tuple[Action, ...]
    state: str
    """The last one."""
    attempts: int

    @property
    def kept(self) -> list[StepRecord]:
        """Those that led to the end."""
        return split_timelines(self.records)[0]

    def final_loss(self, steps: int = 10) -> float:
        """Mean of the last steps."""
        losses = [record.loss for record in self.kept[-steps:]]
        return sum(losses) / len(losses)

    def losses(self) -> dict[int, str]:
        """Bits of the losses that led to the end, by step."""
        return {record.step: record.loss.hex() for record in self.kept}


def run_job(*specs: JobSpec, folder: Path, patience: float = 1.0) -> Told:
    """Train a job to its end. Raises TimeoutError when that takes far too long, ``patience``
    times as long on a busy machine.

    With several specs each goes on where the one before ended, as another attempt would that
    somebody gave another spec: from its last checkpoint, with what its detectors had seen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    controller = _Controller(specs[0], folder)
    for attempt, spec in enumerate(specs):
        controller.spec = spec
        controller.attempt += attempt > 0
        _supervise(controller, patience)
    return Told(
        tuple(StepRecord.from_json(step) for step in controller.steps),
        tuple(controller.actions),
        controller.states[-1][0] if controller.states else "none",
        controller.attempt,
    )


def _supervise(controller: _Controller, patience: float) -> None:
    """One supervisor, and ranks of its own, until the job's end."""
    spec = controller.spec
    timeout_s = patience * (120.0 + 0.5 * spec.training.steps)
    ranks = LocalRanks(spec.snapshots.keep)
    supervision = Supervision(controller.resume(), controller, ranks)
    ranks.deliver, ranks.wake = supervision.deliver, supervision.inbox.wake
    end = time.monotonic() + timeout_s
    try:
        while supervision.phase is not Phase.OVER:
            if time.monotonic() > end:
                raise TimeoutError(f"{spec.name} isn't over after {timeout_s:g} s")
            supervision.step()
            supervision.inbox.wait(PASS_S)
    finally:
        supervision.close()
