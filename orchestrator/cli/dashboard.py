"""`octavo dashboard`: the W&B dashboard of a job, as JSON or saved to W&B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import HomeOption, JobArgument, OutputOption, client_of
from orchestrator.cli.show import CommandError, Output, print_json

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(dashboard)


def dashboard(
    job: JobArgument,
    entity: Annotated[
        str | None, typer.Option(help="W&B entity; default: the spec's, else your own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write its JSON here and save nothing to W&B.")
    ] = None,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Make the job's dashboard in W&B: loss, FP8 headroom, recovery, communication.

    Saved to W&B, where you must be logged in (`wandb login`), the address is printed. With
    --out, or -o json, nothing is sent.
    """
    from monitoring.dashboards import workspace, workspace_json

    shown = client_of(home).job(job)
    spec = shown["spec"]["wandb"]
    if spec["mode"] == "disabled":
        raise CommandError(
            f"{shown['id']} has no W&B run: its spec has wandb.mode: disabled",
            "`octavo watch` and `octavo report` show it without W&B",
        )
    offline = out is not None or output is Output.json
    # What a completed spec says nothing of is not in it.
    whose = entity or spec.get("entity") or (None if offline else _own_entity())
    board = workspace(shown["id"], whose or "", spec["project"])
    if not offline:
        print(_saved(board))
        return
    told = workspace_json(board)
    if out is not None:
        out.write_text(json.dumps(told, indent=2) + "\n")
    if output is Output.json:
        print_json(told)


def _own_entity() -> str:
    import wandb

    try:
        entity = wandb.Api(timeout=20).default_entity
    except Exception as error:  # noqa: BLE001 - whatever W&B raises, it is told
        raise _unreachable(error) from None
    if not entity:
        raise CommandError("W&B knows no default entity of yours", "give one: --entity NAME")
    return str(entity)


def _saved(board: Workspace) -> str:
    """The address of the dashboard, which is in W&B now."""
    try:
        return str(board.save().url)
    except Exception as error:  # noqa: BLE001 - whatever W&B raises, it is told
        raise _unreachable(error) from None


def _unreachable(error: Exception) -> CommandError:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CommandError(
        f"the dashboard could not be saved to W&B: {line}",
        "log in with `wandb login`, or write its JSON with --out FILE",
    )
