"""Faults that drills put into one rank's model; every rank calls them between steps.

Promises: data-parallel replicas stay equal to the bit but where a fault is of one replica, and so
do the copies that tensor ranks hold of a tensor; no wait for the device; what the next update
would undo is in the master weights too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel import engine_state
from parallel.model_plan import ModelPlan, parameter_name
from parallel.precision.backend import LayerScope
from parallel.precision.linear import Float8Linear
from parallel.precision.recipes import ROLES
from parallel.step_hooks import StepHooks
from parallel.topology import Coordinate


class Faults:
    """What can be done to the model of one rank."""

    def __init__(
        self,
        module: nn.Module,
        plan: ModelPlan,
        *,
        scope: LayerScope,
        hooks: StepHooks,
        coordinate: Coordinate,
        linears: Sequence[str],
        parameters: Sequence[str],
    ) -> None:
        """``linears`` and ``parameters`` are the names on all ranks, so that all refuse alike."""
        self._scope = scope
        self._hooks = hooks
        self._coordinate = coordinate
        self._linears = tuple(linears)
        self._all_parameters = tuple(parameters)
        self._transformers = [layer.name for layer in plan.layers if layer.transformer]
        self._parameters = {
            parameter_name(name, plan.layers): parameter
            for name, parameter in module.named_parameters()
        }
        self._modules = {m.name: m for m in module.modules() if isinstance(m, Float8Linear)}
        self._hooked: list[Any] = []
        self._frozen: dict[str, tuple[int, Tensor]] = {}

    # Whether there is a place for it.

    def check_linear(self, tensor: str) -> None:
        """ValueError, on every rank alike, unless ``tensor`` is an operand of an FP8 linear.

        Of Octavo's own: what Transformer Engine quantizes is out of reach.
        """
        name, _, role = tensor.rpartition("/")
        if role not in ROLES or name not in self._linears:
            names = [f"{linear}/{of}" for linear in self._linears for of in ROLES]
            raise ValueError(f"no FP8 linear has an operand {tensor!r}{_near(tensor, names)}")
        if self._scope.layers and not self._modules:
            raise ValueError(f"a drill of {tensor} needs fp8.backend: native")

    def check_layer(self, layer: int) -> None:
        """ValueError, on every rank alike, unless ``layer`` has a SwiGLU MLP by our names."""
        name = self._layer(layer)
        for matrix in ("mlp.gate_up", "mlp.down"):
            if f"{name}.{matrix}.weight" not in self._all_parameters:
                raise ValueError(f"layer {layer} has no {name}.{matrix}.weight to grow")

    def check_parameter(self, name: str) -> None:
        """ValueError, on every rank alike, for a parameter that no rank has."""
        if name not in self._all_parameters:
            raise ValueError(f"no parameter {name!r}{_near(name, self._all_parameters)}")

    # Weights.

    @torch.no_grad()
    def surge_mlp(self, layer: int, factor: float) -> None:
        """Multiply the MLP weights of one layer, parameters and masters alike.

        All its matrices where a layer, of a user's own model, has nothing named ``mlp``. A rank
        without the layer does nothing. Raises ValueError for a layer that the model doesn't have.
        """
        begin = f"{self._layer(layer)}."
        matrices = {
            n: p for n, p in self._parameters.items() if n.startswith(begin) and p.dim() > 1
        }
        mlp = {n: p for n, p in matrices.items() if ".mlp." in n.removeprefix(begin[:-1])}
        for parameter in (mlp or matrices).values():
            parameter.mul_(factor)
            if (piece := engine_state.master_piece(parameter)) is not None:
                piece.mul_(factor)
        self._scope.forget_weights()

    @torch.no_grad()
    def grow_channel(self, layer: int, factor: float) -> None:
        """Multiply the first channel of ``up`` in a layer's MLP, and divide its column of ``down``.

        With tensor ranks it is a channel of the first one's. Raises as ``check_layer``.
        """
        self.check_layer(layer)
        name = self._layer(layer)
        gate_up = self._parameters.get(f"{name}.mlp.gate_up.weight")
        down = self._parameters.get(f"{name}.mlp.down.weight")
        if gate_up is None or down is None or self._coordinate.tensor:
            return
        # Gate stands above up.
        width, first = gate_up.shape[1], len(gate_up) // 2
        _scale_elements(gate_up, factor, lambda index: index // width == first)
        inner = down.shape[1]
        _scale_elements(down, 1.0 / factor, lambda index: index % inner == 0)
        self._scope.forget_weights()

    @torch.no_grad()
    def flip_bit(self, parameter: str, replica: int, bit: int) -> None:
        """Flip bit ``bit`` of the first BF16 value of ``parameter``, on data rank ``replica``.

        In the parameter alone: the next update makes it anew. Raises as ``check_parameter``.
        """
        self.check_parameter(parameter)
        found = self._parameters.get(parameter)
        here = self._coordinate.data == replica and not self._coordinate.tensor
        if found is None or not here:
            return
        mask = 1 << bit if bit < 15 else -(1 << 15)
        found.detach().view(torch.int16).view(-1)[0] ^= mask
        self._scope.forget_weights()

    # Operands of FP8 linears.

    @torch.no_grad()
    def add_outlier(self, tensor: str, factor: float) -> None:
        """A value ``factor`` times as large as all of ``tensor``, as the first of it.

        An input's or a gradient's stands in every micro-batch of the next step, on data rank 0; a
        weight's stays. Raises as ``check_linear``.
        """
        self.check_linear(tensor)
        name, _, role = tensor.rpartition("/")
        if name not in self._scope.layers:
            return
        linear = self._modules[name]
        if role == "weight":
            # Every rank that holds it: the first value of each tensor rank's part of it.
            value = linear.weight.abs().amax() * factor
            linear.weight.view(-1)[0] = value
            piece = engine_state.master_piece(linear.weight)
            if piece is not None and engine_state.master_offset(linear.weight) == 0:
                piece.view(-1)[0] = value
            self._scope.forget_weights()
        elif self._coordinate.data == 0:
            # On all its tensor ranks: what they hold alike stays alike.
            self._hooked.append(
                linear.register_forward_pre_hook(
                    lambda _, args: (_with_outlier(args[0], factor), *args[1:])
                )
                if role == "input"
                else linear.register_forward_hook(
                    lambda _, args, output: _spoil_gradient(output, factor)
                )
            )

    def freeze_scale(self, tensor: str, factor: float) -> None:
        """Keep the delayed scale of ``tensor`` at ``factor`` times what it is, until it is thawed.

        Raises as ``check_linear``, and under a recipe that keeps no scale.
        """
        self.check_linear(tensor)
        name, _, role = tensor.rpartition("/")
        if name not in self._scope.layers:
            return
        scales = self._scope.state_tensors().get("scale")
        if scales is None:
            raise ValueError(
                f"{tensor} has no scale that could stand still: the recipe isn't delayed"
            )
        row = self._scope.layers.index(name) * len(ROLES) + ROLES.index(role)
        self._frozen[tensor] = (row, scales[row] * factor)
        self._hold_scales()

    def thaw_scale(self, tensor: str) -> None:
        """The next update makes the scale of ``tensor`` again."""
        self._frozen.pop(tensor, None)

    def poison_gradient(self, value: float = torch.nan) -> None:
        """``value``, a NaN or an Inf, in one gradient of this rank, before the next exchange."""
        self._hooks.poison_gradient(value)

    def after_step(self) -> None:
        """What lasted for the step ends; scales that stand still are put back."""
        for handle in self._hooked:
            handle.remove()
        self._hooked.clear()
        if self._frozen:
            self._hold_scales()

    def _hold_scales(self) -> None:
        scales = self._scope.state_tensors()["scale"]
        for row, scale in self._frozen.values():
            scales[row].copy_(scale)

    def _layer(self, layer: int) -> str:
        count = len(self._transformers)
        if not 0 <= layer < count:
            raise ValueError(f"layer {layer}: the model has {count}")
        return self._transformers[layer]


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 1, 0.0)
    return f"; did you mean {close[0]!r}?" if close else ""


def _scale_elements(parameter: Tensor, factor: float, chosen: Callable[[Tensor], Tensor]) -> None:
    """Multiply the elements that ``chosen`` says of their flat indices; masters too."""
    parts = [(parameter.detach().view(-1), 0)]
    if (piece := engine_state.master_piece(parameter)) is not None:
        parts.append((piece.view(-1), engine_state.master_offset(parameter)))
    for flat, start in parts:
        index = torch.arange(start, start + flat.numel(), device=flat.device)
        flat.copy_(torch.where(chosen(index), flat * factor, flat))


def _with_outlier(x: Tensor, factor: float) -> Tensor:
    """A copy of ``x`` whose first element is ``factor`` times its largest magnitude."""
    spoilt = x.clone(memory_format=torch.contiguous_format)
    spoilt[(0,) * x.dim()] = x.detach().abs().amax() * factor
    return spoilt


def _spoil_gradient(output: Tensor, factor: float) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: _with_outlier(gradient, factor))
