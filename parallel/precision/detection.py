"""Looks at the device and at Transformer Engine, for ``parallel.precision.choice`` to decide.

Promises: nothing here raises for a machine without a GPU, a driver or Transformer Engine:
what stands in the way is a sentence in the answer.
"""

from __future__ import annotations

from typing import Any

from parallel.config import FP8Config, Precision
from parallel.precision.choice import (
    BackendChoice,
    BackendRefusal,
    BackendRefusedError,
    DeviceFacts,
    TransformerEngineFacts,
    Workload,
    agreed,
    choose,
)


def choose_here(
    precision: Precision, config: FP8Config, device: Any, workload: Workload | None = None
) -> BackendChoice | BackendRefusal:
    """The backend for ``device`` (a torch device or its name) of this process.

    Looks at Transformer Engine only where it could matter.
    """
    facts = device_facts(device)
    matters = precision == "fp8" and config.backend != "native" and facts.kind == "cuda"
    te = TransformerEngineFacts()
    if matters:
        from parallel.precision import transformer_engine

        te = transformer_engine.facts()
    return choose(precision, config, facts, te, workload)


def choose_together(
    precision: Precision, config: FP8Config, device: Any, workload: Workload | None = None
) -> BackendChoice:
    """One backend for all ranks of the default process group; a collective.

    Raises BackendRefusedError, on every rank, where one of them can't run what is asked for.
    """
    import torch.distributed as dist

    mine = choose_here(precision, config, device, workload)
    found: list[BackendChoice | BackendRefusal] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    decided = agreed(found)
    if isinstance(decided, BackendRefusal):
        raise BackendRefusedError(decided)
    return decided


def device_facts(device: Any) -> DeviceFacts:
    """What ``device`` (a torch device or its name) is."""
    import torch

    device = torch.device(device)
    # Without a driver every other question raises.
    if device.type != "cuda" or not torch.cuda.is_available():
        return DeviceFacts("cpu")
    cuda = (torch.version.cuda or "").split(".")[:2]
    return DeviceFacts(
        "cuda",
        capability=torch.cuda.get_device_capability(device),
        cuda=(int(cuda[0]), int(cuda[1])) if len(cuda) == 2 else None,
        name=torch.cuda.get_device_name(device),
    )
