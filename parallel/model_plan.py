"""What the engine is told of a model: its layers, not yet built, and its loss.

Promises: needs no torch, so that whoever only names a model's layers can import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    LossFunction = Callable[[Tensor, Tensor], Tensor]
    """Output of the last layer and targets → scalar, the mean over the micro-batch."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer, not yet built: a stage builds its own and leaves the others alone.

    A layer takes the one tensor that the layer before it returned, and returns one.
    """

    name: str
    """For people and drills: ``embedding``, ``layers.3``, ``head``."""
    build: Callable[[], nn.Module]
    """Makes the module with its initial weights, the same bits on every rank that builds it."""
    cost: float = 1.0
    """Work of the forward pass in any unit that all layers of the model share."""
    transformer: bool = True
    """Whether it is one of the model's repeated layers: every pipeline stage gets one."""
    tied: str | None = None
    """Layers with one key share one module: the first's. Their stages hold copies of it that
    stay equal to the bit; nothing but ``weight`` may be trained in it."""
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None
    """What a tied layer computes with the module; None: calls it."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A whole model."""

    layers: Sequence[LayerPlan]
    loss: LossFunction


def recomputed(plan: LayerPlan, checkpoint: Callable[..., Any]) -> LayerPlan:
    """``plan`` with a module that drops its activations and computes them in the backward.

    ``checkpoint`` is the scope's. Only for layers that call their module.
    """

    def build() -> nn.Module:
        import torch

        module = plan.build()
        compute = module.forward

        def forward(x: Tensor) -> Any:
            return checkpoint(compute, x) if torch.is_grad_enabled() else compute(x)

        module.forward = forward
        return module

    return replace(plan, build=build)


def parameter_name(qualified: str, layers: Sequence[LayerPlan]) -> str:
    """Name for people of a parameter of the layer list: ``2.mlp.down.weight`` is layer 1's.

    A parameter of a module that layers share has the first such layer's name.
    """
    index, _, rest = qualified.partition(".")
    if index == "tied_modules":
        key, _, rest = rest.partition(".")
        layer = next(plan for plan in layers if plan.tied == key)
    else:
        layer = layers[int(index)]
    # A norm + linear is one layer to the reader.
    return f"{layer.name}.{rest}".replace(".linear.weight", ".weight")
