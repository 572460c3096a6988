"""What the ends of ranks, a silence and ranks that never began mean, as incidents. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launch.rank_group import RankEnd
from launch.snapshots import SnapshotError, UnreadSnapshotError
from launch.worker import RankFailedError
from monitoring.records import Incident, IncidentKind
from orchestrator.actions import Action
from orchestrator.recovery.job_facts import JobFacts
from orchestrator.recovery.restart_budget import OUTSIDE, UNMET
from orchestrator.supervision.attempt import ranks_told

_FOLLOWS = re.compile(
    r"^JoinError|closed by peer|connection (reset|refused|closed)|broken pipe|gloo|nccl|socket"
    r"|heartbeat",
    re.IGNORECASE,
)
"""Errors that a rank raises because another one is gone."""


def first_causes(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """The ends that explain the others: lost processes, else errors that no peer explains."""
    lost = [end for end in ends if end.how == "lost"]
    raised = [end for end in ends if end.how == "raised"]
    copies = [end for end in raised if isinstance(end.cause, SnapshotError)]
    own = [end for end in raised if not _FOLLOWS.search(end.error)]
    # Rank 0 has seen who came; the others know of rank 0 alone.
    waited = sorted((end for end in raised if _absent(end)), key=lambda end: end.rank)
    named = waited[:1] if waited and waited[0].rank == 0 else waited
    return lost or copies or own or named or raised


def _absent(end: RankEnd) -> tuple[int, ...]:
    """Ranks that a rank waited for in vain as the attempt began."""
    return end.cause.absent if isinstance(end.cause, RankFailedError) else ()


def blames_a_peer(end: RankEnd) -> bool:
    """Whether a rank ended because another one is gone, which isn't told yet."""
    raised = end.how == "raised" and not isinstance(end.cause, SnapshotError)
    return raised and _FOLLOWS.search(end.error) is not None


def died(ends: Sequence[RankEnd], facts: JobFacts, now: float) -> Incident:
    """The incident of ranks that ended; equal errors of many ranks are told once."""
    causes = first_causes(ends)
    by_error: dict[str, list[int]] = {}
    for end in causes:
        how = "died" if end.how == "lost" else "raised"
        by_error.setdefault(f"{how}: {end.error.rstrip('. ')}", []).append(end.rank)
    told = "; ".join(f"{ranks_told(ranks)} {error}" for error, ranks in by_error.items())
    evidence = {"raised": 1.0} if all(map(_is_own_error, causes)) else {}
    # Of a job that has never trained it is the spec rather, with a path that is not there.
    if evidence and facts.step >= 0 and all(map(_is_outside, causes)):
        evidence[OUTSIDE] = 1.0
    ranks = tuple(end.rank for end in causes)
    if absent := {rank for end in causes for rank in _absent(end)}:
        # Who waited has done nothing. Who is said to be absent and waited too has come: it is the
        # link between them, or either's node, which preflight finds out. Who names himself could
        # not open the meeting.
        absent -= {end.rank for end in ends if _absent(end) and end.rank not in _absent(end)}
        ranks, evidence = tuple(sorted(absent)), {**evidence, UNMET: 1.0}
    return _incident("rank_died", told[0].upper() + told[1:], ranks, evidence, facts, now)


def _is_own_error(end: RankEnd) -> bool:
    """Whether a rank raised what neither a peer nor a bad copy explains."""
    if isinstance(end.cause, SnapshotError):
        return isinstance(end.cause, UnreadSnapshotError)
    return end.how == "raised" and not blames_a_peer(end)


def _is_outside(end: RankEnd) -> bool:
    """Whether what a rank raised lies in what surrounds the job."""
    cause = end.cause
    away = isinstance(cause, OSError | UnreadSnapshotError)
    return away or (isinstance(cause, RankFailedError) and cause.outside)


def unmet(actions: Sequence[Action]) -> bool:
    """Whether ranks didn't meet in the attempt that the newest of ``actions`` ended."""
    return any(i.evidence.get(UNMET) for action in actions[-1:] for i in action.incidents)


def hung(ranks: Sequence[int], seconds: float, facts: JobFacts, now: float, what: str) -> Incident:
    """The incident of a silence of ``seconds``; ``what`` did not come, as ``a new step``."""
    told = ranks_told(ranks) if ranks else "the ranks"
    message = f"No {what} for {seconds:.0f} s; waiting for {told}"
    return _incident("rank_hung", message, tuple(ranks), {"seconds": seconds}, facts, now)


def not_begun(told: str, facts: JobFacts, now: float) -> Incident:
    """The incident of nodes that may not be trained on; ``told``: what preflight found."""
    return _incident("preflight_failed", told.rstrip("."), (), {}, facts, now)


def _incident(
    kind: IncidentKind,
    message: str,
    ranks: tuple[int, ...],
    evidence: dict[str, float],
    facts: JobFacts,
    now: float,
) -> Incident:
    return Incident(
        kind=kind,
        detector="supervisor",
        attempt=facts.attempt,
        timeline=facts.timeline,
        step=max(facts.step, 0),
        onset_step=max(facts.step, 0),
        time=float(now),
        message=f"{message}.",
        evidence=evidence,
        ranks=ranks,
    )
