"""Runs rows of the matrix on one cluster after the other, mending it between.

Promises: a row that hangs costs its deadline, is counted as a failure and leaves the next row a
whole cluster; undisturbed runs are made once a job and shared by the rows that have it; a row
that can't be run here is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tests.hosts.cluster import Cluster
from tests.hosts.faults.outcome import Outcome, judge, kept_losses
from tests.hosts.faults.rows import Row
from tests.hosts.faults.scene import HangError, Scene
from tests.hosts.redis_host import why_no_redis

HOSTS = 3
SAME_NUMBERS = ("recovery", "wandb", "checkpoint", "snapshots", "resources")
"""Sections that don't change a loss."""
UNDISTURBED_S = 300.0
NOT_READY = "the idle workers for a restart were not ready: the machine has other work"

ENVIRONMENT = {
    # Nobody answers there, and nobody refuses: for the row whose job wants W&B.
    "WANDB_BASE_URL": "http://10.255.255.1",
    "WANDB_API_KEY": "0" * 40,
}


class Matrix:
    """A cluster and the undisturbed runs; a context, for the cluster's sake."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None
        self._made: dict[str, Any] = {}
        """What the cluster was made of."""
        self._references: dict[str, dict[int, float]] = {}

    def run(self, row: Row) -> Outcome:
        """One run of one row; what goes wrong is in the outcome, not raised."""
        if row.cluster.get("redis") and (reason := why_no_redis()):
            return Outcome.not_run(row.name, reason)
        try:
            cluster = self._whole_cluster(row.cluster)
            reference = self._reference(cluster, row)
            scene = Scene(cluster, row.changes)
        except Exception as error:
            self._discard()
            return Outcome.failed(row.name, f"before the fault: {error!r}")
        hang, fault_at, ready = "", time.time(), True
        try:
            row.prepare(scene)
            scene.wait_for_step(10)
            ready = scene.wait_until_quiet()
            scene.wait_for_step(max(row.at, scene.newest + 3))
            fault_at = time.time()
            row.act(scene)
            scene.wait_for_end(max(1.0, fault_at + row.deadline_s - time.time()))
        except HangError as error:
            hang = str(error)
        except Exception as error:
            hang = f"the fault could not be done, or mended: {error!r}"
        finally:
            mended = self._mend(cluster)
            scene.close()
        outcome = judge(
            row.name,
            scene.steps,
            scene.state,
            fault_at,
            reference,
            hang=hang,
            problems=() if hang else row.check(scene),
            notes=[*([] if ready else [NOT_READY]), *_notes(scene, fault_at)],
            tolerance=row.tolerance,
        )
        if not mended or not outcome.ok:
            self._discard()
        else:
            scene.give_space_back()
        return outcome

    def _reference(self, cluster: Cluster, row: Row) -> dict[int, float]:
        changes = {k: v for k, v in row.changes.items() if k not in SAME_NUMBERS}
        key = json.dumps(changes, sort_keys=True)
        if key not in self._references:
            scene = Scene(cluster, {**changes, "resources": {"standby": False, "spares": 0}})
            try:
                scene.wait_for_end(UNDISTURBED_S)
            finally:
                scene.close()
            if scene.state != "succeeded" or len(kept_losses(scene.steps)) != scene.newest + 1:
                raise RuntimeError(f"the undisturbed run {scene.state} at step {scene.newest}")
            self._references[key] = kept_losses(scene.steps)
            scene.give_space_back()
        return self._references[key]

    def _whole_cluster(self, made: Mapping[str, Any]) -> Cluster:
        if self._cluster is not None and made != self._made:
            self._discard()
        if self._cluster is None:
            self._cluster = self._stack.enter_context(
                Cluster(HOSTS, environment=ENVIRONMENT, say=self._say, **made)
            )
            self._made = dict(made)
        return self._cluster

    def _mend(self, cluster: Cluster) -> bool:
        try:
            cluster.mend()
        except Exception as error:
            self._say(f"the cluster is given up: {error!r}")
            return False
        return True

    def _discard(self) -> None:
        self._stack.close()
        self._cluster = None

    def __enter__(self) -> Matrix:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def run_rows(
    rows: Sequence[tuple[Row, int]],
    say: Callable[[str], None],
    told: Callable[[Outcome], None],
) -> None:
    """Each row as often as its number says; ``told`` has every outcome as soon as it is there."""
    with Matrix(say) as matrix:
        for row, times in rows:
            for _ in range(times):
                began = time.monotonic()
                outcome = matrix.run(row)
                told(outcome)
                say(f"{row.name}: {outcome.in_words()}; {time.monotonic() - began:.0f} s in all")
                if outcome.skipped:
                    break


def _notes(scene: Scene, fault_at: float) -> list[str]:
    """What the job said from the fault on, with the seconds since."""

    def line(event: dict[str, Any]) -> str:
        return f"{event['time'] - fault_at:.2f} {event['kind']}: {event['message'][:300]}"

    routine = ("checkpoint_written",)
    told = [e for e in scene.events if e["time"] >= fault_at and e["kind"] not in routine]
    return [line(event) for event in told[:40]]
