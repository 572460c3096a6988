"""What a supervisor says of a job, in words. Pure: values in, notices out.

Promises: every notice is one sentence for a person, with the numbers beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.commands import (
    CopyFailed,
    DrillReport,
    RestoredOlder,
    RestorePoint,
    RingReport,
)
from monitoring.records import Incident
from monitoring.wording import counted
from orchestrator.actions import Action
from orchestrator.events import Notice
from orchestrator.recovery.evidence import spans
from orchestrator.recovery.fresh_start import gave_up
from orchestrator.recovery.way_back import WayBack
from orchestrator.saved.resume_from import FOREIGN_ATTEMPT
from orchestrator.supervision.attempt_state import AttemptState
from orchestrator.supervision.copy_troubles import CopyTrouble
from orchestrator.supervision.stop_time import StopTime
from parallel.precision.choice import BackendChoice

MOST_ERRORS = 3
"""That an event tells of many ranks."""
STOPPING = "stopping"
"""The kind of event that says how long the ranks have to stop."""


def attempt_started(
    attempt: int,
    ranks: int,
    restore: RestorePoint | None,
    backend: BackendChoice,
    environment: Mapping[str, str],
) -> Notice:
    """The ranks are given out; ``backend`` is what is known of it beforehand, ``environment``
    what ``monitoring.environment`` knows of the supervisor's."""
    start = restore.step if restore else 0
    source = {"memory": "a copy in memory", "disk": "a checkpoint"}
    told = f"from {source[restore.tier]}" if restore else "from the seed"
    return Notice(
        "attempt_started",
        f"Attempt {attempt} starts {counted(ranks, 'rank')} at step {start}, {told}. "
        f"Linears: {backend}.",
        {
            "attempt": attempt,
            "ranks": ranks,
            "step": start,
            "tier": restore.tier if restore else "seed",
            **backend_detail(backend),
            "environment": dict(environment),
        },
    )


def past_unread(why: str) -> Notice:
    """The controller can't read what was told of the job before this supervisor."""
    told = (
        "What was told of the job so far can't be read, so summary.json, report.html and W&B's "
        f"totals begin here: {why.rstrip('.')}."
    )
    return Notice("past_unread", told, {"why": why})


def backend_chosen(choice: BackendChoice) -> Notice:
    """The ranks looked at their devices."""
    return Notice("backend_chosen", f"Linears: {choice}.", backend_detail(choice))


def backend_detail(choice: BackendChoice) -> dict[str, str]:
    """The keys under which events, W&B and ``octavo status`` have it."""
    return {
        "backend": choice.backend,
        "backend_reason": choice.reason,
        "backend_warning": choice.warning,
    }


def nothing_to_start_from(why: str) -> str:
    """Training from step 0 again is nothing that a job does by itself."""
    return (
        f"Paused, for it would train from its beginning again: {why.rstrip('.')}. Put it back "
        "and `octavo resume`, or submit the job anew."
    )


def keepers_awaited(keepers: Sequence[str], best: int | None) -> Notice:
    """Much of what was trained may be with nodes alone that don't answer; ``best``: the newest step
    that is found, None where nothing is."""
    found, more = "Nothing is found to start from", "something"
    if best is not None:
        found, more = f"The newest state that is found is that of step {best}", "a newer one"
    return Notice(
        "keepers_awaited",
        f"{found}, and {counted(len(keepers), 'keeper')} that may hold {more} "
        f"{'does' if len(keepers) == 1 else 'do'} not answer: the attempt waits for "
        f"{', '.join(keepers)}.",
        {"keepers": list(keepers), "step": best},
    )


def storage_awaited(why: str, most_s: float) -> Notice:
    """What is found to start from may not be all: the storage doesn't say."""
    return Notice(
        "storage_awaited",
        f"{why.rstrip('.')}. It may hold a better state to start from than any that is found, so "
        f"the attempt waits for it for up to {most_s:.3g} s.",
        {"seconds": most_s},
    )


def training(attempt: int, step: int) -> Notice:
    """An attempt's first step is done."""
    return Notice(
        "training", f"Attempt {attempt} trains; its first step was {step}.", {"step": step}
    )


def way_back_missed(why: str, to_step: int | None) -> Notice:
    """Ranks could not take a way back that is stored: another attempt does."""
    return Notice(
        "way_back_missed",
        f"Another attempt goes back to step {to_step} or before, for {why}.",
        {"to_step": to_step},
    )


def recovered(way: WayBack, ended: float, step: int) -> Notice:
    """``step``, which ``ended`` then, followed a way back; both numbers are what
    ``monitoring.summary`` counts."""
    seconds, lost = max(0.0, ended - way.detected), way.steps_lost(step)
    return Notice(
        "recovered",
        f"Recovered by {way.words} in {seconds:.2f} s: training goes on at step {step}, "
        f"{lost} step{'s' * (lost != 1)} {'are' if lost != 1 else 'is'} done again.",
        {
            "action": way.actions[-1].kind,
            "in_place": all(action.in_place for action in way.actions),
            "time_to_recover_s": seconds,
            "steps_lost": lost,
            "step": step,
        },
    )


def checkpoint(step: int, failed: str) -> Notice:
    """A checkpoint was committed; ``failed`` says why it was not."""
    if failed:
        message = f"The checkpoint of step {step} was not made: {failed.rstrip('.')}."
        return Notice("checkpoint_failed", message, {"step": step})
    return Notice("checkpoint_written", f"Checkpoint of step {step} written.", {"step": step})


def stopping(time: StopTime) -> Notice:
    """The ranks were told to stop; the controller reads how long that may take."""
    return Notice(
        STOPPING,
        f"The ranks stop after {time.what_for}, for which they have {time.most_s:.0f} s.",
        {"given_s": time.most_s, "nbytes": time.nbytes},
    )


def copy_trouble(trouble: CopyTrouble) -> Notice:
    """Ranks could not copy their states; or copies are damaged or missing, and others are taken."""
    report, ranks = trouble.first, trouble.ranks
    who, several = spans(ranks, "Rank", "Ranks"), len(ranks) > 1
    if isinstance(report, CopyFailed):
        kind, have = "copy_failed", "have" if several else "has"
        what = f"{who} {have} no {report.tier} copy of step {report.step}"
    else:
        kind, s = "copy_passed_over", "" if several else "s"
        instead = "another one" if report.point is None else "an older step"
        where = {
            "memory": "in the node's own keeper",
            "partner": "in a partner's keeper",
            "disk": "on disk",
        }[report.tier]
        what = f"{who} leave{s} out the copy of step {report.step} {where}, and take{s} {instead}"
    detail = {"ranks": list(ranks), "step": report.step, "tier": report.tier}
    return Notice(kind, f"{what}: {_errors(trouble)}.", detail)


def _errors(trouble: CopyTrouble) -> str:
    """The error; of several each with whose it is, the most frequent ones."""
    errors = [(error.rstrip(". "), ranks) for error, ranks in trouble.errors()]
    if len(errors) == 1:
        return errors[0][0]
    told = [f"{spans(ranks, 'rank', 'ranks')}: {error}" for error, ranks in errors[:MOST_ERRORS]]
    if len(errors) > MOST_ERRORS:
        told.append(counted(len(errors) - MOST_ERRORS, "other error"))
    return "; ".join(told)


def replicated(step: int, attempt: AttemptState) -> Notice:
    """The first step of an attempt that outlives its ranks."""
    replicas, snapshots = attempt.replicas, attempt.resume.spec.snapshots
    slots = max(node.slots for node in attempt.resume.nodes)
    nbytes = attempt.copies.keeper_bytes(slots, replicas, snapshots.keep)
    where = f" and on {replicas} other node{'s' * (replicas > 1)} each" if replicas else ""
    return Notice(
        "copies_held",
        f"Every rank's state of step {step} is held by its node's keeper{where}; a keeper's copies "
        f"take {nbytes / 1e6:.3g} MB at most.",
        {"step": step, "replicas": replicas, "keeper_bytes": nbytes},
    )


def fewer_snapshots(report: RingReport, wanted: int) -> Notice:
    """An attempt's ranks hold fewer snapshots than ``wanted``; a replay reads it."""
    return Notice(
        "fewer_snapshots",
        f"The ranks of attempt {report.attempt} hold {report.kept} snapshots each: their nodes "
        f"have no memory for snapshots.keep: {wanted}, so that they can go back less far without "
        "a restart.",
        {"attempt": report.attempt, "kept": report.kept, "keep": wanted},
    )


def slow_ranks(incident: Incident, nodes: Sequence[str]) -> Notice:
    """Ranks that hold up the others; ``nodes``: those most of whose ranks are slow."""
    detail = {"ranks": list(incident.ranks), "nodes": list(nodes), "step": incident.step}
    return Notice("slow_rank", incident.message, {**detail, **incident.evidence})


def restored_older(report: RestoredOlder, wanted: int) -> Notice:
    """Not every rank had a usable copy of the step that the attempt was to start from."""
    source = {"memory": "a copy in memory", "disk": "a checkpoint"}[report.point.tier]
    foreign = report.point.attempt == FOREIGN_ATTEMPT
    kept = (
        f" What was left out, in BF16 and slowed down by step {wanted} stays so." if foreign else ""
    )
    return Notice(
        "restored_older",
        f"Attempt {report.attempt} starts at step {report.step}, from {source}: not every rank "
        f"has a usable copy of step {wanted}.{kept}",
        {"attempt": report.attempt, "step": report.step, "tier": report.point.tier},
    )


def copy_refused(point: RestorePoint, error: str) -> Notice:
    """A copy could not be loaded; the next attempt leaves it out."""
    return Notice(
        "copy_refused",
        f"The {point.tier} copy of step {point.step} is left out: {error.rstrip('. ')}.",
        {"step": point.step, "tier": point.tier},
    )


def checkpoint_left_out(name: str, why: str) -> Notice:
    """A folder of checkpoints holds no checkpoint, or one that is cut off; older ones are used."""
    message = f"The checkpoint {name} is left out: {why.rstrip('. ')}."
    return Notice("copy_refused", message, {"checkpoint": name, "tier": "disk"})


def unrecorded(first: int, last: int) -> Notice:
    """Steps whose numbers are lost: redoing them would have cost too much, or is too late."""
    return Notice(
        "unrecorded",
        f"Steps {first} to {last} were trained without being recorded; their losses are not "
        "known, and no detector has seen them.",
        {"first": first, "last": last},
    )


def drill(report: DrillReport, kind: str) -> Notice:
    """A rehearsed fault is about to happen."""
    place = f"on rank {report.rank} before step {report.step}"
    return Notice(
        "drill",
        f"Drill {report.drill}, {kind}, fires {place}.",
        {"drill": report.drill, "kind": kind, "rank": report.rank, "step": report.step},
    )


def seen(incident: Incident) -> Notice:
    """A trouble."""
    return Notice("incident", incident.message, {"kind": incident.kind, "step": incident.step})


def decided(action: Action) -> Notice:
    """An action, with what a reader wants to know of it without looking it up."""
    return Notice(
        action.kind,
        action.reason,
        {
            "step": action.step,
            "to_step": action.to_step,
            "in_place": action.in_place,
            "skip_batches": list(action.skip_batches),
            "precision": dict(action.precision),
            "lr_scale": action.lr_scale,
            "exchange": action.exchange,
            "asked_by": None if action.asked is None else action.asked.by,
            "control": None if action.asked is None else action.asked.key,
            "passed_over": [f"{p.rung}: {p.why}" for p in action.passed_over],
        },
    )


def ladder_renewed(actions: Sequence[Action]) -> Notice | None:
    """A person has the job go on that the ladder gave up, as the newest of ``actions`` says."""
    if not actions or not gave_up(actions[-1]):
        return None
    step = max(actions[-1].step, 0)
    return Notice(
        "ladder_renewed",
        "The recovery ladder begins anew: its budgets, and what counts as trouble that comes back, "
        f"leave out all that was before the {actions[-1].kind} at step {step}.",
        {"step": step},
    )
