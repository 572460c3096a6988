"""All detectors of a job as one, with settling windows, one report a trouble, and rewind.

Promises:
- The state is a function of the records alone (and of ``hold``/``settle`` calls), so that a
  replay decides the same. ``rewind(step)`` brings back the state from before that step.
- A record of an older attempt or timeline is refused; one that goes back to an earlier step
  rewinds by itself, whether or not ``rewind`` was called.
- Several detectors at one step give one list. While a trouble is in hand nothing is
  reported twice: until ``rewind``, ``settle``, or ``settle_steps`` later, whichever is first.
  An early trouble (``EARLY``) holds back its like only.

- Incidents of detectors that see no tensors name the layers that had moved before the loss did.

Settling: for ``settle_steps`` steps after a start, a rewind, a change of precision or of the batch
size or a jump of the learning rate, spikes are not reported (the loss moves for good reasons
then); non-finite steps, heavy saturation, frozen scales and replicas that differ always are. The
windows are found from the records themselves.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monitoring.amax import TensorScaling
from monitoring.config import DetectionConfig
from monitoring.detectors.base import Detector, build_detectors
from monitoring.records import Incident, IncidentKind, StepRecord, Suspect

PAST_STEPS = 256
"""Steps back that a rewind can be exact."""
SAVED_PAST_STATES = 8
"""Past states in ``state_dict`` at most, the newest at multiples of ``save_every``."""


IN_STRIDE: frozenset[IncidentKind] = frozenset({"nonfinite", "exchange_error"})
"""Incidents that are answered without a way back, and each is another."""
EARLY: frozenset[IncidentKind] = frozenset({"projected_overflow", "underflow", "frozen_scale"})
"""Incidents of a state that is still good; while one is in hand, worse ones are reported."""
BLIND: frozenset[IncidentKind] = frozenset({"loss_spike", "slow_divergence", "grad_norm_spike"})
"""Incidents of detectors that see no tensors."""


@dataclass(frozen=True, slots=True)
class BankState:
    """State before the record of ``next_step``."""

    detectors: tuple[Any, ...]
    attempt: int = 0
    timeline: int = 0
    next_step: int | None = None
    """Step after the newest record; None before the first."""
    settle_until: int = 0
    """First step that is past the settling window."""
    hold_until: int | None = None
    """First step past the hold; None: no trouble in hand."""
    early_until: int | None = None
    """The same of early troubles."""
    high_precision: tuple[str, ...] = ()
    lr: float = 0.0
    """Of the newest record; 0 before the first."""
    tokens: int = 0
    """Of the newest record."""


def _pack(row: Mapping[str, Any]) -> str:
    """JSON, deflated, in base64: past states are many and much alike."""
    text = json.dumps(row, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 3)).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


class DetectorBank:
    """Feeds records to the detectors and answers with what is worth acting on."""

    def __init__(
        self,
        config: DetectionConfig,
        detectors: Sequence[Detector[Any]] | None = None,
        *,
        scaling: TensorScaling | None = None,
        guessing_loss: float | None = None,
        save_every: int = 10,
    ) -> None:
        """``detectors``: unset, one of each registered, for a job of ``scaling`` whose loss is
        ``guessing_loss`` where it knows nothing (unset: nobody knows).
        ``save_every``: the steps whose past states are saved, to be set to the snapshots'
        interval."""
        self.config = config
        if detectors is None:
            detectors = build_detectors(config, scaling, guessing_loss)
        self.detectors = list(detectors)
        self.save_every = max(1, save_every)
        self._state = self._initial()
        self._past: deque[tuple[int, BankState]] = deque(maxlen=PAST_STEPS)
        self._packed: dict[int, tuple[BankState, str]] = {}

    def observe(self, record: StepRecord) -> list[Incident]:
        """What is new and wrong in this record; [] for one of a replaced attempt or timeline."""
        state = self._state
        if (record.attempt, record.timeline) < (state.attempt, state.timeline):
            return []
        if state.next_step is not None and record.step < state.next_step:
            self.rewind(record.step)
            state = self._state
        state = self._enter(state, record)
        while self._past and self._past[-1][0] >= record.step:
            self._past.pop()
        self._past.append((record.step, state))

        states: list[Any] = []
        incidents: list[Incident] = []
        settling = record.step < state.settle_until
        for detector, own in zip(self.detectors, state.detectors, strict=True):
            following, found = detector.observe(own, record)
            states.append(following)
            incidents += [
                incident
                for incident in found
                if not settling or detector.counts_while_settling(incident)
            ]
        incidents = [self._told_where(incident, states) for incident in incidents]
        hold, early = state.hold_until, state.early_until
        if hold is not None:
            incidents = []
        if early is not None:
            incidents = [incident for incident in incidents if incident.kind not in EARLY]
        # What is dealt with as it is seen holds nothing back: the next one is new.
        lasting = {incident.kind for incident in incidents} - IN_STRIDE
        if lasting - EARLY:
            hold = record.step + self.config.settle_steps
        if lasting & EARLY:
            early = record.step + self.config.settle_steps
        self._state = replace(
            state,
            detectors=tuple(states),
            next_step=record.step + 1,
            hold_until=hold,
            early_until=early,
        )
        return incidents

    def _told_where(self, incident: Incident, states: Sequence[Any]) -> Incident:
        """The incident with the layers that moved before it began, if it knows none itself.

        What moved in the same step may be cause or effect: of a bad batch every tensor shows.
        """
        if incident.kind not in BLIND or incident.suspects:
            return incident
        moved: tuple[Suspect, ...] = ()
        for detector, own in zip(self.detectors, states, strict=True):
            moved = moved or detector.moved_before(own, incident.onset_step)
        return replace(incident, suspects=moved) if moved else incident

    def rewind(self, step: int, *, timeline: int | None = None) -> int:
        """Go back to the state from before ``step`` and settle from there; safe to repeat.

        ``timeline``: the one that starts with it; records of older ones that are still on
        their way are then refused. Unset, they are taken until a newer one arrives.

        Returns the step whose state was found: ``step`` itself, or the newest older one that
        is still kept (the baselines then lack what lay between). With none older the
        detectors start anew, and it returns ``step``.
        """
        newest = self._state
        while self._past and self._past[-1][0] > step:
            self._past.pop()
        if newest.next_step is not None and newest.next_step <= step:
            found, state = step, newest
        elif self._past:
            found, state = self._past[-1]
        else:
            found, state = step, self._initial()
        self._state = replace(
            state,
            attempt=newest.attempt,
            timeline=newest.timeline if timeline is None else timeline,
            next_step=step,
            hold_until=None,
            early_until=None,
            settle_until=step + self.config.settle_steps,
        )
        return found

    def renew(self, step: int) -> None:
        """Learn anew from ``step`` on: what was usual is not what comes. Facts are kept."""
        self._state = replace(
            self._anew(self._state),
            next_step=step,
            settle_until=step + self.config.settle_steps,
            hold_until=None,
            early_until=None,
        )
        past = [(at, self._anew(state)) for at, state in self._past]
        self._past.clear()
        self._past.extend(past)

    def settle(self, step: int) -> None:
        """Open a settling window at ``step`` and end a hold: the trouble is dealt with."""
        self._state = replace(
            self._state,
            settle_until=step + self.config.settle_steps,
            hold_until=None,
            early_until=None,
        )

    def hold(self, step: int) -> None:
        """Report nothing before ``step``, unless ``rewind`` or ``settle`` comes first."""
        self._state = replace(self._state, hold_until=step)

    def state_dict(self) -> dict[str, Any]:
        """Strict JSON of the present state and of some past ones (see ``save_every``)."""
        saved = [(s, p) for s, p in self._past if s % self.save_every == 0][-SAVED_PAST_STATES:]
        # Past states never change: each is packed once, not at every report.
        packed = {
            s: cached
            if (cached := self._packed.get(s)) is not None and cached[0] is p
            else (p, _pack(self._dump(p)))
            for s, p in saved
        }
        self._packed = packed
        return {
            "version": 1,
            "detectors": [detector.name for detector in self.detectors],
            "now": self._dump(self._state),
            "past": [[s, text] for s, (_, text) in packed.items()],
        }

    def load_state_dict(self, row: Mapping[str, Any]) -> None:
        """Take on a saved state. A detector that is new since then starts from nothing."""
        names = list(row["detectors"])
        self._state = self._load(row["now"], names)
        self._past.clear()
        self._past.extend((int(s), self._load(_unpack(p), names)) for s, p in row["past"])

    def _initial(self) -> BankState:
        return BankState(tuple(detector.initial() for detector in self.detectors))

    def _anew(self, state: BankState) -> BankState:
        """The state with no statistics; what is known of facts stays."""
        own = zip(self.detectors, state.detectors, strict=True)
        return replace(state, detectors=tuple(s if d.of_facts else d.initial() for d, s in own))

    def _enter(self, state: BankState, record: StepRecord) -> BankState:
        """The state with the record's attempt, timeline and precision, windows opened."""
        started = state.next_step is None or record.attempt != state.attempt
        moved = state.next_step is not None and (
            record.timeline != state.timeline
            or record.high_precision_layers != state.high_precision
            or self._jumps(state.lr, record.lr)
            or record.tokens != state.tokens
        )
        settle_until = state.settle_until
        if started or moved:
            settle_until = max(settle_until, record.step + self.config.settle_steps)
        if state.tokens not in (0, record.tokens):
            # Noise and gradients of another batch size are others.
            state = self._anew(state)
        hold = state.hold_until
        if hold is not None and record.step >= hold:
            hold = None
        early = state.early_until
        if early is not None and record.step >= early:
            early = None
        return replace(
            state,
            attempt=record.attempt,
            timeline=record.timeline,
            high_precision=record.high_precision_layers,
            lr=record.lr if math.isfinite(record.lr) else state.lr,
            tokens=record.tokens,
            settle_until=settle_until,
            hold_until=hold,
            early_until=early,
        )

    def _jumps(self, before: float, lr: float) -> bool:
        if not (before > 0.0 and math.isfinite(lr) and lr > 0.0):
            return False
        return max(lr / before, before / lr) > self.config.lr_jump

    def _dump(self, state: BankState) -> dict[str, Any]:
        own = [d.dump(s) for d, s in zip(self.detectors, state.detectors, strict=True)]
        return {
            "detectors": own,
            "attempt": state.attempt,
            "timeline": state.timeline,
            "next_step": state.next_step,
            "settle_until": state.settle_until,
            "hold_until": state.hold_until,
            "early_until": state.early_until,
            "high_precision": list(state.high_precision),
            "lr": state.lr,
            "tokens": state.tokens,
        }

    def _load(self, row: Mapping[str, Any], names: Sequence[str]) -> BankState:
        saved = dict(zip(names, row["detectors"], strict=True))
        values = {k: v for k, v in row.items() if k not in ("detectors", "high_precision")}
        return BankState(
            detectors=tuple(
                d.load(saved[d.name]) if d.name in saved else d.initial() for d in self.detectors
            ),
            high_precision=tuple(row["high_precision"]),
            **values,
        )
