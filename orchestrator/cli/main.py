"""The ``octavo`` command.

Exit codes: 0 succeeded, 100 job failed, 101 not finished, 102 not found, 103 cancelled, 104 a
replay differs from what is stored, 1 a drill was not caught;
2 usage or spec error, 3 controller unreachable, 130 interrupted, 143 terminated, 1 anything
else. ``-o json`` on every command, for what it shows and for its errors. A job is named by
its id, its name or a unique beginning.
"""

from __future__ import annotations

import os
import sys
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import control as cli_control
from orchestrator.cli import dashboard as cli_dashboard
from orchestrator.cli import doctor as cli_doctor
from orchestrator.cli import installed as cli_installed
from orchestrator.cli import look as cli_look
from orchestrator.cli import nodes as cli_nodes
from orchestrator.cli import plan as cli_plan
from orchestrator.cli import tokens as cli_tokens
from orchestrator.cli.control import KeyOption
from orchestrator.cli.degrees import degrees_of
from orchestrator.cli.examples import complete
from orchestrator.cli.options import (
    HomeOption,
    JobArgument,
    OutputOption,
    SpecArgument,
    client_elsewhere,
    client_of,
    home_of,
    user,
)
from orchestrator.cli.plan import show_plan
from orchestrator.cli.show import (
    INTERRUPTED,
    NOT_FOUND,
    UNREACHABLE,
    USAGE,
    CommandError,
    Output,
    complain,
    exit_code,
    print_json,
)

app = typer.Typer(
    help="Unattended FP8 training of large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say the version.", is_eager=True, callback=_say_version),
    ] = False,
) -> None:
    """Unattended FP8 training of large language models."""


@app.command()
def run(
    spec: SpecArgument,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the job's directory [default: runs].")
    ] = None,
    keep_home: Annotated[
        bool, typer.Option("--keep-home", help="Leave the controller's store behind.")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Run a job on this machine, from a Ray of its own to the report."""
    from orchestrator.cli.run import run_job

    raise typer.Exit(run_job(spec, out, keep_home=keep_home, output=output))


@app.command()
def submit(
    spec: SpecArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check it and print it completed.")
    ] = False,
    key: KeyOption = "",
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Hand a job to the controller."""
    if dry_run:
        show_plan(spec, output)
        return
    from orchestrator.spec.job import load_spec, spec_data

    # A controller elsewhere looks at the data itself: it is there that they must be.
    checked = load_spec(spec, check_data=client_elsewhere(home) is None)
    job = client_of(home).submit(spec_data(checked), str(spec), key=key, by=user())
    if output is Output.json:
        print_json(job)
    else:
        print(job["id"])


@app.command()
def watch(job: JobArgument, output: OutputOption = Output.table, home: HomeOption = None) -> None:
    """Follow a job in a live view until it ends."""
    from orchestrator.cli.watch import follow, follow_json

    if output is Output.json:
        raise typer.Exit(exit_code(follow_json(client_of(home), job)))
    raise typer.Exit(exit_code(follow(client_of(home), job)))


@app.command()
def report(
    job: JobArgument,
    to: Annotated[
        Path | None, typer.Option("--to", help="File, or - for stdout [default: JOB.html].")
    ] = None,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Write a job's report (HTML), or print its summary (-o json)."""
    from orchestrator.cli.following import whole_view

    view = whole_view(client_of(home), job)
    if output is Output.json:
        from monitoring.summary import summarize

        print_json(summarize(view))
        return
    from monitoring.report import render_report

    file, page = to or Path(f"{view.job}.html"), render_report(view)
    if file == Path("-"):
        sys.stdout.write(page)
        return
    file.write_text(page, encoding="utf-8")
    print(file)


@app.command()
def replay(
    job: JobArgument,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="A file with detection: and recovery: [default: the job's]."),
    ] = None,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Run a job's stored records through a policy: what it would have done, step by step."""
    from orchestrator.cli.replay import replay_job

    raise typer.Exit(replay_job(home, job, policy, output))


@app.command()
def drill(
    spec: SpecArgument,
    kinds: Annotated[
        str,
        typer.Option(help="Kinds of drills, with commas [default: all that it has a place for]."),
    ] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps a run [default: as few as detection needs].")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Rehearse recovery on short copies of a job: what is caught, when, and what it costs."""
    from orchestrator.cli.drill import rehearse

    named = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    raise typer.Exit(rehearse(spec, named, steps, output))


@app.command()
def cancel(
    job: JobArgument,
    reason: Annotated[str, typer.Option(help="Kept with the job.")] = "",
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """End a job, after a checkpoint where it has something to save."""
    gone = client_of(home).cancel(job, reason or f"cancelled by {user()}")
    if output is Output.json:
        print_json(gone)
    else:
        print(f"{gone['id']} {gone['state']}")


@app.command()
def resume(
    job: JobArgument,
    parallelism: Annotated[
        list[str] | None,
        typer.Option(
            "--parallelism",
            metavar="WORD=N,…",
            help="Other degrees: tensor, pipeline, data, zero_stage, num_nodes, slots_per_node.",
        ),
    ] = None,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Let a paused, cancelled or failed job go on from its newest checkpoint, on any degrees."""
    degrees = degrees_of(parallelism or [])
    queued = client_of(home).resume(job, f"resumed by {user()}", degrees)
    if output is Output.json:
        print_json(queued)
        return
    print(f"{queued['id']} {queued['state']}")


@app.command()
def up(
    slots: Annotated[
        int | None, typer.Option(min=1, help="CPU slots [default: one a core, at least 4].")
    ] = None,
    standby: Annotated[
        int | None,
        typer.Option(min=0, help="Idle, imported workers a node: jobs start seconds earlier."),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Redis for Ray's tables, which jobs outlive Ray's death with; 'none': without. "
            "Its password: file redis-password (0600) of the home, or $RAY_REDIS_PASSWORD.",
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of the API [default: 127.0.0.1].")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of the API; 0: any free one.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="PEM file: the API speaks TLS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="PEM file of the certificate's key (0600).")
    ] = None,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="Listen on ADDRESS without TLS all the same.")
    ] = False,
    output: OutputOption = Output.table,
    home: HomeOption = None,
) -> None:
    """Start a controller and a Ray on this machine, or say that they run."""
    from orchestrator.cli.up import bring_up

    listening = {
        "host": listen,
        "port": port,
        "tls_cert": tls_cert and tls_cert.absolute(),
        "tls_key": tls_key and tls_key.absolute(),
        "plain_http": plain_http or None,
    }
    asked = {name: value for name, value in listening.items() if value is not None}
    raise typer.Exit(bring_up(home_of(home), slots, standby, redis, output, asked))


@app.command()
def down(output: OutputOption = Output.table, home: HomeOption = None) -> None:
    """End what `octavo up` started, its jobs after a checkpoint each."""
    from orchestrator.cli.up import bring_down

    raise typer.Exit(bring_down(home_of(home), user(), output))


cli_look.register(app)
cli_control.register(app)
cli_nodes.register(app)
cli_tokens.register(app)
cli_plan.register(app)
cli_dashboard.register(app)
cli_doctor.register(app)
cli_installed.register(app)
complete(app)


def main(arguments: list[str] | None = None) -> None:
    """Entry of ``octavo``: every failure is told in a line and has its exit code."""
    sys.exit(call(arguments))


def call(arguments: list[str] | None = None) -> int:
    """Run the command; its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    command = typer.main.get_command(app)
    try:
        # In a context of its own: what its options say is of this call.
        main = partial(command.main, words, prog_name="octavo", standalone_mode=False)
        code = copy_context().run(main)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        if _output_asked(words) is Output.json:
            complain(CommandError("interrupted", code=INTERRUPTED), Output.json)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has had enough, as `head` does; nobody is left to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 — the last place that can tell it
        return _tell(error, _output_asked(words))


def _output_asked(words: list[str]) -> Output:
    """What ``-o`` says, read without Typer: its own errors are told in that form too."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "--":
            break
        value = following if word in ("-o", "--output") else ""
        if word.startswith("--output="):
            value = word.removeprefix("--output=")
        elif word.startswith("-o") and not value:
            value = word.removeprefix("-o").removeprefix("=")
        if value == Output.json.value:
            return Output.json
    return Output.table


def _tell(error: Exception, output: Output) -> int:
    show = getattr(error, "show", None)
    if callable(show):
        # A usage error of Typer's, which has them in a module of its own.
        message = getattr(error, "message", None)
        if isinstance(message, str):
            error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]
    if callable(show) and output is Output.table:
        show()
        return USAGE
    told = _error_of(error)
    if told is None and output is Output.table:
        raise error
    # Even what nobody foresaw is one object to a program.
    told = told or CommandError(f"octavo failed: {type(error).__name__}: {error}")
    complain(told, output)
    return told.code


def _error_of(error: Exception) -> CommandError | None:
    """The error as a person is told it; None: nobody foresaw it."""
    from orchestrator.api import client_errors as client
    from orchestrator.api.client import TOKEN_VARIABLE
    from orchestrator.spec.errors import SpecError

    usage = getattr(error, "format_message", None)
    if callable(usage):
        return CommandError(str(usage()), "`octavo --help` shows the commands", USAGE)
    match error:
        case CommandError():
            return error
        case SpecError():
            return CommandError.of_spec(error.problems)
        case client.UnreachableError():
            return CommandError(str(error), error.remedy, UNREACHABLE)
        case client.NotFoundError():
            return CommandError(str(error), "`octavo list` shows the jobs there are", NOT_FOUND)
        case client.NotAuthorizedError():
            remedy = f"it is in the home's `token`; elsewhere set ${TOKEN_VARIABLE}"
            return CommandError(str(error), remedy)
        case client.NotYoursError():
            return CommandError(str(error), "`octavo list --mine` shows yours; an admin may")
        case client.NotAllowedError():
            role = error.needed or "ROLE"
            remedy = (
                f"ask an admin to do it, or for a token: `octavo token create NAME --role {role}`"
            )
            return CommandError(str(error), remedy)
        case client.UsageError():
            return CommandError(str(error), code=USAGE)
        case client.ClientError() if error.candidates:
            remedy = "\n".join(["name one of them:", *(f"    {word}" for word in error.candidates)])
            return CommandError(str(error), remedy, candidates=error.candidates)
        case client.ClientError() | OSError():
            return CommandError(str(error))
    return None


if __name__ == "__main__":
    main()
