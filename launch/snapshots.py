"""Copies of a rank's state: what they are called, how they are checked, where they go.

Promises: a copy is checked against its digest before use; one that is damaged, missing or
of another model is refused by a typed error that names rank, step and tier. No torch here:
keepers and supervisors import it. The bytes themselves are ``launch.state_block``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from launch.digests import Payload, digest_of


class SnapshotError(RuntimeError):
    """A copy of a rank's state can't be used; names the rank, the step and the tier."""

    def __init__(self, rank: int, step: int, tier: str, detail: str) -> None:
        super().__init__(f"rank {rank}: copy of step {step} in tier {tier}: {detail}")
        self.rank, self.step, self.tier, self.detail = rank, step, tier, detail

    def __reduce__(self) -> tuple[type[SnapshotError], tuple[int, int, str, str]]:
        return (type(self), (self.rank, self.step, self.tier, self.detail))


class DamagedSnapshotError(SnapshotError):
    """The bytes aren't those that were written: a digest, a size or the header is wrong."""


class MissingSnapshotError(SnapshotError):
    """Nobody holds that step."""


class UnreadSnapshotError(SnapshotError):
    """Its storage doesn't give it now, for a reason that is none of the copy's (EIO, ESTALE,
    EACCES): it may the next time."""


class MismatchedSnapshotError(SnapshotError):
    """The copy is of another model, layout or optimizer than this rank has now."""


class StoreGoneError(RuntimeError):
    """Where a copy should have gone has ended; another one takes its place in a moment."""


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """Which state a copy is of: before ``step``, in that timeline of that attempt."""

    job: str
    attempt: int
    timeline: int
    rank: int
    step: int

    @property
    def branch(self) -> tuple[int, int]:
        """(attempt, timeline): grows by every restart and rollback."""
        return (self.attempt, self.timeline)

    def order(self) -> tuple[int, int, int]:
        """Sort key from oldest to newest."""
        return (self.attempt, self.timeline, self.step)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A packed state with the digest it was sent with."""

    payload: Payload
    digest: str


class SnapshotSource(Protocol):
    """Where a rank may find a copy of its state."""

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        """The copy, or None. Raises DamagedSnapshotError, or what says that it can't be had."""


class SnapshotStore(SnapshotSource, Protocol):
    """Where ranks put copies of their state outside their own process."""

    def put(
        self, key: SnapshotKey, payload: Payload, digest: str, *, replicated: bool = False
    ) -> None:
        """Blocks until a copy is held and checked; raises when it isn't.

        ``replicated``: all ranks send this step to partner nodes too.
        """


class PartnerCopies(Protocol):
    """The copies of a rank's state on other nodes."""

    @property
    def behind(self) -> bool:
        """Whether a copy is still on its way: another would only queue up."""

    def offer(
        self, key: SnapshotKey, payload: Payload, digest: str, told: Callable[[str, int], None]
    ) -> None:
        """Send a copy on its way; ``told`` is called once it is held, or with why it isn't, and
        with the number of the partner.

        Never waits for another node, never raises.
        """


def refuse_damaged(snapshot: StoredSnapshot, rank: int, step: int, tier: str) -> None:
    """Raise DamagedSnapshotError unless the payload has its digest."""
    found = digest_of(snapshot.payload)
    if found != snapshot.digest:
        raise DamagedSnapshotError(
            rank, step, tier, f"digest is {found[:12]}…, {snapshot.digest[:12]}… was written"
        )
