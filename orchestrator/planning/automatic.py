"""`parallelism: auto` in a job file: what must be given with it, and what it comes to.

Promises: the same file gives the same degrees wherever it is read, before any node is taken; the
completed spec has them written out, so whoever reads it later needs no search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.planning.devices import DEVICES
from orchestrator.planning.estimate import Hardware
from orchestrator.planning.fitting import node_changes, snapshot_changes
from orchestrator.planning.search import (
    FIXED,
    Choice,
    base_of,
    degrees_of,
    divisors,
    search,
    varied,
)
from orchestrator.spec.checks import check_spec
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.errors import Finding, dotted
from orchestrator.spec.job import JobSpec

AUTO = "auto"
_PATH = ("parallelism",)


def is_auto(data: Mapping[str, Any]) -> bool:
    """Whether a job file leaves the degrees to Octavo."""
    return bool(data.get("parallelism") == AUTO)


def fixed_keys(data: Mapping[str, Any]) -> frozenset[str]:
    """What of ``training`` a job file gives and a search may therefore not change."""
    training = data.get("training")
    given = training if isinstance(training, Mapping) else {}
    return frozenset(key for key in FIXED if given.get(key) is not None)


def missing(spec: JobSpec) -> Iterator[Finding]:
    """What a search needs to know and a job file doesn't say."""
    if spec.model.factory is not None:
        message = (
            "auto knows the sizes of the built-in model alone, and model.factory makes another"
        )
        yield Finding(_PATH, message, "write the degrees: {tensor: 1, pipeline: 1, zero_stage: 1}")
        return
    if not (spec.gpus_per_node or spec.slots_per_node):
        message = "auto needs to know how many ranks a node has"
        yield Finding(_PATH, message, "give gpus_per_node, or slots_per_node on CPU")
    if spec.training.train_batch_size is None:
        message = "is needed with parallelism: auto, which keeps it whatever the degrees"
        remedy = "say how many sequences a step takes, over all ranks"
        yield Finding(("training", "train_batch_size"), message, remedy)


def choose(spec: JobSpec, data: Mapping[str, Any]) -> tuple[JobSpec | None, list[Finding]]:
    """A spec whose other sections have been checked, completed on the best degrees; or why not."""
    if found := list(missing(spec)):
        return None, found
    hardware = Hardware.of(spec)
    best, _ = search(base_of(spec), hardware, fixed_keys(data), limit=1)
    if not best:
        return None, [_none_accepted(base_of(spec))]
    choice = best[0]
    if choice.estimate.fits:
        return choice.spec, []
    return None, [_misfit(choice, base_of(spec), hardware, fixed_keys(data))]


def _none_accepted(base: JobSpec) -> Finding:
    """That no degrees can be, with what the checks say of some that share the batch."""
    slots = base.num_nodes * slots_per_node(base)
    for ranks in divisors(slots):
        degrees = replace(degrees_of(base), tensor=1, pipeline=ranks, micro=1)
        some = varied(base, degrees)
        found = check_spec(some, set(), check_data=False) if some is not None else []
        # More stages than layers say nothing of the file.
        first = next((f for f in found if f.path != (*_PATH, "pipeline")), None)
        if first is not None:
            key = dotted(first.path)
            message = f"auto found no degrees; of tensor 1, pipeline {ranks}: {key} {first.message}"
            return Finding(_PATH, message, first.remedy)
    message = f"auto found no degrees of {slots} ranks whose replicas can share "
    message += f"train_batch_size {base.training.train_batch_size}"
    return Finding(_PATH, message, f"make it a multiple of {slots}, for example")


def _misfit(least: Choice, base: JobSpec, hardware: Hardware, fixed: frozenset[str]) -> Finding:
    """That nothing fits, how much is missing, and the first change with which something does."""
    found = least.estimate
    device = hardware.device.name
    if not found.fits_device:
        told = f"{found.device_bytes / 1e9:.0f} GB of the {found.device_room / 1e9:.0f} GB that "
        message = f"auto found nothing that fits: {least.degrees} needs {told}{device} has to use"
    else:
        told = f"{found.host_bytes / 1e9:.0f} GB of the {found.host_room / 1e9:.0f} GB"
        message = (
            f"auto found nothing that fits a node's memory: the least takes {told} of a node to use"
        )
    for words, change in (*snapshot_changes(base), *node_changes(base)):
        changed = change(base)
        best = search(changed, hardware, fixed, limit=1)[0] if changed is not None else []
        if best and best[0].estimate.fits:
            return Finding(_PATH, message, f"write {words}")
    for larger in sorted(DEVICES.values(), key=lambda d: d.memory):
        if larger.gpu == hardware.device.gpu and larger.memory > hardware.device.memory:
            best = search(base, Hardware(larger, hardware.network), fixed, limit=1)[0]
            if best and best[0].estimate.fits:
                return Finding(_PATH, message, f"{larger.name} would do")
    return Finding(_PATH, message, "add nodes, or choose a smaller model or seq_len")
