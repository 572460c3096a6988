"""``octavo doctor``: what stands in the way, on this machine or on a cluster's nodes.

    octavo doctor                     this machine
    octavo doctor --group h100        the nodes of a group, through the Ray of the controller
    octavo doctor --group all         every node

Promises: nothing is changed and no slot is taken; every finding is ok, warning or error with its
remedy; it ends, whatever hangs; exit code 0 without an error, 1 with one, 3 where the cluster
can't be reached.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import HomeOption, OutputOption, home_of
from orchestrator.cli.show import NOT_FOUND, UNREACHABLE, CommandError, Output, print_json
from orchestrator.cli.tables import plain, print_table

if TYPE_CHECKING:
    from orchestrator.doctor.checks import MachineFinding, NodeAnswer
    from orchestrator.home.folder import Home

EVERY = "all"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    group: Annotated[
        str | None,
        typer.Option("--group", help="A cluster's nodes: a group's name, or 'all'."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="Of Ray's head [default: the home's]."),
    ] = None,
    storage: Annotated[
        Path | None,
        typer.Option("--storage", help="Folder of jobs' directories [default: the home's]."),
    ] = None,
    no_wandb: Annotated[
        bool, typer.Option("--no-wandb", help="Don't ask whether W&B can be reached.")
    ] = False,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Look for what stands in the way of training: on this machine, or on a cluster's nodes."""
    from orchestrator.doctor.checks import Level, compare, examine

    kept = home_of(home)
    folder = str((storage or kept.jobs_dir).absolute())
    if group is None:
        from launch.machine_facts import gather

        found = examine(gather(folder, wandb=not no_wandb))
    else:
        found = compare(_nodes(kept, group, address, folder, wandb=not no_wandb))
    _show(found, output)
    raise typer.Exit(int(any(finding.level is Level.error for finding in found)))


def _nodes(
    home: Home, group: str, address: str | None, folder: str, *, wandb: bool
) -> list[NodeAnswer]:
    """Raises CommandError where the cluster can't be asked, or has no such group."""
    from orchestrator.doctor.nodes import ClusterUnreachableError, ask

    where = address or os.environ.get("RAY_ADDRESS") or home.ray_address()
    if not where:
        message = f"the controller of {home.path} is on no cluster of several nodes"
        remedy = "run it on a node of the cluster with --address HOST:6379 (Ray's head)"
        raise CommandError(message, remedy, UNREACHABLE)
    try:
        with _mark(Path(folder)) as mark:
            named = None if group == EVERY else group
            answers = ask(where, named, folder, mark, wandb=wandb)
    except ClusterUnreachableError as error:
        remedy = "run it on a node of the cluster, as the user that Ray runs as (its token)"
        raise CommandError(str(error), remedy, UNREACHABLE) from None
    if not answers:
        remedy = "`octavo doctor --group all` shows every node"
        raise CommandError(f"no node is of the group {group!r}", remedy, NOT_FOUND)
    return answers


@contextlib.contextmanager
def _mark(folder: Path) -> Iterator[str]:
    """A file in the folder that every node must see; empty where none can be made here."""
    mark = folder / f".octavo-doctor-{secrets.token_hex(6)}"
    try:
        mark.touch(exist_ok=False)
    except OSError:
        yield ""
        return
    try:
        yield str(mark)
    finally:
        mark.unlink(missing_ok=True)


def _show(found: Sequence[MachineFinding], output: Output) -> None:
    from orchestrator.doctor.checks import Level

    counts = {level: sum(f.level is level for f in found) for level in Level}
    if output is Output.json:
        told = {level.value: count for level, count in counts.items()}
        print_json({"counts": told, "findings": [f.to_json() for f in found]})
        return
    several = any(f.node for f in found)
    rows = [("CHECK", *(("NODE",) if several else ()), "", "FOUND")]
    for f in found:
        node = (plain(f.node or "–"),) if several else ()
        rows.append((f.check, *node, f.level.value, plain(f.message)))
    print_table(rows, flexible=("FOUND",))
    worse = [f for f in found if f.level is not Level.ok]
    for f in worse:
        where = f"{f.node} " if f.node else ""
        print(f"\n{f.level.value}: {where}{f.check}: {plain(f.message)}\n    {f.remedy}")
    print(f"\n{counts[Level.error]} errors, {counts[Level.warning]} warnings")
