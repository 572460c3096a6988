"""What a user of torchft would train with: one replica group a rank, healed from a living peer.

    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 REPLICA_GROUP_ID=0 NUM_REPLICA_GROUPS=2 \
        torchrun --standalone --nproc-per-node 1 --max-restarts 3 \
        tests/benchmarks/peers/torchft_train.py job.yaml \
        --met DIR [--ddp]

After torchft's README and its ``train_ddp.py`` (pytorch/torchft): a ``Manager`` over gloo and its
``Optimizer``, ``min_replica_size=1`` so that survivors go on alone, live recovery through the
manager's own HTTP transport, each group under a torchrun of its own that starts it anew.
``init_sync`` is off, for all start from the same weights, as its docstring advises; the model is
built before the manager, for the others wait for a manager that is there already. The groups meet
once, in files of ``--met``, so that a run begins with all of them whoever was first. Gradients are
averaged by ``Manager.allreduce`` in one flat tensor; with ``--ddp`` by its
``DistributedDataParallel``, as the README has it. That one ends the survivors over gloo in release
0.2.0: its hook asserts a future that there isn't once a peer's connection was closed in ``wait``.

The model is the job's, its FP8 linears too, in FP32 parameters under autocast and AdamW: torchft
replicates a module, and drives no DeepSpeed engine. A group that is alone in a step trains on its
own part of the batch.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from launch.data import TokenStream, batch_of
from launch.schedule import lr_at
from orchestrator.spec.job import load_spec
from parallel.precision.backend import make_scope
from parallel.precision.choice import BackendChoice
from parallel.precision.detection import choose_here
from tests.benchmarks.peers import recorded

TIMEOUT = timedelta(seconds=30)
"""Of collectives and calls, as in torchft's example."""
MEET_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--met", type=Path, required=True)
    parser.add_argument("--ddp", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    os.environ[recorded.RANK] = str(group)
    job = load_spec(arguments.spec)
    training = job.training
    micro, count = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
    assert micro is not None and count is not None

    backend = choose_here(job.precision, job.fp8, "cpu")
    if not isinstance(backend, BackendChoice):
        raise SystemExit(f"{backend}")
    scope = make_scope(
        backend,
        job.precision,
        job.fp8,
        num_layers=job.model.num_layers,
        device="cpu",
        built_in=False,
    )
    plan = recorded.make(
        options=job.model.options, seq_len=training.seq_len, seed=training.seed, scope=scope
    )
    module = nn.Sequential(*(layer.build() for layer in plan.layers)).float()
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in module.parameters() if p.dim() > 1]},
            {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
        fused=True,
    )
    stream = TokenStream(job.data, training.seq_len)

    def state_dict() -> dict[str, Any]:
        return {
            "model": module.state_dict(),
            "optimizer": adamw.state_dict(),
            "scales": scope.state_tensors(),
            "precision": scope.state_meta(),
        }

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])
        for name, tensor in scope.state_tensors().items():
            tensor.copy_(state["scales"][name])
        scope.load_meta(state["precision"])
        scope.forget_weights()

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_{group}",
        timeout=TIMEOUT,
        init_sync=False,
    )
    # Their heartbeats have begun, so that the first quorum waits for all.
    _meet(arguments.met, group, groups)
    model = DistributedDataParallel(manager, module) if arguments.ddp else module
    optimizer = Optimizer(manager, adamw)

    while manager.current_step() < training.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        batches = stream.micro_batches(batch_of(step, frozenset()), group, groups, micro, count)
        for turn, (tokens, targets) in enumerate(batches):
            # Gradients are averaged once a step, with or after the last micro-batch.
            alone = arguments.ddp and turn < count - 1
            with model.no_sync() if alone else nullcontext():
                with scope.micro_batch(), torch.autocast("cpu", torch.bfloat16):
                    output = model(tokens)
                (plan.loss(output, targets) / count).backward()
        if not arguments.ddp:
            _average(manager, module)
        scope.reduce_amax(None)
        torch.nn.utils.clip_grad_norm_(module.parameters(), training.max_norm)
        for of in adamw.param_groups:
            of["lr"] = lr_at(step, training, 1.0)
        optimizer.step()
        scope.finish_step(manager.current_step() > step)
    manager.shutdown()


def _meet(folder: Path, group: int, groups: int) -> None:
    """Wait until every group has been here once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(group)).touch()
    deadline = time.monotonic() + MEET_S
    while len(list(folder.iterdir())) < groups:
        if time.monotonic() > deadline:
            raise SystemExit(f"{folder}: not all of {groups} groups came within {MEET_S:.0f} s")
        time.sleep(0.02)


def _average(manager: Manager, module: nn.Module) -> None:
    """The gradients' mean over the groups that take part, in place; errors are the manager's."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(mean)


if __name__ == "__main__":
    main()
