"""The clients that put files on a cluster: kubectl, Ray's launcher, sbatch, docker.

Promises: a client that isn't there, and a target that has none, are told with what to do by hand;
each is run with a time-out, with no terminal to ask on, and what it said is told where it failed.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.cluster_profile import CLOUDS, KUBERNETES, ClusterProfile, Target
from deploy.container import CLOUD_MODULES
from deploy.rendered import Rendered, write
from deploy.systemd import HEAD_UNIT, node_unit, token_file
from orchestrator.cli.show import UNREACHABLE, USAGE, CommandError

KUBECTL_S = 120.0
LAUNCHER_S = 3600.0
SBATCH_S = 60.0
BUILD_S = 7200.0


@dataclass(frozen=True, slots=True)
class Step:
    """One client's run, in a folder that has the files."""

    command: tuple[str, ...]
    timeout_s: float
    said: str
    """What it does, for a question."""


def applying(
    profile: ClusterProfile, target: Target, files: Sequence[Rendered], job: Path | None
) -> Step:
    """What applies the files. Raises CommandError where nothing here can."""
    name = files[0].name
    if target in KUBERNETES:
        _wants("kubectl", f"kubectl apply --server-side -f {name}", "where kubectl is set up")
        command = ("kubectl", "apply", "--server-side", "--request-timeout=60s", "-f", name)
        said = f"apply {name} to namespace {profile.kubernetes.namespace} of `kubectl`'s cluster"
        return Step(command, KUBECTL_S, said)
    if target in CLOUD_MODULES:
        missing = [module for module in CLOUD_MODULES[target] if not _importable(module)]
        if missing:
            told = f"`ray up` wants the Python packages of {target}: {', '.join(missing)}"
            remedy = f"pip install -c constraints.txt '.[{target}]' in a checkout"
            raise CommandError(told, f"{remedy}, or run `ray up {name}` where they are")
    if target in CLOUDS or target == "on-prem":
        _wants_token(profile)
        ray = str(Path(sys.executable).with_name("ray"))
        return Step((ray, "up", "--yes", name), LAUNCHER_S, f"start {profile.name} by `ray up`")
    if target == "slurm":
        if job is None:
            raise CommandError("sbatch wants a job", "name its file: --job job.yaml", USAGE)
        _wants("sbatch", f"sbatch {name} {job}", "on a login node")
        # Not the folder that it is called in, which is gone when the job writes its log there.
        words = ("sbatch", f"--chdir={Path.cwd()}", name, str(job.absolute()))
        return Step(words, SBATCH_S, f"queue {job} by `sbatch`")
    if target == "systemd":
        raise CommandError("no client installs units on other hosts", _by_hand(profile))
    raise CommandError("images are built of a checkout", _build(files))


def run_client(step: Step, files: Sequence[Rendered]) -> str:
    """Run it; what it said. Raises CommandError where it fails, or takes too long."""
    with tempfile.TemporaryDirectory(prefix="octavo-deploy-") as folder:
        write(files, Path(folder))
        done = _run(step.command, Path(folder), step.timeout_s)
    if done.returncode != 0:
        told = (done.stdout + done.stderr).strip()
        raise CommandError(f"`{' '.join(step.command)}` failed with {done.returncode}", told)
    return done.stdout


def cluster_difference(target: Target, files: Sequence[Rendered]) -> str:
    """What an apply would change in the Kubernetes cluster, as a diff; empty: nothing."""
    if target not in KUBERNETES:
        remedy = f"name a folder with what was rendered before: --out DIR (target {target})"
        raise CommandError("only a Kubernetes cluster can be asked what it has", remedy, USAGE)
    _wants("kubectl", "octavo deploy diff --out DIR", "against files that were rendered before")
    command = ("kubectl", "diff", "--server-side", "--request-timeout=60s", "-f", files[0].name)
    with tempfile.TemporaryDirectory(prefix="octavo-deploy-") as folder:
        write(files, Path(folder))
        done = _run(command, Path(folder), KUBECTL_S)
    # 0: nothing, 1: something, more: a failure; 1 also for a cluster that doesn't answer.
    if done.returncode > 1 or (done.returncode == 1 and not done.stdout.strip()):
        told = "the cluster can't be asked what it has"
        raise CommandError(told, done.stderr.strip(), UNREACHABLE)
    return done.stdout


def _run(
    command: Sequence[str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        told = f"`{' '.join(command)}` did not end in {timeout_s:.0f} s"
        raise CommandError(told, "look at the cluster, then say it again") from None
    except OSError as error:
        raise CommandError(f"{command[0]} can't be run: {error.strerror or error}") from None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # Of its parent.
        return False


def _wants(client: str, instead: str, where: str) -> None:
    if shutil.which(client) is None:
        remedy = f"render it (--out DIR) and run `{instead}` {where}"
        raise CommandError(f"{client} is not on this machine's PATH", remedy)


def _wants_token(profile: ClusterProfile) -> None:
    """Ray's token, which `ray up` copies: without it that ends in an assertion of Ray's."""
    file = Path(profile.security.ray_token_file).expanduser()
    if not file.is_file() or not file.stat().st_size:
        remedy = f"`ray get-auth-token --generate` once, and chmod 600 {file}"
        raise CommandError(f"no token of Ray's in {file}", remedy, USAGE)
    if file.stat().st_mode & 0o077:
        raise CommandError(f"{file} can be read by others", f"chmod 600 {file}", USAGE)


def _by_hand(profile: ClusterProfile) -> str:
    head = profile.head.address
    user, home, jobs = (profile.hosts.user, profile.storage.home.path, profile.storage.jobs.path)
    lines = [
        "render them (--out units), then, as root, on every host:",
        f"  the user, where it isn't there: useradd --create-home {user}",
        f"  Octavo in {profile.hosts.environment}, the same release everywhere",
        f"  {jobs}: a shared file system; install -d -o {user} -g {user} {jobs}",
        f"  Ray's token (ray get-auth-token --generate, once), the same everywhere, 0600: "
        f"{token_file(profile)}, and for `octavo doctor` ~{user}/.ray/auth_token",
        f"on {head}: install -d -o {user} -g {user} -m 700 {home}",
        "then the units:",
        f"  {head}: units/{HEAD_UNIT} to /etc/systemd/system, `systemctl daemon-reload`, "
        f"`systemctl enable --now {HEAD_UNIT}`",
    ]
    lines += [
        f"  {', '.join(group.hosts)}: the same with {node_unit(group)}"
        for group in profile.node_groups
    ]
    return "\n".join(lines)


def _build(files: Sequence[Rendered]) -> str:
    lines = ["render them into one (--out CHECKOUT), then, there:"]
    lines += [
        f"  docker build -f {f.name} -t NAME:TAG ."
        for f in files
        if f.name.startswith("Containerfile")
    ]
    return "\n".join(lines)
