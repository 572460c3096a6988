"""Where jobs get their nodes: placement, replacement, spares, quarantine, the autoscaler.

Between the pure decisions (``orchestrator.placement``), the store and
Ray (``orchestrator.nodes.groups``). Promises: one placement at a time, so that two jobs never reach
for the same node; a quarantined node is in no new placement; what is taken is in the store or given
back; a node that Ray didn't grant is passed over for a while; what is refused says why.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.events import EventDraft
from orchestrator.lifecycle import JobState
from orchestrator.node_slot import NodeSlot, working
from orchestrator.nodes.groups import NodeGroups, group_name
from orchestrator.nodes.notices import keeper_told, moves, resized, spare_told
from orchestrator.nodes.settling import Settling
from orchestrator.nodes.sight import Sight
from orchestrator.placement.placement import (
    Barred,
    Mended,
    Need,
    NodeCapacity,
    Short,
    fill,
    fit,
    need_of,
    told_node,
    wish,
)
from orchestrator.placement.quarantine import barring
from orchestrator.placement.regroup import counts_of, mend_some, place_some
from orchestrator.spec.config import QuarantineConfig
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow, UnknownJobError

logger = logging.getLogger(__name__)

UNWILLING_S = 30.0
"""Seconds for which a node that Ray didn't grant is passed over."""
KEEPERS_EVERY_S = 5.0
"""Seconds between two tries to start keepers anew of a job that trains."""
RECONCILE_EVERY_S = 60.0
"""Seconds between two comparisons of what is held with the records."""
FILL_EVERY_S = 2.0
"""Seconds between two looks for spares."""
GIVEN_UP_S = 10.0
"""Seconds for which a job that gave up its spares looks for no others."""


class NodeDesk:
    """The nodes of one controller."""

    def __init__(
        self,
        store: Store,
        groups: NodeGroups,
        config: QuarantineConfig | None = None,
        *,
        fixed: bool = True,
    ) -> None:
        """``fixed``: no node will ever be added, so nobody is asked for one."""
        self._store = store
        self._groups = groups
        self.settling = Settling(store, groups, config or QuarantineConfig())
        """What jobs show of their nodes."""
        self._fixed = fixed
        self._placing = threading.RLock()
        # Of this process: a controller that restarts tries them all again.
        self._unwilling: dict[str, float] = {}
        self._filled: dict[str, float] = {}
        self._kept: dict[str, float] = {}
        self._reconciled = -math.inf
        self._wished: list[dict[str, float]] | None = None
        self._short: dict[str, int] = {}
        """How many nodes jobs wait for in place of lost ones."""
        self._left: dict[str, list[NodeSlot]] = {}
        """Seats on nodes that live and that a job has left: their keepers have its newest state.
        A controller that restarts forgets them; they go back when the job ends."""

    @property
    def short(self) -> frozenset[str]:
        """Jobs that wait for nodes in place of lost ones."""
        return frozenset(self._short)

    # -- jobs that wait

    def sight(self, now: float) -> Sight:
        """The nodes as they are now, for all decisions of a pass."""
        return Sight(self._capacities(now), self._store.nodes.in_force(now), now)

    def fits_without(self, row: JobRow, others: Sequence[JobRow], sight: Sight) -> bool:
        """Whether a job would have what it waits for once ``others`` had given back their nodes."""
        return self.fits_with(
            row, [(other, seat) for other in others for seat in other.nodes], sight
        )

    def fits_with(
        self, row: JobRow, seats: Sequence[tuple[JobRow, NodeSlot]], sight: Sight
    ) -> bool:
        """Whether it would once the others had given back these seats: what it may begin on, else
        nodes in place of lost ones."""
        back = [(other.asks.need.resource, seat) for other, seat in seats]
        return sight.fits_with(row, back, self.short_of(row, sight))

    def short_of(self, row: JobRow, sight: Sight) -> int | None:
        """How many nodes a job that holds some waits for in place of lost ones; None: for none.

        Before this process has tried to mend it, as far as it shows by the nodes that are gone: on
        one that was quarantined meanwhile it may start.
        """
        missing = self._short.get(row.id)
        gone = any(seat.node_id not in sight.alive for seat in working(row.nodes))
        if missing is None and gone and row.state in (JobState.STARTING, JobState.RECOVERING):
            plan = sight.mended(row)
            missing = plan.missing if isinstance(plan, Short) else None
        return missing

    def admit(self, row: JobRow, now: float) -> str:
        """Give a queued job its nodes; empty, or why it has to wait."""
        with self._placing:
            asks = row.asks
            need = asks.need
            nodes = self._capacities(now)
            barred = self._barred(row.id, nodes, now)
            seats = place_some(need, asks.counts, nodes, barred)
            if seats is None:
                return fit(need, nodes, barred, asks.least).reason
            if refused := self._take(row, seats, now):
                return f"needs {need}; Ray didn't grant {_told_nodes(refused)} yet"
            try:
                self._store.grant(row.id, group_name(row.id), seats, now)
            except BaseException:
                self._groups.give_back(row.id, seats)
                raise
        return ""

    def reconcile(self, now: float) -> None:
        """Give back seats that no record knows: a controller may have died between what it was
        granted and its record. At its start, and now and then, for a give-back may have died too.

        Of a job that recovers those stay whose keepers hold something: it may start from that.
        """
        if now - self._reconciled < RECONCILE_EVERY_S:
            return
        self._reconciled = now
        with self._placing:
            for job, numbers in self._groups.seats_held().items():
                try:
                    row = self._store.job(job)
                except UnknownJobError:
                    continue  # of another store: nothing is known of it
                known = {seat.bundle for seat in (*row.nodes, *self._left.get(job, ()))}
                surplus = numbers - known
                if surplus and row.nodes and row.state is not JobState.RUNNING:
                    copies = self._groups.copies(job)
                    surplus = {n for n in surplus if n in copies and not copies[n].nbytes}
                if surplus:
                    logger.warning("seats %s of %s are in no record: given back", surplus, job)
                    gone = [NodeSlot("", "", number, 0) for number in sorted(surplus)]
                    self._groups.give_back(job, gone)

    # -- jobs that hold nodes

    def mend(self, row: JobRow, now: float) -> str:
        """See to it that every rank of the job has a node; empty, or what it waits for.

        Ranks move to spares at once; else to other nodes, which are taken here.
        """
        self.settling.settle(row, now)
        with self._placing:
            before, row = row, self._store.job(row.id)
            if row.attempt != before.attempt or not row.state.holds_nodes:
                # Others have seen to it since it was read; whoever begins an attempt is told.
                return ""
            need = need_of(row.spec)
            lost = self._groups.lost(row.id, row.nodes, need.resource, row.spec.snapshots.keep)
            tries = 0
            while True:
                nodes = self._capacities(now)
                barred = self._barred(row.id, [*nodes, *row.nodes], now)
                plan = mend_some(
                    row.nodes,
                    need,
                    counts_of(row.spec),
                    nodes,
                    lost=lost,
                    barred=barred,
                    waits=row.spec.recovery.no_other_node == "wait",
                    numbered=self._numbered(row.id),
                )
                if isinstance(plan, Short):
                    self._short[row.id] = plan.missing
                    return plan.reason
                refused = self._take(row, plan.taken, now)
                if not refused:
                    break
                tries += 1
                if tries > len(nodes):
                    return f"needs {need} again; Ray didn't grant {_told_nodes(refused)} yet"
            self._short.pop(row.id, None)
            if plan.nodes != row.nodes:
                told = [*moves(plan, lost, barred, now), *resized(row, plan, now)]
                try:
                    self._store.replace_nodes(row.id, plan.nodes, *told)
                except BaseException:
                    self._groups.give_back(row.id, plan.taken)
                    raise
                gone = [seat for seat in plan.dropped if seat.bundle in lost]
                left = [seat for seat in plan.dropped if seat not in gone]
                # A job that fails on node after node would hold them all, and for nothing.
                copies = self._groups.copies(row.id) if left else {}
                empty = [s for s in left if s.bundle in copies and not copies[s.bundle].nbytes]
                self._groups.give_back(row.id, [*gone, *empty])
                kept = [seat for seat in left if seat not in empty]
                self._left.setdefault(row.id, []).extend(kept)
            self._tell_stayed(row, plan, barred, now)
        return ""

    def try_out(self, row: JobRow, seats: Sequence[NodeSlot], now: float) -> list[NodeSlot] | None:
        """Those of ``seats`` that Ray wouldn't grant the job, which are passed over for a while:
        they are taken and given back. None, and none is taken, where the job isn't any more as
        ``row`` says: seats of these numbers may be its next attempt's, and would end with it."""
        with self._placing:
            there = self._store.job(row.id)
            held = {seat.bundle for seat in (*there.nodes, *self._left.get(row.id, ()))}
            same = (there.state, there.attempt, there.nodes) == (row.state, row.attempt, row.nodes)
            if not same or not held.isdisjoint(seat.bundle for seat in seats):
                return None
            refused = self._take(row, seats, now)
            if not refused:
                self._groups.give_back(row.id, seats)
        return refused

    def keep_up(self, row: JobRow, now: float) -> None:
        """Start keepers anew that died while the job trains: what it snapshots next has a place
        outside its ranks again."""
        # The first is started at once; one that doesn't stay up not in each pass again.
        rests = now - self._kept.get(row.id, -math.inf) < KEEPERS_EVERY_S
        if not self._groups.keepers_ended(row.id, row.nodes) or rests:
            return
        self._kept[row.id] = now
        need = need_of(row.spec)
        with self._placing:
            row = self._store.job(row.id)
            ended, keep = self._groups.keepers_ended(row.id, row.nodes), row.spec.snapshots.keep
            for seat in self._groups.revive(row.id, ended, need.resource, keep):
                self._store.note(row.id, keeper_told(seat, now))

    def leave(self, row: JobRow) -> None:
        """Give back the nodes that the job has left, once it trains elsewhere."""
        if row.state is not JobState.RUNNING or row.id not in self._left:
            return
        with self._placing:
            there = self._store.job(row.id)
            # Since it was read it may have left others, which hold what it goes on from.
            if (there.state, there.attempt) == (row.state, row.attempt):
                self._groups.give_back(row.id, self._left.pop(row.id, ()))

    def fill(self, row: JobRow, now: float) -> tuple[NodeSlot, ...] | None:
        """Take spares that the group is short of; all that it has then, None if that is no news.

        Spares on nodes that died or were quarantined are given back.
        """
        need = row.asks.need
        if not need.spares or now - self._filled.get(row.id, 0.0) < FILL_EVERY_S:
            return None
        self._filled[row.id] = now
        with self._placing:
            row = self._store.job(row.id)
            nodes = self._capacities(now)
            alive = {n.node_id for n in nodes}
            barred = self._barred(row.id, nodes, now)
            bad = [
                seat
                for seat in row.nodes
                if seat.spare and (seat.node_id not in alive or seat.node_id in barred)
            ]
            kept = tuple(seat for seat in row.nodes if seat not in bad)
            lost = {seat.bundle for seat in bad}
            found = fill(row.nodes, need, nodes, barred, lost)
            if found:
                numbered = self._numbered(row.id)
                found = fill(row.nodes, need, nodes, barred, lost, numbered=numbered)
            if found and self._take(row, found, now):
                found = ()
            if not found and not bad:
                return None
            told = [spare_told(seat, now) for seat in found]
            try:
                self._store.replace_nodes(row.id, (*kept, *found), *told)
            except BaseException:
                self._groups.give_back(row.id, found)
                raise
            self._groups.give_back(row.id, bad)
        return tuple(seat for seat in (*kept, *found) if seat.spare)

    def give_up_spares(self, row: JobRow, seats: Sequence[NodeSlot], to: str, now: float) -> None:
        """Take these spares from a job, for another one that is more important."""
        with self._placing:
            row = self._store.job(row.id)
            # Its ranks may have moved to one meanwhile.
            given = [seat for seat in row.nodes if seat.spare and seat in seats]
            if not given:
                return
            kept = [seat for seat in row.nodes if seat not in given]
            which = "Some of its" if any(seat.spare for seat in kept) else "Its"
            told = f"{which} spares, {_told_nodes(given)}, go to {to}"
            event = EventDraft(
                "spares_given_up", now, f"{told}, which has a higher priority.", {"to": to}
            )
            self._store.replace_nodes(row.id, kept, event)
            self._groups.give_back(row.id, given)
            # The other one comes first.
            self._filled[row.id] = now + GIVEN_UP_S

    def release(self, row: JobRow) -> None:
        """Give back all that the job holds."""
        with self._placing:
            self._groups.release(row.id)
            self._store.release(row.id)
        self._filled.pop(row.id, None)
        self._kept.pop(row.id, None)
        self._short.pop(row.id, None)
        self._left.pop(row.id, None)
        self.settling.forget(row.id)

    def wish(self, waiting: Sequence[JobRow], holding: Sequence[JobRow], now: float) -> None:
        """Tell the autoscaler what jobs wait for; it is told only when that changes."""
        if self._fixed:
            return
        nodes = self._groups.capacities()
        held = [
            replace(row.asks.need, nodes=max(len(row.nodes), row.asks.need.nodes))
            for row in holding
        ]
        barred = barring(self._store.nodes.in_force(now), nodes, "", now)
        needs = [_with_spares(r.asks.need) for r in waiting]
        fewer = any(0 < len(row.nodes) < row.asks.need.nodes for row in holding)
        shapes = wish(needs, held, nodes, barred, short=bool(self._short) or fewer)
        if shapes != self._wished:
            self._groups.wish(shapes)
            self._wished = shapes

    # -- how it is done

    def _numbered(self, job: str) -> int:
        """The largest number of a seat that the job holds, or has left and not given back; a
        controller before this one may have known of it alone."""
        left = {seat.bundle for seat in self._left.get(job, ())}
        return max(left | self._groups.seats_held().get(job, set()), default=-1)

    def _take(self, row: JobRow, seats: Sequence[NodeSlot], now: float) -> list[NodeSlot]:
        """Those that Ray didn't grant; they are passed over for a while."""
        if not seats:
            return []
        need = need_of(row.spec)
        refused = self._groups.take(row.id, seats, need.resource, row.spec.snapshots.keep)
        self._unwilling |= {seat.node_id: now + UNWILLING_S for seat in refused}
        return refused

    def _capacities(self, now: float) -> list[NodeCapacity]:
        """Living nodes, their free slots without what jobs hold by our own records: Ray tells of
        a placement a moment later. Those that didn't grant a moment ago have none."""
        held: dict[str, dict[str, float]] = {}
        for row in self._store.tended.seated():
            resource = row.asks.need.resource
            for seat in row.nodes:
                of = held.setdefault(seat.node_id, {})
                of[resource] = of.get(resource, 0.0) + seat.slots
        found = []
        for node in self._groups.capacities():
            used = held.get(node.node_id, {})
            free = {
                k: max(0.0, min(node.free.get(k, 0.0), total - used.get(k, 0.0)))
                for k, total in node.total.items()
            }
            if self._unwilling.get(node.node_id, 0.0) > now:
                free = dict.fromkeys(free, 0.0)
            found.append(replace(node, free=free))
        return found

    def _barred(
        self, job: str, nodes: Sequence[NodeCapacity | NodeSlot], now: float
    ) -> dict[str, Barred]:
        return barring(self._store.nodes.in_force(now), nodes, job, now)

    def _tell_stayed(
        self, row: JobRow, plan: Mended, barred: dict[str, Barred], now: float
    ) -> None:
        for seat in plan.stayed:
            why = barred[seat.node_id].reason.rstrip(".")
            told = (
                f"Node {told_node(seat)} is quarantined, and no other is free: the job goes on "
                f"there (recovery.no_other_node: continue). {why}."
            )
            self._store.note(row.id, EventDraft("node_kept", now, told, {"node_id": seat.node_id}))


def _told_nodes(seats: Sequence[NodeSlot]) -> str:
    return ", ".join(told_node(seat) for seat in seats)


def _with_spares(need: Need) -> Need:
    return replace(need, nodes=need.nodes + need.spares)
