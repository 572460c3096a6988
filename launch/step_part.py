"""What some ranks measured in one step, put together so that other ranks' can be added later.

A rank's report is a part of one rank; parts of ranks that are not the same are merged, on the way
or at the supervisor, until all ranks are in one. Promises: pure; ``merged`` is associative and
commutative, to the bit, so that any tree of ranks, nodes and whatever lies between gives the record
that all reports at one place would have given; a part keeps of each rank what is asked for by rank
(its own seconds, whether it was finite, whose replica it is) and of the rest only what adds up: its
size grows with the ranks by 12 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from launch.commands import RankReport, Report
from monitoring.exact_sums import ExactSum
from monitoring.tensor_sums import Sums, added, sums_of

Names = tuple[str, ...]
Firsts = Mapping[Names, int]
"""What ranks name → the first rank that names it."""
ReplicaSums = Mapping[tuple[int, ...], Mapping[tuple[Names, bytes], tuple[int, ...]]]
"""Ranks that hold the same → what they say of it (parameters, the sums of each) → who says so."""

MOST_PARAMETERS = 64
"""Names of non-finite parameters kept in a record."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The exchange's numbers of some ranks that measured the same ones, in order of their keys."""

    first_rank: int
    count: int
    sums: tuple[ExactSum, ...]
    worst: tuple[float, ...]
    """The largest; NaN counts as none."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Of the ranks in ``ranks``; the fields are those of their reports."""

    attempt: int
    timeline: int
    step: int
    ranks: npt.NDArray[np.int32]
    """In order."""
    compute_s: npt.NDArray[np.float64]
    """Of each."""
    time: float
    """The latest."""
    batch: int
    lr: float
    """Both the first rank's."""
    loss: float
    grad_norm: float
    """Both the last rank's, which is on the last pipeline stage, where the loss is made."""
    tokens: int
    step_time_s: float
    """The longest."""
    skipped: bool
    command: int
    """Number of the last command that all of them have applied."""
    batches: frozenset[int]
    """All that were used; one, unless something is wrong."""
    drills: frozenset[int]
    tensors: Sums
    high_precision_layers: Firsts
    comm: Mapping[Names, Exchanged]
    nonfinite_ranks: tuple[int, ...] = ()
    """In order."""
    nonfinite_parameters: Firsts = field(default_factory=dict)
    replicas: ReplicaSums = field(default_factory=dict)


Sent = Report | StepPart
"""What a supervisor is sent: reports of a step may be merged on the way."""


def part_of(*reports: RankReport) -> StepPart:
    """The part of some ranks, at least one, of the same step. ValueError when statistics don't fit
    their names. The same as each rank's part merged with the others', for less."""
    ordered = sorted(reports, key=lambda report: report.rank)
    first, last = ordered[0], ordered[-1]
    odd = [r for r in ordered if r.nonfinite_loss or r.nonfinite_parameters]
    return StepPart(
        attempt=first.attempt,
        timeline=first.timeline,
        step=first.step,
        ranks=np.array([report.rank for report in ordered], np.int32),
        compute_s=np.array([report.compute_s for report in ordered], np.float64),
        time=max(report.time for report in ordered),
        batch=first.batch,
        lr=first.lr,
        loss=last.loss,
        grad_norm=last.grad_norm,
        tokens=max(report.tokens for report in ordered),
        step_time_s=max(report.step_time_s for report in ordered),
        skipped=any(report.skipped for report in ordered),
        command=min(report.command for report in ordered),
        batches=frozenset(report.batch for report in ordered),
        drills=frozenset(drill for report in ordered for drill in report.drills),
        tensors=sums_of((r.rank, r.stats_names, r.stats) for r in ordered),
        high_precision_layers=_first({r.high_precision_layers: r.rank} for r in ordered),
        comm=_measured(ordered),
        nonfinite_ranks=tuple(report.rank for report in odd),
        nonfinite_parameters=_few(_first({r.nonfinite_parameters: r.rank} for r in odd)),
        replicas=_replicas(
            {r.replicas: {(r.checksum_names, r.checksums): (r.rank,)}}
            for r in ordered
            if r.checksums
        ),
    )


def _measured(reports: Sequence[RankReport]) -> Mapping[Names, Exchanged]:
    groups: dict[Names, list[RankReport]] = {}
    for report in reports:
        if report.comm:
            groups.setdefault(tuple(report.comm), []).append(report)
    found = {}
    for keys, ranks in groups.items():
        columns = list(zip(*(report.comm.values() for report in ranks), strict=True))
        sums = tuple(map(ExactSum.of, columns))
        found[keys] = Exchanged(ranks[0].rank, len(ranks), sums, tuple(map(worst, columns)))
    return found


def merged(parts: Sequence[StepPart]) -> StepPart:
    """One part of all the ranks of ``parts``, none of which is in two of them; at least one part,
    all of the same attempt, timeline and step."""
    if len(parts) == 1:
        return parts[0]
    ranks = np.concatenate([part.ranks for part in parts])
    order = np.argsort(ranks, kind="stable")
    first = min(parts, key=lambda part: int(part.ranks[0]))
    last = max(parts, key=lambda part: int(part.ranks[-1]))
    return StepPart(
        attempt=first.attempt,
        timeline=first.timeline,
        step=first.step,
        ranks=ranks[order],
        compute_s=np.concatenate([part.compute_s for part in parts])[order],
        time=max(part.time for part in parts),
        batch=first.batch,
        lr=first.lr,
        loss=last.loss,
        grad_norm=last.grad_norm,
        tokens=max(part.tokens for part in parts),
        step_time_s=max(part.step_time_s for part in parts),
        skipped=any(part.skipped for part in parts),
        command=min(part.command for part in parts),
        batches=frozenset().union(*(part.batches for part in parts)),
        drills=frozenset().union(*(part.drills for part in parts)),
        tensors=added(part.tensors for part in parts),
        high_precision_layers=_first(part.high_precision_layers for part in parts),
        comm=_exchanged(part.comm for part in parts),
        nonfinite_ranks=tuple(sorted(rank for part in parts for rank in part.nonfinite_ranks)),
        nonfinite_parameters=_few(_first(part.nonfinite_parameters for part in parts)),
        replicas=_replicas(part.replicas for part in parts),
    )


def in_order(names: Firsts) -> Names:
    """All of them once, in the order in which the ranks, one after the other, first name them."""
    groups = sorted(names, key=names.__getitem__)
    return tuple(dict.fromkeys(name for group in groups for name in group))


def _first(parts: Iterable[Firsts]) -> Firsts:
    found: dict[Names, int] = {}
    for part in parts:
        for names, rank in part.items():
            found[names] = min(rank, found.get(names, rank))
    return found


def _few(names: Firsts) -> Firsts:
    """Without those that can't be among the first ``MOST_PARAMETERS``, whoever comes to them: the
    ranks before these have named as many."""
    if len(names) < 2:
        return names
    kept: dict[Names, int] = {}
    seen: set[str] = set()
    for group in sorted(names, key=names.__getitem__):
        if len(seen) >= MOST_PARAMETERS:
            break
        kept[group] = names[group]
        seen.update(group)
    return kept


def _exchanged(parts: Iterable[Mapping[Names, Exchanged]]) -> Mapping[Names, Exchanged]:
    groups: dict[Names, list[Exchanged]] = {}
    for part in parts:
        for keys, one in part.items():
            groups.setdefault(keys, []).append(one)
    return {
        keys: found[0]
        if len(found) == 1
        else Exchanged(
            min(one.first_rank for one in found),
            sum(one.count for one in found),
            tuple(map(_sum, zip(*(one.sums for one in found), strict=True))),
            tuple(map(worst, zip(*(one.worst for one in found), strict=True))),
        )
        for keys, found in groups.items()
    }


def _sum(sums: Sequence[ExactSum]) -> ExactSum:
    found = ExactSum((), sum(one.odd for one in sums))
    return found.plus(part for one in sums for part in one.parts)


def worst(values: Iterable[float]) -> float:
    """The largest; NaN only where all are."""
    known = [value for value in values if value == value]
    return max(known) if known else float("nan")


def _replicas(parts: Iterable[ReplicaSums]) -> ReplicaSums:
    found: dict[tuple[int, ...], dict[tuple[Names, bytes], tuple[int, ...]]] = {}
    for part in parts:
        for group, said in part.items():
            mine = found.setdefault(group, {})
            for what, ranks in said.items():
                mine[what] = tuple(sorted((*mine.get(what, ()), *ranks)))
    return found
