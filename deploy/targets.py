"""What is rendered for each target: names and texts of files, and what a person does with them.

A new target is a new entry of ``RENDERERS``, and a word of ``cluster_profile.Target``. Promises:
pure; the same profile gives the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

from deploy import container, kuberay, launcher, slurm, systemd
from deploy.cluster_profile import ClusterProfile, Target
from deploy.rendered import Rendered, yaml_text
from deploy.used_keys import notes

RENDERED = "Rendered by `octavo deploy`; change cluster.yaml and render it again.\n"
Renderer = Callable[[ClusterProfile, str], list[Rendered]]
"""(profile, text of a job file or "") → files."""


def render(profile: ClusterProfile, target: Target, job: str = "") -> list[Rendered]:
    """The target's files, each with what somebody should know who reads it."""
    return [_noted(file, notes(profile, target)) for file in RENDERERS[target](profile, job)]


def _noted(file: Rendered, told: Sequence[str]) -> Rendered:
    """``told`` below the first line that every file has."""
    lines = [line for note in told for line in textwrap.wrap(note, 97, break_on_hyphens=False)]
    first = f"# {RENDERED}"
    below = first + "".join(f"# {line}\n" for line in lines)
    return replace(file, text=file.text.replace(first, below, 1))


def _namespaced(profile: ClusterProfile, file: str) -> str:
    # No Namespace among the objects: whoever deletes these would delete the home's volume with it.
    namespace = profile.kubernetes.namespace
    return (
        f"  kubectl create namespace {namespace}; kubectl apply --server-side -f {file}\n"
        "Deleting all of this deletes volumes that it made: to end a cluster delete its object."
    )


def _kuberay(profile: ClusterProfile, job: str) -> list[Rendered]:
    comment = f"{RENDERED}{_namespaced(profile, 'raycluster.yaml')}"
    text = yaml_text(kuberay.cluster_objects(profile), comment)
    return [Rendered("raycluster.yaml", text)]


def _rayjob(profile: ClusterProfile, job: str) -> list[Rendered]:
    comment = f"{RENDERED}{_namespaced(profile, 'rayjob.yaml')}"
    return [Rendered("rayjob.yaml", yaml_text(kuberay.job_objects(profile, job), comment))]


def _launcher(target: Target) -> Renderer:
    def rendered(profile: ClusterProfile, job: str) -> list[Rendered]:
        comment = f"{RENDERED}  ray up {target}.yaml     ray down {target}.yaml"
        text = yaml_text([launcher.launcher_object(profile, target)], comment)
        return [Rendered(f"{target}.yaml", text)]

    return rendered


def _slurm(profile: ClusterProfile, job: str) -> list[Rendered]:
    return [Rendered("octavo.sbatch", slurm.batch_script(profile), executable=True)]


def _systemd(profile: ClusterProfile, job: str) -> list[Rendered]:
    head = Rendered(systemd.HEAD_UNIT, systemd.head_service(profile))
    nodes = [
        Rendered(systemd.node_unit(group), systemd.node_service(profile, group))
        for group in profile.node_groups
    ]
    return [head, *nodes]


def _container(profile: ClusterProfile, job: str) -> list[Rendered]:
    return [
        Rendered("Containerfile.gpu", container.gpu_file(profile)),
        Rendered("Containerfile.cpu", container.cpu_file(profile)),
        Rendered(".dockerignore", container.ignore_file()),
    ]


RENDERERS: dict[Target, Renderer] = {
    "kuberay": _kuberay,
    "rayjob": _rayjob,
    "aws": _launcher("aws"),
    "gcp": _launcher("gcp"),
    "azure": _launcher("azure"),
    "on-prem": _launcher("on-prem"),
    "slurm": _slurm,
    "systemd": _systemd,
    "container": _container,
}
