"""Keepers that end while their job trains: who finds it, when, and what becomes of it."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from orchestrator.node_slot import NodeSlot
from orchestrator.nodes import groups as on_ray
from orchestrator.nodes.desk import KEEPERS_EVERY_S
from orchestrator.nodes.groups import RayNodeGroups
from orchestrator.protocol import keeper_actor
from tests.unit.control_plane import ControlPlane, running

JOB = "job-1"
SEATS = [NodeSlot(f"node{n}", f"10.0.0.{n}", n, 1) for n in range(3)]


class Actors:
    """Keepers by name, as Ray finds them; how each ends, a test says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """Whom Ray was asked for."""
        self.stays: dict[str, Future[None]] = {}
        self.keepers = {keeper_actor(JOB, seat.bundle): self._keeper(seat) for seat in SEATS}

    def _keeper(self, seat: NodeSlot) -> Any:
        def stay() -> Any:
            future = self.stays[keeper_actor(JOB, seat.bundle)] = Future[None]()
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(stay=SimpleNamespace(remote=stay))

    def find(self, name: str) -> Any:
        self.asked.append(name)
        return self.keepers.get(name)

    def end(self, seat: int, error: Exception) -> None:
        self.stays[keeper_actor(JOB, seat)].set_exception(error)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    found = Actors()
    monkeypatch.setattr(on_ray, "_actor", found.find)
    return found


def ended(groups: RayNodeGroups) -> list[int]:
    return [seat.bundle for seat in groups.keepers_ended(JOB, SEATS)]


def test_the_end_of_a_keeper_is_known_by_the_next_look_without_asking_any(actors: Actors) -> None:
    groups = RayNodeGroups()
    assert ended(groups) == []
    actors.end(1, ActorDiedError())
    assert ended(groups) == ended(groups) == [1]
    assert len(actors.asked) == len(SEATS), "each was asked for once"


def test_a_keeper_that_was_out_of_reach_is_watched_on(actors: Actors) -> None:
    groups = RayNodeGroups()
    assert ended(groups) == []
    actors.end(1, ActorUnavailableError("the connection broke", None))
    assert ended(groups) == []
    actors.end(1, ActorDiedError())
    assert ended(groups) == [1]


def test_one_that_was_gone_before_anybody_watched_it_has_ended(actors: Actors) -> None:
    del actors.keepers[keeper_actor(JOB, 2)]
    assert ended(RayNodeGroups()) == [2]


def test_one_that_an_older_octavo_started_is_let_be(actors: Actors) -> None:
    actors.keepers[keeper_actor(JOB, 0)] = SimpleNamespace()
    groups = RayNodeGroups()
    assert ended(groups) == ended(groups) == []


def test_one_that_does_not_stay_up_is_not_started_in_each_pass(plane: ControlPlane) -> None:
    job = running(plane)
    plane.steps(20)
    started = 0
    for _ in range(20):
        plane.groups.without_keeper.add((job, 0))
        plane.steps(1, KEEPERS_EVERY_S / 10)
        started += not plane.groups.without_keeper
    assert started == 2
    assert len(plane.told(job, "keeper_started")) == 2
