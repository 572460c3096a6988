"""``python -m tests.hosts.faults``: the matrix, or a part of it; exit code 1 when a row failed.

Every outcome is appended to ``OUT.jsonl`` as it is there, and OUT, the Markdown, is made from that
file: a part that is run anew replaces its own rows, and ``--resume`` goes on with the rows, and
the times a row, that an interrupted matrix has left.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.hosts.cluster import interruptible
from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.records import Records, left_to_do
from tests.hosts.faults.rows import ROWS
from tests.hosts.faults.runs import run_rows
from tests.hosts.faults.table import markdown
from tests.hosts.network import why_not


def main() -> int:
    """Run what is asked for; the exit code."""
    rows = {row.name: row for row in ROWS}
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.faults", description=__doc__)
    parser.add_argument("--rows", help=f"of {','.join(rows)} [default: all]")
    parser.add_argument("--repeat", type=int, help="times a row [default: each row's own]")
    parser.add_argument("--out", type=Path, default=Path("runs/faults.md"))
    parser.add_argument("--resume", action="store_true", help="go on with the last session")
    parser.add_argument("--table", action="store_true", help="run nothing; the Markdown anew")
    given = parser.parse_args()
    asked = given.rows.split(",") if given.rows else list(rows)
    if unknown := sorted(set(asked) - set(rows)):
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(rows)}")
    records = Records(given.out.with_suffix(".jsonl"), resume=given.resume)

    def write() -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(markdown(records.newest()))

    def told(outcome: Outcome) -> None:
        records.add(outcome)
        write()

    if given.table:
        write()
        print(given.out.read_text())
        return 0
    if reason := why_not():
        print(f"the matrix can't be run here: {reason}", file=sys.stderr)
        return 1
    times = [(name, given.repeat or row.repeat) for name, row in rows.items() if name in asked]
    try:
        with interruptible():
            run_rows(
                [(rows[name], left) for name, left in left_to_do(times, records)],
                lambda line: print(line, flush=True),
                told,
            )
    except KeyboardInterrupt:
        print(f"interrupted; what was done is in {records.path}, --resume goes on with the rest")
        return 130
    print(markdown(records.newest()))
    return 0 if all(outcome.ok for outcome in records.ours()) else 1


if __name__ == "__main__":
    sys.exit(main())
