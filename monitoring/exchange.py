"""What the gradient exchange of a step, or of a job, came to, by the names that readers know.

    bytes               a rank sent, mean over the ranks
    compression_ratio   BF16's bytes over them, scales counted
    relative_error      what rounding to FP8 took of the gradients' norm, the worst rank's
    wire_bits           an element crosses the network in: 8, 16 after a fallback, or 32
    busbw_gbps          gigabits a second that a rank sent while it exchanged, casts included,
                        as DeepSpeed's log of communication has it
    quantize_s, wire_s, dequantize_s    where the time went, mean over the ranks

Promises: nothing is told of a step that sent nothing, and no time where none was taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

PARTS = ("quantize_s", "wire_s", "dequantize_s")


def exchange_numbers(comm: Mapping[str, float]) -> dict[str, float]:
    """The numbers of one step from ``StepRecord.comm``; empty where nothing was sent."""
    sent = comm.get("bytes", 0.0)
    if sent <= 0:
        return {}
    values = {
        "bytes": sent,
        "compression_ratio": comm.get("uncompressed_bytes", sent) / sent,
        "relative_error": comm.get("relative_error", 0.0),
    }
    if "wire_bits" in comm:
        values["wire_bits"] = comm["wire_bits"]
    seconds = {name: comm[name] for name in PARTS if name in comm}
    if (took := sum(seconds.values())) > 0:
        values["busbw_gbps"] = 8e-9 * sent / took
    return {**values, **seconds}


def mean_numbers(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over those of the steps that sent anything, each number's over those that have it.

    Without ``wire_bits``, of which a mean says nothing.
    """
    told = [numbers for comm in steps if (numbers := exchange_numbers(comm))]
    names = dict.fromkeys(name for numbers in told for name in numbers if name != "wire_bits")
    return {name: fmean(n[name] for n in told if name in n) for name in names}
