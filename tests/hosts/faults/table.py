"""The matrix as Markdown, and as JSON with every repetition."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.rows import ROWS

HEAD = (
    "| fault | runs | recovered, equal to the bit | steps lost: median, worst | "
    "fault → next new step, s: median, worst |\n|---|---|---|---|---|"
)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A row a fault, in the matrix's order, and what went wrong below."""
    lines = [HEAD]
    for row in ROWS:
        runs = [outcome for outcome in outcomes if outcome.row == row.name]
        if not runs:
            continue
        good = [outcome for outcome in runs if outcome.ok]
        lost = sorted(outcome.steps_lost for outcome in good)
        outage = sorted(outcome.outage_s for outcome in good)
        shown = (
            f"{statistics.median(lost):g}, {lost[-1]} | "
            f"{statistics.median(outage):.2f}, {outage[-1]:.2f}"
            if good
            else "– | –"
        )
        lines.append(f"| {row.told} | {len(runs)} | {len(good)} of {len(runs)} | {shown} |")
    failed = [outcome for outcome in outcomes if not outcome.ok]
    lines += ["", *(f"- {outcome.row}: {outcome.trouble}" for outcome in failed)]
    return "\n".join(lines).rstrip() + "\n"


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """``path`` as Markdown, and JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(outcomes))
    rows = [outcome.to_json() for outcome in outcomes]
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
