"""Checksums of data-parallel ranks, compared: which parameters differ, and on whom.

Promises: pure, numpy only; the order of the ranks' reports changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from monitoring.records import ReplicaComparison

SUMS = 2
"""Sums a parameter."""
MOST_PARAMETERS = 64
"""Names kept in a comparison."""


@dataclass(frozen=True, slots=True)
class RankSums:
    """What one rank reports of its parameters."""

    rank: int
    replicas: tuple[int, ...]
    """Ranks that hold the same, this one among them."""
    names: tuple[str, ...]
    sums: bytes
    """int64 [parameters, SUMS], little-endian."""


def compare(reports: Iterable[RankSums]) -> ReplicaComparison | None:
    """How the parameters of all ranks' replicas compare; None where nothing can be compared.

    Ranks that differ from most of their replicas are the ones named; all of a group that has
    no most. Raises ValueError when replicas name different parameters, or sums don't fit them.
    """
    groups: dict[tuple[int, ...], list[RankSums]] = {}
    for report in reports:
        if report.sums:
            groups.setdefault(report.replicas, []).append(report)
    compared = [_compare(group) for group in groups.values() if len(group) > 1]
    if not compared:
        return None
    broken = [found for found in compared if found.parameters]
    names = dict.fromkeys(name for found in broken for name in found.parameters)
    return ReplicaComparison(
        tuple(names)[:MOST_PARAMETERS],
        tuple(sorted(rank for found in broken for rank in found.ranks)),
        bool(broken) and all(found.outvoted for found in broken),
    )


def _compare(group: Sequence[RankSums]) -> ReplicaComparison:
    names = group[0].names
    for report in group:
        wanted = len(names) * SUMS * 8
        if report.names != names or len(report.sums) != wanted:
            raise ValueError(
                f"rank {report.rank} sent {len(report.sums)} bytes of sums for "
                f"{len(report.names)} parameters; its replica {group[0].rank} has {len(names)}, "
                f"which takes {wanted}"
            )
    if len({report.sums for report in group}) == 1:
        return ReplicaComparison()
    tables = [np.frombuffer(r.sums, dtype="<i8").reshape(len(names), SUMS) for r in group]
    differs = np.any([table != tables[0] for table in tables], axis=(0, 2))
    usual, votes = Counter(report.sums for report in group).most_common(1)[0]
    outvoted = 2 * votes > len(group)
    ranks = tuple(r.rank for r in group if not outvoted or r.sums != usual)
    return ReplicaComparison(
        tuple(name for name, odd in zip(names, differs, strict=True) if odd), ranks, outvoted
    )
