"""Before a job's nodes go back, and before it goes on on more or fewer: the newest state that only
memory holds becomes a checkpoint.

Ranks that are told to stop write their last state themselves. Where there are none left that could
(they died, and the job is paused for a person, cancelled or failed before the next attempt), the
keepers still hold every rank's newest snapshot, and would take it along when they end; ranks that
are more or fewer than those before them can start from a checkpoint alone. Promises:
what is written is what the next attempt would have started from, or could have, had its ranks been
as many as those that made it (a checkpoint fits any degrees); nothing is written where disk has
that step, or a later one, already; a job's nodes wait for it for a bounded time, and as long for a
storage that fails or doesn't say what it has; what is lost is told; no pass waits.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from launch.attempt_folder import AttemptOverError
from launch.commands import RestorePoint, SnapshotReport
from launch.keeper import Inventory
from launch.keeper_clients import patience_s
from launch.snapshots import SnapshotKey
from monitoring.job_view import JobView
from monitoring.records import StepRecord
from monitoring.utilization import RANK_PEAK
from orchestrator.actions import Action
from orchestrator.events import EventDraft
from orchestrator.lifecycle import JobState
from orchestrator.node_slot import working
from orchestrator.nodes.groups import DiskOrder, NodeGroups
from orchestrator.planning.utilization import rank_peak_tokens_per_s
from orchestrator.protocol import BY_KEEPERS, FencedError, ResumeState, whole_history
from orchestrator.saved.checkpoint_facts import facts_of
from orchestrator.saved.checkpoint_shelf import STORAGE_S, CheckpointShelf
from orchestrator.saved.closing import WHOLE_RECORDS, write_closing
from orchestrator.saved.restore import Made, candidates, newest_written, points_in_memory
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.degrees import DegreesRefusedError, on_nodes
from orchestrator.spec.job import JobSpec
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

AGAIN_S = 10.0
"""Seconds between two tries, for ``STORAGE_S`` at most, of a storage that fails or a keeper that
doesn't answer."""
TOLD_AFTER_S = 30.0
"""Seconds after which it is told what a job's nodes are held for."""
_STORAGE_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.ETIMEDOUT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)
"""What of a storage may pass, though it was fine a moment later."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Try:
    """What came of one try to keep what memory holds."""

    told: Sequence[EventDraft] = ()
    """For people; nothing where there was nothing to keep."""
    may_pass: bool = False
    """Whether nothing was kept, for a reason of the storage."""
    newest_on_disk: int = -1

    def lost_sight(self, again: _Try) -> bool:
        """Whether the keepers are gone by ``again``: what was told of this one stands."""
        newest = self.told[0].detail["step"] if self.told else -1
        return not again.told and again.newest_on_disk < newest


@dataclass(eq=False)
class _Look:
    """What is being done for one job."""

    step: int
    """The newest in memory."""
    given_s: float
    """Seconds after ``since`` in which the part that is being done ends, or its storage hangs."""
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    """When that part began."""
    thread: threading.Thread = field(default_factory=threading.Thread)
    told: bool = False
    given_up: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, held: Mapping[int, Inventory]) -> _Look:
        copies = [inventory.nbytes for inventory in held.values()]
        steps = {key.step for nbytes in copies for key in nbytes}
        writes = patience_s(max((sum(nbytes.values()) for nbytes in copies), default=0))
        return cls(max(steps, default=0), 2 * STORAGE_S + writes)

    def writes(self, seconds: float) -> None:
        """A write of at most ``seconds`` begins: more copies may have been found than at first."""
        self.given_s, self.since = STORAGE_S + seconds, time.monotonic()


class Rescue:
    """Of one controller: a thread a job, while it lasts."""

    def __init__(
        self, store: Store, groups: NodeGroups, clock: Callable[[], float], done: Callable[[], None]
    ) -> None:
        """``done`` is called, by the thread, when a job's nodes may go back."""
        self._store = store
        self._groups = groups
        self._clock = clock
        self._done = done
        self._looks: dict[str, _Look] = {}

    def unwritten(self, row: JobRow) -> bool:
        """Whether the next attempt, on the nodes that ``row`` has now, can take nothing from memory
        though all of a newer state than any checkpoint's is there: its ranks are more or fewer.
        True as well while it is seen to (``over``). By what is stored: disk isn't asked."""
        if row.id in self._looks:
            return True
        before = self._store.attempts.nodes_of(row.id).get(row.attempt, 0)
        if row.spec.resources.min_nodes is None or before in {0, len(working(row.nodes))}:
            return False
        last = self._store.attempts.resume_state(row.id)
        found = worth_keeping(self._groups.copies(row.id), (), last)
        if self._groups.silent(row.id):
            # One that is busy may hold what the others lack: ``over`` waits for it.
            return True
        return bool(found) and found[0].step > newest_written(last.written)

    def over(self, row: JobRow) -> bool:
        """Whether nothing of the job is in memory alone that should not be lost; begins to see
        to it where that isn't known yet."""
        if row.state is JobState.SUCCEEDED or not row.attempt:
            return True
        if (look := self._looks.get(row.id)) is not None:
            return self._is_over(row.id, look)
        held = self._groups.copies(row.id)
        nothing = not any(inventory.nbytes for inventory in held.values())
        if nothing and not self._groups.silent(row.id):
            return True
        # The disk may take its time to say what it has.
        look = self._looks[row.id] = _Look.of(held)
        look.thread = threading.Thread(
            target=self._run, args=(row.id, held, look), name=f"rescue {row.id}", daemon=True
        )
        look.thread.start()
        return False

    def _is_over(self, job: str, look: _Look) -> bool:
        """Not while it is at work, unless the storage lets no call return."""
        now = time.monotonic()
        waited = now - look.began
        if look.thread.is_alive() and now - look.since <= look.given_s:
            if waited > TOLD_AFTER_S and not look.told:
                look.told = True
                self._store.note(job, _at_work(look, self._clock()))
            return False
        del self._looks[job]
        if look.thread.is_alive():
            look.given_up.set()
            why = f"its storage lets no call return for {waited:.0f} s"
            self._store.note(job, _told(look.step, why, self._clock()))
        return True

    def _run(self, job: str, held: Mapping[int, Inventory], look: _Look) -> None:
        try:
            self._keep(job, held, look)
        except Exception as error:
            logger.exception("the newest state of %s in memory could not be looked after", job)
            if look.given_up.is_set():
                return
            why = f"What the nodes' memory held of the job could not be looked after: {error!r}."
            with suppress(Exception):  # the store may be what failed
                self._store.note(job, EventDraft("checkpoint_failed", self._clock(), why, {}))
        self._done()

    def _keep(self, job: str, held: Mapping[int, Inventory], look: _Look) -> None:
        last = self._store.attempts.resume_state(job)
        deadline = time.monotonic() + STORAGE_S
        while self._groups.silent(job) and time.monotonic() < deadline:
            # One that is busy with gigabytes may hold what the others lack.
            time.sleep(AGAIN_S)
            held = self._groups.copies(job)
        tried = self._try(last, held, look, patient=time.monotonic() < deadline)
        while tried.may_pass:
            # What ends ranks is often the storage, which comes back. The last try is one without
            # patience, however long those before it took.
            time.sleep(AGAIN_S)
            patient = time.monotonic() < deadline
            again = self._try(last, self._groups.copies(job), look, patient=patient)
            if tried.lost_sight(again):
                break
            tried = again
        if look.given_up.is_set():
            return
        for event in tried.told:
            self._store.note(job, event)
        if tried.told and not self._store.job(job).state.holds_nodes:
            try:
                # What its supervisor wrote when it ended knows nothing of this.
                write_closing(self._view(job), Path(last.job_dir), last.attempt)
            except (OSError, AttemptOverError) as error:
                logger.warning("the report of %s is as it was: %s", job, error)

    def _view(self, job: str) -> JobView:
        """What is stored of the job, as its supervisor's view of it is."""
        row = self._store.job(job)
        past = whole_history(partial(self._store.past.history, job))
        whole = self._store.past.newest_steps(job, WHOLE_RECORDS)
        light = past.steps[: len(past.steps) - len(whole)]
        return JobView(
            job=job,
            state=row.state.word,
            spec=row.spec.model_dump(mode="json"),
            steps=[StepRecord.from_json(step) for step in (*light, *whole)],
            incidents=past.incidents,
            actions=[action.to_json() for action in self._store.past.actions(job)],
            events=past.events,
            extra={"job_dir": row.job_dir, RANK_PEAK: rank_peak_tokens_per_s(row.spec)},
        )

    def _try(
        self, last: ResumeState, held: Mapping[int, Inventory], look: _Look, *, patient: bool
    ) -> _Try:
        """``patient``: while disk doesn't say what it has, nothing is written to it."""
        spec, ranks = last.spec, sum(node.slots for node in last.nodes)
        shelf = CheckpointShelf(last.job_dir, spec.checkpoint.num_to_keep, ranks, facts_of(spec))
        told: list[EventDraft] = []
        on_disk = shelf.points()
        newest = max((point.step for point in on_disk), default=-1)
        for point in worth_keeping(held, on_disk, last):
            if patient and shelf.unseen:
                told.append(_told(point.step, shelf.unseen, self._clock()))
                return _Try(told, True, newest)
            seats, nbytes = holders(held, point)
            world = sum(map(len, seats.values()))
            shelf.resize(world, facts_of(_of_ranks(spec, world)))
            order = DiskOrder(
                Path(last.job_dir), last.attempt, last.timeline, seats, world, patience_s(nbytes)
            )
            look.writes(order.timeout_s)
            if look.given_up.is_set():
                # Whoever goes on with the job has the folder of this attempt, too.
                break
            why = self._write(order, shelf, point.step, last.actions)
            told.append(_told(point.step, why, self._clock()))
            if not why:
                break
            if patient and (shelf.unopened or _storage_fails(why, last.job_dir)):
                # Before an older one is written: the newest may be, in a minute.
                return _Try(told, True, newest)
        return _Try(told, False, newest)

    def _write(
        self, order: DiskOrder, shelf: CheckpointShelf, step: int, actions: Sequence[Action]
    ) -> str:
        """Empty, or why there is no checkpoint of that step."""
        try:
            shelf.begin(order.attempt)
        except FencedError as error:
            return str(error)
        if shelf.unopened:
            return shelf.unopened
        failed = self._groups.write_copies(order)
        if failed:
            return _by_rank(failed)
        whole = SnapshotReport(order.attempt, order.timeline, 0, step, "disk", 0, "")
        return shelf.commit(whole, actions)


def worth_keeping(
    held: Mapping[int, Inventory],
    on_disk: Sequence[RestorePoint],
    last: ResumeState,
) -> list[RestorePoint]:
    """Points in memory that a next attempt would take before any on disk, best first. Pure.

    With resources.min_nodes some may be of more or fewer ranks than the last attempt has.
    """
    ranks = sum(node.slots for node in last.nodes)
    of: dict[int, set[SnapshotKey]] = {}
    for inventory in held.values():
        # A keeper that outlived an older Octavo's end doesn't tell.
        worlds: Mapping[SnapshotKey, int] = getattr(inventory, "worlds", {})
        for key in inventory.nbytes:
            of.setdefault(worlds.get(key) or ranks, set()).add(key)
    whole = [point for world, keys in of.items() for point in points_in_memory(keys, world)]
    made: list[Made] = [*on_disk, *chain.from_iterable(of.values())]
    in_memory = [point for point in whole if not _passed_by(point, made)]
    snapshots = last.spec.snapshots
    found = candidates(
        [*in_memory, *on_disk],
        last.actions,
        recorded=last.step,
        reach=snapshots.every * snapshots.keep,
    )
    steps_on_disk = {point.step for point in on_disk}
    worth: list[RestorePoint] = []
    for point in found:
        # Step 0 is what the seed gives.
        if point.tier == "disk" or point.step in {0, *steps_on_disk}:
            break
        worth.append(point)
    return worth


def _passed_by(point: RestorePoint, made: Iterable[Made]) -> bool:
    """Whether a later attempt began before ``point``: what it trained stands in its place."""
    return any(other.attempt > point.attempt and other.step < point.step for other in made)


def _of_ranks(spec: JobSpec, world_size: int) -> JobSpec:
    """``spec`` with the degrees that so many ranks have of it."""
    try:
        return on_nodes(spec, world_size // slots_per_node(spec))
    except DegreesRefusedError:
        return spec


def holders(
    held: Mapping[int, Inventory], point: RestorePoint
) -> tuple[dict[int, list[SnapshotKey]], int]:
    """Which seat writes which rank's copy of ``point``, the ranks spread over those that hold
    them, and the bytes of the seat that has most to write. Pure."""
    at: dict[SnapshotKey, list[int]] = {}
    for seat, inventory in held.items():
        for key in inventory.nbytes:
            if key.order() == (point.attempt, point.timeline, point.step):
                at.setdefault(key, []).append(seat)
    seats: dict[int, list[SnapshotKey]] = {}
    load = dict.fromkeys(held, 0)
    for key in sorted(at, key=lambda key: (len(at[key]), key.rank)):
        seat = min(at[key], key=lambda seat: (load[seat], seat))
        seats.setdefault(seat, []).append(key)
        load[seat] += held[seat].nbytes[key]
    return seats, max(load.values(), default=0)


def _storage_fails(why: str, job_dir: str) -> bool:
    """Whether ``why`` nothing was written may pass."""
    if any(os.strerror(number) in why for number in _STORAGE_ERRORS):
        return True
    folder = Path(job_dir) / "checkpoints"
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"octavo")
    except OSError:
        return True
    return False


def _by_rank(failed: Mapping[int, str]) -> str:
    """What went wrong, each with the ranks that it befell: often the same for all."""
    ranks: dict[str, list[int]] = {}
    for rank, why in sorted(failed.items()):
        ranks.setdefault(why, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(mine) > 1)} {', '.join(map(str, mine[:4]))}"
        f"{f' and {len(mine) - 4} more' if len(mine) > 4 else ''}: {why}"
        for why, mine in ranks.items()
    )


def _at_work(look: _Look, now: float) -> EventDraft:
    message = (
        f"The state of step {look.step} is in the nodes' memory and in no checkpoint yet: they are "
        f"held while it is written, {look.given_s:.0f} s at most."
    )
    return EventDraft("rescue", now, message, {"step": look.step, "given_s": look.given_s})


def _told(step: int, why: str, now: float) -> EventDraft:
    if why:
        message = (
            f"The state of step {step}, which the nodes' memory held and no checkpoint does, could "
            f"not be written to disk: {why.rstrip('.')}."
        )
        return EventDraft("checkpoint_failed", now, message, {"step": step})
    message = (
        f"Checkpoint of step {step} written from the nodes' memory: no rank was left that could "
        "have written its last state."
    )
    return EventDraft("checkpoint_written", now, message, {"step": step, "by": BY_KEEPERS})
