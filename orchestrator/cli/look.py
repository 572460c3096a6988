"""The commands that show jobs: list, status, logs, events.

Promises: what users and ranks wrote is shown as text; a log or a list of events that is followed
ends with the job, and the exit code tells its state.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from launch.log_lines import LogLine
from monitoring.clock import stamp
from orchestrator.cli.options import (
    HomeOption,
    JobArgument,
    OutputOption,
    client_of,
    seconds_of,
    user,
)
from orchestrator.cli.show import (
    NOT_FOUND,
    CommandError,
    EventLines,
    Output,
    exit_code,
    print_job,
    print_jobs,
    print_json,
    print_json_line,
)
from orchestrator.cli.tables import as_text

FollowOption = Annotated[bool, typer.Option("-f", "--follow", help="Go on until it ends.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("list")(list_jobs)
    app.command("jobs", help="All jobs; the same as `octavo list`.")(list_jobs)
    for command in (status, logs, events):
        app.command()(command)


def list_jobs(
    mine: Annotated[
        bool, typer.Option("--mine", help="Those alone that you submitted: your token, or you.")
    ] = False,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Those alone in this state; repeatable."),
    ] = None,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """All jobs."""
    client = client_of(home)
    jobs = client.jobs(_whose(client.whoami()["name"]) if mine else None, state or ())
    if output is Output.json:
        print_json(jobs)
    else:
        print_jobs(jobs)


def status(job: JobArgument, output: OutputOption = Output.table, home: HomeOption = None) -> None:
    """One job; the exit code tells its state."""
    shown = client_of(home).job(job)
    if output is Output.json:
        print_json(shown)
    else:
        print_job(shown)
    raise typer.Exit(exit_code(shown["state"]))


def logs(
    job: JobArgument,
    rank: Annotated[int, typer.Option(min=0, help="Whose log.")] = 0,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Of this attempt alone [default: the newest].")
    ] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Of the last 90s, 10m, 2h or 1d alone.")
    ] = "",
    tail: Annotated[int | None, typer.Option(min=1, help="The last lines alone.")] = None,
    follow: FollowOption = False,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """What a rank printed."""
    client = client_of(home)
    begin: dict[str, float] = {}
    if since:
        # By the controller's clock: its hosts' are nearer to it than this one's.
        begin["since"] = client.clock() - seconds_of(since, "--since")
    if tail is not None:
        begin["tail"] = tail
    seen = False
    for piece in client.follow_logs(job, rank, attempt, follow=follow, **begin):
        if not seen and not follow and not piece["exists"]:
            remedy = "`octavo status -o json` shows the attempts, the spec the ranks"
            told = f"rank {rank} has no log of attempt {piece['attempt']}"
            raise CommandError(told, remedy, NOT_FOUND)
        seen = True
        if output is Output.json:
            for line in piece["lines"]:
                print_json_line(line)
        else:
            for line in piece["lines"]:
                sys.stdout.write(f"{as_text(LogLine(**line).text(stamp))}\n")
            sys.stdout.flush()
    if follow:
        raise typer.Exit(exit_code(client.job(job)["state"]))


def events(
    job: JobArgument,
    follow: FollowOption = False,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """What happened to a job."""
    client = client_of(home)
    told = client.follow_events(job, follow=follow)
    if output is Output.json and not follow:
        print_json(list(told))
        return
    lines = EventLines()
    for event in told:
        if output is Output.json:
            print_json_line(event)
        else:
            print(lines.of(event), flush=True)
    if follow:
        raise typer.Exit(exit_code(client.job(job)["state"]))


def _whose(token: str) -> str:
    """Who submitted the jobs of who holds a token: of the home's, who is logged in."""
    from orchestrator.access import HOME

    return user() if token == HOME else token
