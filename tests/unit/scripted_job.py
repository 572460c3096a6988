"""Ranks and a controller without processes: a supervisor is stepped against them.

``ScriptedRanks`` keeps the ranks' side of the bargain (commands at step boundaries,
snapshots, the skip ledger) and breaks on demand; ``ScriptedController`` stores, refuses
and forgets as the real one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.checkpoints import write_rank_file
from launch.commands import (
    Assignment,
    Command,
    ExchangeReport,
    RankReport,
    RankResult,
    Report,
    Rollback,
    RollbackReport,
    SetExchange,
    SetPrecision,
    SnapshotReport,
    Stop,
)
from launch.digests import digest_of
from launch.rank_group import RankEnd, Seat
from launch.shipping import Tier
from launch.snapshots import SnapshotKey
from launch.stacks import Stack
from monitoring.amax import COLUMNS, encode
from orchestrator.actions import Action
from orchestrator.instant import Instant
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import (
    Acknowledgement,
    FencedError,
    JobHistory,
    PastMark,
    ResumeState,
    SupervisorBatch,
)
from orchestrator.recovery.controls import ControlAnswer
from orchestrator.recovery.resume import batches_of, standing
from orchestrator.saved.restore import WRITTEN_OR_BACK
from orchestrator.spec.job import JobSpec
from orchestrator.supervision.outbox import ControllerUnreachableError
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.preflight_gate import PreflightGate
from orchestrator.supervision.supervision import Supervision

LAYERS = ("layers.0.mlp.down", "layers.1.mlp.down")
WORLD = 2


def spec(**sections: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "scripted",
        "slots_per_node": WORLD,
        "training": {"steps": 200},
        "snapshots": {"every": 5, "keep": 6, "certify_after": 5},
        "checkpoint": {"every": 0},
        "detection": {"min_history": 6, "settle_steps": 2, "exchange_error": 0.04},
        "recovery": {"calm_steps": 20, "horizon": 50},
    }
    for name, section in sections.items():
        known = values.get(name)
        values[name] = known | section if isinstance(known, dict) else section
    return JobSpec.model_validate(values)


class ScriptedController:
    """In-memory store with fencing; ``down`` makes it unreachable, ``fenced`` refuse all."""

    def __init__(self, job_spec: JobSpec, job_dir: Path) -> None:
        self.spec = job_spec
        self.job_dir = job_dir
        self.attempt = 1
        self.down = 0
        """Calls that will fail before it is back."""
        self.on_down: Callable[[], None] = lambda: None
        """What happens with each."""
        self.fenced = False
        self.order: list[str] = []
        """What was stored, in order: kinds of actions and events, states."""
        self.steps: list[dict[str, Any]] = []
        self.actions: list[Action] = []
        self.answers: list[ControlAnswer] = []
        self.events: list[Any] = []
        self.states: list[tuple[str, str]] = []
        self.detector_state: Any = None
        self._sequences: set[tuple[int, int]] = set()

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        if self.down > 0:
            self.down -= 1
            self.on_down()
            raise ControllerUnreachableError("restarting")
        if self.fenced or attempt != self.attempt:
            return Acknowledgement(False, f"attempt {attempt} is not the current one")
        if (attempt, batch.sequence) in self._sequences:
            return Acknowledgement(True)
        self._sequences.add((attempt, batch.sequence))
        self.steps.extend(dict(step) for step in batch.steps)
        self.events.extend(batch.events)
        self.actions.extend(batch.actions)
        self.answers.extend(batch.answers)
        self.order += [f"action {a.kind}" for a in batch.actions]
        if batch.transition is not None:
            state, cause = batch.transition
            self.states.append((state.word, cause.name))
            self.order.append(f"state {state.word}")
        self.detector_state = batch.detector_state or self.detector_state
        return Acknowledgement(True)

    def next_attempt(self, job: str, attempt: int, reason: str) -> ResumeState:
        if attempt != self.attempt:
            raise FencedError(f"attempt {attempt} is over")
        self.attempt += 1
        return self.resume()

    def resume(self) -> ResumeState:
        stand = standing(self.spec, self.actions)
        return ResumeState(
            job="scripted-000001",
            spec=self.spec,
            job_dir=str(self.job_dir),
            attempt=self.attempt,
            timeline=stand.timeline,
            step=max((s["step"] for s in self.steps[-1:]), default=-1),
            actions=tuple(self.actions),
            precision=stand.precision,
            ledger=stand.ledger,
            lr_scale=stand.lr_scale,
            exchange=stand.exchange,
            fired_drills=(),
            detector_state=self.detector_state,
            nodes=tuple(
                NodeSlot(f"{n:02x}" * 28, "127.0.0.1", n, self.spec.slots_per_node or WORLD)
                for n in range(self.spec.num_nodes)
            ),
            placement_group="",
            batches=batches_of((s["step"], s["batch"]) for s in self.steps),
            written=tuple(asdict(e) for e in self.events if e.kind in WRITTEN_OR_BACK),
        )

    def history(self, job: str, after: PastMark | None = None) -> JobHistory:
        return JobHistory(tuple(self.steps), (), tuple(asdict(event) for event in self.events))

    def kinds(self) -> list[str]:
        return [action.kind for action in self.actions]

    def event(self, kind: str) -> Any:
        return next(e for e in reversed(self.events) if e.kind == kind)


@dataclass
class Script:
    """What happens at which step, to whom."""

    loss: Callable[[int], float] = lambda step: (
        5.0 * math.exp(-0.005 * step) * (1 + 0.002 * (step % 3))
    )
    """Loss of a healthy step."""
    spike: Callable[[int, int], bool] = lambda step, batch: False
    """(step, batch) whose loss is ten times too high."""
    nonfinite: frozenset[int] = frozenset()
    saturated: Callable[[int, str], bool] = lambda step, layer: False
    """(step, layer) that saturates while it computes in FP8."""
    flushed: Callable[[int, str], bool] = lambda step, layer: False
    """(step, layer) whose values are flushed to zero while it computes in FP8."""
    differs: Callable[[int], bool] = lambda step: False
    """Step before which rank 1 holds other parameters than rank 0; they are compared at all."""
    compute: Callable[[int, int], float] = lambda rank, step: 0.04
    """Seconds that a rank spends outside of communication, by (rank, step)."""
    nbytes: int = 10
    """Of each rank's state."""
    disk_full: bool = False
    """No checkpoint can be written."""
    coarse: Callable[[int], bool] = lambda step: False
    """Step whose gradients the exchange rounds coarsely while they go in FP8."""


@dataclass
class ScriptedRanks:
    """All ranks as one: they run in lockstep."""

    script: Script = field(default_factory=Script)
    deliver: Callable[[Sequence[Report]], None] = lambda reports: None
    clock: Callable[[], float] = lambda: 0.0
    """When a step ends, for its reports."""
    assignments: Sequence[Assignment] = ()
    attempts: list[Sequence[Assignment]] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    held: list[SnapshotKey] = field(default_factory=list)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    importing: bool = False
    running: bool = False
    kills: int = 0
    standby: int = 0
    closed: bool = False
    unheard: tuple[str, ...] = ()
    """Keepers that don't answer; what they hold is not in ``held``."""
    settled: list[int] = field(default_factory=list)
    seen: dict[int, Stack] = field(default_factory=dict)
    """What their processes are doing."""
    on_post: Callable[[Command], None] = lambda command: None

    # What the supervisor calls.

    def start(self, seats: Sequence[Seat]) -> None:
        assert sum(seat.slots for seat in seats) == WORLD
        self.ends = {}
        self.running = False
        self.standby = 0

    def ready(self) -> bool:
        return not self.importing

    def master(self) -> tuple[str, int]:
        return ("127.0.0.1", 29500 + len(self.attempts))

    def run(self, assignments: Sequence[Assignment]) -> None:
        first = assignments[0]
        self.assignments = assignments
        self.attempts.append(assignments)
        self.running = True
        self.waiting: list[Command] = []
        self.applied = 0
        self.step = first.restore.step if first.restore else 0
        self.timeline = first.timeline
        self.ledger = set(first.ledger)
        self.precision = dict(first.precision)
        self.exchange = first.exchange
        self.attempt = first.attempt

    def ended(self) -> tuple[RankEnd, ...]:
        return tuple(self.ends[rank] for rank in sorted(self.ends))

    def post(self, command: Command) -> None:
        self.on_post(command)
        self.commands.append(command)
        self.waiting.append(command)

    def kill(self) -> None:
        self.kills += 1
        self.running = False

    def fill_standby(self, spares: Sequence[Seat] = ()) -> None:
        self.standby = WORLD + sum(seat.slots for seat in spares)

    def copies(self) -> list[SnapshotKey]:
        return list(self.held)

    def silent(self) -> Sequence[str]:
        return self.unheard

    def stacks(self) -> dict[int, Stack]:
        return dict(self.seen)

    def settle(self, replicas: int) -> None:
        self.settled.append(replicas)

    def memory(self) -> dict[str, int]:
        return {"keeper": 10 * len(self.held)}

    def close(self) -> None:
        self.kill()
        self.closed = True

    # What a test calls.

    def lose(self, rank: int) -> None:
        """SIGKILL: nothing is reported any more."""
        self.running = False
        self.ends[rank] = RankEnd(rank, "lost", error="the process was killed")

    def fail(self, rank: int, error: BaseException) -> None:
        self.running = False
        self.ends[rank] = RankEnd(rank, "raised", error=repr(error), cause=error)

    def train(self, steps: int = 1) -> None:
        """Run steps, each after the commands that have come."""
        for _ in range(steps):
            self._apply()
            if self.running:
                self._step()

    def copied(self, *tiers: Tier) -> None:
        """All report a copy of the present step."""
        for rank in range(WORLD):
            for tier in tiers:
                place = (self.attempt, self.timeline, rank, self.step)
                self.deliver([SnapshotReport(*place, tier, self.script.nbytes, "d")])

    def finish(self, detail: str = "") -> None:
        """All steps are done, and their checkpoint written; ``detail``: why it was not."""
        if not detail and not self.script.disk_full:
            self._write_checkpoint()
        for rank in range(WORLD):
            result = RankResult(rank, self.step, "finished", detail, self.applied)
            self.ends[rank] = RankEnd(rank, "done", result)
        self.running = False

    def batch_of(self, step: int) -> int:
        return [b for b in range(step + len(self.ledger) + 1) if b not in self.ledger][step]

    def _apply(self) -> None:
        for command in self.waiting:
            assert command.attempt == self.attempt
            self.applied = command.number
            order = command.order
            if isinstance(order, Rollback):
                self.step, self.timeline = order.to_step, order.timeline
                self.ledger |= set(order.skip_batches)
                self.precision |= dict(order.precision or {})
                self.deliver(
                    [
                        RollbackReport(self.attempt, self.timeline, r, self.step, 0.0, 0.01)
                        for r in range(WORLD)
                    ]
                )
            elif isinstance(order, SetPrecision):
                self.precision |= dict(order.precision)
            elif isinstance(order, SetExchange):
                if order.dtype == "auto":
                    self.exchange = "fp8"
                    place = (self.attempt, self.timeline, 0, self.step, 0.0)
                    self.deliver([ExchangeReport(*place, "fp8", "it took 1 ms, BF16 2 ms")])
                else:
                    self.exchange = order.dtype
            elif isinstance(order, Stop):
                if order.checkpoint and not self.script.disk_full:
                    self._write_checkpoint()
                for rank in range(WORLD):
                    result = RankResult(rank, self.step, "stopped", order.reason, self.applied)
                    self.ends[rank] = RankEnd(rank, "done", result)
                self.running = False
        self.waiting = []

    def _write_checkpoint(self) -> None:
        folder = Path(self.assignments[0].job_dir)
        for rank in range(WORLD):
            key = SnapshotKey("scripted-000001", self.attempt, self.timeline, rank, self.step)
            path = write_rank_file(folder, key, b"state", digest_of(b"state"))
            place = (self.attempt, self.timeline, rank, self.step)
            self.deliver([SnapshotReport(*place, "disk", 5, "d", str(path))])

    def _step(self) -> None:
        if self.step % 5 == 0:
            self.copied("ring", "memory")
            for rank in range(WORLD):
                key = SnapshotKey("scripted-000001", self.attempt, self.timeline, rank, self.step)
                self.held.append(key)
        for rank in range(WORLD):
            self.deliver([self._report(rank)])
        self.step += 1

    def _report(self, rank: int) -> RankReport:
        batch = self.batch_of(self.step)
        skipped = self.step in self.script.nonfinite
        loss = self.script.loss(self.step)
        if self.script.spike(self.step, batch):
            loss *= 10
        fp8 = self.exchange == "fp8"
        names = tuple(f"{layer}/{role}" for layer in LAYERS for role in ("input", "weight"))
        in_bf16 = tuple(name for name in LAYERS if self.precision.get(name) == "bf16")
        stats = np.zeros((len(names), len(COLUMNS)), np.float32)
        stats[:, :6] = [4.0, 100.0, 0.0, 0.0, 0.0, 1000.0]
        for i, name in enumerate(names):
            layer = name.split("/")[0]
            if self.script.saturated(self.step, layer) and layer not in in_bf16:
                stats[i, :6] = [400.0, 100.0, 300.0, 0.0, 0.0, 1000.0]
            if self.script.flushed(self.step, layer) and layer not in in_bf16:
                stats[i, :6] = [4.0, 100.0, 0.0, 600.0, 0.0, 1000.0]
        return RankReport(
            attempt=self.attempt,
            timeline=self.timeline,
            rank=rank,
            step=self.step,
            time=self.clock(),
            batch=batch,
            loss=math.nan if skipped else loss,
            grad_norm=math.nan if skipped else 1.0,
            lr=1e-3,
            tokens=4096,
            step_time_s=0.1,
            compute_s=self.script.compute(rank, self.step),
            skipped=skipped,
            nonfinite_parameters=(),
            nonfinite_loss=skipped and rank == 0,
            comm={
                "bytes": 10.0 * (rank + 1),
                "wire_bits": 8.0 if fp8 else 16.0,
                "relative_error": (0.055 if self.script.coarse(self.step) else 0.026) * fp8,
            },
            stats=encode(stats),
            stats_names=names,
            high_precision_layers=in_bf16,
            drills=(),
            command=self.applied,
            checksums=np.array([7, rank * self.script.differs(self.step)], "<i8").tobytes(),
            checksum_names=(f"{LAYERS[0]}.weight",),
            replicas=tuple(range(WORLD)),
        )


class Bench:
    """A supervisor between scripted ranks and a scripted controller, with a clock by hand."""

    gate: PreflightGate | None = None
    """Of supervisors from here on."""
    set_by = 0.0
    """Seconds that the wall clock was set forward by."""

    def __init__(self, job_dir: Path, script: Script | None = None, **sections: Any) -> None:
        self.controller = ScriptedController(spec(**sections), job_dir)
        self.ranks = ScriptedRanks(script or Script())
        self.now = 1000.0
        self.ranks.clock = lambda: self.now
        self.pauses: list[float] = []
        self.take_over(self.controller.resume())

    def take_over(self, resume: ResumeState) -> None:
        """A supervisor that starts from ``resume``."""
        self.supervision = Supervision(
            resume,
            self.controller,
            self.ranks,
            clock=self.clock,
            sleep=self.pauses.append,
            gate=self.gate,
        )
        self.ranks.deliver = self.supervision.deliver

    def clock(self) -> Instant:
        return Instant(self.now + self.set_by, self.now)

    def step(self, seconds: float = 0.1) -> None:
        """One pass of the supervisor."""
        self.now += seconds
        self.supervision.step()

    def store_away(self, seconds: float) -> None:
        """From now on nothing can be stored, until whoever waits for it has waited ``seconds``."""
        self.settled()

        def passes() -> None:
            self.now += seconds / 2

        self.controller.down, self.controller.on_down = 2, passes

    def train(self, steps: int) -> None:
        """Steps of the ranks, a pass of the supervisor after each."""
        for _ in range(steps):
            if not self.ranks.running:
                self.step()
            self.ranks.train()
            self.step()

    def settled(self) -> ScriptedController:
        """The controller, once all that was told has arrived."""
        if self.supervision.phase is not Phase.OVER:
            assert self.supervision._journal.flush(10.0)
        return self.controller

    def close(self) -> None:
        self.supervision.close()


Make = Callable[..., Bench]
"""The fixture ``bench``: makes a job, and ends it after the test."""
