"""Delayed scaling state that Transformer Engine keeps: remembered, brought back, read.

Promises: the tensors are the library's own and keep their identity; nothing here waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.config import FP8Config
from parallel.precision import scaling
from parallel.precision.formats import E4M3
from parallel.precision.transformer_engine import GRAD_OUTPUT, INPUT, WEIGHT, ScalingState


class DelayedStates:
    """Scales and histories of a scope's switchable linears, in order of registration.

    Where tensors are ordered ``[tensors]``, it is by linear and then ROLES.
    """

    def __init__(self, states: Sequence[ScalingState], config: FP8Config) -> None:
        assert config.margin is not None and config.amax_history_len is not None
        self.states = tuple(states)
        self._margin = config.margin
        self._rows = config.amax_history_len
        self._live = [
            tensor
            for state in self.states
            for tensor in (
                state.forward_scale,
                state.backward_scale,
                state.forward_history,
                state.backward_history,
            )
        ]
        self._before = [tensor.clone() for tensor in self._live]

    def remember(self) -> None:
        """The state as it is now is what ``bring_back`` returns to."""
        torch._foreach_copy_(self._before, self._live)

    def bring_back(self) -> None:
        """The state of the last ``remember``, in place."""
        torch._foreach_copy_(self._live, self._before)

    def scales_before(self) -> Tensor:
        """float32 [tensors], as of the last ``remember``."""
        return _by_role(self._before[0::4], self._before[1::4])

    def calibrated_before(self) -> Tensor:
        """Whether the scales of ``scales_before`` were made from data, bool [tensors].

        A 1 is what a scale starts from, and what an amax may give: then the history tells, except
        one of a single row, which keeps nothing.
        """
        seen = [
            ((history > 0) & torch.isfinite(history)).any(0)
            for pair in zip(self._before[2::4], self._before[3::4], strict=True)
            for history in pair
        ]
        return (self.scales_before() != 1) | _by_role(seen[0::2], seen[1::2])

    def newest_amax(self, updates: int, fp8_max: Tensor) -> Tensor:
        """float32 [tensors]: the largest amax that the last ``updates`` brought.

        Row 0 is looked at too: gradients that a BF16 linear saw after the last update are there.
        A history of one row keeps nothing but the scale that the newest amax made.
        """
        if self._rows == 1:
            return fp8_max * 2.0**-self._margin / _by_role(self._live[0::4], self._live[1::4])
        first = self._rows - min(updates, self._rows - 1)
        parts = [
            torch.cat((history[:1], history[first:]))[:, :slots]
            for state in self.states
            for history, slots in (
                (state.forward_history, WEIGHT + 1),
                (state.backward_history, GRAD_OUTPUT + 1),
            )
        ]
        return torch.cat(parts, dim=1).amax(0)

    def forget(self, linear: int) -> None:
        """One that leaves FP8: its scales stay, what they were made from goes."""
        self.states[linear].forward_history.zero_()
        self.states[linear].backward_history.zero_()

    def make_room(self, linears: Sequence[int], amax: Tensor) -> None:
        """Weights of up to ``amax``, float32 [linears], don't saturate from now on."""
        states = [self.states[i] for i in linears]
        scales = [state.forward_scale[WEIGHT] for state in states]
        made = scaling.scale_with_room(
            torch.stack(scales),
            amax,
            torch.full_like(amax, E4M3.max),
            margin=self._margin,
            warmed=torch.stack([(s.forward_history[:, WEIGHT] != 0).any() for s in states]),
        )
        torch._foreach_copy_(scales, list(made.unbind()))


def _by_role(forward: Sequence[Tensor], backward: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [
            part
            for f, b in zip(forward, backward, strict=True)
            for part in (f[INPUT : WEIGHT + 1], b[: GRAD_OUTPUT + 1])
        ]
    )
