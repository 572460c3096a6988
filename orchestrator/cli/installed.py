"""Commands and readers of packages that stand above this one, found by name and not by an import.

Promises: imports run one way, from ``deploy`` down: what is above says in its entry points (group
``octavo.commands``) which function adds its commands, and in others what it offers besides; only
Octavo's own are looked for, which costs a millisecond, not a look through all that is installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import typer

GROUP = "octavo.commands"


def register(app: typer.Typer) -> None:
    """Add them; none in a checkout that isn't installed."""
    for add in loaded(GROUP):
        add(app)


def loaded(group: str) -> list[Any]:
    """What Octavo's entry points of ``group`` name, in the order of their names."""
    try:
        found = distribution("octavo").entry_points.select(group=group)
    except PackageNotFoundError:
        return []
    return [entry.load() for entry in sorted(found, key=lambda entry: entry.name)]
