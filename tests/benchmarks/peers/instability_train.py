"""What a user of a stability rule would train with: a plain loop, checkpoints, and the rule.

    torchrun --standalone --nproc-per-node 1 --max-restarts 3 \
        tests/benchmarks/peers/instability_train.py job.yaml --rule zclip --folder DIR \
        [--every 50] [--recurs]

One process; the job's model with its FP8 linears in FP32 parameters under autocast, AdamW and the
job's schedule. It saves every so many steps, in one file, and goes on from that when it starts.
The job's drills are fired by ``launch.drills``, as in a job: once in a run's life, however often it
is started, but with ``--recurs`` whenever their batch is trained on, for what is in the data.

Each step is a line of ``DIR/steps.jsonl``, also where the rule raises; why it did is one of
``DIR/raised.jsonl``. A rule that ends the run for a person leaves ``DIR/stopped`` and exit code 0,
so that torchrun doesn't start it again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launch.data import TokenStream, batch_of
from launch.drills import Drills
from launch.schedule import lr_at
from orchestrator.spec.job import JobSpec, load_spec
from parallel.faults import Faults
from parallel.model_plan import ModelPlan, parameter_name
from parallel.precision.backend import LayerScope, make_scope
from parallel.precision.choice import BackendChoice
from parallel.precision.detection import choose_here
from parallel.topology import Coordinate
from parallel.transformer import layer_plans, loss_fn
from tests.benchmarks.back_on_curve import Executed
from tests.benchmarks.peers.stability_rules import RULES, Raised, Rule, Stopped

STEPS, RAISED, STOPPED = "steps.jsonl", "raised.jsonl", "stopped"
_SAVED, _FIRED = "last.pt", "fired.json"


class Gradients:
    """Where the drill of a non-finite gradient puts its value: ``Faults``' hooks, without an
    exchange.

    In a matrix that every token goes through. The first of the model is the embedding's row of
    byte 0, which no text has: who doesn't clip by a norm of NaN would never notice.
    """

    def __init__(self, matrix: nn.Parameter) -> None:
        self._matrix = matrix
        self._poison: float | None = None

    def poison_gradient(self, value: float) -> None:
        """Into the matrix' gradient, once the next backward is over."""
        self._poison = value

    def after_backward(self) -> None:
        if self._poison is not None and self._matrix.grad is not None:
            self._matrix.grad.view(-1)[0] = self._poison
            self._poison = None


class Loop:
    """The run of one process."""

    def __init__(self, job: JobSpec, rule: Rule, folder: Path, every: int, recurs: bool) -> None:
        self._job, self._rule, self._folder = job, rule, folder
        self._every, self._recurs = every, recurs
        self._scope = _scope(job)
        plans = layer_plans(
            job.model, seq_len=job.training.seq_len, seed=job.training.seed, scope=self._scope
        )
        self._module = nn.Sequential(*(layer.build() for layer in plans)).float()
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._optimizer = self._make_optimizer()
        self._stream = TokenStream(job.data, job.training.seq_len)
        named = {parameter_name(n, plans): p for n, p in self._module.named_parameters()}
        self._gradients = Gradients(named["layers.0.mlp.down.weight"])
        self._faults = Faults(
            self._module,
            ModelPlan(plans, loss_fn),
            scope=self._scope,
            hooks=self._gradients,  # type: ignore[arg-type]
            coordinate=Coordinate(0, 0, 0),
            linears=self._scope.layers,
            parameters=tuple(named),
        )
        fired = folder / _FIRED
        self._fired: list[int] = json.loads(fired.read_text()) if fired.exists() else []
        self._drills = Drills(
            job.drills,
            rank=0,
            fired=() if recurs else self._fired,
            target=self._faults,
            announce=self._announce,
        )

    def run(self) -> None:
        """Raises what the rule raises."""
        for step in range(self._load(), self._job.training.steps):
            batch = batch_of(step, self._rule.excluded)
            began_at = batch if self._recurs else step
            self._drills.fire(began_at, timeline=0, batch=batch)
            lr = lr_at(step, self._job.training) * self._drills.lr_factor
            loss = self._backward(batch)
            applied = False
            try:
                self._rule.clip(self._parameters, loss)
                for group in self._optimizer.param_groups:
                    group["lr"] = lr
                if self._rule.own_optimizer is not None:
                    self._optimizer.factor = self._rule.factor  # type: ignore[attr-defined]
                self._optimizer.step()
                self._scope.finish_step(True)
                applied = self._rule.factor != 0
            finally:
                _append(self._folder / STEPS, asdict(Executed(step, loss, time.time(), applied)))
            self._rule.after(step, batch, loss)
            if (step + 1) % self._every == 0:
                self._save(step + 1)

    def _backward(self, batch: int) -> float:
        """All micro-batches of ``batch``; the mean loss."""
        training = self._job.training
        micro, count = training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps
        assert micro is not None and count is not None
        self._optimizer.zero_grad()
        total = torch.zeros(())
        change = self._drills.change_of(batch)
        for tokens, targets in self._stream.micro_batches(batch, 0, 1, micro, count, change):
            with self._scope.micro_batch(), torch.autocast("cpu", torch.bfloat16):
                output = self._module(tokens)
            loss: Tensor = loss_fn(output, targets) / count
            loss.backward()
            total += loss.detach()
        self._gradients.after_backward()
        self._faults.after_step()
        self._scope.reduce_amax(None)
        return float(total)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        training = self._job.training
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._parameters if p.dim() > 1]},
            {"params": [p for p in self._parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        numbers: dict[str, Any] = {
            "lr": 0.0,
            "betas": training.betas,
            "eps": training.eps,
            "weight_decay": training.weight_decay,
        }
        if self._rule.own_optimizer is not None:
            return self._rule.own_optimizer(groups, **numbers)
        return torch.optim.AdamW(groups, **numbers, fused=True)

    def _announce(self, drill: int, step: int) -> bool:
        self._fired.append(drill)
        (self._folder / _FIRED).write_text(json.dumps(self._fired))
        return True

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "module": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scales": self._scope.state_tensors(),
            "precision": json.dumps(self._scope.state_meta()),
        }
        part = self._folder / f"{_SAVED}.part"
        torch.save(state, part)
        part.rename(self._folder / _SAVED)

    def _load(self) -> int:
        """Take back the newest state; the step to go on with."""
        file = self._folder / _SAVED
        if not file.exists():
            return 0
        state = torch.load(file, weights_only=True)
        self._module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        for name, tensor in self._scope.state_tensors().items():
            tensor.copy_(state["scales"][name])
        self._scope.load_meta(json.loads(state["precision"]))
        self._scope.forget_weights()
        return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--rule", choices=sorted(RULES), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--recurs", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    job = load_spec(arguments.spec)
    rule = RULES[arguments.rule](job.training.steps, folder)
    try:
        Loop(job, rule, folder, arguments.every, arguments.recurs).run()
    except Raised as error:
        _append(folder / RAISED, {"why": str(error)})
        raise
    except Stopped as error:
        (folder / STOPPED).write_text(str(error))


def _scope(job: JobSpec) -> LayerScope:
    backend = choose_here(job.precision, job.fp8, "cpu")
    if not isinstance(backend, BackendChoice):
        raise SystemExit(f"{backend}")
    return make_scope(
        backend, job.precision, job.fp8, num_layers=job.model.num_layers, device="cpu"
    )


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
