"""What is installed beside an image's own packages, while the GPU image is built.

    python deploy/image_packages.py FOLDER [EXTRA…]

Run in a checkout by the image's Python: it writes ``wanted.txt``, what Octavo and its extras of
those names need but for torch, and ``pinned.txt``, the versions that Octavo is tested with, but for
packages that the image has already: those belong together (torch, NCCL, NumPy) and stay.
NVIDIA's torch is named as a version before the one it is made of (2.13.0a0), which no requirement
takes, and is looked at here instead. Promises: needs nothing but the standard library; exit code 1,
saying why, for a torch that Octavo is not for.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions, version
from pathlib import Path


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """``ray[default]>=2.60`` → ``ray``."""
    return canonical(re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0])


def wanted(dependencies: Iterable[str]) -> list[str]:
    """All but torch."""
    return [line for line in dependencies if name_of(line) != "torch"]


def pinned(constraints: Iterable[str], there: set[str]) -> list[str]:
    """Those of packages that the image hasn't got."""
    lines = (line.strip() for line in constraints)
    return [line for line in lines if "==" in line and name_of(line) not in there]


def wrong_torch(dependencies: Iterable[str], found: str) -> str:
    """Why a torch of version ``found`` won't do, or nothing; the first two numbers count."""
    asked = next(line for line in dependencies if name_of(line) == "torch")
    least = _numbers(re.search(r">=([\d.]+)", asked))
    beyond = _numbers(re.search(r"<([\d.]+)", asked))
    have = _numbers(re.match(r"([\d.]+\d)", found))
    if least <= have < beyond:
        return ""
    return f"the image has torch {found}, and Octavo is for {asked}: take another gpu_base"


def _numbers(match: re.Match[str] | None) -> tuple[int, ...]:
    assert match is not None, "a version has numbers"
    return tuple(map(int, match[1].split(".")))[:2]


def main() -> None:
    """Entry."""
    folder = Path(sys.argv[1])
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    if why := wrong_torch(project["dependencies"], version("torch")):
        sys.exit(why)
    there = {canonical(found.metadata["Name"]) for found in distributions()}
    constraints = Path("constraints.txt").read_text().splitlines()
    asked = [*project["dependencies"]]
    for extra in sys.argv[2:]:
        asked += project["optional-dependencies"][extra]
    (folder / "wanted.txt").write_text("\n".join(wanted(asked)) + "\n")
    (folder / "pinned.txt").write_text("\n".join(pinned(constraints, there)) + "\n")


if __name__ == "__main__":
    main()
