"""``octavo deploy``: a cluster profile rendered for a target, compared, and applied.

    octavo deploy render --target kuberay cluster.yaml --out manifests
    octavo deploy diff   --target kuberay cluster.yaml --out manifests
    octavo deploy apply  --target kuberay cluster.yaml

Found by ``orchestrator.cli`` through the entry point group ``octavo.commands``: deploy stands above
the orchestrator and may import it, not the other way round. Promises: nothing outside ``--out`` is
changed but by ``apply``; a client that isn't there is told, with what to do by hand; every client
that is run has a time-out. Imports nothing heavy: every `octavo` imports it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import OutputOption
from orchestrator.cli.show import USAGE, CommandError, Output, print_json

if TYPE_CHECKING:
    from deploy.cluster_profile import ClusterProfile, Target
    from deploy.rendered import Rendered

DIFFERENT = 1

ProfileArgument = Annotated[
    Path, typer.Argument(metavar="CLUSTER", help="A cluster profile (YAML).")
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="kuberay, rayjob, aws, gcp, azure, on-prem, slurm, systemd or container "
        "[default: the profile's].",
    ),
]
JobOption = Annotated[
    Path | None, typer.Option("--job", help="A job file, which a rayjob or Slurm trains.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder [default: standard output].")]
AgainstOption = Annotated[
    Path | None,
    typer.Option("--out", help="Folder to compare with [default: the Kubernetes cluster]."),
]

deploy_app = typer.Typer(
    help="A cluster for Octavo, from one profile: rendered, compared, applied.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(deploy_app, name="deploy")


@deploy_app.command()
def render(
    profile: ProfileArgument,
    target: TargetOption = None,
    out: OutOption = None,
    job: JobOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Write a target's files."""
    from deploy.rendered import write

    _, wanted, files, noted = _rendered(profile, target, job, output)
    if out is None:
        if output is Output.json:
            print_json({"target": wanted, "files": {f.name: f.text for f in files}, **noted})
            return
        several = len(files) > 1
        for file in files:
            print(f"# --- {file.name}\n{file.text}" if several else file.text, end="")
        return
    try:
        written = write(files, out)
    except OSError as error:
        raise CommandError(f"{out} can't be written: {error.strerror or error}") from None
    if output is Output.json:
        print_json({"target": wanted, "files": [str(out / f.name) for f in files], **noted})
        return
    for file in files:
        path = out / file.name
        print(f"{path}" if path in written else f"{path} unchanged")


@deploy_app.command()
def diff(
    profile: ProfileArgument,
    target: TargetOption = None,
    out: AgainstOption = None,
    job: JobOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show what a render would change in a folder, or an apply in the cluster.

    Exit code 1: something; 3: the cluster can't be asked.
    """
    from deploy.clients import cluster_difference
    from deploy.rendered import differences

    _, wanted, files, noted = _rendered(profile, target, job, output)
    if out is None:
        text = cluster_difference(wanted, files)
        if output is Output.json:
            print_json({"target": wanted, "different": bool(text), "diff": text, **noted})
        elif text:
            print(text, end="")
        raise typer.Exit(DIFFERENT if text else 0)
    found = differences(files, out)
    if output is Output.json:
        told = [{"file": d.name, "new": d.new, "diff": list(d.lines)} for d in found]
        print_json({"target": wanted, "different": bool(found), "files": told, **noted})
    else:
        for difference in found:
            print("\n".join(difference.lines))
    raise typer.Exit(DIFFERENT if found else 0)


@deploy_app.command()
def apply(
    profile: ProfileArgument,
    target: TargetOption = None,
    job: JobOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Hand a target's files to its client: kubectl, ray up, sbatch, docker build."""
    from deploy.clients import applying, run_client
    from deploy.cluster_profile import hourly

    checked, wanted, files, noted = _rendered(profile, target, job, output)
    step = applying(checked, wanted, files, job)
    if not yes:
        if output is Output.json:
            raise CommandError("nobody can be asked with -o json", "say --yes", USAGE)
        cost = hourly(checked)
        typer.confirm(f"{step.said}{f' ({cost})' if cost else ''}?", abort=True)
    told = run_client(step, files)
    if output is Output.json:
        command = list(step.command)
        print_json({"target": wanted, "command": command, "output": told, **noted})
    else:
        print(told, end="" if told.endswith("\n") else "\n")


def _rendered(
    file: Path, target: str | None, job: Path | None, output: Output
) -> tuple[ClusterProfile, Target, list[Rendered], dict[str, object]]:
    """What is asked for, checked and rendered; last what there is to note, for an answer as JSON:
    else it is on stderr already. Raises SpecError for a profile, or a job, that is wrong."""
    from deploy.cluster_profile import TARGETS
    from deploy.profile_file import load_profile
    from deploy.targets import render as render_target
    from deploy.used_keys import notes
    from orchestrator.spec.errors import nearest

    word = next((known for known in TARGETS if known == target), None)
    if target is not None and word is None:
        hint = nearest(target, TARGETS)
        told = f"--target: {target!r} is none of {', '.join(TARGETS)}"
        raise CommandError(told, hint, USAGE)
    checked, wanted = load_profile(file, word)
    text = ""
    if wanted == "rayjob" and job is None:
        raise CommandError("a rayjob trains a job", "name its file: --job job.yaml", USAGE)
    if job is not None:
        if wanted not in ("rayjob", "slurm"):
            raise CommandError(f"--job means nothing for {wanted}", "leave it out", USAGE)
        text = _job_text(job, checked, wanted)
    noted = notes(checked, wanted)
    if output is not Output.json:
        for note in noted:
            print(f"octavo deploy: {note}", file=sys.stderr)
    return checked, wanted, render_target(checked, wanted, text), {"notes": noted}


def _job_text(file: Path, profile: ClusterProfile, target: Target) -> str:
    """Of a job file that is right and fits the cluster, as far as that can be said elsewhere."""
    from deploy.job_checks import check_job
    from orchestrator.spec.errors import SpecError, read_text
    from orchestrator.spec.job import load_spec, read_source

    spec = load_spec(file, check_data=False)
    source = read_source(file)
    problems = [source.problem(found) for found in check_job(profile, target, spec, source.data)]
    if problems:
        raise SpecError(problems)
    return read_text(file)
