"""The training whose state is saved: a small language model under plain DeepSpeed, ZeRO 1.

    training = Training.built("64 MB", rank, checkpoint={})
    training.step()
    training.tensors      # what must come back to the bit

Weights are BF16 and the same on both ranks, FP32 masters and Adam's moments are divided, so that a
rank has 8 bytes a parameter. Promises: a step is a function of the seed and the number of the
step; ``digests`` are of all that the training goes on from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh

from parallel.engine_state import create_moments, optimizer_tensors

WIDTH, VOCABULARY, TOKENS = 512, 256, 64
BLOCKS: Mapping[str, int] = {"2 MB": 0, "64 MB": 4, "256 MB": 16, "1 GB": 64}
"""By the size of a rank's state, about: 8 bytes for each of 2.1 million parameters a block."""
DIVIDED = ("masters", "exp_avg", "exp_avg_sq")
"""Tensors of which each rank has its own part."""
_GROUP = "all"


def nbytes_of(size: str) -> int:
    """Bytes of a rank's state, about."""
    parameters = 2 * VOCABULARY * WIDTH + BLOCKS[size] * 8 * WIDTH**2
    return 8 * parameters


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = nn.functional.gelu(self.up(self.norm(hidden)))
        return hidden + self.down(inner)


class Model(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return out


@dataclass
class Training:
    """One rank of it."""

    engine: Any
    rank: int
    mesh: DeviceMesh
    done: int = field(default=0)

    @classmethod
    def built(cls, size: str, rank: int, checkpoint: Mapping[str, Any]) -> Training:
        """The engine; ``checkpoint``: that section of DeepSpeed's configuration."""
        import deepspeed

        torch.manual_seed(0)
        model = Model(BLOCKS[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "checkpoint": dict(checkpoint),
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if not engine.optimizer.optimizer.state:
            create_moments(engine.optimizer.optimizer)
        mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
        return cls(engine, rank, mesh)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Live, flat, by name. DeepSpeed's own loading puts others in their place."""
        return optimizer_tensors(self.engine.optimizer, [_GROUP])

    @property
    def nbytes(self) -> int:
        """Of this rank's state."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())

    def step(self) -> None:
        """One step: forward, backward, exchange of gradients, update."""
        generator = torch.Generator().manual_seed(2 * self.done + self.rank)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS + 1), generator=generator)
        logits = self.engine(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits[0].float(), tokens[0, 1:])
        self.engine.backward(loss)
        self.engine.step()
        self.done += 1

    def digests(self) -> dict[str, str]:
        """Of each tensor's bytes, by name."""
        found = {}
        for name, tensor in self.tensors.items():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            found[name] = hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
        return found

    def state_dict(self) -> dict[str, Any]:
        """As a script would have it: the model's own, and this rank's part of the optimizer's."""
        mine = {what: self._own(what) for what in (*DIVIDED, "step")}
        return {"model": self.engine.module.state_dict(), "optimizer": mine}

    def sharded_state_dict(self) -> dict[str, Any]:
        """The same for ``torch.distributed.checkpoint``, which is told what is a part of what."""
        mine: dict[str, Any] = {
            what: DTensor.from_local(self._own(what), self.mesh, [Shard(0)]) for what in DIVIDED
        }
        return {
            "model": self.engine.module.state_dict(),
            "optimizer": mine | {"step": self._own("step")},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back ``state_dict``, in place."""
        with torch.no_grad():
            for name, tensor in self.engine.module.state_dict().items():
                tensor.copy_(state["model"][name])
            for what, tensor in state["optimizer"].items():
                self._own(what).copy_(tensor)

    def _own(self, what: str) -> Tensor:
        return self.tensors[f"{_GROUP}.{what}"]
