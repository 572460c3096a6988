"""An environment of its own for each peer that needs more than Octavo's.

    python -m tests.benchmarks.peers.environments [--folder runs/peers] [NAME …]

torchrun and the deepspeed launcher come with what Octavo needs anyway, and share its environment.
The others get ``FOLDER/NAME``: torch first and pinned, as the Makefile has it, then what
``requirements/NAME.txt`` lists, everything else at the releases of ``constraints.txt``. Promises:
an environment that is whole, which is tried each time, is left as it is, one that isn't is made
anew; a peer that can't be installed, or can't load its script and the job, is ``Unavailable`` with
the reason, no error: what our own packages lack there must not count as the peer's failure.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.processes import ROOT, SideError, run_to_end

FOLDER = ROOT / "runs/peers"
JOB = ROOT / "deploy/jobs/demo.yaml"
WHOLE = "installed"
"""File in a whole one, of the requirements that are installed."""
LIMIT_S = 1800.0
"""Of one step of an installation."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What there is to install."""

    name: str
    before: tuple[str, ...]
    """What must be there before the requirements: what they are built with."""
    modules: tuple[str, ...]
    """What can be imported once it is whole: the peer, and what its script takes of ours."""
    packages: tuple[str, ...]
    """Whose releases are told."""


PEERS = (
    # DeepSpeed is built from its sdist, which imports torch.
    Peer(
        "ray_train",
        ("setuptools", "wheel", "ninja", "numpy"),
        (
            "ray.train.torch",
            "deepspeed",
            "tests.benchmarks.peers.saved",
            "tests.benchmarks.plain_deepspeed",
        ),
        ("ray", "torch", "deepspeed"),
    ),
    Peer(
        "torchft",
        (),
        ("torchft", "tests.benchmarks.peers.torchft_train"),
        ("torchft", "torch"),
    ),
)
BESIDE = ("torchao",)
"""What is compared within one process: packages beside Octavo's own."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A whole one."""

    name: str
    bin: Path

    def command(self, program: str) -> str:
        """Path of a program in it."""
        return str(self.bin / program)


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a peer can't be had here."""

    name: str
    reason: str


OURS = Environment("octavo", Path(sys.executable).parent)


def environment_of(name: str, folder: Path = FOLDER) -> Environment | Unavailable:
    """The environment of peer ``name``, installed if it isn't. Raises KeyError for no peer."""
    peer = {peer.name: peer for peer in PEERS}[name]
    place = folder / name
    found = Environment(name, place / "bin")
    whole = place / WHOLE
    requirements = Path(__file__).parent / "requirements" / f"{name}.txt"
    wanted = requirements.read_text()
    log = folder / f"{name}-install.log"
    if whole.exists() and whole.read_text() == wanted and not _why_not_whole(peer, found, log):
        return found
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    log.write_text("")
    constraints = ROOT / "constraints.txt"
    pip = (
        *(found.command("python"), "-m", "pip", "--disable-pip-version-check"),
        *("install", "-q", "-c", str(constraints)),
    )
    steps: list[tuple[str, ...]] = [
        (sys.executable, "-m", "venv", str(place)),
        (*pip, "pip"),
        (*pip, _pinned("torch", constraints)),
    ]
    if peer.before:
        steps.append((*pip, *peer.before))
    steps.append((*pip, "--no-build-isolation", "-r", str(requirements)))
    for step in steps:
        try:
            run_to_end(step, log, LIMIT_S)
        except SideError as error:
            return Unavailable(name, f"{' '.join(step[1:])}: {error}")
    if reason := _why_not_whole(peer, found, log):
        return Unavailable(name, reason)
    whole.write_text(wanted)
    return found


def beside(package: str, folder: Path = FOLDER) -> Path | Unavailable:
    """A folder with ``package`` alone, at its release of ``constraints.txt``, for a Python that has
    what it needs: for what is compared within one process. Installed if it isn't."""
    wanted = _pinned(package, ROOT / "constraints.txt")
    place, log = folder / package, folder / f"{package}-install.log"
    whole = place / WHOLE
    if whole.exists() and whole.read_text() == wanted:
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    log.write_text("")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    try:
        run_to_end((*pip, "--no-deps", "--target", str(place), wanted), log, LIMIT_S)
        load = f"import sys; sys.path.append({str(place)!r}); import {package}"
        run_to_end((sys.executable, "-c", load), log, LIMIT_S)
    except SideError as error:
        return Unavailable(package, str(error))
    whole.write_text(wanted)
    return place


def _why_not_whole(peer: Peer, found: Environment, log: Path) -> str:
    """Why it can't load what it must, empty if it can."""
    modules = (*peer.modules, "orchestrator.spec.job")
    load = f"orchestrator.spec.job.load_spec(__import__('pathlib').Path({str(JOB)!r}))"
    code = "; ".join([*(f"import {module}" for module in modules), load])
    try:
        run_to_end((found.command("python"), "-c", code), log, LIMIT_S)
    except SideError as error:
        return str(error)
    return ""


def releases(names: Container[str], folder: Path = FOLDER) -> dict[str, str]:
    """What is installed in the peers' environments that are whole, by whose package it is; of names
    that are no such peers nothing."""
    told = {}
    for peer in PEERS:
        place = folder / peer.name
        if peer.name not in names or not (place / WHOLE).exists():
            continue
        for package in peer.packages:
            if number := _release(Environment(peer.name, place / "bin"), package):
                told[f"{peer.name}'s {package}"] = number
    return told


def _release(environment: Environment, package: str) -> str:
    """Of a package there; empty for none."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run(
        [environment.command("python"), "-c", code], capture_output=True, text=True, timeout=60
    )
    return told.stdout.strip()


def _pinned(package: str, constraints: Path) -> str:
    lines = constraints.read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).partition("+")[0]


def main() -> int:
    """Install what is named, or all; the number of those that can't be had."""
    parser = argparse.ArgumentParser()
    every = [*(peer.name for peer in PEERS), *BESIDE]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *every])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    missing = 0
    for name in arguments.names or every:
        install = beside if name in BESIDE else environment_of
        found = install(name, arguments.folder)
        missing += isinstance(found, Unavailable)
        print(f"{name}: {found.reason if isinstance(found, Unavailable) else 'is there'}")
    return missing


if __name__ == "__main__":
    sys.exit(main())
