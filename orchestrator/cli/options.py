"""Arguments and options that the commands share, and what they stand for."""

from __future__ import annotations

import functools
import getpass
import inspect
import re
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.show import USAGE, CommandError, Output

if TYPE_CHECKING:
    from orchestrator.api.client import Client
    from orchestrator.home.folder import Home

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_AUTHORITY: ContextVar[Path | None] = ContextVar("authority", default=None)
"""What ``--ca`` of the command that runs says."""


def _jobs_beginning(incomplete: str) -> list[str]:
    """Jobs for the shell to complete; none where the controller doesn't say at once."""
    try:
        client = client_of(None)
        client.hurry()
        return [j["id"] for j in client.jobs() if str(j["id"]).startswith(incomplete)]
    except Exception:  # noqa: BLE001 - a shell that completes is no place to tell it
        return []


JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Id, name or unique beginning.", autocompletion=_jobs_beginning
    ),
]
OutputOption = Annotated[Output, typer.Option("-o", "--output", help="How to show it.")]
SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A job file (YAML).")]
HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="The controller's folder; else $OCTAVO_HOME or ~/.octavo."),
]
_CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar="OCTAVO_CA",
        help="PEM file: who signed the certificate of the controller at $OCTAVO_URL.",
    ),
]


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """``command`` with an option ``--ca``, where it has one for the controller's home."""
    signature = inspect.signature(command, eval_str=True)
    if "home" not in signature.parameters or "ca" in signature.parameters:
        return command

    @functools.wraps(command)
    def run(*args: Any, ca: Path | None = None, **kwargs: Any) -> Any:
        _AUTHORITY.set(ca)
        return command(*args, **kwargs)

    option = inspect.Parameter(
        "ca", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CaOption
    )
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def home_of(path: Path | None) -> Home:
    """The home that ``--home`` names, or the default one."""
    from orchestrator.home.folder import Home

    return Home(path) if path else Home.default()


def client_of(path: Path | None) -> Client:
    """A client of the controller whose home ``--home`` names, else of the one at ``$OCTAVO_URL``,
    else of the default home's."""
    from orchestrator.api.client import Client

    remote = client_elsewhere(path)
    return Client.of_home(home_of(path)) if remote is None else remote


def client_elsewhere(path: Path | None) -> Client | None:
    """A client of the controller at ``$OCTAVO_URL``, if commands with this ``--home`` are for it:
    what the command line says is nearer than the environment."""
    from orchestrator.api.client import Client

    return Client.of_environment(_AUTHORITY.get()) if path is None else None


def user() -> str:
    """Who asks, for the records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "someone"


def seconds_of(term: str, option: str) -> float:
    """``90s``, ``30m``, ``2h``, ``1d`` → seconds; a usage error of ``option`` for anything else."""
    match = re.fullmatch(r"(\d{1,6})\s*(s|m|min|h|d)", term.strip(), re.ASCII)
    if match is None or not int(match[1]):
        told = f"{option}: {term!r} is no time"
        raise CommandError(told, "times are as 90s, 30m, 2h, 1d", USAGE)
    return float(int(match[1]) * _UNITS[match[2]])
