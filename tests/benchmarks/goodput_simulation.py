"""A job of weeks under a trace of faults, decided on by the recovery policy itself.

What a fault leads to comes from Octavo's own code: incidents as the supervisor words them
(``lost_ranks``), ``recovery.policy.decide`` on ``JobFacts``' history with its budgets, the action
applied to the facts. What a recovery costs, which copies are there and when spares come back are
named inputs. Between faults time is computed, not stepped through, so that 54 days take a second.
The restart from disk that Octavo is compared with has no policy: it starts again, always.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from launch.rank_group import RankEnd
from monitoring.records import Incident, StepRecord
from orchestrator.planning.intervals import Setting
from orchestrator.protocol import ResumeState
from orchestrator.recovery.job_facts import JobFacts
from orchestrator.recovery.policy import decide
from orchestrator.spec.job import JobSpec
from orchestrator.supervision.lost_ranks import died, hung
from tests.benchmarks.fault_trace import Fault


@dataclass(frozen=True, slots=True)
class World:
    """What the simulation is told beside ``Setting``. Seconds."""

    seconds: float
    """That the job runs, in all."""
    spares: int = 16
    """Nodes that stand ready."""
    repair_s: float = 4 * 3600.0
    """Until a node that failed is a spare again. An assumption."""
    person_s: float = 1800.0
    """Until somebody resumes a job that was paused. An assumption."""
    replica_check_every: int = 10
    """Steps between comparisons of replicas."""
    collective_timeout_s: float = 600.0
    """Until a hang is noticed where only the collective's timeout looks: PyTorch's, for NCCL."""


@dataclass
class Outcome:
    """What became of the time."""

    wall_s: float
    step_s: float
    """Of one step, without copies."""
    steps: int = 0
    """Kept."""
    redone_s: float = 0.0
    waiting_s: float = 0.0
    """For a spare, or for a person."""
    answers: Counter[str] = field(default_factory=Counter)
    """Kinds of actions, and from which tier training went on."""

    @property
    def ettr(self) -> float:
        return self.steps * self.step_s / self.wall_s

    def told(self) -> str:
        """``restart from memory 401, pause from disk 2``."""
        return ", ".join(f"{kind} {count}" for kind, count in self.answers.most_common())


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds that steps take, with their copies."""

    setting: Setting
    snapshots: int
    """Steps between them; 0: none."""
    checkpoints: int

    def seconds(self, first: int, last: int) -> float:
        """From the beginning of step ``first`` to that of step ``last``."""
        return (
            (last - first) * self.setting.step_s
            + _multiples(first, last, self.snapshots) * self.setting.snapshot_s
            + _multiples(first, last, self.checkpoints) * self.setting.checkpoint_s
        )

    def reached(self, first: int, seconds: float) -> int:
        """The step that has begun ``seconds`` after ``first`` did."""
        low, high = first, first + math.ceil(seconds / self.setting.step_s) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.seconds(first, middle) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def newest(self, first: int, every: int, arrives_s: float, seconds: float) -> int | None:
        """The newest step after ``first`` whose copy, one each ``every`` steps, had arrived
        ``seconds`` after ``first`` began; None where none had."""
        if not every or seconds < arrives_s:
            return None
        step = self.reached(first, seconds - arrives_s) // every * every
        return step if step > first else None


def _multiples(first: int, last: int, every: int) -> int:
    return last // every - first // every if every else 0


@dataclass(frozen=True, slots=True)
class Struck:
    """Where a fault found the job."""

    fault: Fault
    first: int
    """Step that training went on at last."""
    trained_s: float
    """Since then; 0 where it had not gone on yet."""
    step: int
    """That was under way."""


class Side(Protocol):
    """What answers faults."""

    clock: Clock

    def answer(self, struck: Struck, out: Outcome) -> tuple[float, int]:
        """Seconds until training goes on, and the step that it goes on at."""


def simulate(side: Side, world: World, faults: Sequence[Fault]) -> Outcome:
    """A job from its start, over all faults, to the end of ``world.seconds``."""
    setting = side.clock.setting
    out = Outcome(world.seconds, setting.step_s)
    goes_on, first = setting.times.start_s, 0
    for fault in faults:
        if fault.time >= world.seconds:
            break
        trained = max(0.0, fault.time - goes_on)
        step = side.clock.reached(first, trained)
        after, back = side.answer(Struck(fault, first, trained, step), out)
        out.redone_s += side.clock.seconds(back, step) if step > back else 0.0
        # What it waits for already, it goes on waiting for.
        goes_on, first = max(goes_on, fault.time + after), back
    out.steps = side.clock.reached(first, max(0.0, world.seconds - goes_on))
    return out


class Spares:
    """Nodes that stand ready, and those under repair."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._back: list[float] = []
        """When each broken node is a spare again."""

    def taken(self, now: float, count: int) -> float:
        """Seconds until ``count`` nodes have others in their place."""
        self._back = sorted(t for t in self._back if t > now)
        self._back += [now + self._world.repair_s] * count
        short = len(self._back) - self._world.spares
        return max(0.0, sorted(self._back)[short - 1] - now) if short > 0 else 0.0


class Octavo:
    """Memory snapshots, partner copies, spares, checkpoints; the policy decides."""

    def __init__(self, setting: Setting, spec: JobSpec, world: World) -> None:
        self.clock = Clock(setting, spec.snapshots.every, spec.checkpoint.every)
        self._setting, self._world, self._policy = setting, world, spec.recovery
        self._facts = JobFacts(_beginning(spec))
        self._spares = Spares(world)
        self._on_disk = 0
        self._loads = True
        """From disk, the last time; until it goes on, no memory holds anything."""

    def answer(self, struck: Struck, out: Outcome) -> tuple[float, int]:
        """By the policy's action."""
        fault, facts, times = struck.fault, self._facts, self._setting.times
        self._written(struck)
        noticed, step = self._noticed(struck)
        if step > facts.step + 1:
            facts.record(_record(facts, step - 1, fault.time + noticed))
        now = fault.time + noticed
        incident = self._incident(fault, step, now)
        action = decide([incident], facts.history(now, ()), self._policy)
        facts.apply(action)
        facts.attempt += 1
        point = self._in_memory(struck, noticed, action.to_step)
        waited = 0.0
        if fault.takes == "node":
            waited = self._spares.taken(now, 1 + fault.partner_too)
        if action.kind != "restart":
            # It gave up: somebody looks, and resumes from disk.
            point, waited = None, waited + self._world.person_s
        if self._loads and not struck.trained_s:
            point = None
        self._loads = point is None
        out.waiting_s += waited
        out.answers[f"{action.kind} from {'disk' if point is None else 'memory'}"] += 1
        if point is None:
            return noticed + waited + self._setting.disk_s, self._on_disk
        restart_s = times.node_s if fault.takes == "node" else times.rank_s
        return noticed + waited + restart_s, point

    def _written(self, struck: Struck) -> None:
        found = self.clock.newest(
            struck.first, self.clock.checkpoints, self._setting.write_s, struck.trained_s
        )
        self._on_disk = self._on_disk if found is None else found

    def _noticed(self, struck: Struck) -> tuple[float, int]:
        """Seconds until the fault is seen, and the step that is under way then."""
        if struck.fault.takes == "hang":
            return self._setting.times.hang_s, struck.step
        if struck.fault.takes != "corruption":
            return 0.0, struck.step
        # It trains on until replicas are compared, before a step.
        every = self._world.replica_check_every
        seen = (struck.step // every + 1) * every
        return self.clock.seconds(struck.first, seen) - struck.trained_s, seen + 1

    def _incident(self, fault: Fault, step: int, now: float) -> Incident:
        if fault.takes == "hang":
            return hung((0,), self._setting.times.hang_s, self._facts, now, "new step")
        found = died([RankEnd(0, "lost", error=fault.cause)], self._facts, now)
        if fault.takes == "corruption":
            agreed = max(0, step - 1 - self._world.replica_check_every)
            found = replace(found, kind="replica_disagreement", onset_step=agreed)
        return found

    def _in_memory(self, struck: Struck, noticed: float, to_step: int | None) -> int | None:
        """The newest step that keepers hold of all ranks, ``to_step`` at most."""
        fault, setting = struck.fault, self._setting
        lost = fault.takes == "node"
        if fault.partner_too or (lost and not setting.partners):
            return None
        arrives = setting.ship_s if lost else setting.snapshot_s
        every = self.clock.snapshots
        # While it hangs, nothing trains; while replicas differ unseen, it does.
        unseen = noticed if fault.takes == "corruption" else 0.0
        found = self.clock.newest(struck.first, every, arrives, struck.trained_s + unseen)
        point = struck.first if found is None else found
        if to_step is not None and point > to_step:
            # From before the replicas differed.
            point = max(struck.first, to_step // every * every)
        return point


class FromDisk:
    """Every fault is a start from nothing and from the newest checkpoint: torchrun's restarts, a
    scheduler that requeues. Replicas that differ go unnoticed, which costs it nothing."""

    def __init__(self, setting: Setting, checkpoints: int, world: World) -> None:
        # What is written beside training is copied first.
        copied = replace(setting, checkpoint_s=setting.checkpoint_s + setting.snapshot_s)
        self.clock = Clock(copied, 0, checkpoints)
        self._setting, self._world = setting, world
        self._spares = Spares(world)
        self._on_disk = 0

    def answer(self, struck: Struck, out: Outcome) -> tuple[float, int]:
        """Always the same."""
        fault = struck.fault
        found = self.clock.newest(
            struck.first, self.clock.checkpoints, self._setting.write_s, struck.trained_s
        )
        self._on_disk = self._on_disk if found is None else found
        noticed = self._world.collective_timeout_s if fault.takes == "hang" else 0.0
        waited = 0.0
        if fault.takes == "node":
            waited = self._spares.taken(fault.time + noticed, 1 + fault.partner_too)
        out.waiting_s += waited
        out.answers["restart from disk"] += 1
        return noticed + waited + self._setting.disk_s, self._on_disk


def _beginning(spec: JobSpec) -> ResumeState:
    return ResumeState(
        job="simulated",
        spec=spec,
        job_dir="",
        attempt=1,
        timeline=0,
        step=-1,
        actions=(),
        precision={},
        ledger=(),
        lr_scale=1.0,
        fired_drills=(),
        detector_state=None,
        nodes=(),
        placement_group="",
    )


def _record(facts: JobFacts, step: int, now: float) -> StepRecord:
    return StepRecord(
        attempt=facts.attempt,
        timeline=facts.timeline,
        step=step,
        time=now,
        batch=step,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens=1,
        step_time_s=1.0,
    )
