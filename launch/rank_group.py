"""What a supervisor needs of a group of ranks, whatever runs them.

Promises: no call but ``kill`` and ``close`` waits for a rank; a rank that ended is told
by ``ended``, never raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from launch.commands import Assignment, Command, RankResult
from launch.snapshots import SnapshotKey
from launch.stacks import Stack


@dataclass(frozen=True, slots=True)
class Seat:
    """One node of the group."""

    node_id: str
    """Ray's node id, hex."""
    node_ip: str
    slots: int
    """Ranks on this node."""
    keeper: str
    """Name of the actor that holds this node's snapshots."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    how: Literal["done", "raised", "lost"]
    """done: its loop returned; raised: its loop raised; lost: its process is gone."""
    result: RankResult | None = None
    error: str = ""
    """One line for a person; empty when done."""
    cause: BaseException | None = None
    """What was raised."""


class NodeSilentError(RuntimeError):
    """A node that the next attempt needs doesn't answer."""

    def __init__(self, node_ip: str, why: str) -> None:
        super().__init__(f"node {node_ip}: {why}")
        self.node_ip, self.why = node_ip, why

    def __reduce__(self) -> tuple[type[NodeSilentError], tuple[str, str]]:
        return (type(self), (self.node_ip, self.why))


class RankGroup(Protocol):
    """The ranks of one job; one attempt at a time."""

    def start(self, seats: Sequence[Seat]) -> None:
        """Begin an attempt: claim a standby worker a rank, or create one."""

    def ready(self) -> bool:
        """Whether every worker has done its imports; one that died shows in ``ended``."""

    def master(self) -> tuple[str, int]:
        """Where rank 0 waits for the others. Call when ready. Raises NodeSilentError."""

    def run(self, assignments: Sequence[Assignment]) -> None:
        """Give the ranks out, in order, and start their loops."""

    def ended(self) -> tuple[RankEnd, ...]:
        """Ranks that have ended in this attempt, in order of ranks."""

    def post(self, command: Command) -> None:
        """Send a command to every rank, rank 0 last."""

    def kill(self) -> None:
        """End every rank of the attempt; on return their processes are gone."""

    def fill_standby(self, spares: Sequence[Seat] = ()) -> None:
        """Start as many idle workers as there are ranks, and as many as each spare has slots,
        without waiting for them; those elsewhere end."""

    def stacks(self) -> dict[int, Stack]:
        """What each rank's process is doing; waits for a bounded time."""

    def copies(self) -> list[SnapshotKey]:
        """What the keepers of all nodes hold of this job; a lost keeper holds nothing."""

    def silent(self) -> Sequence[str]:
        """Keepers that may hold something and did not answer when ``copies`` last asked."""

    def settle(self, replicas: int) -> None:
        """Let keepers forget ranks whose copies, ``replicas`` of each, are elsewhere by now."""

    def memory(self) -> dict[str, int]:
        """Bytes that each keeper held when ``copies`` last asked, by the keeper's name."""

    def close(self) -> None:
        """End the ranks and the standby workers."""
