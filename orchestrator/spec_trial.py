"""A factory's model made once without memory (PyTorch's ``meta`` device), before a job starts.

    python -m orchestrator.spec_trial < {"model": …, "fp8": …, "precision": …, …}

Promises: a user's code runs in a process of its own that is ended after ``TRIAL_S``, and sees no
GPU; only what is wrong on every machine is a problem: a plan that breaks the contract, and
patterns that match none of the model's linears. Code that can't be run here is left to the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

from orchestrator.spec import JobSpec, spec_data
from orchestrator.spec_errors import Finding, KeyPath, Source, SpecError
from orchestrator.spec_factory import unmatched_parameters

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
            [sys.executable, "-m", "orchestrator.spec_trial"],
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

    from parallel.config import HighPrecisionLayers
    from parallel.model_factory import FactoryError, factory_plan
    from parallel.model_plan import parameter_name
    from parallel.precision.recipes import unmatched_patterns
    from parallel.precision.scope import PrecisionScope

    # A scope that keeps no linear in BF16 takes them all, and knows their names.
    kept = spec.fp8.high_precision_layers
    none = HighPrecisionLayers()
    scope = PrecisionScope(
        "fp8",
        spec.fp8.model_copy(update={"high_precision_layers": none}),
        num_layers=spec.model.num_layers,
        device="meta",
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
    exchanged = spec.gradient_exchange.high_precision_parameters
    patterns = kept.names if spec.precision == "fp8" else ()
    if not patterns and not exchanged:
        return []
    parameters: list[str] = []
    seen: set[str | None] = {None}
    with torch.device("meta"):
        for i, layer in enumerate(plan.layers):
            # Copies of one module are one: a name is given once.
            if layer.tied in seen - {None}:
                continue
            seen.add(layer.tied)
            module = layer.build()
            parameters += [
                parameter_name(f"{i}.{n}", plan.layers) for n, _ in module.named_parameters()
            ]
    found = list(unmatched_parameters(exchanged, parameters))
    names = scope.layers
    for i, pattern in enumerate(patterns):
        alone = kept.model_copy(update={"names": (pattern,)})
        if unmatched_patterns(alone, names):
            message = f"matches none of the {len(names)} linears of the factory's model"
            remedy = f"they are {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
            found.append(Finding((*_PATTERNS, i), message, remedy if names else ""))
    return found


def main() -> None:
    """Entry of ``python -m orchestrator.spec_trial``: findings as JSON on stdout."""
    spec = JobSpec.model_validate(json.load(sys.stdin))
    # Whatever the user's code prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        found = trial(spec)
    print(json.dumps([(finding.path, finding.message, finding.remedy) for finding in found]))


if __name__ == "__main__":
    main()
