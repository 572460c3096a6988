"""Whether the device that a spec names for planning is one that its ranks can be on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.planning.devices import DEVICES, device_named
from orchestrator.spec.errors import Finding

if TYPE_CHECKING:
    from orchestrator.spec.job import JobSpec


def check_device(spec: JobSpec) -> Iterator[Finding]:
    """A GPU's name for a job on CPU, or the other way round."""
    if spec.resources.device is None:
        return
    device, on_gpu = device_named(spec.resources.device), bool(spec.gpus_per_node)
    if device.gpu == on_gpu:
        return
    kind = ", ".join(d.name for d in DEVICES.values() if d.gpu)
    message = f"the job's ranks are on {'GPUs' if on_gpu else 'CPU'}"
    remedy = f"name one of {kind}" if on_gpu else "name cpu, or set gpus_per_node"
    yield Finding(("resources", "device"), message, remedy)
