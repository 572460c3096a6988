"""A plan in words, as comments of a job file. Pure.

Promises: every line begins with ``#`` where it is printed before a job file; numbers are those of
the estimate, rounded for people (times to what they are worth), decimal units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from orchestrator.planning.cluster import Cluster, ClusterGroup
from orchestrator.planning.estimate import MARGIN, USABLE, USABLE_HOST, Estimate
from orchestrator.planning.fitting import Remedy
from orchestrator.planning.intervals import Advice
from orchestrator.planning.presets import EXPERTS, PRESETS
from orchestrator.planning.search import Choice, reasons
from orchestrator.spec.errors import Finding, dotted

_WORDS = {
    "weights": "weights, BF16",
    "masters": "masters, FP32",
    "moments": "Adam's moments",
    "gradients": "gradients, as made and added up",
    "error_feedback": "error feedback",
    "activations": "activations",
    "working": "for a while: loss, backward, update",
    "fp8": "FP8 weights and scales",
    "exchange": "exchange buffers",
    "runtime": "libraries",
    "gradient_exchange": "gradients",
    "parameter_gather": "updated parameters",
    "tensor": "tensor ranks' sums",
    "pipeline": "pipeline stages",
    "tied": "tied embeddings' gradients",
    "snapshots": "snapshots to partner nodes",
}
_STEP_WORDS = {
    "tensor": "tensor ranks' sums",
    "pipeline": "pipeline stages",
    "exchange": "gradient exchange",
    "products": "matrix products",
    "attention": "attention",
    "memory": "bound by memory",
    "bubble": "pipeline bubble",
    "update": "update",
}
_SHARES = (8, 64, 512)
WORTH_TELLING = 0.001
"""Of the time, by which other intervals must be better."""
_WIDTH = 92


def estimate_lines(
    found: Estimate, fitting: Sequence[Remedy], other_recompute: Estimate | None
) -> Iterator[str]:
    """The estimate of a job, without the ``#``."""
    device, network = found.hardware.device, found.hardware.network
    speed = "FP8's speed, as Transformer Engine has it" if found.fp8_speed else "BF16's speed"
    products = f"; products at {speed}" if device.gpu else ""
    yield f"on {found.ranks} × {device.what}{products}; nodes on {network.what}"
    yield (
        f"parameters: {_count(found.parameters)}, a rank holds {_count(found.parameters_a_rank)}; "
        f"{_count(found.tokens)} tokens a step"
    )
    worst = found.memory.stages[found.memory.worst]
    room = f" of {size(found.device_room)} ({USABLE:.0%} of the device)" * bool(found.device_room)
    stage = f" (stage {found.memory.worst})" if len(found.memory.stages) > 1 else ""
    holes = ""
    if worst.holes:
        holes = f" in use; resident up to {size(worst.total)}, with what the allocator keeps free"
    yield f"memory a rank{stage}: {size(worst.alive)}{holes}{room}"
    yield from _parts({k: v for k, v in worst.parts().items() if k in _WORDS}, _WORDS, size)
    if other_recompute is not None:
        other = other_recompute.memory.stages[other_recompute.memory.worst]
        with_it = other.activations < worst.activations
        yield (
            f"  activations {'with' if with_it else 'without'} recompute: "
            f"{size(other.activations)}, a rank {size(other.alive)}"
        )
    room = f" of {size(found.host_room)} ({USABLE_HOST:.0%} of its memory)" * bool(found.host_room)
    ranks = ""
    if found.host_bytes > found.memory.host:
        ranks, room = f", with its ranks up to {size(found.host_bytes)}{room}", ""
    yield (
        f"snapshots in a node's memory: {size(found.memory.host)}{room}{ranks}, "
        f"{size(max(found.memory.snapshots))} each; a checkpoint: {size(found.memory.checkpoint)}"
    )
    yield f"sent a step, by the rank that sends most: {size(found.traffic.total)}"
    yield from _parts(found.traffic.parts(), _WORDS, size)
    yield from _time_lines(found)
    yield from _verdict(found, fitting)


def _time_lines(found: Estimate) -> Iterator[str]:
    """How long it takes and what it costs: no more digits than the roofline is good for."""
    step, shares = found.step, found.times or (1.0, 1.0)
    sooner, later = (share * step.total for share in shares)
    yield (
        f"step: {_between(sooner, later, duration)}; "
        f"{_between(found.tokens_a_second / shares[1], found.tokens_a_second / shares[0], _round)} "
        "tokens/s, "
        f"{_between(found.flops_a_rank / shares[1], found.flops_a_rank / shares[0], rate)} a rank, "
        f"MFU {_between(found.mfu / shares[1], found.mfu / shares[0], _percent)} of BF16's peak, "
        f"bubble {found.bubble:.1%}"
    )
    yield from _parts(step.parts(), _STEP_WORDS, duration)
    cost = ""
    if found.cost is not None:
        costs = _between(found.cost * shares[0], found.cost * shares[1], _round)
        cost = f", {costs} at {found.price:g} a device-hour"
    days = _between(found.days * shares[0], found.days * shares[1], _round)
    yield f"{found.steps:,} steps: {days} days{cost}"
    if found.times is None:
        yield "times on CPU are an order of magnitude, no more"
    else:
        yield (
            f"times are {shares[0]:g} to {shares[1]:g} of their parts' sum, as published runs came "
            "out that nothing was fitted to; they are other systems': Octavo was timed on no GPU"
        )


def _between(low: float, high: float, shown: Callable[[float], str]) -> str:
    """``2.1 to 3.7 s``; one of them where they are shown alike."""
    first, last = shown(low), shown(high)
    if first == last:
        return last
    unit = last.partition(" ")[2]
    shorter = first.removesuffix(f" {unit}") if unit and first.endswith(f" {unit}") else first
    return f"{shorter.removesuffix('%') if last.endswith('%') else shorter} to {last}"


def _round(number: float) -> str:
    """With two digits: ``210,000``, ``2.9``."""
    return f"{float(f'{number:.2g}'):,.10g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def _verdict(found: Estimate, fitting: Sequence[Remedy]) -> Iterator[str]:
    if found.fits:
        known = found.device_room or found.host_room
        if found.fits_narrowly:
            share = found.device_bytes / found.device_room
            yield (
                f"fits narrowly: it takes {share:.0%} of what the device has to use, and may take "
                f"{MARGIN:.0%} more than is told here; try a few steps first, or take more ranks"
            )
        else:
            yield "fits" if known else "fits, as far as is known: how much memory nodes have isn't"
        return
    what = ["the device"] * (not found.fits_device)
    what += ["the nodes' memory"] * (not found.fits_host)
    yield f"DOES NOT FIT {', nor '.join(what)}"
    for remedy in fitting:
        worst = remedy.estimate.device_bytes
        after = duration(remedy.estimate.step.total)
        yield f"  would fit with {remedy}: {size(worst)} a rank, {after} a step"
    if not fitting:
        yield "  nothing that was tried makes it fit: more nodes, or a device with more memory"


def interval_lines(found: Advice) -> Iterator[str]:
    """What faults and copies cost, and the intervals that cost least."""
    of = found.setting
    yield (
        f"faults: one in {_span(of.mttf_s)} is published of as many nodes (arXiv 2410.21680); with "
        f"snapshots each {_steps(found.now_snapshots)} and checkpoints each "
        f"{_steps(found.now_checkpoints)}, {found.now_ettr:.2%} of the time is training"
    )
    near = found.ettr - found.now_ettr < WORTH_TELLING
    told = "as good as the best, " if near else f"{found.ettr:.2%} with "
    yield f"  {told}snapshots.every: {found.snapshots} and checkpoint.every: {found.checkpoints}"
    yield (
        f"  because a snapshot stops training for {duration(of.snapshot_s)}, a fault takes "
        f"{duration(of.memory_s)} and half of what lies between two, and {of.disk_share:.1%} of "
        "faults leave nothing but the disk"
    )


def _steps(every: int) -> str:
    return f"{every:,} steps" if every else "job's end"


def _span(seconds: float) -> str:
    """``7.9 h``, ``12 days``."""
    return f"{seconds / 3600:.2g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.2g} days"


def cluster_lines(
    cluster: Cluster, group: ClusterGroup, given: Sequence[str], misfits: Sequence[Finding]
) -> Iterator[str]:
    """What a plan took from a cluster, and where the job doesn't fit it."""
    slots = f"{group.gpus} × {group.device}" if group.gpus else f"{group.cpus} CPUs"
    price = "" if group.price is None else f"; {group.price:g} {cluster.currency} a node-hour"
    yield (
        f"cluster {cluster.name}, group {group.name}: up to {group.nodes} nodes of {slots}, "
        f"{size(group.memory)} of memory each{price}"
    )
    if given:
        which = "is the cluster's" if len(given) == 1 else "are the cluster's"
        yield f"  {', '.join(given)} {which}: the job file doesn't say"
    for misfit in misfits:
        remedy = f"; {misfit.remedy}" if misfit.remedy else ""
        yield f"DOES NOT FIT {cluster.name}: {dotted(misfit.path)} {misfit.message}{remedy}"


def choice_lines(best: Sequence[Choice], tried: Sequence[Choice]) -> Iterator[str]:
    """What ``parallelism: auto`` chose, the next best, and why."""
    yield f"parallelism: auto, of {len(tried)} degrees:"
    for i, choice in enumerate(best, 1):
        found = choice.estimate
        fits = "" if found.fits else "  doesn't fit"
        yield (
            f"  {i}. {choice.degrees}, data {choice.spec.parallelism.data}: "
            f"{duration(found.step.total)} a step, {size(found.device_bytes)} a rank{fits}"
        )
    if best:
        yield from (f"  {line}" for line in reasons(best[0], tried))


PRESETS_NOTE = (
    "STATE: weights, gradients in BF16 and FP32, masters and moments: 20 bytes a\n"
    "parameter. OF n: a rank's share over n model ranks (tensor × pipeline), as if\n"
    "all were cut evenly."
)


def preset_rows() -> list[tuple[str, ...]]:
    """Known shapes, and what the state of each takes, under a heading."""
    rows = [("PRESET", "PARAMETERS", "STATE", *(f"OF {n}" for n in _SHARES), "SOURCE")]
    for preset in PRESETS.values():
        rows.append(_preset_row(preset.name, preset.parameters, preset.source))
    for experts in EXPERTS.values():
        told = f"{_count(experts.active)} active; can't be trained here; {experts.source}"
        rows.append(_preset_row(experts.name, experts.parameters, told))
    return rows


def _preset_row(name: str, parameters: int, source: str) -> tuple[str, ...]:
    state = 20 * parameters
    return name, _count(parameters), size(state), *(size(state // n) for n in _SHARES), source


def _parts(
    parts: Mapping[str, float], words: Mapping[str, str], shown: Callable[[float], str]
) -> Iterator[str]:
    line = ""
    for told in (f"{words[name]}: {shown(value)}" for name, value in parts.items() if value > 0):
        if line and len(line) + len(told) > _WIDTH:
            yield f"  {line}"
            line = ""
        line += f"; {told}" if line else told
    if line:
        yield f"  {line}"


def size(nbytes: float) -> str:
    """``1.2 GB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """``13 s``, ``340 ms``."""
    return f"{_round(seconds)} s" if seconds >= 1 else f"{_round(1000 * seconds)} ms"


def rate(flops: float) -> str:
    """Operations a second: ``410 TFLOP/s``."""
    if flops >= 1e11:
        return f"{_round(flops / 1e12)} TFLOP/s"
    return f"{_round(flops / 1e9)} GFLOP/s"


def _count(number: float) -> str:
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
