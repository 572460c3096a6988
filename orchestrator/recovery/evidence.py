"""What the rungs of the recovery ladder read from incidents and history. Pure.

Promises: everything is counted from stored actions and records; nothing here decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from monitoring.records import Incident, IncidentKind, Suspect
from orchestrator.actions import Action, ActionKind, History, Restorable
from orchestrator.recovery.fresh_start import since_fresh_start
from orchestrator.recovery.restart_budget import is_outside, is_restart, restarts_spent
from orchestrator.spec.config import RecoveryConfig

LOST_RANK: frozenset[IncidentKind] = frozenset(
    {"rank_died", "rank_hung", "slow_rank", "supervisor_lost", "preflight_failed"}
)
"""Ranks are gone, or all of them with their supervisor, or never began, or their node is to be
replaced: only another attempt helps."""
DIVERGENCE: frozenset[IncidentKind] = frozenset(
    {"nonfinite", "loss_spike", "slow_divergence", "grad_norm_spike"}
)
EXCHANGE: frozenset[IncidentKind] = frozenset({"exchange_error"})
"""Training is sound, its gradients are only rounded coarsely on the way."""
SATURATION: frozenset[IncidentKind] = frozenset({"amax_saturation", "amax_surge"})
EARLY: frozenset[IncidentKind] = frozenset({"projected_overflow", "underflow", "frozen_scale"})
"""FP8 fits a layer badly, or soon will; the state that training is in is still good."""
LEAPS: frozenset[IncidentKind] = frozenset({"loss_spike", "grad_norm_spike"})
"""What one bad batch shows as."""
LEAP_STEPS = 3
"""Steps within which leaps are taken to begin at the same: a new domain's first batches may be
easy."""
PLATEAU_STEPS = 16
"""The same of plateaus, whose beginning is known to half an average's length."""
SAME_HEIGHT = 1.5
"""Ratio of losses up to which they are taken to be as high: batches of a new domain differ."""
WORST_DATA = 1.5
"""Times the loss of guessing that data may cost a good state: one that is sure of the other."""
SKIPPING: tuple[ActionKind, ...] = ("rollback",)
"""Answers that leave batches out, and nothing else."""
CORRUPTION: frozenset[IncidentKind] = frozenset({"replica_disagreement"})
"""What a rank holds is not what was computed; no remedy of training cures that."""


def count(history: History, kind: ActionKind, within: int | None = None) -> int:
    """Actions of that kind that the policy took in the newest ``within`` steps, or in the job's
    life; what came before a person resumed it is another life (``recovery.fresh_start``)."""
    return sum(
        action.kind == kind
        and action.asked is None
        and (within is None or history.step - action.step < within)
        for action in since_fresh_start(history.actions)
    )


def kept_by_hand(history: History) -> set[str]:
    """Layers that a person put into BF16, and nobody has moved since: the policy leaves them."""
    newest = {name: (p, a.asked) for a in history.actions for name, p in a.precision.items()}
    return {name for name, (p, asked) in newest.items() if p == "bf16" and asked is not None}


def raised_again(incidents: Sequence[Incident], history: History) -> bool:
    """Whether the ranks raised an error, as they did at the restart before, with no step since.

    The supervisor marks such an incident with ``raised`` in its evidence; a process that
    was killed has no such mark, and is worth another try. So is what lies outside of the job.
    """
    if not any(incident.evidence.get("raised") for incident in incidents) or is_outside(incidents):
        return False
    before = history.actions[-1] if history.actions else None
    return (
        before is not None
        and is_restart(before)
        and before.step == history.step
        and any(incident.evidence.get("raised") for incident in before.incidents)
        and not is_outside(before.incidents)
    )


def troubles(incidents: Iterable[Incident]) -> set[str]:
    """The troubles that the incidents are symptoms of."""
    names = {"divergence": DIVERGENCE, "saturation": SATURATION, "corruption": CORRUPTION}
    kinds = {incident.kind for incident in incidents}
    return {name for name, symptoms in names.items() if kinds & symptoms}


def earlier_answer(
    incidents: Sequence[Incident], history: History, policy: RecoveryConfig
) -> Action | None:
    """The newest rollback, of any rung, that answered the same trouble within the horizon.

    Step numbers go back with a rollback: an incident at a lower number than the action
    lies in its replay and is a recurrence too. A leap that was accepted was no trouble. Of a
    bad batch that was skipped nothing is left, so that a leap is another trouble much sooner.
    """
    for action in reversed(since_fresh_start(history.actions)):
        if action.kind == "accept":
            return None
        if action.kind not in ("rollback", "layer_fallback", "whole_bf16", "lower_lr"):
            continue
        leaps = is_leap(incidents) and is_leap(action.incidents)
        reach = min(policy.batch_horizon, policy.horizon) if leaps else policy.horizon
        if history.step - action.step > reach:
            continue
        if troubles(action.incidents) & troubles(incidents):
            return action
    return None


def answers_in_a_row(
    incidents: Sequence[Incident],
    history: History,
    policy: RecoveryConfig,
    kinds: Collection[ActionKind],
) -> tuple[Action, ...]:
    """The answers of those kinds to the same trouble, each within the horizon of the one after it;
    newest first. An answer of another kind ends the row."""
    row: list[Action] = []
    before = history
    while (earlier := earlier_answer(incidents, before, policy)) and earlier.kind in kinds:
        row.append(earlier)
        at = next(i for i, action in enumerate(before.actions) if action is earlier)
        before = replace(before, actions=before.actions[:at], step=earlier.step)
    return tuple(row)


def is_leap(incidents: Sequence[Incident]) -> bool:
    """Whether a bad batch could be all there is: a leap of loss or gradients, with what it
    saturates. A slow divergence, or steps that stay non-finite, are a state that other batches
    don't cure."""
    kinds = {incident.kind for incident in incidents}
    return bool(kinds & LEAPS) and kinds <= LEAPS | SATURATION


def is_plateau(incidents: Sequence[Incident]) -> bool:
    """Whether the loss stays above the best of late; a rise, or a drift away from the lowest it
    ever was, is none."""
    return all(i.kind == "slow_divergence" and "best" in i.evidence for i in incidents)


@dataclass(frozen=True, slots=True)
class OtherData:
    """A leap that came with whatever was tried."""

    height: float
    """Highest loss."""
    tries: int
    """Stretches of batches that led to it."""


def other_data(
    incidents: Sequence[Incident], history: History, policy: RecoveryConfig
) -> OtherData | str:
    """What the incidents are if the data has become another; else why they aren't."""
    row = answers_in_a_row(incidents, history, policy, (*SKIPPING, "whole_bf16"))
    tries = 1 if is_plateau(incidents) else policy.max_consecutive_rollbacks
    if fp8_now(history) or len(row) < tries:
        return "other batches, and BF16, were not tried for it yet"
    height = same_level(incidents, row)
    if height is None:
        return "it was not the same leap of the loss each time"
    if height > WORST_DATA * history.guessing_loss:
        guessed = f"{WORST_DATA:g} times that of guessing ({history.guessing_loss:.3g} nats)"
        return f"a loss of {height:.3g} is more than {guessed}"
    return OtherData(height, len(row) + 1)


def same_level(incidents: Sequence[Incident], row: Sequence[Action]) -> float | None:
    """How high the loss went each time, if it was at the same step and to the same height; else
    None.

    That is what other data looks like, whose first batch any state meets at the same step. A
    state that goes bad does so sooner or later, as its batches are.
    """
    each = [tuple(incidents), *(action.incidents for action in row)]
    if all(map(is_leap, each)):
        apart = LEAP_STEPS
    elif all(map(is_plateau, each)):
        apart = PLATEAU_STEPS
    else:
        return None
    onsets = [min(incident.onset_step for incident in found) for found in each]
    if max(onsets) - min(onsets) > apart:
        return None
    losses = [[i.evidence["loss"] for i in found if "loss" in i.evidence] for found in each]
    if not all(losses):
        return None
    lowest, highest = min(map(max, losses)), max(map(max, losses))
    return highest if highest <= SAME_HEIGHT * lowest else None


def skips_in_a_row(step: int, history: History) -> tuple[Action, ...]:
    """The skip_step actions of the steps right before ``step``, newest first.

    Incidents are decided in order of steps, so the newest actions are the ones to look
    at; a way back in between (a rollback, a restart) begins a new row.
    """
    row: list[Action] = []
    for action in reversed(history.actions):
        if action.asked is not None and action.to_step is None:
            continue  # what a person changes does not undo what the steps showed
        if action.kind != "skip_step" or action.incidents[0].step != step - len(row) - 1:
            break
        row.append(action)
    return tuple(row)


def onset(incidents: Sequence[Incident], history: History) -> int:
    """First step taken to be touched, a row of non-finite steps counted from its first."""
    first = min(incident.onset_step for incident in incidents)
    if any(incident.kind == "nonfinite" for incident in incidents):
        step = min(i.step for i in incidents if i.kind == "nonfinite")
        for action in skips_in_a_row(step, history):
            first = min(first, *(incident.onset_step for incident in action.incidents))
    return max(first, 0)


def fp8_suspects(
    incidents: Sequence[Incident], history: History, policy: RecoveryConfig
) -> tuple[str, ...]:
    """Suspect layers that compute in FP8 now, most suspect first, at most ``max_suspects``.

    The detectors name the most suspect layer first; saturation speaks before the others. What
    was corrupted is no fault of its layer's precision; nor is a gradient that moved no earlier
    than the loss did, which is computed before any gradient of its step.
    """
    telling = [incident for incident in incidents if incident.kind not in CORRUPTION]
    ordered = sorted(telling, key=lambda incident: incident.kind not in SATURATION)
    loss_moved = min((i.onset_step for i in telling if i.kind == "loss_spike"), default=math.inf)
    names = dict.fromkeys(
        suspect.layer
        for incident in ordered
        for suspect in incident.suspects
        if suspect.tensor != "grad_output" or _since(suspect, incident) < loss_moved
    )
    running = set(fp8_now(history))
    return tuple(name for name in names if name in running)[: policy.max_suspects]


def _since(suspect: Suspect, incident: Incident) -> float:
    """First step in which the suspect's tensor had moved."""
    return suspect.evidence.get("since_step", incident.onset_step)


def fp8_now(history: History) -> tuple[str, ...]:
    """Layers that compute in FP8 at present."""
    return tuple(name for name in history.fp8_layers if history.precision.get(name) != "bf16")


# Where to go back to.


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a rollback lands, and the batches it leaves out."""

    to_step: int
    in_place: bool
    skip_batches: tuple[int, ...]
    words: str
    """How it is told: ``go back to …``."""


def landing(
    incidents: Sequence[Incident],
    history: History,
    policy: RecoveryConfig,
    row: Sequence[Action] = (),
) -> Landing | str:
    """Newest certified snapshot at or before the onset, else the newest one there.

    Without any, an attempt from a checkpoint or the seed is the way back, while restarts
    are left; a string says that they are spent. The batches left out are those of the
    steps from the onset to the newest recorded one: the steps between the landing and
    the onset were healthy and are replayed with the batches they had. ``row``: rollbacks that
    skipped batches before; where these follow close, as many more are left out as
    ``further_batches`` says.
    """
    first = onset(incidents, history)
    skip = touched_batches(first, history)
    skip += further_batches(skip, history, row)
    skipping = f" and skip {spans(skip, 'batch', 'batches')}" if skip else ""
    found = snapshot_before(first, history.restorable)
    if found is not None:
        quality = (
            f"the certified snapshot of step {found.step}"
            if found.certified
            else f"the snapshot of step {found.step} (not certified: no certified one at or "
            f"before step {first} is left)"
        )
        return Landing(found.step, True, skip, f"go back to {quality}{skipping}")
    if why := restarts_spent(history, policy):
        return f"no snapshot at or before step {first} is in memory, and {why}"
    words = f"restart from the newest checkpoint at or before step {first}{skipping}"
    return Landing(first, False, skip, words)


def touched_batches(first: int, history: History) -> tuple[int, ...]:
    """Batches of the steps from ``first`` to the newest, as far as they are known."""
    return tuple(
        history.batches[step]
        for step in range(first, history.step + 1)
        if step in history.batches and history.batches[step] not in history.ledger
    )


def further_batches(
    touched: Sequence[int], history: History, row: Sequence[Action]
) -> tuple[int, ...]:
    """Batches after the touched ones that are left out too, for bad ones come in stretches.

    None the first time, then 2, 4, …: as long as no more than that lie between what was skipped
    before and what is bad now.
    """
    skipped = [batch for action in row[:1] for batch in action.skip_batches]
    if not touched or not skipped:
        return ()
    more = 1 << len(row)
    if min(touched) - max(skipped) - 1 > more:
        return ()
    after = itertools.count(max(touched) + 1)
    return tuple(itertools.islice((b for b in after if b not in history.ledger), more))


def snapshot_before(step: int, restorable: Iterable[Restorable]) -> Restorable | None:
    """Newest certified snapshot at or before ``step``, else the newest one there."""
    usable = [snapshot for snapshot in restorable if snapshot.step <= step]
    certified = [snapshot for snapshot in usable if snapshot.certified]
    return max(certified or usable, key=lambda snapshot: snapshot.step, default=None)


def spans(numbers: Sequence[int], one: str, many: str) -> str:
    """``batches 4-7, 9``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
    return f"{one if len(numbers) == 1 else many} {told}"


def cause(incidents: Sequence[Incident]) -> str:
    """What the incidents say, once each."""
    return "; ".join(dict.fromkeys(incident.message.rstrip(".") for incident in incidents))


def repaired_within(history: History, policy: RecoveryConfig) -> Action | None:
    """The restart that answered a corruption within the horizon before this one."""
    return next(
        (
            action
            for action in reversed(since_fresh_start(history.actions))
            if is_restart(action)
            and any(incident.kind in CORRUPTION for incident in action.incidents)
            and history.step - action.step <= policy.horizon
        ),
        None,
    )
