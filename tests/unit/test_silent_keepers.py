"""What the loss of a node's keeper is told by: its death, not a connection that breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from orchestrator.node_slot import NodeSlot
from orchestrator.nodes import groups
from orchestrator.nodes.groups import RayNodeGroups
from orchestrator.protocol import keeper_actor

SEATS = [NodeSlot(f"node{n}", f"10.0.0.{n}", n, 4) for n in range(3)]


class Ping:
    """An answer, or what asking raised."""

    def __init__(self, error: RayError | None) -> None:
        self.error = error


class FakeKeeper:
    """Raises at its first pings what a test says."""

    def __init__(self) -> None:
        self.errors: list[RayError] = []
        self.ping = self

    def remote(self) -> Ping:
        return Ping(self.errors.pop(0) if self.errors else None)


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeKeeper]:
    """Of each seat; what is restarted has nothing to raise any more."""
    found = {seat.bundle: FakeKeeper() for seat in SEATS}
    by_name = {keeper_actor("toy", number): keeper for number, keeper in found.items()}

    def get(ping: Ping, timeout: float) -> None:
        if ping.error is not None:
            raise ping.error

    monkeypatch.setattr(groups, "_actor", by_name.get)
    monkeypatch.setattr(groups, "PING_S", 0.5)
    monkeypatch.setattr(groups, "AGAIN_S", 0.01)
    monkeypatch.setattr(ray, "wait", lambda pings, **_: (pings, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"NodeID": seat.node_id, "Alive": True} for seat in SEATS]
    )
    return found


class Taking(RayNodeGroups):
    """Notes whose keeper is started again."""

    def __init__(self) -> None:
        super().__init__()
        self.restarted: list[int] = []

    def take(self, job: str, seats: Sequence[NodeSlot], *_: object) -> list[NodeSlot]:
        self.restarted += [seat.bundle for seat in seats]
        return []


def unavailable() -> RayError:
    return ActorUnavailableError("connection reset by peer", None)


@pytest.mark.parametrize(
    ("error", "times", "lost", "restarted"),
    [
        (unavailable, 3, set(), []),
        (unavailable, 100_000, {1}, []),
        (ActorDiedError, 1, set(), [1]),
    ],
)
def test_only_a_keeper_that_died_is_started_again_without_its_copies(
    keepers: dict[int, FakeKeeper],
    error: Callable[[], RayError],
    times: int,
    lost: set[int],
    restarted: list[int],
) -> None:
    keepers[1].errors = [error() for _ in range(times)]
    nodes = Taking()
    assert nodes.lost("toy", SEATS, "CPU", 4) == lost
    assert nodes.restarted == restarted
