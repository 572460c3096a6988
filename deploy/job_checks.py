"""Whether a job fits the cluster that it is deployed with: before pods or an allocation wait for
nodes that can't exist.

Promises: pure; a finding is about the job's file, with the profile's number in it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from deploy.cluster_profile import KUBERNETES, ClusterProfile, Target
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.errors import Finding, value_at
from orchestrator.spec.job import JobSpec


def check_job(
    profile: ClusterProfile, target: Target, spec: JobSpec, data: Mapping[str, Any]
) -> Iterator[Finding]:
    """What of ``spec``, whose file has ``data``, the profile's cluster does not have."""
    wanted, gpus = slots_per_node(spec), bool(spec.gpus_per_node)
    what = "GPUs" if gpus else "CPUs"
    there = [(g.gpus if gpus else g.cpus, g.most) for g in profile.node_groups]
    most = max((slots for slots, _ in there), default=0)
    nodes = sum(number for slots, number in there if slots >= wanted)
    least = spec.resources.min_nodes or spec.num_nodes
    if wanted > most:
        told = f"is more than any node of {profile.name} has: {most} {what}"
        remedy = "ask for fewer, or give the cluster's profile a group that has them"
        yield Finding(("gpus_per_node" if gpus else "slots_per_node",), told, remedy)
    elif least > nodes:
        told = f"is more than {profile.name} can have: {nodes} nodes with {wanted} {what}"
        yield Finding(("num_nodes",), told, "ask for fewer, or raise the group's `max:`")
    stored = value_at(data, ("checkpoint", "storage_path"))
    jobs = PurePosixPath(profile.storage.jobs.path)
    if target in KUBERNETES and stored is not None and jobs not in _upwards(str(stored)):
        told = f"is on no volume: pods lose it, and see different ones; {jobs} is everybody's"
        yield Finding(("checkpoint", "storage_path"), told, f"leave it out, or write {jobs}/…")


def _upwards(path: str) -> tuple[PurePosixPath, ...]:
    """A path and the folders that it is in."""
    found = PurePosixPath(posixpath.normpath(path))
    return (found, *found.parents)
