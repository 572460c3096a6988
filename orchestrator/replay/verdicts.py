"""How the decisions of a replay compare with those that a job has stored. Pure.

Promises: a decision is told with both its sides, the stored and the replayed one, and with the
fields that differ; those that say what is done (``DEEDS``) are told apart from those that say why
and when; of several at one place, those of a kind are compared with each other.

``ASSUMPTION`` says what holds after the first decision that differs in deeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from monitoring.records import Incident
from orchestrator.actions import Action

ASSUMPTION = (
    "From here on the records are of a course that this policy would not have taken. They are "
    "read on as they are: at every step the model's state, its precision, skip ledger, learning "
    "rate and snapshots are the recorded ones; budgets, recurrence and calm count what this "
    "policy would have done."
)

DEEDS = (
    "kind",
    "to_step",
    "in_place",
    "skip_batches",
    "precision",
    "lr_scale",
    "exchange",
)
"""Fields of an action that say what is done; the others say why, and when."""


class Verdict(StrEnum):
    """How a decision compares with the stored one at the same place."""

    SAME = "same"
    CHANGED = "changed"
    NEW = "new"
    MISSING = "missing"
    GIVEN = "given"
    """No policy decides it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One decision, stored or replayed or both."""

    attempt: int
    timeline: int
    step: int
    verdict: Verdict
    stored: Action | None
    replayed: Action | None
    differing: tuple[str, ...] = ()
    """Fields of the two actions that differ."""
    assumed: bool = False
    """``ASSUMPTION`` is in force: a decision before this one differs in deeds."""

    @property
    def deeds_differ(self) -> bool:
        """Whether training would have gone on otherwise."""
        new_or_missing = self.verdict in (Verdict.NEW, Verdict.MISSING)
        return new_or_missing or bool(set(self.differing) & set(DEEDS))

    def to_json(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "timeline": self.timeline,
            "step": self.step,
            "verdict": self.verdict.value,
            "differing": list(self.differing),
            "assumed": self.assumed,
            "stored": None if self.stored is None else self.stored.to_json(),
            "replayed": None if self.replayed is None else self.replayed.to_json(),
        }


@dataclass(slots=True)
class Stretch:
    """Steps of one timeline in one attempt, and what was decided among them."""

    attempt: int
    timeline: int
    first: int | None = None
    """None: no step was recorded."""
    last: int | None = None
    again: int | None = None
    """Last of its steps that an earlier stretch has recorded too."""
    decisions: list[Judged] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "timeline": self.timeline,
            "first": self.first,
            "last": self.last,
            "again": self.again,
            "decisions": [judged.to_json() for judged in self.decisions],
        }


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found."""

    job: str
    records: int
    stretches: tuple[Stretch, ...]
    unanswered: tuple[Incident, ...]
    """Incidents that are stored and that no stored action answers."""
    goes_on: bool
    """``JobTrace.goes_on``."""
    not_kept: tuple[str, ...]
    decided_by: tuple[str, ...]
    """``JobTrace.decided_by``."""

    @property
    def decisions(self) -> tuple[Judged, ...]:
        """All of them, in order."""
        return tuple(judged for stretch in self.stretches for judged in stretch.decisions)

    @property
    def exact(self) -> bool:
        """Whether the records came out as they are stored, words included."""
        alike = (Verdict.SAME, Verdict.GIVEN)
        return not self.unanswered and all(
            judged.verdict in alike and not judged.differing for judged in self.decisions
        )

    @property
    def departs(self) -> bool:
        """Whether training would have gone another way."""
        return any(judged.deeds_differ for judged in self.decisions)


def paired(
    stored: Sequence[Action], replayed: Sequence[Action]
) -> list[tuple[Action | None, Action | None]]:
    """What is stored with what would be done at the same place, those of a kind with each other
    first."""
    left = list(stored)
    pairs: list[tuple[Action | None, Action | None]] = []
    for action in replayed:
        match = next((s for s in left if s.kind == action.kind), left[0] if left else None)
        if match is not None:
            left.remove(match)
        pairs.append((match, action))
    return pairs + [(action, None) for action in left]


def judge(
    stored: Action | None,
    replayed: Action | None,
    place: tuple[int, int, int],
    *,
    given: bool,
    strict: bool,
    assumed: bool,
) -> Judged:
    """One pair, at attempt, timeline and step; ``given``: no policy decides it, ``strict``: other
    words are a change too."""
    differing: tuple[str, ...] = ()
    if given:
        verdict = Verdict.GIVEN
    elif stored is None:
        verdict = Verdict.NEW
    elif replayed is None:
        verdict = Verdict.MISSING
    else:
        differing = differences(stored, replayed)
        counted = differing if strict else set(differing) & set(DEEDS)
        verdict = Verdict.CHANGED if counted else Verdict.SAME
    return Judged(*place, verdict, stored, replayed, differing, assumed)


def differences(stored: Action, replayed: Action) -> tuple[str, ...]:
    """Names of the fields that differ; NaN is equal to itself, and a mapping has no order."""
    old, new = stored.to_json(), replayed.to_json()
    return tuple(
        name
        for name in old
        if json.dumps(old[name], sort_keys=True) != json.dumps(new[name], sort_keys=True)
    )
