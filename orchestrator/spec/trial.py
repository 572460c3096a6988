"""A factory's model made once without memory (PyTorch's ``meta`` device), before a job starts.

    python -m orchestrator.spec.trial < {"model": …, "fp8": …, "precision": …, …}

Promises: a user's code runs in a process of its own that is ended after ``TRIAL_S``, and sees no
GPU; only what is wrong on every machine is a problem: a plan that breaks the contract, linears
whose widths FP8 or the tensor ranks can't divide, an FP8 job none of whose linears would compute
in FP8, tensor ranks that share nothing, and patterns that match nothing. Code that can't be run
here is left to the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from orchestrator.spec.errors import Finding, KeyPath, Source, SpecError
from orchestrator.spec.factory import unmatched_parameters
from orchestrator.spec.job import JobSpec, spec_data

if TYPE_CHECKING:
    from parallel.tensor import TensorGroup

TRIAL_S = 20.0
"""Less than the API's client waits for an answer."""
_PATTERNS: KeyPath = ("fp8", "high_precision_layers", "names")


def check_factory_model(spec: JobSpec, file: str) -> None:
    """Raise ``SpecError`` for a factory whose model isn't as the completed ``spec`` says.

    ``file``: the job file, as the user named it. Takes as long as importing PyTorch does, and
    no time for the built-in model.
    """
    if spec.model.factory is None:
        return
    data = spec_data(spec)
    told = [Finding(tuple(path), message, remedy) for path, message, remedy in _asked(data)]
    if told:
        source = Source(file, data, {})
        raise SpecError([source.problem(finding) for finding in told])


def _asked(data: dict[str, Any]) -> list[tuple[list[str | int], str, str]]:
    """What the other process finds; nothing where it doesn't come to an end."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        # The factory is found here as it was when its name was checked.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.spec.trial"],
            input=json.dumps(data),
            capture_output=True,
            text=True,
            env=environment,
            timeout=TRIAL_S,
        )
        return list(json.loads(done.stdout))
    return []


# What follows runs in the other process.


def trial(spec: JobSpec) -> list[Finding]:
    """Make the model of ``spec.model.factory``; what is wrong with it."""
    import torch

    from parallel.model_factory import FactoryError, factory_plan
    from parallel.model_plan import parameter_name
    from parallel.precision.recipes import UnfitLinearError, unmatched_patterns
    from parallel.precision.scope import PrecisionScope
    from parallel.tensor import is_sharded

    kept = spec.fp8.high_precision_layers
    scope = PrecisionScope(
        spec.precision,
        spec.fp8,
        num_layers=spec.model.num_layers,
        device="meta",
        tensor=_shares(spec.parallelism.tensor),
        built_in=False,
        compiled=False,
    )
    try:
        plan = factory_plan(
            spec.model,
            seq_len=spec.training.seq_len,
            seed=spec.training.seed,
            scope=scope,
            tensor=None,
        )
    except FactoryError as error:
        return [Finding(("model", "factory"), error.message, error.remedy)]
    parameters: list[str] = []
    sharded = spec.parallelism.tensor == 1
    seen: set[str | None] = {None}
    with torch.device("meta"):
        for i, layer in enumerate(plan.layers):
            # Copies of one module are one: a name is given once.
            if layer.tied in seen - {None}:
                continue
            seen.add(layer.tied)
            try:
                module = layer.build()
            except UnfitLinearError as error:
                message = f"{layer.name} has a linear {error.linear!r}: {error.message}"
                return [Finding(("model", "factory"), message, error.remedy)]
            sharded |= any(map(is_sharded, module.parameters()))
            parameters += [
                parameter_name(f"{i}.{n}", plan.layers) for n, _ in module.named_parameters()
            ]
    exchanged = spec.gradient_exchange.high_precision_parameters
    found = list(unmatched_parameters(exchanged, parameters))
    if not sharded:
        message = "none of the linears of the factory's model is shared by tensor ranks"
        found.append(
            Finding(("parallelism", "tensor"), message, "give scope.linear shard=, or make it 1")
        )
    if spec.precision != "fp8":
        return found
    names = (*scope.layers, *scope.fixed_layers)
    if not scope.layers:
        message = "none of the linears of its model would compute in FP8"
        if names:
            message += f"; high_precision_layers keeps {len(names)} in BF16"
        remedy = "make them with scope.linear, or convert them, in widths that FP8 takes; or set "
        found.append(Finding(("model", "factory"), message, remedy + "precision: bf16"))
        return found
    for i, pattern in enumerate(kept.names):
        alone = kept.model_copy(update={"names": (pattern,)})
        if unmatched_patterns(alone, names):
            message = f"matches none of the {len(names)} linears of the factory's model"
            told = ", ".join(names[:4])
            remedy = f"they are {told}{', …' if len(names) > 4 else ''}"
            found.append(Finding((*_PATTERNS, i), message, remedy))
    return found


def _shares(tensor: int) -> TensorGroup | None:
    """Tensor ranks that make shards and can't compute: their sizes are what is asked."""
    from parallel.tensor import TensorGroup

    nobody: Any = None
    return TensorGroup(nobody, 0, tensor) if tensor > 1 else None


def main() -> None:
    """Entry of ``python -m orchestrator.spec.trial``: findings as JSON on stdout."""
    spec = JobSpec.model_validate(json.load(sys.stdin))
    # Whatever the user's code prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        found = trial(spec)
    print(json.dumps([(finding.path, finding.message, finding.remedy) for finding in found]))


if __name__ == "__main__":
    main()
