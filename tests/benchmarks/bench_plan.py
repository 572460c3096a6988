"""Memory and traffic that `octavo plan` foretells against those of real ranks on this machine.

    python -m tests.benchmarks.bench_plan [--only NAME …] [--out DIR]

Each setting runs its ranks over gloo with the product's engine and its ring of snapshots, for a few
steps, twice: with every block of memory mapped by itself, which shows what is *in use* at the peak
and nothing else, and with the product's allocator, which shows what is *resident*, its holes too.
Measured is a rank's peak less what it had after a step of a tiny model. Foretold is
``orchestrator.planning.memory``: what is in use, and what is resident at most. The ring, ``keep`` +
1 copies of the state, is known exactly and would flatter every row: its bytes are taken off both
sides but in the column that has it. The largest rank of each pipeline stage counts. Not a test of
CI: it takes minutes and up to 12 GB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.planning.memory import RankMemory, job_memory
from orchestrator.planning.shapes import held, shape_of, stages
from orchestrator.planning.traffic import exchanged_bytes
from orchestrator.spec.errors import Source
from orchestrator.spec.job import JobSpec, spec_of
from parallel.topology import coordinates
from tests.benchmarks.results import Result, add_arguments, at_most, measured, report
from tests.ranks.launch_ranks import RankFailed, run_ranks

STEPS = 2
AIM = at_most(5)
"""Per cent that the memory in use may be off, of the worst."""
MODEL = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
MODEL |= {"ffn_size": 2816, "vocab_size": 8192}
TINY = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 256, "vocab_size": 256}
TRAINING = {"steps": 100, "seq_len": 256, "train_micro_batch_size_per_gpu": 4}
NARROW = {**MODEL, "hidden_size": 512, "ffn_size": 1408, "vocab_size": 32000}
"""A large vocabulary over few weights: what happens at the loss is most of it."""
TIED = {**NARROW, "tie_embeddings": True}

SETTINGS: dict[str, dict[str, Any]] = {
    "1 rank, FP8": {"slots_per_node": 1},
    "1 rank, BF16": {"slots_per_node": 1, "precision": "bf16"},
    "1 rank, FP8, recompute": {"slots_per_node": 1, "training": {"recompute": "full"}},
    "1 rank, mxfp8": {"slots_per_node": 1, "fp8": {"recipe": "mxfp8"}},
    "1 rank, long micro-batch": {
        "slots_per_node": 1,
        "training": {"train_micro_batch_size_per_gpu": 16},
    },
    "data 2, ZeRO 0": {"slots_per_node": 2, "parallelism": {"zero_stage": 0}},
    "data 2, ZeRO 1": {"slots_per_node": 2},
    "data 2, ZeRO 1, feedback": {
        "slots_per_node": 2,
        "gradient_exchange": {"error_feedback": True},
    },
    "data 2, ZeRO 2": {"slots_per_node": 2, "parallelism": {"zero_stage": 2}},
    "data 2, ZeRO 1, BF16 on the wire": {
        "slots_per_node": 2,
        "communication_data_type": "bf16",
    },
    "tensor 2": {"slots_per_node": 2, "parallelism": {"tensor": 2}},
    "pipeline 2": {"slots_per_node": 2, "parallelism": {"pipeline": 2}},
    "1 rank, large vocabulary": {"slots_per_node": 1, "model": NARROW},
    "1 rank, tied": {"slots_per_node": 1, "model": TIED},
    "1 rank, tied, 1 micro-batch": {
        "slots_per_node": 1,
        "model": TIED,
        "training": {"gradient_accumulation_steps": 1},
    },
    "data 2, tied": {"slots_per_node": 2, "model": TIED},
    "pipeline 2, tied": {"slots_per_node": 2, "model": TIED, "parallelism": {"pipeline": 2}},
    "pipeline 2, 8 micro-batches": {
        "slots_per_node": 2,
        "parallelism": {"pipeline": 2},
        "training": {"gradient_accumulation_steps": 8},
    },
    "1 rank, one layer, 2,048 tokens": {
        "slots_per_node": 1,
        "model": {**MODEL, "hidden_size": 512, "num_layers": 1, "ffn_size": 1408},
        "training": {"seq_len": 2048, "train_micro_batch_size_per_gpu": 1},
    },
    "1 rank, 4,096 tokens": {
        "slots_per_node": 1,
        "training": {"seq_len": 4096, "train_micro_batch_size_per_gpu": 1},
    },
    "1 rank, 4,096 tokens, recompute": {
        "slots_per_node": 1,
        "training": {
            "seq_len": 4096,
            "train_micro_batch_size_per_gpu": 1,
            "recompute": "full",
        },
    },
    "data 2, ZeRO 2, 4 micro-batches": {
        "slots_per_node": 2,
        "model": NARROW,
        "communication_data_type": "bf16",
        "parallelism": {"zero_stage": 2},
        "training": {"gradient_accumulation_steps": 4},
    },
    "data 2, ZeRO 0, recompute": {
        "slots_per_node": 2,
        "model": NARROW,
        "parallelism": {"zero_stage": 0},
        "training": {"recompute": "full"},
    },
    "tensor 2, recompute": {
        "slots_per_node": 2,
        "model": NARROW,
        "parallelism": {"tensor": 2},
        "training": {"recompute": "full"},
    },
    "1 rank, one key head, block": {
        "slots_per_node": 1,
        "model": {**MODEL, "num_kv_heads": 1},
        "fp8": {"recipe": "block"},
    },
}


def spec_of_setting(name: str) -> JobSpec:
    """The completed spec of one of ``SETTINGS``."""
    given = SETTINGS[name]
    values: dict[str, Any] = {
        "name": "bench-plan",
        "num_nodes": 1,
        "model": MODEL,
        "data": {"source": "python-stdlib"},
        **given,
        "training": {**TRAINING, "gradient_accumulation_steps": 2, **given.get("training", {})},
        "snapshots": {"keep": 2, "certify_after": 10, "every": 10},
    }
    return spec_of(Source(name, values, {}), check_data=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one rank."""

    peak: int
    """Resident bytes beyond what its code took, at most."""
    sent: int
    """Bytes exchanged a step."""


def measure(rank: int, world_size: int, spec: JobSpec, alone: bool) -> Measured:
    """A few steps of ``spec``; ``alone``: with every block mapped by itself, so without holes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401
    import torch

    from launch.allocator import M_MMAP_THRESHOLD, keep_freed_memory
    from launch.engine import engine_of
    from launch.snapshot_ring import SnapshotRing
    from launch.snapshots import SnapshotKey

    torch.set_num_threads(1)
    if alone:
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 20)
    else:
        keep_freed_memory()

    def run(of: JobSpec, steps: int) -> int:
        engine = engine_of(of)
        ring = SnapshotRing(of.snapshots.keep, engine.live_tensors())
        training = of.training
        assert training.train_micro_batch_size_per_gpu is not None
        shape = (training.train_micro_batch_size_per_gpu, training.seq_len)

        def batches() -> Iterator[tuple[Any, Any]]:
            while True:
                tokens = torch.randint(0, of.model.vocab_size, shape)
                yield tokens, tokens

        for step in range(steps):
            ring.take(SnapshotKey("bench", 1, 0, rank, step), {})
            engine.train_step(batches(), 1e-4)
        return int(engine.take_exchange_statistics()["bytes"]) // steps

    # A tiny model first: code and libraries are loaded as they are called.
    run(spec.model_copy(update={"model": spec.model.model_copy(update=TINY)}), 1)
    gc.collect()
    before = _status()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    sent = run(spec, STEPS)
    return Measured(1024 * (_status()["VmHWM"] - before), sent)


def _status() -> Mapping[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        k: int(v.split()[0]) for k, _, v in (line.partition(":") for line in lines) if "kB" in v
    }


def foretold_sent(spec: JobSpec, stage: int) -> int:
    """Bytes that a rank of a stage is foretold to send of its gradients in a step."""
    degrees = spec.parallelism
    here = stages(spec.model, spec.training.seq_len, degrees.pipeline, degrees.tensor)[stage]
    return exchanged_bytes(spec, held(shape_of(spec.model), here, degrees.tensor))


@dataclass(frozen=True, slots=True)
class Stage:
    """What was foretold and measured of one pipeline stage, in bytes."""

    told: RankMemory
    ring: int
    peak: int
    resident: int
    told_sent: int
    sent: int

    @property
    def off(self) -> float:
        """Per cent that the memory in use is foretold too large."""
        return 100 * (self.told.alive / self.peak - 1)

    @property
    def off_with_ring(self) -> float:
        """The same of memory with the ring of snapshots."""
        return 100 * ((self.told.alive + self.ring) / (self.peak + self.ring) - 1)

    def line(self, name: str, stage: int) -> str:
        """For people."""
        holes = (self.resident - self.peak) / (self.told.activations + self.told.working)
        return (
            f"{name:<34} {stage:>5} {self.told.alive / 1e6:>8.0f} {self.peak / 1e6:>8.0f} "
            f"{self.off:>+6.1f}% {self.off_with_ring:>+8.1f}% "
            f"{self.told.total / 1e6:>8.0f} {self.resident / 1e6:>8.0f} {holes:>5.1f} "
            f"{self.told_sent:>11,} {self.sent:>11,}"
        )


def stages_of(name: str) -> list[Stage]:
    """Both of each pipeline stage of a setting. Raises RankFailed."""
    spec = spec_of_setting(name)
    degrees = spec.parallelism
    assert degrees.data is not None
    world = degrees.data * degrees.tensor * degrees.pipeline
    used, resident = (
        run_ranks(measure, world, spec, alone, timeout_s=900.0) for alone in (True, False)
    )
    memory = job_memory(spec)
    found = []
    for stage, told in enumerate(memory.stages):
        ring = (spec.snapshots.keep + 1) * memory.snapshots[stage]
        ranks = [r for r in range(world) if coordinates(r, degrees).pipe == stage]
        peak, there = (max(of[r].peak for r in ranks) - ring for of in (used, resident))
        sent = max(resident[r].sent for r in ranks)
        found.append(Stage(told, ring, peak, there, foretold_sent(spec, stage), sent))
    return found


def rows_of(found: Sequence[Stage], settings: int, failed: int) -> list[Result]:
    """Over all stages of all settings."""
    where = f"{settings} settings"
    counts: dict[str, Any] = {"failures": failed}
    off = [abs(stage.off) for stage in found]
    with_ring = [abs(stage.off_with_ring) for stage in found]
    resident = [stage.resident / stage.told.total for stage in found]
    sent = [100 * abs(stage.told_sent / stage.sent - 1) for stage in found if stage.sent]
    name = "memory in use, octavo plan's away from the measured"
    return [
        measured(name, where, off, "%", **counts),
        measured(f"{name}, the worst", where, [max(off)] if off else [], "%", aim=AIM, **counts),
        measured(f"{name}, ring included", where, with_ring, "%", **counts),
        measured("resident memory, measured over the most that plan tells", where, resident, "×"),
        measured("bytes sent a step, octavo plan's away from the measured", where, sent, "%"),
    ]


def main() -> int:
    """Print a line a setting and pipeline stage, then the table; the number that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    print(
        f"{'':<34} {'':>5} {'in use, MB':>25} {'with ring':>9} {'resident, MB':>17} {'holes':>5} "
        f"{'sent':>23}"
    )
    print(
        f"{'setting':<34} {'stage':>5} {'foretold':>8} {'measured':>8} {'':>7} {'':>9} "
        f"{'at most':>8} {'measured':>8} {'':>5} {'foretold':>11} {'measured':>11}"
    )
    found: list[Stage] = []
    failed = 0
    for name in asked.only:
        try:
            of_setting = stages_of(name)
        except RankFailed as error:
            failed += 1
            print(f"{name}: {error}", flush=True)
            continue
        for number, stage in enumerate(of_setting):
            print(stage.line(name, number), flush=True)
        found += of_setting
    rows = rows_of(found, len(asked.only), failed)
    report("bench_plan", rows, asked.out, seconds=time.monotonic() - began)
    return failed


if __name__ == "__main__":
    sys.exit(main())
