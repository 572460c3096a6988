"""Stand-ins for nodes and supervisors, so that controller and API run in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.controller import Controller
from orchestrator.controls import Control
from orchestrator.node_groups import Group, Need, NodeCapacity
from orchestrator.protocol import NodeSlot, ResumeState
from orchestrator.store import Store
from orchestrator.supervisors import LastWords, Presence


class FakeGroups:
    """Nodes with CPU slots; a group takes its slots from the first nodes that have them."""

    def __init__(self, *slots: int) -> None:
        self.total = {f"node{i}": n for i, n in enumerate(slots)}
        self.held: dict[str, list[tuple[str, int]]] = {}
        self.made = 0
        self.broken: set[str] = set()

    def free(self) -> dict[str, int]:
        left = dict(self.total)
        for bundles in self.held.values():
            for node, slots in bundles:
                left[node] -= slots
        return left

    def capacities(self) -> list[NodeCapacity]:
        left = self.free()
        return [
            NodeCapacity(node, {"CPU": float(n)}, {"CPU": float(left[node])})
            for node, n in self.total.items()
        ]

    def acquire(self, job: str, need: Need, keep: int) -> Group | None:
        if job in self.broken:
            raise RuntimeError("the node is on fire")
        nodes = [n for n, left in self.free().items() if left >= need.slots][: need.nodes]
        if len(nodes) < need.nodes:
            return None
        self.made += 1
        group = f"group{self.made}"
        self.held[group] = [(n, need.slots) for n in nodes]
        slots = tuple(NodeSlot(n, "10.0.0.1", i, need.slots) for i, n in enumerate(nodes))
        return Group(group, slots)

    def repair(self, job: str, need: Need, keep: int, group: str) -> Group | None:
        if group not in self.held:
            return self.acquire(job, need, keep)
        nodes = [n for n, _ in self.held[group]]
        slots = tuple(NodeSlot(n, "10.0.0.1", i, need.slots) for i, n in enumerate(nodes))
        return Group(group, slots)

    def release(self, job: str, group: str) -> None:
        self.held.pop(group, None)


class FakeSupervisors:
    """Supervisors that do nothing by themselves; a test says what became of them."""

    def __init__(self) -> None:
        self.alive: dict[str, ResumeState] = {}
        self.done: set[str] = set()
        self.stopped: list[tuple[str, str]] = []
        self.asked: list[tuple[str, list[Control]]] = []
        self.started: list[ResumeState] = []
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

    def kill(self, job: str) -> None:
        self.alive.pop(job, None)
        self.done.discard(job)


TOKEN = "correct-horse"
"""Of the fixture ``api``."""


class ControlPlane:
    """A controller with stand-ins and a clock that a test moves."""

    def __init__(self, folder: Path, *slots: int, fixed: bool = True) -> None:
        self.now = 1000.0
        self.groups = FakeGroups(*slots)
        self.supervisors = FakeSupervisors()
        self.store = Store(f"sqlite:///{folder}/store.db")
        self.jobs_dir = folder / "jobs"
        self.fixed = fixed
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        """As after a restart: nothing but the store and the world outside is left."""
        return Controller(
            self.store,
            self.groups,
            self.supervisors,
            self.jobs_dir,
            fixed_cluster=self.fixed,
            clock=lambda: self.now,
        )

    def submit(self, name: str = "toy", **changes: Any) -> str:
        self.now += 1
        text = self.jobs_dir.parent / "text.txt"
        text.write_text("x" * 4096)
        data = {"name": name, "slots_per_node": 4, "parallelism": {"pipeline": 2}}
        data |= {"data": {"source": str(text)}, **changes}
        return self.controller.submit(data, f"{name}.yaml").id

    def steps(self, count: int = 1, seconds: float = 0.5) -> None:
        for _ in range(count):
            self.now += seconds
            self.controller.step(self.now)

    def state(self, job: str) -> str:
        return self.store.job(job).state.word

    def told(self, job: str, kind: str) -> list[str]:
        return [e["message"] for e in self.store.events(job) if e["kind"] == kind]
