"""Known holes in the packages that Octavo is tested with: `make audit`, and CI where it can ask.

    python -m deploy.audit constraints.txt

Promises: bounded; what can't be asked, or knows nothing of holes (many a mirror of an index),
is told and is no failure; a hole that is known is: exit code 1, with the release that mends it.
pip-audit gets an environment of its own, which is gone afterwards: it is no part of Octavo's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOL = "pip-audit==2.10.1"
INSTALL_S = 120.0
AUDIT_S = 180.0
ANSWER_S = 10
"""Seconds that the index may take for one package."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit came to."""

    lines: tuple[str, ...]
    code: int


def judge(report: Mapping[str, Any]) -> Verdict:
    """Of pip-audit's JSON."""
    holes, audited, unknown = [], 0, 0
    for package in report.get("dependencies", ()):
        if "skip_reason" in package:
            unknown += 1
            continue
        audited += 1
        for hole in package["vulns"]:
            mended = ", ".join(hole.get("fix_versions", ())) or "none yet"
            name = f"{package['name']} {package['version']}"
            holes.append(f"{name}: {hole['id']}, mended in: {mended}")
    if not audited:
        told = f"nothing audited: the index here tells of holes in none of {unknown} packages"
        return Verdict((told,), 0)
    told = f"{audited} packages audited, {unknown} unknown there, {len(holes)} known holes"
    return Verdict((*holes, told), int(bool(holes)))


def audit(constraints: Path) -> Verdict:
    """Ask for all packages of a file of pinned versions."""
    # The packages as they are pinned: nothing is installed or resolved for it.
    pinned = [line for line in constraints.read_text().splitlines() if "==" in line]
    with tempfile.TemporaryDirectory(prefix="octavo-audit-") as folder:
        wanted = Path(folder) / "pinned.txt"
        wanted.write_text("\n".join(pinned) + "\n")
        own = Path(folder) / "venv"
        venv.create(own, with_pip=True)
        pip = [str(own / "bin" / "pip"), "install", "--quiet", TOOL]
        if why := _run(pip, INSTALL_S)[1]:
            return Verdict((f"nothing audited: {TOOL} can't be had here: {why}",), 0)
        command = [str(own / "bin" / "pip-audit"), "-r", str(wanted), "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", "--timeout", str(ANSWER_S)]
        said, why = _run(command, AUDIT_S, may_fail=True)
        try:
            return judge(json.loads(said))
        except ValueError:
            return Verdict((f"nothing audited: the index can't be asked: {why or said[-300:]}",), 0)


def _run(command: Sequence[str], timeout_s: float, *, may_fail: bool = False) -> tuple[str, str]:
    """(what it said, why it failed)."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return "", f"no end in {timeout_s:.0f} s"
    if done.returncode != 0 and not (may_fail and done.stdout.strip()):
        return done.stdout, (done.stderr.strip().splitlines() or [f"{done.returncode}"])[-1]
    return done.stdout, ""


def main() -> int:
    """Entry of ``python -m deploy.audit``."""
    verdict = audit(Path(sys.argv[1]))
    print("\n".join(verdict.lines))
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
