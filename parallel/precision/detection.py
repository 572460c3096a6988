"""Looks at the device and at Transformer Engine, for ``parallel.precision.choice`` to decide.

Promises: nothing here raises for a machine without a GPU, a driver or Transformer Engine:
what stands in the way is a sentence in the answer.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from parallel.config import FP8Config, Precision
from parallel.precision.choice import (
    BackendChoice,
    BackendRefusal,
    BackendRefusedError,
    DeviceFacts,
    TransformerEngineFacts,
    choose,
)

MODULE = "transformer_engine"
_RECIPE_CHECKS = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def choose_here(precision: Precision, config: FP8Config, device: Any) -> BackendChoice:
    """The backend for ``device`` (a torch device or its name) of this process.

    Looks at Transformer Engine only where it could matter. Raises BackendRefusedError.
    """
    facts = device_facts(device)
    matters = precision == "fp8" and config.backend != "native" and facts.kind == "cuda"
    te = transformer_engine_facts() if matters else TransformerEngineFacts()
    decided = choose(precision, config, facts, te)
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


def installed() -> bool:
    """Whether there is a Transformer Engine at all; doesn't import it."""
    return importlib.util.find_spec(MODULE) is not None


def transformer_engine_facts() -> TransformerEngineFacts:
    """Import Transformer Engine and ask it what it can run; call it with a GPU only."""
    if not installed():
        return TransformerEngineFacts()
    try:
        package = importlib.import_module(MODULE)
        te = importlib.import_module(f"{MODULE}.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        # The bare metapackage raises RuntimeError, a wrong CUDA or torch OSError.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return TransformerEngineFacts(problem=f"Transformer Engine can't be imported: {first}")
    unsupported: dict[str, str] = {}
    try:
        for recipe, check in _RECIPE_CHECKS.items():
            able, why = getattr(te, check)(return_reason=True)
            if not able:
                unsupported[recipe] = why
    except (AttributeError, TypeError, RuntimeError) as error:
        return TransformerEngineFacts(
            problem=f"Transformer Engine can't say what it runs here: {error}"
        )
    version = getattr(package, "__version__", None)
    if version is None:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed_version

        try:
            version = installed_version("transformer_engine")
        except PackageNotFoundError:
            version = ""
    return TransformerEngineFacts(version=version, unsupported=unsupported)
