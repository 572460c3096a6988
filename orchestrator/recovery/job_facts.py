"""What the stored actions of a job add up to. Pure.

Promises: a supervisor that lived through the actions and one that was handed them by the
controller hold the same facts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

from monitoring.amax import split_name
from monitoring.records import StepRecord
from orchestrator.actions import Action, History, Restorable
from orchestrator.protocol import ResumeState
from parallel.config import ExchangeDtype, Precision

REMEMBERED_STEPS = 8192
"""Steps whose batch is remembered; a rollback never skips further back than a ring reaches."""


class JobFacts:
    """Timeline, precision, ledger, learning rate, drills: what the next command builds on."""

    def __init__(self, resume: ResumeState) -> None:
        self.attempt = resume.attempt
        self.timeline = resume.timeline
        self.step = resume.step
        self.actions: list[Action] = list(resume.actions)
        self.precision: dict[str, Precision] = dict(resume.precision)
        self.ledger: tuple[int, ...] = tuple(resume.ledger)
        self.lr_scale = resume.lr_scale
        self.exchange: ExchangeDtype | None = resume.exchange
        model = resume.spec.model
        # A model of the user's own may have any loss.
        self.guessing_loss = math.inf if model.factory else math.log(model.vocab_size)
        """What gradients cross the network in; None: not decided yet."""
        self.fired_drills: set[int] = set(resume.fired_drills)
        self.fp8_layers: tuple[str, ...] = ()
        self.fixed_layers: tuple[str, ...] = ()
        """Linears that stay in BF16 by the spec; known with ``fp8_layers``."""
        self.batches: OrderedDict[int, int] = OrderedDict(resume.batches)
        """Batch of each step up to ``step``; beyond it, of the timeline before."""
        self.last_incident_step: int | None = max(
            (i.step for action in self.actions for i in action.incidents), default=None
        )
        self._runs_fp8 = resume.spec.precision == "fp8"

    def record(self, record: StepRecord) -> None:
        """Take in the newest step."""
        self.step = record.step
        self.batches[record.step] = record.batch
        self.fired_drills.update(record.drills)
        while len(self.batches) > REMEMBERED_STEPS:
            self.batches.popitem(last=False)
        if not self.fp8_layers and self._runs_fp8 and record.tensors:
            self.fp8_layers = self._switchable(record)
            fixed = set(record.high_precision_layers) - set(self.precision)
            self.fixed_layers = tuple(sorted(fixed))

    def apply(self, action: Action) -> None:
        """Take in an action that is stored."""
        self.actions.append(action)
        if action.incidents:
            seen = max(incident.step for incident in action.incidents)
            self.last_incident_step = max(seen, self.last_incident_step or 0)
        for name, precision in action.precision.items():
            if precision == "bf16":
                self.precision[name] = precision
            else:
                self.precision.pop(name, None)
        self.ledger = tuple(sorted({*self.ledger, *action.skip_batches}))
        if action.lr_scale is not None:
            self.lr_scale = action.lr_scale
        self.exchange = action.exchange or self.exchange
        if action.in_place and action.to_step is not None:
            self.timeline += 1
            self.step = action.to_step - 1

    def whole_precision(self) -> dict[str, Precision]:
        """Every switchable layer's precision: a snapshot that is restored may know another."""
        return {name: self.precision.get(name, "fp8") for name in self.fp8_layers}

    def history(self, now: float, restorable: Sequence[Restorable]) -> History:
        """What the policy may know."""
        return History(
            attempt=self.attempt,
            timeline=self.timeline,
            step=self.step,
            time=float(now),
            actions=tuple(self.actions),
            restorable=tuple(restorable),
            precision=dict(self.precision),
            fp8_layers=self.fp8_layers,
            lr_scale=self.lr_scale,
            ledger=self.ledger,
            batches=dict(self.batches),
            last_incident_step=self.last_incident_step,
            exchange=self.exchange,
            guessing_loss=self.guessing_loss,
        )

    def _switchable(self, record: StepRecord) -> tuple[str, ...]:
        """Layers with statistics, without those that the spec keeps in BF16."""
        layers: Collection[str] = dict.fromkeys(split_name(name)[0] for name in record.tensors)
        fixed = set(record.high_precision_layers) - set(self.precision)
        return tuple(name for name in layers if name not in fixed)
