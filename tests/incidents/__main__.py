"""``make incidents``: every drill kind on every layout, and healthy jobs; writes a table.

    python -m tests.incidents [--out FILE] [--only NAME …]

The exit code is 1 when something was not as it must be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.incidents.runs import Runs, rows
from tests.incidents.scenarios import HEALTHY, LAYOUTS, SCENARIOS

HEAD = (
    *("drill", "layout", "first seen as", "after steps", "suspects", "answers"),
    *("steps lost", "final loss", "verdict"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="rehearse every incident")
    parser.add_argument("--out", type=Path, default=Path("runs/incidents.md"))
    parser.add_argument("--only", nargs="*", help="names of drills, or 'healthy'")
    arguments = parser.parse_args()
    wanted = arguments.only
    lines = [_line(HEAD), _line(("---",) * len(HEAD))]
    print(lines[0], flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="octavo-incidents-") as folder:
        runs = Runs(Path(folder))
        for scenario in SCENARIOS:
            if wanted and scenario.name not in wanted:
                continue
            for layout in scenario.layouts:
                found, wrong = runs.rehearse(scenario, layout)
                failed += bool(wrong)
                lines.append(_line(tuple(rows(scenario, layout, found, wrong))))
                print(lines[-1], flush=True)
        lines.append("")
        for healthy in HEALTHY:
            if wanted and not {"healthy", healthy.name} & set(wanted):
                continue
            for layout in LAYOUTS:
                told, wrong = runs.stay_healthy(healthy, layout)
                failed += bool(wrong)
                done = f"{len(told.kept)} steps, {len(told.actions)} actions, {told.state}"
                news = [f"- healthy, {healthy.name}, {layout}: {done}"]
                news += [f"  - {problem}" for problem in wrong]
                print("\n".join(news), flush=True)
                lines += news
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    told_at = time.strftime("%Y-%m-%d %H:%M")
    arguments.out.write_text("\n".join([f"# Incidents, {told_at}", "", *lines, ""]))
    print(f"{arguments.out}: {failed} not as they must be")
    return 1 if failed else 0


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
