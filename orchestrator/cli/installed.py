"""Commands of packages that stand above this one, found by name and not by an import.

Promises: imports run one way, from ``deploy`` down: what is above says in its entry points (group
``octavo.commands``) which function adds its commands; only Octavo's own are looked for, which costs
a millisecond, not a look through all that is installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import typer

GROUP = "octavo.commands"


def register(app: typer.Typer) -> None:
    """Add them; none in a checkout that isn't installed."""
    try:
        found = distribution("octavo").entry_points.select(group=GROUP)
    except PackageNotFoundError:
        return
    for entry in sorted(found, key=lambda entry: entry.name):
        entry.load()(app)
