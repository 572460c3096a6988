"""`octavo plan`: what a job will be, before anything is started.

Promises: everything that would refuse the job on this machine refuses it here, in the same words;
what is printed is a job file again. `octavo submit --dry-run` is the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from orchestrator.cli_options import OutputOption, SpecArgument
from orchestrator.cli_show import Output, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(spec: SpecArgument, output: OutputOption = Output.table) -> None:
    """Check a job and print it completed, with what its linears will run on and why."""
    show_plan(spec, output)


def show_plan(file: Path, output: Output) -> None:
    """Raises SpecError for a file that would be refused."""
    from orchestrator.client import URL_VARIABLE
    from orchestrator.resume_from import check_resume_from
    from orchestrator.spec import load_spec, spec_data, spec_yaml
    from orchestrator.spec_backend import backend_of
    from orchestrator.spec_storage import check_storage
    from orchestrator.spec_trial import check_factory_model

    checked = load_spec(file)
    # A controller elsewhere has folders of its own.
    if checked.checkpoint.storage_path is not None and URL_VARIABLE not in os.environ:
        check_storage(checked.checkpoint.storage_path, str(file))
    if URL_VARIABLE not in os.environ:
        check_resume_from(checked, str(file))
    check_factory_model(checked, str(file))
    backend = f"linears: {backend_of(checked)}"
    if output is Output.json:
        print_json(spec_data(checked))
        print(backend, file=sys.stderr)
    else:
        # As a comment: the output is a job file.
        sys.stdout.write(f"# {backend}\n{spec_yaml(checked)}")
