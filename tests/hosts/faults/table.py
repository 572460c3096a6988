"""The matrix as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.rows import ROWS, Row

HEAD = (
    "| fault | runs | recovered | losses against the undisturbed run | steps lost: median, worst "
    "| fault → next new step, s: median, worst |\n|---|---|---|---|---|---|"
)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A row a fault, in the matrix's order, and what went wrong below."""
    lines = [HEAD]
    for row in ROWS:
        if runs := [outcome for outcome in outcomes if outcome.row == row.name]:
            lines.append(_line(row, runs))
    failed = [outcome for outcome in outcomes if not outcome.ok]
    lines += ["", *(f"- {outcome.row}: {outcome.trouble}" for outcome in failed)]
    return "\n".join(lines).rstrip() + "\n"


def _line(row: Row, outcomes: Sequence[Outcome]) -> str:
    runs = [outcome for outcome in outcomes if not outcome.skipped]
    if not runs:
        return f"| {row.told} | 0 | skipped: {outcomes[-1].skipped} | – | – | – |"
    good = [outcome for outcome in runs if outcome.ok]
    lost = sorted(outcome.steps_lost for outcome in good)
    outage = sorted(outcome.outage_s for outcome in good)
    aim = "" if row.aim_s is None else f" (aim: {row.aim_s:g})"
    shown = (
        f"{statistics.median(lost):g}, {lost[-1]} | "
        f"{statistics.median(outage):.2f}, {outage[-1]:.2f}{aim}"
        if good
        else "– | –"
    )
    return f"| {row.told} | {len(runs)} | {len(good)} | {_proof(runs)} | {shown} |"


def _proof(runs: Sequence[Outcome]) -> str:
    compared = sum(outcome.compared for outcome in runs)
    differing = sum(outcome.differing for outcome in runs)
    equal = f"{compared - differing:,} of {compared:,} equal to the bit"
    if not differing:
        return equal
    return f"{equal}, the others within {max(outcome.furthest for outcome in runs):.2g}"
