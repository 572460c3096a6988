"""``python -m tests.hosts.faults``: the matrix, or a part of it; exit code 1 when a row failed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.hosts.cluster import interruptible
from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.rows import ROWS
from tests.hosts.faults.runs import run_rows
from tests.hosts.faults.table import markdown, write
from tests.hosts.network import why_not


def main() -> int:
    """Run what is asked for; the exit code."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.faults", description=__doc__)
    parser.add_argument("--rows", help=f"of {','.join(names)} [default: all]")
    parser.add_argument("--repeat", type=int, help="times a row [default: each row's own]")
    parser.add_argument("--out", type=Path, default=Path("runs/faults.md"))
    given = parser.parse_args()
    asked = given.rows.split(",") if given.rows else names
    if unknown := sorted(set(asked) - set(names)):
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(names)}")
    if reason := why_not():
        print(f"the matrix can't be run here: {reason}", file=sys.stderr)
        return 1
    outcomes: list[Outcome] = []
    try:
        with interruptible():
            outcomes = run_rows(
                [row for row in ROWS if row.name in asked],
                given.repeat,
                lambda line: print(line, flush=True),
                lambda done: write(done, given.out),
            )
    except KeyboardInterrupt:
        print(f"interrupted; what was done is in {given.out}")
        return 130
    print(markdown(outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
