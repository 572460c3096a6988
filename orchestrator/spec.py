"""The JobSpec: what a user submits, composed of the packages' own sections."""

from __future__ import annotations

from pydantic import Field

from launch.config import RunConfig
from monitoring.config import DetectionConfig, WandbConfig
from orchestrator.config import RecoveryConfig, ResourcesConfig

NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


class JobSpec(RunConfig):
    """A job, as submitted."""

    name: str = Field(pattern=NAME_PATTERN)
    resources: ResourcesConfig = ResourcesConfig()
    detection: DetectionConfig = DetectionConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    wandb: WandbConfig = WandbConfig()
    envs: dict[str, str] = {}
    """Environment of the ranks; no secrets, they are stored and shown in clear."""
