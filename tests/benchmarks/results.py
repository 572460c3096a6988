"""What benchmarks found, as rows: of one benchmark as JSON, of all of them as one table.

    rows = [measured("submit", "10,000 jobs", seconds, "s", aim=at_most(0.05))]
    report("bench_control_plane", rows, out)     # prints the table; JSON into ``out``, if given
    print(markdown(read(folder)))                # `make bench`: all that are there

A row is one quantity of one side ("octavo", or a peer) in one setting. Promises: a failure or a
hang is a number of its row and never drops it; a report tells with what versions, at what commit,
when and on what machine it was made, and the table tells it of each that differs; what is read back
is what was written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from orchestrator.home.folder import replace_file

OCTAVO = "octavo"
PACKAGES = ("octavo", "torch", "deepspeed", "ray", "wandb", "torchao")
"""Whose versions are told, where they are installed; a peer with an environment of its own tells
its own (``tests.benchmarks.peers.environments.releases``)."""
ROOT = Path(__file__).parents[2]
CHANGED = "+changes"
"""Ends the commit of a working tree that isn't as committed."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What a row is to be."""

    limit: float
    rule: Literal["at most", "at least"] = "at most"
    of: Literal["median", "mean", "worst"] = "median"
    """What of the row's values is judged."""

    def met(self, value: float) -> bool:
        return value <= self.limit if self.rule == "at most" else value >= self.limit


def at_most(limit: float) -> Aim:
    """Of the median. None at all (0) is of every value: what must not happen may not happen once,
    and a median would leave out nearly half the runs."""
    return Aim(limit, of="median" if limit else "worst")


def at_least(limit: float) -> Aim:
    return Aim(limit, "at least")


@dataclass(frozen=True, slots=True)
class Result:
    """One row."""

    name: str
    """What was measured."""
    setting: str
    """On what: model, sizes, seed."""
    unit: str
    median: float
    """NaN where no run gave a value."""
    low: float
    high: float
    """Spread: least and most."""
    n: int
    """Runs, or values, that ``median`` is of."""
    side: str = OCTAVO
    """Who: octavo, or the peer."""
    aim: Aim | None = None
    failures: int = 0
    """Runs that ended wrongly, beside ``n``."""
    hangs: int = 0
    """Runs that were timed out, beside ``n``."""
    note: str = ""
    values: tuple[float, ...] = ()
    """All of them, in the order in which they were measured."""

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one. A run that failed or hung met none."""
        if self.aim is None:
            return None
        numbers = [value for value in self.values if not math.isnan(value)]
        judged = {
            "median": self.median,
            "mean": statistics.fmean(numbers) if numbers else math.nan,
            "worst": self.high if self.aim.rule == "at most" else self.low,
        }
        return not (self.failures or self.hangs) and self.aim.met(judged[self.aim.of])


def measured(
    name: str,
    setting: str,
    values: Iterable[float],
    unit: str,
    *,
    side: str = OCTAVO,
    aim: Aim | None = None,
    failures: int = 0,
    hangs: int = 0,
    note: str = "",
) -> Result:
    """The row of some values of one quantity; there may be none, where every run failed. One that
    is no number is a failure: it would sort anywhere among the others."""
    told = tuple(values)
    found = sorted(value for value in told if not math.isnan(value))
    failures += len(told) - len(found)
    middle = statistics.median(found) if found else math.nan
    spread = (found[0], found[-1]) if found else (math.nan, math.nan)
    return Result(
        name, setting, unit, middle, *spread, len(found), side, aim, failures, hangs, note, told
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What one benchmark found."""

    benchmark: str
    rows: tuple[Result, ...]
    seconds: float = 0.0
    """That it took."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers and settings that can't run here → why."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """``environment()`` of the process that made it."""
    failed: str = ""
    """Why the benchmark as a whole did not end well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--out``: where the JSON goes."""
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")


def report(
    benchmark: str,
    rows: Sequence[Result],
    out: Path | None = None,
    *,
    seconds: float = 0.0,
    left_out: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Report:
    """Print the rows as a table, and write them to ``out/<benchmark>.json``.

    ``versions``: of peers that have an environment of their own.
    """
    made = Report(benchmark, tuple(rows), seconds, left_out or {}, environment(versions))
    print(markdown([made]), flush=True)
    if out is not None:
        write(made, out)
    return made


def without_rows(
    benchmark: str, reason: str, *, seconds: float = 0.0, hung: bool = False
) -> Report:
    """The report of a benchmark that gave none: one row, which tells why."""
    counts = {"failures": int(not hung), "hangs": int(hung)}
    row = measured(benchmark, "as a whole", [], "", note=reason, **counts)
    return Report(benchmark, (row,), seconds, {}, environment(), reason)


def write(made: Report, folder: Path) -> None:
    """To ``folder/<benchmark>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(made), indent=2) + "\n"
    replace_file(folder / f"{made.benchmark}.json", text)


def read(folder: Path) -> list[Report]:
    """What is in ``folder``, by name; a file of something else, or of half of it, is a report that
    failed."""
    return [_read(file) for file in sorted(folder.glob("bench_*.json"))]


def _read(file: Path) -> Report:
    try:
        return from_json(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        return without_rows(file.stem, f"{file.name} can't be read: {error}")


def write_table(reports: Sequence[Report], folder: Path) -> None:
    """``bench.md`` and ``bench.json``: one table of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "bench.md", markdown(reports) + "\n")
    whole = {**environment(), "reports": [to_json(made) for made in reports]}
    replace_file(folder / "bench.json", json.dumps(whole, indent=2) + "\n")


def markdown(reports: Sequence[Report]) -> str:
    """One table; below it what was left out, and where, when and with what each was made."""
    lines = [
        "| what | setting | who | median | spread | n | failed / hung | aim |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(row) for made in reports for row in made.rows),
    ]
    left_out: dict[tuple[str, str], list[str]] = {}
    for made in reports:
        for who, why in made.left_out.items():
            left_out.setdefault((who, " ".join(why.split())), []).append(made.benchmark)
    if left_out:
        lines += ["", "Not run here:"]
        # One may be left out of some for one reason, of others for another, and of others not.
        lines += [f"- {who} ({', '.join(of)}): {why}" for (who, why), of in left_out.items()]
    origins = _origins(reports)
    for names, made in origins:
        whose = f"{', '.join(names)}: " if len(origins) > 1 else ""
        lines += ["", f"{whose}{_origin(made)}"]
    took = [f"{made.benchmark} {made.seconds / 60:.1f}" for made in reports if made.seconds]
    if took:
        lines += ["", f"Minutes: {', '.join(took)}."]
    return "\n".join(lines)


def _origins(reports: Sequence[Report]) -> list[tuple[list[str], dict[str, Any]]]:
    """Benchmarks by where, when and with what they were made. One that names more packages than
    another, and none at another version, is of the same origin. What wasn't made has none."""
    found: list[tuple[list[str], dict[str, Any]]] = []
    for report in reports:
        made = report.made
        if not made:
            continue
        versions = made.get("versions", {})
        for names, known in found:
            same = all(made.get(k) == known.get(k) for k in ("machine", "commit", "time"))
            if same and all(known["versions"].get(k, v) == v for k, v in versions.items()):
                names.append(report.benchmark)
                known["versions"] |= versions
                break
        else:
            found.append(([report.benchmark], {**made, "versions": dict(versions)}))
    return found


def _origin(made: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    commit = f"commit {made['commit']}" if made.get("commit") else "no commit told"
    told = (made.get("machine", "no machine told"), commit, made.get("time", ""), versions)
    return f"{'; '.join(filter(None, told))}."


def _line(row: Result) -> str:
    told = {True: "met", False: "**not met**", None: ""}[row.met]
    each = {"worst": ", each", "mean": ", in the mean"}.get(row.aim.of, "") if row.aim else ""
    each = each if row.n > 1 else ""
    limit = f"{row.aim.rule} {shown(row.aim.limit, row.unit)}{each}: {told}" if row.aim else ""
    note = f" ({row.note})" if row.note else ""
    failed = f"{row.failures} / {row.hangs}" if row.failures or row.hangs else ""
    spread = f"{shown(row.low, row.unit)} – {shown(row.high, row.unit)}" if row.n > 1 else ""
    cells = (row.name + note, row.setting, row.side, shown(row.median, row.unit), spread, row.n)
    return "| " + " | ".join(map(_cell, (*cells, failed, limit))) + " |"


def _cell(value: object) -> str:
    """An error's lines and bars would end the table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def shown(value: float, unit: str) -> str:
    """A number with its unit, to three digits; losses (``nats``) to four decimals."""
    if math.isnan(value):
        return "–"
    if unit == "s" and value < 1:
        return f"{1e3 * value:.3g} ms"
    if unit == "%":
        # Of what is nearly all, the last digits tell.
        return f"{value:.2f} %"
    if unit == "nats":
        return f"{value:.4f} nats"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".strip()


def environment(more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Versions, ``more`` of them among these, machine, day and commit."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions | dict(more or {}),
        "machine": _machine(),
        "time": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def commit() -> str:
    """Of the code that runs, with ``CHANGED`` where it isn't as committed; empty outside git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + (CHANGED if head and _git("status", "--porcelain", "-uno") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {cpu}, {memory:.0f} GiB, {platform.system()}"


def to_json(made: Report) -> dict[str, Any]:
    """Strict JSON."""
    return {
        "benchmark": made.benchmark,
        **made.made,
        "seconds": made.seconds,
        "rows": [{**_plain(asdict(row)), "met": row.met} for row in made.rows],
        "left_out": dict(made.left_out),
        "failed": made.failed,
    }


def from_json(data: Mapping[str, Any]) -> Report:
    """The inverse; ValueError for other JSON."""
    try:
        return Report(
            str(data["benchmark"]),
            tuple(_row(row) for row in data["rows"]),
            float(data["seconds"]),
            dict(data["left_out"]),
            {key: data[key] for key in ("versions", "machine", "time", "commit") if key in data},
            data.get("failed", ""),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are no results of a benchmark: {error!r}") from error


def _row(data: Mapping[str, Any]) -> Result:
    floats = {k: math.nan if data[k] is None else data[k] for k in ("median", "low", "high")}
    aim = None if data["aim"] is None else Aim(**data["aim"])
    values = tuple(math.nan if value is None else value for value in data.get("values", ()))
    rest = {key: value for key, value in data.items() if key != "met"}
    return Result(**{**rest, **floats, "aim": aim, "values": values})


def _plain(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
