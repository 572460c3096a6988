"""What a user of Ray Train would run: a TorchTrainer with a FailureConfig, checkpoints reported.

    RAY_TRAIN_V2_ENABLED=1 python tests/benchmarks/peers/ray_train_driver.py job.yaml \
        --workers 2 --storage DIR [--address local] [--every 10] [--out steps.json]

After Ray's guides "Handling Failures and Node Preemption" and "Saving and Loading Checkpoints"
(train/user-guides of docs.ray.io, V2): the training function takes ``ray.train.get_checkpoint()``
when it starts, every rank reports a checkpoint of its own file, which Ray puts together, and
``FailureConfig(max_failures=…)`` has the run's workers started anew. ``report`` is a barrier of
all workers, so it is called with a checkpoint alone, not every step. ``--every 0``: no checkpoints.
``--out``: when ``fit`` was called, and of each step that the last attempt trained its end in
seconds since the epoch, loss and gradient norm, as ``plain_deepspeed`` writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

MAX_FAILURES = 3


def train(config: dict[str, Any]) -> None:
    """One worker's training function."""
    # As torchrun would have it; DeepSpeed reads both when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["LOCAL_SIZE"] = str(ray.train.get_context().get_local_world_size())
    import torch

    from launch.engine import engine_of
    from orchestrator.spec.job import load_spec
    from tests.benchmarks.peers import saved
    from tests.benchmarks.plain_deepspeed import training_steps

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    job = load_spec(Path(config["spec"]))
    engine = engine_of(job)
    first, every = 0, config["every"]
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved.load_file(engine, Path(folder) / f"rank-{rank}.pt")
            first = int((Path(folder) / "step").read_text())
    rows = []
    for step, result in training_steps(job, engine, first):
        loss = float(result.loss)
        rows.append((time.time(), loss, result.grad_norm))
        if every and (step + 1) % every == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved.save_file(engine, Path(folder) / f"rank-{rank}.pt")
                if rank == 0:
                    (Path(folder) / "step").write_text(str(step + 1))
                reported = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step + 1, "loss": loss}, checkpoint=reported)
    if rank == 0 and config["out"]:
        Path(config["out"]).write_text(json.dumps({"began": config["began"], "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--address", default="local")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.address == "local":
        ray.init(address="local", num_cpus=arguments.workers + 1, include_dashboard=False)
    else:
        ray.init(address=arguments.address)
    config = {
        "began": time.time(),
        "spec": str(arguments.spec.resolve()),
        "every": arguments.every,
        "out": str(arguments.out.resolve()) if arguments.out else "",
    }
    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(arguments.storage.resolve()),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=MAX_FAILURES),
        ),
    ).fit()


if __name__ == "__main__":
    main()
