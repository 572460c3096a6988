"""Whole jobs through ``octavo run``: tensor ranks that recover, and a user's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_run import job_file, octavo, start

OWN_MODEL = """
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
from parallel.model_plan import LayerPlan, ModelPlan


def make(*, options, seq_len, seed, scope):
    width = options["width"]

    class Block(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.mlp = scope.norm_mlp(f"layers.{i}.mlp", width, 2 * width, eps=1e-5, smooth=False,
                                      sharded=False)
            for weight in (self.mlp.gate_up.weight, self.mlp.down.weight):
                nn.init.normal_(weight, 0, 0.05)

        def forward(self, x):
            return x + self.mlp(x)

    def embedding():
        return nn.Embedding(256, width, dtype=torch.bfloat16)

    def head():
        return nn.Linear(width, 256, dtype=torch.bfloat16)

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    blocks = [LayerPlan(f"layers.{i}", partial(Block, i)) for i in range(2)]
    ends = [LayerPlan(n, f, transformer=False) for n, f in (("in", embedding), ("out", head))]
    return ModelPlan([ends[0], *blocks, ends[1]], loss)
"""


def summary_of(file: Path, out: Path, *options: str) -> dict[str, Any]:
    running = start(file, out, *options)
    told, errors = running.communicate(timeout=240)
    assert running.returncode == 0, errors
    summary: dict[str, Any] = json.loads(told)
    return summary


def test_tensor_ranks_roll_back_and_move_the_layer_that_saturates_to_bf16(tmp_path: Path) -> None:
    file = job_file(
        tmp_path,
        parallelism={"tensor": 2},
        training={"steps": 60, "seq_len": 32, "train_batch_size": 8, "lr": 3e-3},
        snapshots={"every": 5, "certify_after": 5},
        drills=[{"kind": "weight_surge", "step": 45, "layer": 1, "factor": 64}],
    )
    summary = summary_of(file, tmp_path / "out", "--keep-home")
    assert (summary["state"], summary["steps"], summary["rollbacks"]) == ("succeeded", 60, 1)
    assert set(summary["high_precision_layers"]) == {"layers.1.mlp.gate_up", "layers.1.mlp.down"}
    # Accountable: what it saw and did comes out of its records again, to the last digit.
    (home,) = (tmp_path / "out").glob(".octavo-*")
    replayed = octavo("replay", "tiny", "--home", str(home), "-o", "json")
    assert replayed.returncode == 0, replayed.stdout
    found = json.loads(replayed.stdout)
    decisions = [decision for stretch in found["stretches"] for decision in stretch["decisions"]]
    assert [decision["replayed"]["kind"] for decision in decisions] == ["layer_fallback"]
    assert found["exact"] and decisions[0]["replayed"] == decisions[0]["stored"]


def test_a_users_own_model_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    file = job_file(
        tmp_path,
        parallelism={"pipeline": 2},
        model={"factory": "own_model:make", "num_layers": 2, "options": {"width": 64}},
        training={"steps": 40, "seq_len": 32, "train_batch_size": 8, "lr": 3e-3},
    )
    summary = summary_of(file, tmp_path / "out")
    assert (summary["state"], summary["steps"]) == ("succeeded", 40)
    assert summary["final_loss"] < 3.0
