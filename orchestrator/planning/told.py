"""A plan in words, as comments of a job file. Pure.

Promises: every line begins with ``#`` where it is printed before a job file; numbers are those of
the estimate, rounded for people, decimal units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from orchestrator.planning.estimate import USABLE, USABLE_HOST, Estimate
from orchestrator.planning.fitting import Remedy
from orchestrator.planning.intervals import Advice
from orchestrator.planning.presets import EXPERTS, PRESETS
from orchestrator.planning.search import Choice, reasons

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
    "runtime": "libraries and allocator",
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
    yield f"memory a rank{stage}: {size(worst.total)}{room}"
    yield from _parts(worst.parts(), _WORDS, size)
    if other_recompute is not None:
        other = other_recompute.memory.stages[other_recompute.memory.worst]
        with_it = other.activations < worst.activations
        yield (
            f"  activations {'with' if with_it else 'without'} recompute: "
            f"{size(other.activations)}, a rank {size(other.total)}"
        )
    room = f" of {size(found.host_room)} ({USABLE_HOST:.0%} of its memory)" * bool(found.host_room)
    yield (
        f"snapshots in a node's memory: {size(found.memory.host)}{room}, "
        f"{size(max(found.memory.snapshots))} each; a checkpoint: {size(found.memory.checkpoint)}"
    )
    yield f"sent a step, by the rank that sends most: {size(found.traffic.total)}"
    yield from _parts(found.traffic.parts(), _WORDS, size)
    step = found.step
    yield (
        f"step: {duration(step.total)}; {found.tokens_a_second:,.0f} tokens/s, "
        f"{rate(found.flops_a_rank)} a rank, MFU {found.mfu:.1%} of BF16's peak, "
        f"bubble {found.bubble:.1%}"
    )
    yield from _parts(step.parts(), _STEP_WORDS, duration)
    cost = f", {found.cost:,.0f} at {found.price:g} a device-hour" if found.cost is not None else ""
    yield f"{found.steps:,} steps: {found.days:,.2g} days{cost}"
    if not device.gpu:
        yield "times on CPU are an order of magnitude, no more"
    yield from _verdict(found, fitting)


def _verdict(found: Estimate, fitting: Sequence[Remedy]) -> Iterator[str]:
    if found.fits:
        known = found.device_room or found.host_room
        yield "fits" if known else "fits, as far as is known: how much memory the nodes have isn't"
        return
    what = ["the device"] * (not found.fits_device)
    what += ["the nodes' memory, for its snapshots"] * (not found.fits_host)
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
    why = (
        f"a snapshot stops training for {duration(of.snapshot_s)}, and a fault takes back half of "
        f"what lies between two and {duration(of.memory_s)}"
    )
    near = found.ettr - found.now_ettr < WORTH_TELLING
    told = "as good as the best, " if near else f"{found.ettr:.2%} with "
    yield (
        f"  {told}snapshots.every: {found.snapshots} and checkpoint.every: {found.checkpoints}: "
        f"{why}; one in {1 / of.disk_share:,.0f} faults leaves the disk alone"
    )


def _steps(every: int) -> str:
    return f"{every:,} steps" if every else "job's end"


def _span(seconds: float) -> str:
    """``7.9 h``, ``12 days``."""
    return f"{seconds / 3600:.2g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.2g} days"


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


def preset_lines() -> Iterator[str]:
    """Known shapes, and what the state of each takes."""
    shares = " ".join(f"{f'OF {n}':>8}" for n in _SHARES)
    yield f"{'PRESET':<12} {'PARAMETERS':>10} {'STATE':>8} {shares}  SOURCE"
    for preset in PRESETS.values():
        yield _preset_line(preset.name, preset.parameters, "", preset.source)
    for experts in EXPERTS.values():
        active = f" ({_count(experts.active)} active; can't be trained here)"
        yield _preset_line(experts.name, experts.parameters, active, experts.source)
    yield (
        "STATE: weights, gradients in BF16 and FP32, masters and moments, 20 bytes a parameter;\n"
        "OF n: a rank's share over n model ranks (tensor × pipeline), as if all were cut evenly."
    )


def _preset_line(name: str, parameters: int, note: str, source: str) -> str:
    state = 20 * parameters
    shares = " ".join(f"{size(state // n):>8}" for n in _SHARES)
    return f"{name:<12} {_count(parameters):>10} {size(state):>8} {shares}  {source}{note}"


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
    """``12.7 s``, ``340 ms``."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{1000 * seconds:.3g} ms"


def rate(flops: float) -> str:
    """Operations a second: ``412 TFLOP/s``."""
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP/s"


def _count(number: float) -> str:
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
