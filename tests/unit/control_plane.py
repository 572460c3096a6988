"""Stand-ins for nodes and supervisors, so that controller and API run in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.keeper import Inventory, Keeper
from orchestrator.controller.controller import Controller
from orchestrator.controller.supervisors import LastWords, Presence
from orchestrator.instant import Instant
from orchestrator.lifecycle import Cause, JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.nodes.groups import DiskOrder
from orchestrator.placement.placement import NodeCapacity, Resource
from orchestrator.protocol import ResumeState, SupervisorBatch
from orchestrator.recovery.controls import Control
from orchestrator.store.database import Store


class FakeGroups:
    """Nodes with CPU slots, each at an address of its own."""

    def __init__(self, *slots: int) -> None:
        self.total = {f"node{i}": n for i, n in enumerate(slots)}
        self.held: dict[str, dict[int, NodeSlot]] = {}
        """Seats by job and number."""
        self.broken: set[str] = set()
        """Jobs whose nodes are on fire."""
        self.dead: set[str] = set()
        """Nodes that are gone."""
        self.unwilling: set[str] = set()
        """Nodes that grant nothing."""
        self.renamed: dict[str, str] = {}
        """Nodes whose Ray was started again, under another id."""
        self.wishes: list[list[dict[str, float]]] = []
        self.takes = 0
        self.without_keeper: set[tuple[str, int]] = set()
        """Seats (job, number) whose keeper died."""
        self.keepers: dict[str, dict[int, Keeper]] = {}
        """Keepers that hold something, by job and seat."""
        self.mute = 0
        """Times that keepers don't say what they hold before they do."""
        self.unheard: set[int] = set()

    def free(self) -> dict[str, int]:
        left = dict(self.total)
        for seats in self.held.values():
            for seat in seats.values():
                left[seat.node_id] -= seat.slots
        return left

    def capacities(self) -> list[NodeCapacity]:
        left = self.free()
        return [
            NodeCapacity(
                self.renamed.get(node, node),
                {"CPU": float(n)},
                {"CPU": float(left[node])},
                f"10.0.0.{int(node.removeprefix('node')) + 1}",
            )
            for node, n in self.total.items()
            if node not in self.dead
        ]

    def take(
        self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int
    ) -> list[NodeSlot]:
        if job in self.broken:
            raise RuntimeError("the node is on fire")
        # Granted or not: Ray's groups begin by ending what has these numbers.
        held = self.held.get(job, {}).keys()
        assert not held & {s.bundle for s in seats}, "a number is used twice"
        free = self.free()
        refused = [
            s for s in seats if s.node_id in self.unwilling | self.dead or free[s.node_id] < s.slots
        ]
        if refused:
            return refused
        mine = self.held.setdefault(job, {})
        mine |= {seat.bundle: seat for seat in seats}
        self.takes += 1
        nodes = [seat.node_id for seat in mine.values()]
        assert len(set(nodes)) == len(nodes), "two seats of a job on one node"
        return []

    def lost(self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int) -> set[int]:
        mine = self.held.get(job, {})
        gone = [s for s in seats if s.bundle not in mine]
        return {
            s.bundle
            for s in seats
            if s.node_id in self.dead or (s in gone and self.take(job, [s], resource, keep))
        }

    def revive(
        self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int
    ) -> list[NodeSlot]:
        revived = [seat for seat in seats if seat.node_id not in self.dead]
        self.without_keeper -= {(job, seat.bundle) for seat in revived}
        return revived

    def keepers_ended(self, job: str, seats: Sequence[NodeSlot]) -> list[NodeSlot]:
        return [seat for seat in seats if (job, seat.bundle) in self.without_keeper]

    def give_back(self, job: str, seats: Sequence[NodeSlot]) -> None:
        for seat in seats:
            self.held.get(job, {}).pop(seat.bundle, None)

    def release(self, job: str) -> None:
        self.held.pop(job, None)
        self.keepers.pop(job, None)

    def seats_held(self) -> dict[str, set[int]]:
        return {job: set(seats) for job, seats in self.held.items() if seats}

    def copies(self, job: str) -> dict[int, Inventory]:
        keepers = self.keepers.get(job, {})
        if self.mute > 0:
            self.mute -= 1
            self.unheard = set(keepers)
            return {}
        self.unheard = set()
        return {seat: keeper.inventory(job) for seat, keeper in keepers.items()}

    def silent(self, job: str) -> set[int]:
        return self.unheard

    def write_copies(self, order: DiskOrder) -> dict[int, str]:
        failed = {}
        for seat, keys in order.keys.items():
            for key in keys:
                keeper = self.keepers[key.job][seat]
                made = (order.job_dir, order.attempt, order.timeline, order.world_size)
                try:
                    keeper.write(key, *made)
                except Exception as error:
                    failed[key.rank] = f"{type(error).__name__}: {error}"
        return failed

    def wish(self, shapes: Sequence[dict[str, float]]) -> None:
        self.wishes.append(list(shapes))


class FakeSupervisors:
    """Supervisors that do nothing by themselves; a test says what became of them."""

    def __init__(self) -> None:
        self.alive: dict[str, ResumeState] = {}
        self.done: set[str] = set()
        self.stopped: list[tuple[str, str]] = []
        self.asked: list[tuple[str, list[Control]]] = []
        self.started: list[ResumeState] = []
        self.spares_told: list[tuple[str, list[NodeSlot]]] = []
        self.words = LastWords()

    def start(self, resume: ResumeState) -> None:
        assert resume.job not in self.alive, "two supervisors of one job"
        self.alive[resume.job] = resume
        self.started.append(resume)

    def look(self, job: str, now: float) -> Presence:
        if job in self.done:
            return Presence.DONE
        return Presence.WORKING if job in self.alive else Presence.ABSENT

    def last_words(self, job: str) -> LastWords:
        return self.words

    def stop(self, job: str, reason: str) -> None:
        self.stopped.append((job, reason))

    def control(self, job: str, controls: Sequence[Control]) -> None:
        self.asked.append((job, list(controls)))

    def spares(self, job: str, spares: Sequence[NodeSlot]) -> None:
        self.spares_told.append((job, list(spares)))

    def kill(self, job: str) -> None:
        self.alive.pop(job, None)
        self.done.discard(job)


TOKEN = "correct-horse"
"""Of the fixture ``api``."""


class ControlPlane:
    """A controller with stand-ins and a clock that a test moves."""

    def __init__(self, folder: Path, *slots: int, fixed: bool = True) -> None:
        self.now = 1000.0
        self.set_by = 0.0
        """Seconds that the wall clock was set forward by since then."""
        self.groups = FakeGroups(*slots)
        self.supervisors = FakeSupervisors()
        self.store = Store(f"sqlite:///{folder}/store.db")
        self.jobs_dir = folder / "jobs"
        self.fixed = fixed
        self.sequences: dict[tuple[str, int], int] = {}
        """Newest batch of each attempt that a test told."""
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        """As after a restart: nothing but the store and the world outside is left."""
        return Controller(
            self.store,
            self.groups,
            self.supervisors,
            self.jobs_dir,
            fixed_cluster=self.fixed,
            clock=self.clock,
        )

    def clock(self) -> Instant:
        return Instant(self.now + self.set_by, self.now)

    def submit(
        self, name: str = "toy", *, by: str = "", key: str | None = None, **changes: Any
    ) -> str:
        self.now += 1
        text = self.jobs_dir.parent / "text.txt"
        text.write_text("x" * 4096)
        data = {"name": name, "slots_per_node": 4, "parallelism": {"pipeline": 2}}
        data |= {"data": {"source": str(text)}, **changes}
        return self.controller.intake.submit(data, f"{name}.yaml", by=by, key=key).id

    def steps(self, count: int = 1, seconds: float = 0.5) -> None:
        for _ in range(count):
            self.now += seconds
            self.controller.step(self.clock())

    def state(self, job: str) -> str:
        return self.store.job(job).state.word

    def told(self, job: str, kind: str) -> list[str]:
        return [e["message"] for e in self.store.past.events(job) if e["kind"] == kind]


def running(plane: ControlPlane, name: str = "toy", **changes: Any) -> str:
    """A job that trains, on the nodes that were free."""
    job = plane.submit(name, **changes)
    plane.steps(2)
    tell(plane, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))
    return job


def tell(plane: ControlPlane, job: str, **told: Any) -> None:
    """A batch of the job's supervisor."""
    attempt = plane.store.job(job).attempt
    done = plane.sequences.get((job, attempt), 0) + 1
    plane.sequences[job, attempt] = done
    answer = plane.controller.report(job, attempt, SupervisorBatch(done, **told))
    assert answer.accepted, answer.reason


def where(plane: ControlPlane, job: str) -> list[str]:
    """Nodes that have ranks, in order."""
    return [seat.node_id for seat in plane.store.job(job).nodes if not seat.spare]


def spares(plane: ControlPlane, job: str) -> list[str]:
    """Nodes that are kept ready for it, in order."""
    return [seat.node_id for seat in plane.store.job(job).nodes if seat.spare]
