"""Whose copies a rank makes, and whose it may start from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from launch.commands import RestorePoint
from launch.held_copies import HeldCopies
from launch.keeper import Inventory, Keeper, keeper_class
from launch.rank_group import Seat
from launch.snapshots import SnapshotKey

JOB = "job-1"
NODES = 4


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Actors by name, each of which is its name; one that isn't here is gone."""
    living: dict[str, Any] = {f"k{node}": f"k{node}" for node in range(NODES)}
    monkeypatch.setattr("launch.held_copies.named_actor", living.get)
    return living


def seats() -> list[Seat]:
    """A rank a node."""
    return [Seat(f"n{node}", f"10.0.0.{node}", 1, f"k{node}") for node in range(NODES)]


def assigned(rank: int, *points: RestorePoint, replicas: int = 1) -> Any:
    run = SimpleNamespace(snapshots=SimpleNamespace(replicas=replicas))
    first, rest = (points[0], points[1:]) if points else (None, ())
    return SimpleNamespace(rank=rank, run=run, restore=first, fallbacks=rest)


def held(copies: HeldCopies, **by: list[tuple[int, int]]) -> None:
    """Keepers hold (rank, step), of 100 bytes and the step."""
    copies._held = {
        name: Inventory({SnapshotKey(JOB, 1, 0, r, s): 100 + s for r, s in mine}, 1000)
        for name, mine in by.items()
    }


def test_a_rank_gets_whoever_holds_what_it_may_start_from_partners_first(
    keepers: dict[str, Any],
) -> None:
    copies = HeldCopies(JOB)
    held(copies, k0=[(0, 20)], k1=[(0, 20), (1, 20)], k2=[(2, 20)], k3=[(0, 10), (3, 20)])
    points = [RestorePoint(20, "memory", 1, 0), RestorePoint(10, "memory", 1, 0)]
    told = copies.handles(seats(), [assigned(rank, *points) for rank in range(NODES)])
    assert [h.own for h in told] == ["k0", "k1", "k2", "k3"]
    assert [h.partners for h in told] == [("k1",), ("k2",), ("k3",), ("k0",)]
    assert [h.sources for h in told] == [("k1", "k3"), (), (), ()]
    assert [h.own_is_source for h in told] == [True] * 4
    assert [h.nbytes for h in told] == [120] * 4 and told[0].held_nbytes == 1000


def test_what_no_restore_point_names_is_no_source(keepers: dict[str, Any]) -> None:
    copies = HeldCopies(JOB)
    held(copies, k0=[(0, 20)], k1=[(0, 20)])
    on_disk = RestorePoint(20, "disk", 1, 0, "somewhere")
    (told,) = copies.handles(seats()[:1], [assigned(0, on_disk, replicas=0)])
    assert (told.sources, told.own_is_source, told.nbytes) == ((), False, 0)
    (told,) = copies.handles(seats()[:1], [assigned(0, replicas=0)])
    assert (told.sources, told.partners, told.own_is_source) == ((), (), False)


def test_a_keeper_that_is_gone_is_neither_partner_nor_source(keepers: dict[str, Any]) -> None:
    copies = HeldCopies(JOB)
    held(copies, k1=[(0, 20), (1, 20)])
    del keepers["k1"]
    point = RestorePoint(20, "memory", 1, 0)
    told = copies.handles(seats(), [assigned(rank, point) for rank in range(NODES)])
    assert (told[0].partners, told[0].sources, told[1].own) == ((), (), None)


def test_a_keeper_that_is_silent_is_told_apart_from_one_that_has_died(
    keepers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, Any] = {
        "k0": Inventory({SnapshotKey(JOB, 1, 0, 0, 20): 100}, 1000),
        "k1": GetTimeoutError("nothing is ready"),
        "k2": ActorDiedError(),
    }
    del keepers["k3"]

    def get(name: str, timeout: float) -> Inventory:
        if isinstance(said[name], RayError):
            raise said[name]
        return said[name]  # type: ignore[no-any-return]

    for name in keepers:
        inventory = SimpleNamespace(remote=lambda _, name=name: name)
        keepers[name] = SimpleNamespace(inventory=inventory)
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (asked, []))
    monkeypatch.setattr(ray, "get", get)
    copies = HeldCopies(JOB)
    assert [key.step for key in copies.ask(["k0", "k1", "k2", "k3"])] == [20]
    assert copies.silent == ("k1",)
    said["k1"] = said["k0"]
    copies.ask(["k0", "k1"])
    assert copies.silent == ()


def test_a_new_supervisor_asks_the_keepers_of_nodes_that_the_job_has_left_too(
    keepers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"octavo-keeper-{JOB}-{number}" for number in range(4)]
    others = ["octavo-keeper-job-1-two-0", "octavo-keeper-job-17-0", "octavo-worker-job-1-9"]
    actors = [{"name": name, "namespace": "octavo"} for name in [*names, *others]]
    actors.append({"name": f"octavo-keeper-{JOB}-5", "namespace": "another"})
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: actors)
    left = SnapshotKey(JOB, 1, 0, 0, 20)
    for name in names[:3]:
        inventory = SimpleNamespace(remote=lambda _, name=name: name)
        keepers[name] = SimpleNamespace(inventory=inventory)
    asked: list[str] = []

    def get(name: str, timeout: float) -> Inventory:
        asked.append(name)
        return Inventory({left: 100} if name == names[0] else {}, 1000)

    monkeypatch.setattr(ray, "wait", lambda asked, num_returns, timeout: (asked, []))
    monkeypatch.setattr(ray, "get", get)
    copies = HeldCopies(JOB)
    # The job sits on its second and third node; it has left the first, and the fourth has died.
    here = [Seat(f"n{number}", "10.0.0.1", 1, names[number]) for number in (2, 1)]
    copies.begin(here)
    assert copies.ask([seat.keeper for seat in here]) == [left]
    assert sorted(asked) == names[:3]


def test_what_a_keeper_is_asked_does_not_queue_behind_the_puts_of_large_states() -> None:
    made = keeper_class().__ray_metadata__
    groups = {"ping": "asked", "inventory": "asked", "stay": "watched"}
    assert made.method_meta.concurrency_group_for_methods == groups
    assert made.concurrency_groups == {"asked": 2, "watched": 1}
    # As it is sent to the node; known there by its title.
    loaded = ray.cloudpickle.loads(ray.cloudpickle.dumps(made.modified_class))
    keeper = loaded(4, "keeper")
    assert isinstance(keeper, Keeper) and made.class_name == "Keeper"
    assert keeper.ping() and keeper.inventory("job") == Inventory({}, 0)
    # A plain one stays as it is.
    assert not hasattr(Keeper.ping, "__ray_concurrency_group__")
