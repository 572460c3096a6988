"""Memory and traffic that `octavo plan` foretells against those of real ranks on this machine.

    python -m tests.benchmarks.bench_plan [--only NAME …]

Each setting runs its ranks over gloo with the product's engine and its ring of snapshots, for a few
steps. Measured is a rank's peak resident memory less what it had after a step of a tiny
model; foretold is the total of ``orchestrator.planning.memory`` with the ring. The largest
rank of each pipeline stage counts. Not a test of CI: it takes minutes and up to 12 GB.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.planning.memory import job_memory
from orchestrator.planning.shapes import held, shape_of, stages
from orchestrator.planning.traffic import exchanged_bytes
from orchestrator.spec.errors import Source
from orchestrator.spec.job import JobSpec, spec_of
from parallel.topology import coordinates
from tests.ranks.launch_ranks import run_ranks

STEPS = 2
MODEL = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
MODEL |= {"ffn_size": 2816, "vocab_size": 8192}
TINY = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 256, "vocab_size": 256}
TRAINING = {"steps": 100, "seq_len": 256, "train_micro_batch_size_per_gpu": 4}

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


def measure(rank: int, world_size: int, spec: JobSpec) -> tuple[int, int]:
    """Of one rank: peak resident bytes beyond what its code took, bytes exchanged a step."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401
    import torch

    from launch.allocator import keep_freed_memory
    from launch.engine import engine_of
    from launch.snapshot_ring import SnapshotRing
    from launch.snapshots import SnapshotKey

    torch.set_num_threads(1)
    keep_freed_memory()

    def run(of: JobSpec, steps: int) -> int:
        engine = engine_of(of)
        ring = SnapshotRing(of.snapshots.keep, engine.live_tensors())
        training = of.training
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
    return 1024 * (_status()["VmHWM"] - before), sent


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


def main() -> None:
    """Print a line a setting and pipeline stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    print(
        f"{'setting':<34} {'stage':>5} {'foretold':>9} {'measured':>9} {'off by':>7} "
        f"{'sent':>12} {'measured':>12}"
    )
    for name in parser.parse_args().only:
        spec = spec_of_setting(name)
        degrees = spec.parallelism
        assert degrees.data is not None
        world = degrees.data * degrees.tensor * degrees.pipeline
        measured = run_ranks(measure, world, spec, timeout_s=600.0)
        memory = job_memory(spec)
        for stage, rank_memory in enumerate(memory.stages):
            foretold = rank_memory.total + (spec.snapshots.keep + 1) * memory.snapshots[stage]
            ranks = [r for r in range(world) if coordinates(r, degrees).pipe == stage]
            found, sent = (max(measured[r][i] for r in ranks) for i in (0, 1))
            print(
                f"{name:<34} {stage:>5} {foretold / 1e6:>7.0f} M {found / 1e6:>7.0f} M "
                f"{foretold / found - 1:>+7.1%} {foretold_sent(spec, stage):>12,} {sent:>12,}",
                flush=True,
            )


if __name__ == "__main__":
    main()
