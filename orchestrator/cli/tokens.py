"""``octavo token``: who may use the controller's API, and for what.

    octavo token create NAME --role submit --expires 90d    prints the token, this once
    octavo token list [--all]                               without their secrets
    octavo token rotate NAME --overlap 1h                   another secret; the one before ends
    octavo token rotate home                                that of the home, on its machine
    octavo token revoke NAME                                ends it at once
    octavo token whoami                                     whose token this command uses

Promises: a new token is on stdout alone, and nothing else is, so that
``OCTAVO_TOKEN=$(octavo token create …)`` has it; none is ever an argument, which every user of the
machine could read in its list of processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monitoring.clock import clock, moment, zone
from orchestrator.access import HOME
from orchestrator.cli.options import HomeOption, OutputOption, client_of, home_of, seconds_of
from orchestrator.cli.show import (
    NOT_FOUND,
    CommandError,
    Output,
    print_json,
)
from orchestrator.cli.tables import print_table

if TYPE_CHECKING:
    from orchestrator.api.client import Client
    from orchestrator.home.folder import Home

LISTED = "`octavo token list` shows those there are"

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Whose it is: it owns the jobs that it submits.")
]
ExpiresOption = Annotated[
    str, typer.Option("--expires", metavar="TIME", help="As 12h, 90d [default: never].")
]

token_app = typer.Typer(
    help="Who may use the controller's API: tokens with a name and a role.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class TokenRole(StrEnum):
    """What a token is for."""

    read = "read"
    submit = "submit"
    admin = "admin"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(token_app, name="token")


@token_app.command()
def create(
    name: NameArgument,
    role: Annotated[
        TokenRole,
        typer.Option(
            "--role",
            help="read: look at everything; submit: that, and jobs of its own; admin: everything.",
        ),
    ],
    expires: ExpiresOption = "",
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Make a token; it is shown this once."""
    seconds = seconds_of(expires, "--expires") if expires else None
    _show_new(client_of(home).create_token(name, role.value, seconds), output)


@token_app.command("list")
def list_tokens(
    everything: Annotated[
        bool, typer.Option("--all", help="Those too that are in force no more.")
    ] = False,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """The tokens, without their secrets."""
    found = client_of(home).tokens(ended=everything)
    if output is Output.json:
        print_json(found)
        return
    print_table(table(found), flexible=("CREATED BY", "NAME"))


@token_app.command()
def rotate(
    name: NameArgument,
    expires: Annotated[
        str,
        typer.Option(
            "--expires", metavar="TIME", help="As 12h, 90d [default: as the one before was made]."
        ),
    ] = "",
    overlap: Annotated[
        str,
        typer.Option("--overlap", metavar="TIME", help="The one before is accepted for so long."),
    ] = "",
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Make another token of the same name, role and lifetime; the one before ends."""
    seconds = seconds_of(expires, "--expires") if expires else None
    longer = seconds_of(overlap, "--overlap") if overlap else 0.0
    if name == HOME:
        _renew(home_of(home), output)
        return
    client = client_of(home)
    _show_new(_asked(client, lambda: client.rotate_token(name, seconds, longer)), output)


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, or its id.")],
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """End a token at once."""
    client = client_of(home)
    ended = _asked(client, lambda: client.revoke_token(name))
    if output is Output.json:
        print_json(ended)
        return
    for row in ended:
        print(f"{row['name']} {row['id']} revoked")


@token_app.command()
def whoami(output: OutputOption = Output.table, home: HomeOption = None) -> None:
    """Whose token this command uses, and what it may do."""
    found = client_of(home).whoami()
    if output is Output.json:
        print_json(found)
    else:
        print(f"{found['name']}, role {found['role']}{_until(found['expires_at'])}")


def table(tokens: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row a token, under a heading."""
    here = zone(time.time()).partition(" (")[0]
    rows: list[tuple[str, ...]] = [
        ("NAME", "ROLE", "ID", "STATE", f"EXPIRES ({here})", "CREATED", "CREATED BY")
    ]
    for token in tokens:
        ends = [t for t in (token["expires_at"], token["revoked_at"]) if t is not None]
        rows.append(
            (
                token["name"],
                token["role"],
                token["id"],
                token["state"],
                clock(min(ends))[:16] if ends else "never",
                clock(token["created_at"])[:10],
                token["created_by"],
            )
        )
    return rows


def _show_new(made: Mapping[str, Any], output: Output) -> None:
    if output is Output.json:
        print_json(made)
        return
    print(made["token"])
    until = _until(made["expires_at"])
    told = f"{made['name']}, role {made['role']}{until}; this is shown once: keep it"
    print(told, file=sys.stderr)


def _renew(home: Home, output: Output) -> None:
    """Another token of the home: its file, which commands on this machine read."""
    try:
        home.renew_token()
    except FileNotFoundError:
        remedy = "do it where the controller runs, and name its folder with --home"
        raise CommandError(f"{home.path} has no token", remedy, NOT_FOUND) from None
    file = str(home.path / "token")
    if output is Output.json:
        print_json({"name": HOME, "role": "admin", "file": file})
    else:
        print(f"the token of the home was made anew: {file}; the one before ends now")


def _until(expires_at: float | None) -> str:
    if expires_at is None:
        return ", which doesn't expire"
    return f", until {moment(expires_at)}"


def _asked(client: Client, ask: Any) -> Any:
    """What the controller answered; a token that it doesn't know is told as such."""
    from orchestrator.api.client_errors import NotFoundError

    try:
        return ask()
    except NotFoundError as error:
        raise CommandError(str(error), LISTED, NOT_FOUND) from None
