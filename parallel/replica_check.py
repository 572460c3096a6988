"""Checksums of a rank's parameters, so that data-parallel replicas can be compared.

Data-parallel ranks hold the same parameters to the bit. A flipped bit, a wrong sum or an update
that one of them missed stays unseen in the loss, for the others train on. Each rank sums up its
parameters' bits where they are, and sends the sums along with what else it reports of the step:
whoever merges the reports compares them (``monitoring.replicas``). No rank waits for another,
nor for its device.

A sum: the bits of each value as an integer; added up exactly, in any order, modulo 2**64; once
plain, and once with each row times its number from 1, so that rows that changed places show. Any
single bit changes it.

Parameters are made anew from the master weights, of which each rank keeps its share, in every
update: a bit flipped in one lives for one step, and only a check of every step sees each. What a
rank gets wrong again and again is seen by any.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

SUMS = 2
"""Of each parameter: plain, and with its rows weighted."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """The parameters that this rank shares with its replicas."""

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], replicas: dist.ProcessGroup
    ) -> None:
        """Parameters by name, the same on every rank of ``replicas``; they may change."""
        named = list(parameters)
        self.names = tuple(name for name, _ in named)
        self.replicas = tuple(dist.get_process_group_ranks(replicas))
        """Ranks that hold the same, this one among them."""
        self._parameters = [parameter.detach() for _, parameter in named]
        longest = max((p.shape[0] for p in self._parameters if p.dim() >= 2), default=1)
        device = self._parameters[0].device if self._parameters else None
        self._numbers = torch.arange(1, longest + 1, device=device)

    @torch.no_grad()
    def sums(self) -> Tensor:
        """int64 [parameters, SUMS] on their device, of the present values."""
        sums = torch.empty(
            len(self._parameters), SUMS, dtype=torch.int64, device=self._numbers.device
        )
        for out, parameter in zip(sums, self._parameters, strict=True):
            bits = parameter.view(_BITS[parameter.element_size()])
            rows = (bits.flatten(1) if bits.dim() >= 2 else bits.view(1, -1)).sum(
                1, dtype=torch.int64
            )
            torch.sum(rows, 0, out=out[0])
            torch.sum(rows * self._numbers[: len(rows)], 0, out=out[1])
        return sums
