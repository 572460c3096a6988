"""``octavo nodes``: the nodes, who holds them, and which are left out, why and until when.

    octavo nodes                                  all of them
    octavo nodes quarantine NODE --reason WHY     leave one out; --for 2h, or until it is released
    octavo nodes release NODE                     take it back

A node is named by its address, its host name, Ray's id or a unique beginning of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from monitoring.clock import moment
from orchestrator.cli.options import HomeOption, OutputOption, client_of, seconds_of, user
from orchestrator.cli.show import NOT_FOUND, USAGE, CommandError, Output, print_json
from orchestrator.cli.tables import plain, print_table

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Address, host name or id.")]

NAMED = "`octavo nodes` shows the nodes there are"

nodes_app = typer.Typer(
    help="The nodes: who holds them, and which are quarantined.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(nodes_app, name="nodes")


@nodes_app.callback()
def nodes(
    context: typer.Context, output: OutputOption = Output.table, home: HomeOption = None
) -> None:
    """The nodes: who holds them, and which are quarantined, why and until when."""
    if context.invoked_subcommand is not None:
        return
    found = client_of(home).nodes()
    if output is Output.json:
        print_json(found)
        return
    print_table(table(found), flexible=("HELD BY", "STATE"))


@nodes_app.command()
def quarantine(
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the node.")],
    term: Annotated[
        str, typer.Option("--for", metavar="TIME", help="As 90s, 30m, 2h, 1d [default: for good].")
    ] = "",
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Leave a node out; jobs that are on it go on there until they start anew."""
    seconds = seconds_of(term, "--for") if term else None
    if not reason.strip():
        raise CommandError("--reason: say why, for whoever finds it so", "", USAGE)
    _show(_asked(lambda: client_of(home).quarantine(node, reason, user(), seconds)), output)


@nodes_app.command()
def release(
    node: NodeArgument, output: OutputOption = Output.table, home: HomeOption = None
) -> None:
    """Take a quarantined node back."""
    _show(_asked(lambda: client_of(home).release(node, user())), output)


def table(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row a node, under a heading."""
    rows: list[tuple[str, ...]] = [("NODE", "ID", "FREE", "HELD BY", "STATE")]
    rows += [(_name(n), n["node_id"][:8], _free(n), _holders(n), _state(n)) for n in nodes]
    return rows


def _name(node: Mapping[str, Any]) -> str:
    name, address = node["name"], node["address"]
    return f"{address} {name}" if name and name != address else address or "?"


def _free(node: Mapping[str, Any]) -> str:
    told = [
        f"{node['free'].get(kind, 0):g}/{total:g} {kind}" for kind, total in node["total"].items()
    ]
    return ", ".join(told) or "–"


def _holders(node: Mapping[str, Any]) -> str:
    told = [f"{h['job']} ({'spare' if h['spare'] else h['slots']})" for h in node["held_by"]]
    return ", ".join(told) or "–"


def _state(node: Mapping[str, Any]) -> str:
    entry = node["quarantine"]
    if entry is None:
        return "ready"
    until = "until it is released"
    if entry["until"] is not None:
        until = f"until {moment(entry['until'])}"
    dead = "" if node["alive"] else "gone; "
    who = f" by {entry['by']}" if entry["by"] else ""
    return f"{dead}quarantined{who} {until}: {entry['reason']}"


def _asked(ask: Any) -> dict[str, Any]:
    """What the controller answered; a node that it doesn't know is told as such."""
    from orchestrator.api.client_errors import NotFoundError

    try:
        return dict(ask())
    except NotFoundError as error:
        raise CommandError(str(error), NAMED, NOT_FOUND) from None


def _show(node: Mapping[str, Any], output: Output) -> None:
    if output is Output.json:
        print_json(node)
    else:
        print(plain(f"{_name(node)} {_state(node)}"))
