"""What became of a job, in numbers: ``summary.json``, and the running totals behind it.

Promises: ``summarize`` is pure and gives strict JSON (non-finite numbers as ``"nan"`` and
``"inf"``, unknown ones as null). ``Tally`` is the same arithmetic one record at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitoring.detectors.baseline import median
from monitoring.environment import environment_of
from monitoring.exchange import mean_numbers
from monitoring.goodput import goodput
from monitoring.job_view import GOES_BACK, JobView, Row, landing, split_steps
from monitoring.records import EXCHANGE_BITS, StepRecord
from monitoring.tensor_stats import encode_float
from monitoring.utilization import mfu_pct, peaks_of


@dataclass(slots=True)
class Tally:
    """Running totals of a job; feed it records and actions as they come."""

    attempt: int = 0
    timeline: int = 0
    rollbacks: int = 0
    """Returns to an earlier step within an attempt."""
    restarts: int = 0
    steps_lost: int = 0
    """Recorded steps whose work was given up: by a rollback or a restart, to be done again, or with
    a job that failed or is paused. What a rank had begun and nobody recorded is not counted:
    nothing of it could have been kept. This is the definition; events and W&B say the same
    number."""
    steps_skipped: int = 0
    """Steps whose update was left out."""
    recover_times_s: list[float] = field(default_factory=list)
    """Of each return: from the incident to the first step done after it."""
    high_precision_layers: tuple[str, ...] = ()
    _kept: list[tuple[int, float]] = field(default_factory=list)
    _useful_s: float = 0.0
    _begun: float | None = None
    _now: float = 0.0
    _pending: list[tuple[tuple[int, int], float]] = field(default_factory=list)

    def add_action(self, action: Row) -> None:
        """Take in a decision, before the records that follow it."""
        if action.get("to_step") is not None:
            # Now, for the job may end, or rest, before it has done them again.
            self._give_up(int(action["to_step"]))
        if action["kind"] not in GOES_BACK:
            return
        if action["kind"] == "restart" or not action.get("in_place", True):
            self.restarts += 1
        else:
            self.rollbacks += 1
        mark = (int(action["attempt"]), int(action["timeline"]))
        self._pending.append((mark, _began(action)))

    def add_step(self, record: StepRecord) -> None:
        """Take in a record; one that goes back undoes what it replaces."""
        self._give_up(record.step)
        self._kept.append((record.step, record.step_time_s))
        self._useful_s += record.step_time_s
        self.attempt, self.timeline = record.attempt, record.timeline
        self.steps_skipped += record.skipped
        self.high_precision_layers = record.high_precision_layers
        if self._begun is None:
            self._begun = record.time - record.step_time_s
        self._now = record.time
        mark = (record.attempt, record.timeline)
        answered = [began for before, began in self._pending if before < mark]
        if answered:
            self.recover_times_s.append(max(0.0, record.time - min(answered)))
            self._pending = [entry for entry in self._pending if entry[0] >= mark]

    def _give_up(self, step: int) -> None:
        """What was kept from ``step`` on is lost."""
        while self._kept and self._kept[-1][0] >= step:
            self._useful_s -= self._kept.pop()[1]
            self.steps_lost += 1

    @property
    def time_to_recover_s(self) -> float | None:
        """The slowest recovery's; None when there was none."""
        return max(self.recover_times_s, default=None)

    @property
    def ettr(self) -> float | None:
        """Share of the time since the first step that went into steps which were kept."""
        if self._begun is None or self._now <= self._begun:
            return None
        return max(0.0, min(1.0, self._useful_s / (self._now - self._begun)))


def _began(action: Row) -> float:
    """When the trouble that an action answers was seen."""
    times = [float(incident["time"]) for incident in action.get("incidents", ())]
    return min([*times, float(action["time"])])


def tally(view: JobView) -> Tally:
    """The totals of a whole view; actions are taken in before the records that follow them."""
    totals = Tally()
    waiting = sorted(view.actions, key=lambda a: (int(a["attempt"]), int(a["timeline"])))
    for record in view.steps:
        mark = (record.attempt, record.timeline)
        while waiting and (int(waiting[0]["attempt"]), int(waiting[0]["timeline"])) < mark:
            totals.add_action(waiting.pop(0))
        totals.add_step(record)
    for action in waiting:
        totals.add_action(action)
    return totals


def summarize(view: JobView) -> dict[str, Any]:
    """The contents of ``summary.json``. Times in seconds, losses in nats a token."""
    kept, _ = split_steps(view)
    totals = tally(view)
    steps = kept[-1].step + 1 if kept else 0
    attempts = max((r.attempt for r in view.steps), default=0)
    step_time = median([r.step_time_s for r in kept]) if kept else None
    tokens = median([r.tokens / r.step_time_s for r in kept if r.step_time_s > 0] or [0.0])
    final = next((r.loss for r in reversed(kept) if not r.skipped), None)
    return {
        "job": view.job,
        "state": view.state,
        "steps": steps,
        "steps_planned": view.section("training", "steps"),
        "final_loss": _json(final),
        "incidents": [_short_incident(row) for row in view.incidents],
        "actions": [_short_action(view, row) for row in view.actions],
        "steps_lost": totals.steps_lost,
        "steps_skipped": totals.steps_skipped,
        "batches_skipped": sorted(
            {b for row in view.actions for b in row.get("skip_batches") or ()}
        ),
        "time_to_recover_s": _json(totals.time_to_recover_s),
        "step_time_s": _json(step_time),
        "tokens_per_s": _json(tokens) if kept else None,
        "mfu_pct": _json(_mfu(view, kept)),
        "ettr": _json(totals.ettr),
        "goodput": goodput(view).to_json(),
        "attempts": attempts,
        "rollbacks": totals.rollbacks,
        # A job that was resumed has had an attempt more, without an action of the policy.
        "restarts": max(totals.restarts, attempts - 1),
        "high_precision_layers": list(totals.high_precision_layers),
        "gradient_exchange": _exchange(kept),
        # Of a step, on average.
        "comm": {
            name: _json(number) for name, number in mean_numbers([r.comm for r in kept]).items()
        },
        **_checkpoints(view),
        "environment": dict(environment_of(view)),
    }


def _mfu(view: JobView, kept: Sequence[StepRecord]) -> float | None:
    """The median of the kept steps; None where nobody knows what the devices could."""
    peaks = peaks_of(view)
    found = [mfu_pct(record, peaks.get(record.attempt)) for record in kept]
    known = [value for value in found if value is not None]
    return median(known) if known else None


def _checkpoints(view: JobView) -> dict[str, Any]:
    """The newest checkpoint's step, and the steps whose checkpoint could not be written."""
    written, failed = set(), set()
    for event in view.events:
        kind, detail = event["kind"], event.get("detail") or {}
        if kind == "checkpoint_written":
            written.add(detail["step"])
        elif kind == "checkpoint_failed" or (
            kind == "copy_failed" and detail.get("tier") == "disk"
        ):
            failed.add(detail["step"])
    return {
        "checkpoint_step": max(written, default=None),
        "checkpoints_failed": sorted(failed - written),
    }


def _exchange(kept: Sequence[StepRecord]) -> str | None:
    """What gradients crossed the network in, in the last step; None where nothing did."""
    comm = kept[-1].comm if kept else {}
    return EXCHANGE_BITS.get(int(comm.get("wire_bits", 0))) if comm.get("bytes") else None


def _json(value: float | None) -> float | str | None:
    return None if value is None else encode_float(float(value))


def _short_incident(row: Row) -> dict[str, Any]:
    keys = ("kind", "detector", "attempt", "timeline", "step", "onset_step", "time", "message")
    short = {key: row.get(key) for key in keys}
    short["suspects"] = [suspect["layer"] for suspect in row.get("suspects", ())]
    short["ranks"] = list(row.get("ranks", ()))
    return short


def _short_action(view: JobView, row: Row) -> dict[str, Any]:
    """The action; of a restart, ``to_step`` is where the next attempt really started."""
    keys = ("kind", "attempt", "timeline", "step", "time", "reason", "to_step", "lr_scale")
    short: dict[str, Any] = {key: row.get(key) for key in (*keys, "exchange")}
    found = landing(view, row)
    short["to_step"] = found.step if found else row.get("to_step")
    short["tier"] = found.tier if found else None
    precision: Mapping[str, str] = row.get("precision", {})
    short["precision"] = dict(precision)
    short["skip_batches"] = list(row.get("skip_batches", ()))
    asked: Mapping[str, str] = row.get("asked") or {}
    short["asked_by"] = asked.get("by")
    short["passed_over"] = [dict(p) for p in row.get("passed_over", ())]
    return short
