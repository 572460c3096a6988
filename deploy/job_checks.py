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
from deploy.planned import cluster_of
from orchestrator.planning.cluster import check_cluster
from orchestrator.spec.errors import Finding, value_at
from orchestrator.spec.job import JobSpec


def check_job(
    profile: ClusterProfile, target: Target, spec: JobSpec, data: Mapping[str, Any]
) -> Iterator[Finding]:
    """What of ``spec``, whose file has ``data``, the profile's cluster does not have."""
    yield from check_cluster(cluster_of(profile), spec)
    stored = value_at(data, ("checkpoint", "storage_path"))
    jobs = PurePosixPath(profile.storage.jobs.path)
    if target in KUBERNETES and stored is not None and jobs not in _upwards(str(stored)):
        told = f"is on no volume: pods lose it, and see different ones; {jobs} is everybody's"
        yield Finding(("checkpoint", "storage_path"), told, f"leave it out, or write {jobs}/…")


def _upwards(path: str) -> tuple[PurePosixPath, ...]:
    """A path and the folders that it is in."""
    found = PurePosixPath(posixpath.normpath(path))
    return (found, *found.parents)
