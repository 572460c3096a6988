"""`make bench`: every benchmark, one after the other, each in a process of its own; after each, one
table of all rows there are (``tests.benchmarks.results``), and the same as files.

    python -m tests.benchmarks [--out runs/bench] [--resume] [--limit HOURS] [NAME…]

``--resume``: what has its results from this very commit already is not run again, and where a
benchmark keeps runs, it goes on after the last of them; what was left out of the results then, for
want of a network, root or room, is told, and how to have it tried again. Without it, and where the
working tree isn't as committed, all is run anew. Promises: a benchmark that crashes, is ended after
``--limit`` hours, or has not run is a row with its reason, and the others have their turn; an
earlier result never stands for the one that failed; what a benchmark that was ended had started is
ended too. The exit status is the number of those that gave nothing: a missed aim is told in the
table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.peers.environments import FOLDER, Unavailable, beside
from tests.benchmarks.peers.processes import (
    ROOT,
    SideError,
    end_all,
    environment,
    interrupt_on_signals,
    new_mark,
)
from tests.benchmarks.results import (
    CHANGED,
    Report,
    commit,
    markdown,
    measured,
    read,
    without_rows,
    write,
    write_table,
)

BENCHMARKS = (
    "bench_overhead",
    "bench_recovery",
    "bench_snapshots",
    "bench_checkpoints",
    "bench_saving",
    "bench_telemetry",
    "bench_detection",
    "bench_start",
    "bench_rank_killed",
    "bench_instability",
    "bench_api",
    "bench_fp8_linear",
    "bench_fp8_step",
    "bench_exchange",
    "bench_hooks",
    "bench_exchange_casts",
    "bench_exchange_error",
    "bench_curves",
    "bench_fidelity",
    "bench_parity",
    "bench_detectors",
    "bench_plan",
    "bench_control_plane",
    "bench_goodput",
)
KEEPING = frozenset(
    ("bench_rank_killed", "bench_instability", "bench_hooks", "bench_curves", "bench_parity")
)
"""Those that keep single runs in a file (``--kept``)."""
WITH_TORCHAO = frozenset(("bench_fp8_linear", "bench_fp8_step", "bench_fidelity", "bench_parity"))
"""Those that compare with torchao, within one process."""
LIMIT_HOURS = 5.0
"""Twice what the longest takes."""
END_S = 90.0
"""That a benchmark has to end what it started, before it is ended with it."""


def main() -> int:
    """Run all, or those that are named; the number of those that gave nothing."""
    interrupt_on_signals()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--resume", action="store_true", help="leave what this commit has done")
    parser.add_argument("--limit", type=float, default=LIMIT_HOURS, help="hours, of each")
    asked = parser.parse_args()
    names = tuple(asked.names or BENCHMARKS)
    reports = run_all(names, asked.out, asked.limit * 3600, resume=asked.resume)
    print(f"\n{markdown(table(reports))}\n\n{asked.out}/bench.md, bench.json")
    return sum(bool(made.failed) for made in reports if made.benchmark in names)


def run_all(
    names: Sequence[str], out: Path, limit_s: float, *, resume: bool = False
) -> list[Report]:
    """All reports that are in ``out`` after ``names`` have run, by name."""
    at = commit()
    known = bool(at) and not at.endswith(CHANGED)
    if resume and not known:
        print("the working tree isn't as committed: all is run anew", file=sys.stderr)
    resume = resume and known
    for name in names:
        print(f"\n== {name}", flush=True)
        if resume and (done := _done(out, name, at)):
            print("has its results from this commit", flush=True)
            for left, why in done.left_out.items():
                print(f"  without {left}: {why}", flush=True)
            if done.left_out:
                print(f"  where that is mended: rm {out / name}.json, and resume", flush=True)
            continue
        arguments = ["--out", str(out.resolve())]
        if name in KEEPING:
            kept = out.resolve() / "kept" / f"{name}-{at or 'unknown'}.json"
            kept.parent.mkdir(parents=True, exist_ok=True)
            if not resume:
                kept.unlink(missing_ok=True)
            arguments += ["--kept", str(kept)]
        run(name, arguments, out, limit_s, _beside() if name in WITH_TORCHAO else ())
        write_table(table(read(out)), out)
    return read(out)


def table(reports: Sequence[Report]) -> list[Report]:
    """``reports`` in the order of ``BENCHMARKS``, each that isn't among them as a row of that."""
    found = {made.benchmark: made for made in reports}
    missing = {
        name: Report(name, (measured(name, "as a whole", [], "", note="not run yet"),))
        for name in BENCHMARKS
    }
    return [found.pop(name, missing[name]) for name in BENCHMARKS] + list(found.values())


def _beside() -> Sequence[Path]:
    torchao = beside("torchao", FOLDER)
    if isinstance(torchao, Unavailable):
        # The benchmark tells that it isn't there; this is why.
        print(f"torchao: {torchao.reason}", file=sys.stderr, flush=True)
        return ()
    return (torchao,)


def _done(out: Path, name: str, at: str) -> Report | None:
    """What it found from this commit, if it ended well."""
    made = {report.benchmark: report for report in read(out)}.get(name)
    if made is None or made.failed or made.made.get("commit") != at:
        return None
    return made


def command(name: str) -> list[str]:
    """Starts one in a process of its own."""
    return [sys.executable, "-m", f"tests.benchmarks.{name}"]


def run(
    name: str, arguments: Sequence[str], out: Path, limit_s: float, paths: Sequence[Path] = ()
) -> None:
    """Run one to its end, its output shown and kept in ``out``; where it leaves no result there,
    write one of what became of it.

    ``paths``: folders of packages that it finds beside what is installed.
    """
    out.mkdir(parents=True, exist_ok=True)
    result = out / f"{name}.json"
    result.unlink(missing_ok=True)
    log = out / f"{name}.log"
    mark = new_mark()
    env = environment(mark, {"PYTHONUNBUFFERED": "1"})
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, paths)])
    began = time.monotonic()
    with log.open("w") as kept:
        process = subprocess.Popen(
            [*command(name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=kept,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=ROOT,
        )
    hung = False
    try:
        hung = not _shown_to_end(process, log, began + limit_s)
    finally:
        left = _end(process, mark)
    seconds = time.monotonic() - began
    if hung:
        reason = f"was not over after {limit_s / 3600:.3g} h, and was ended"
    else:
        reason = f"exited {process.returncode}: {_last_line(log)}"
    if left:
        print(left, file=sys.stderr, flush=True)
    if not result.exists():
        write(without_rows(name, reason, seconds=seconds, hung=hung), out)
    elif hung:
        # It told its rows, and did not end: they stand, beside that.
        (told,) = (made for made in read(out) if made.benchmark == name)
        extra = without_rows(name, reason, hung=True).rows
        write(replace(told, rows=told.rows + extra, failed=reason), out)


def _shown_to_end(process: subprocess.Popen[bytes], log: Path, deadline: float) -> bool:
    """Print what it prints until it is over; False where time is over before."""
    with log.open(errors="replace") as shown:
        while True:
            over = process.poll() is not None
            print(shown.read(), end="", flush=True)
            if over or time.monotonic() > deadline:
                return over
            time.sleep(0.5)


def _end(process: subprocess.Popen[bytes], mark: str) -> str:
    """End it, if it still runs, and all that it left; what could not be ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        end_all(mark)
    except SideError as error:
        return str(error)
    return ""


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


if __name__ == "__main__":
    sys.exit(main())
