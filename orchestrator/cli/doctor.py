"""``octavo doctor``: what stands in the way, on this machine or on a cluster's nodes.

    octavo doctor                     this machine
    octavo doctor --group h100        the nodes of a group, through the Ray of the controller
    octavo doctor --group all         every node
    octavo doctor --address HOST:PORT every node of the Ray there

Promises: nothing is changed and no slot is taken; every finding is ok, warning or error with its
remedy; it ends, whatever hangs; exit code 0 without an error, 1 with one, 3 where the cluster
can't be reached.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monitoring.wording import counted
from orchestrator.cli.options import HomeOption, OutputOption, home_of
from orchestrator.cli.show import (
    NOT_FOUND,
    UNREACHABLE,
    USAGE,
    CommandError,
    Output,
    print_json,
)
from orchestrator.cli.tables import plain, print_table

if TYPE_CHECKING:
    from orchestrator.doctor.checks import MachineFinding
    from orchestrator.doctor.comparison import NodeAnswer
    from orchestrator.home.folder import Home

EVERY = "all"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            help="A cluster's nodes: a group's name, or 'all' [default with --address: all].",
        ),
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
    from orchestrator.doctor.checks import Level, examine
    from orchestrator.doctor.comparison import compare

    kept = home_of(home)
    folder = str((storage or kept.jobs_dir).absolute())
    where = _cluster(kept, group, address) if group or address else ""
    if where:
        found = compare(_nodes(where, group or EVERY, folder, wandb=not no_wandb))
    else:
        from launch.machine_facts import gather

        found = examine(gather(folder, wandb=not no_wandb))
    _show(found, output)
    raise typer.Exit(int(any(finding.level is Level.error for finding in found)))


def _cluster(home: Home, group: str | None, address: str | None) -> str:
    """Where the Ray is whose nodes are meant; empty: this machine is all of them.

    Raises CommandError where there is none, or it has no groups.
    """
    from orchestrator.cluster.local import running_host

    if address is not None and not re.fullmatch(r"\S+:\d{1,5}", address):
        raise CommandError(f"--address: {address!r} is no HOST:PORT", "as head.lan:6379", USAGE)
    where = address or os.environ.get("RAY_ADDRESS") or home.ray_address()
    if where:
        return where
    if running_host(home) is None:
        message = f"no controller of {home.path} runs here, so its cluster is not known"
        remedy = "on a node of a cluster give --address HOST:6379 (Ray's head); without --group "
        raise CommandError(message, remedy + "`octavo doctor` looks at this machine", UNREACHABLE)
    if group == EVERY:
        return ""
    message = f"no group {group!r}: the controller of {home.path} is on this machine alone"
    raise CommandError(message, "`octavo doctor` looks at it", NOT_FOUND)


def _nodes(where: str, group: str, folder: str, *, wandb: bool) -> list[NodeAnswer]:
    """Raises CommandError where the cluster can't be asked, or has no such group."""
    from orchestrator.doctor.nodes import ClusterUnreachableError, UnknownGroupError, ask

    try:
        with _mark(Path(folder)) as mark:
            return ask(where, None if group == EVERY else group, folder, mark, wandb=wandb)
    except ClusterUnreachableError as error:
        remedy = "run it on a node of the cluster, as the user that Ray runs as (its token)"
        raise CommandError(str(error), remedy, UNREACHABLE) from None
    except UnknownGroupError as error:
        raise CommandError(
            str(error), "`octavo doctor --group all`: every node", NOT_FOUND
        ) from None


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
    print(f"\n{counted(counts[Level.error], 'error')}, {counted(counts[Level.warning], 'warning')}")
