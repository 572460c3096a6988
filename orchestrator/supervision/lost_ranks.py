"""What the ends of ranks, a silence and ranks that never began mean, as incidents. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launch.rank_group import RankEnd
from launch.snapshots import SnapshotError
from monitoring.records import Incident, IncidentKind
from orchestrator.recovery.job_facts import JobFacts
from orchestrator.supervision.attempt import ranks_told

_FOLLOWS = re.compile(
    r"closed by peer|connection (reset|refused|closed)|broken pipe|gloo|nccl|socket|heartbeat",
    re.IGNORECASE,
)
"""Errors that a rank raises because another one is gone."""


def first_causes(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """The ends that explain the others: lost processes, else errors that no peer explains."""
    lost = [end for end in ends if end.how == "lost"]
    raised = [end for end in ends if end.how == "raised"]
    copies = [end for end in raised if isinstance(end.cause, SnapshotError)]
    own = [end for end in raised if not _FOLLOWS.search(end.error)]
    return lost or copies or own or raised


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
    own_error = any(
        end.how == "raised" and not isinstance(end.cause, SnapshotError) and not blames_a_peer(end)
        for end in causes
    )
    ranks = tuple(end.rank for end in causes)
    evidence = {"raised": 1.0} if own_error else {}
    return _incident("rank_died", told[0].upper() + told[1:], ranks, evidence, facts, now)


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
        time=now,
        message=f"{message}.",
        evidence=evidence,
        ranks=ranks,
    )
