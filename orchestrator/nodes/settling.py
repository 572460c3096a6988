"""What attempts show of their nodes, taken in: what is held against those, and what comes of it.

Promises: at once and wholly; a look tells that there is nothing new; done again, it changes
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orchestrator.lifecycle import JobState
from orchestrator.nodes.groups import NodeGroups
from orchestrator.nodes.notices import judged_told
from orchestrator.placement.accusation import accused, failed_checks, machine_addresses
from orchestrator.placement.checks import laid
from orchestrator.placement.docket import Dismissed
from orchestrator.placement.placement import NodeCapacity, need_of
from orchestrator.spec.config import QuarantineConfig
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

logger = logging.getLogger(__name__)


class Settling:
    """Of one controller."""

    def __init__(self, store: Store, groups: NodeGroups, config: QuarantineConfig) -> None:
        self._store = store
        self._groups = groups
        self._config = config
        self._settled: dict[str, tuple[int, ...]] = {}
        """Up to which record what jobs show of their nodes was taken in."""
        self._trained: dict[str, int] = {}
        """The attempt of which it was taken in that it trains."""

    def settle(self, row: JobRow, now: float) -> None:
        """Take in what the job's present attempt shows of its nodes; done again, it changes
        nothing, and a look tells that there is nothing new."""
        mark = (row.attempt, *self._store.past.newest(row.id))
        if self._settled.get(row.id) == mark:
            return
        seen = self._store.past.incidents(row.id, row.attempt)
        checks = self._store.nodes.checks(row.id, row.attempt, self._config.window_s)
        if seen or checks:
            drilled = self._store.past.events_of_attempt(row.id, row.attempt, "drill")
            rehearsed = {e["detail"]["rank"] for e in drilled}
            nodes = self._groups.capacities()
            addresses = machine_addresses(nodes)
            # Not where it stands now: some seats may have been replaced for what is told here.
            seats = self._store.attempts.seats_of(row)
            failures = laid(checks)
            judged = self._store.nodes.accuse(
                row.id,
                [
                    *accused(seen, seats, rehearsed, addresses, row.id),
                    *failed_checks(failures, addresses, row.id),
                ],
                self._config,
                _large_enough(nodes, row),
                now,
                checks=checks,
                cleared=failures.cleared,
                tell=lambda judged: judged_told(judged, now),
            )
            for case, found in judged:
                if isinstance(found, Dismissed):
                    logger.info("node %s is not quarantined: %s", case.node_id[:8], found.why)
        self._settled[row.id] = mark

    def trains(self, row: JobRow, now: float) -> None:
        """Take in, once an attempt, that the job trains: nodes that failed before, and were let
        off because they were most of those it had, may be few beside those that have passed."""
        if row.state is not JobState.RUNNING or self._trained.get(row.id) == row.attempt:
            return
        window_s = self._config.window_s
        checks = self._store.nodes.checks(row.id, row.attempt, window_s, trains=True)
        if checks:
            nodes = _large_enough(self._groups.capacities(), row)
            cleared = laid(checks).cleared
            self._store.nodes.reconsider(
                row.id, row.attempt, self._config, nodes, now, checks=checks, cleared=cleared
            )
        self._trained[row.id] = row.attempt

    def forget(self, job: str) -> None:
        """It holds no nodes any more."""
        self._settled.pop(job, None)
        self._trained.pop(job, None)


def _large_enough(nodes: Sequence[NodeCapacity], row: JobRow) -> list[NodeCapacity]:
    """Those that a seat of the job would fit on, were nothing else there."""
    need = need_of(row.spec)
    return [n for n in nodes if n.total.get(need.resource, 0) >= need.slots]
