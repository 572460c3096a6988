"""Arguments and options that the commands share, and what they stand for."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli_show import Output

if TYPE_CHECKING:
    from orchestrator.client import Client
    from orchestrator.home import Home

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id, name or unique beginning.")]
OutputOption = Annotated[Output, typer.Option("-o", "--output", help="How to show it.")]
SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A job file (YAML).")]
HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="The controller's folder; else $OCTAVO_HOME or ~/.octavo."),
]


def home_of(path: Path | None) -> Home:
    """The home that ``--home`` names, or the default one."""
    from orchestrator.home import Home

    return Home(path) if path else Home.default()


def client_of(path: Path | None) -> Client:
    """A client of that home's controller."""
    from orchestrator.client import Client

    return Client.of_home(home_of(path))


def user() -> str:
    """Who asks, for the records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "someone"
