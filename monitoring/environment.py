"""What a job's processes run on, versions and machine: for records, W&B's configuration, reports.

Promises: no import of what is asked about, and nothing that could be a secret or a path.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata

from monitoring.job_view import JobView

PACKAGES = (
    *("octavo", "torch", "deepspeed", "ray", "transformer-engine", "triton", "numpy"),
    *("wandb", "pydantic", "sqlalchemy"),
)
"""Distributions whose version is told, where they are there."""


def environment() -> dict[str, str]:
    """Of this process: ``python``, ``platform``, ``cpus``, and a version a package."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "machine": platform.machine(),
        "cpus": str(os.cpu_count() or 0),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment_of(view: JobView) -> Mapping[str, str]:
    """What the newest attempt of a job ran on, as its start told; empty before there is one."""
    for event in reversed(view.events):
        detail = event.get("detail") or {}
        if event["kind"] == "attempt_started" and "environment" in detail:
            told: Mapping[str, str] = detail["environment"]
            return told
    return {}
