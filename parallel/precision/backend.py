"""The interface that every precision backend has, and the one place that makes a scope.

A backend creates this rank's linears, owns their scaling state, and moves single linears
between FP8 and BF16. The model (``parallel.transformer``) and the engine know ``LayerScope``
only; which class stands behind it is decided by ``parallel.precision.choice``.

    choice = detection.choose_together(precision, fp8, device)
    scope = make_scope(choice, precision, fp8, num_layers=…, device=…, tensor=…, stage=…)

Promises: importing this imports neither torch nor a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from parallel.config import FP8Config, Precision
from parallel.precision.choice import BackendChoice

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from parallel.tensor import ShardKind, TensorGroup


class LayerScope(Protocol):
    """Creates this rank's linears and owns their precision and scaling state.

    The order of a step: for every micro-batch its forward inside ``micro_batch()`` and its
    backward, then ``reduce_amax`` over the ranks of the stage, the optimizer,
    ``finish_step``, and then, when wanted, ``statistics``. Feature counts are always the whole
    matrix's; with tensor ranks a module holds its shard alone. All linears are made before the
    first forward. No method waits for the device.
    """

    def linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype = ...,
        shard: ShardKind | None = None,
        sections: Sequence[int] = (),
    ) -> nn.Module:
        """A bias-free linear with its own ``weight`` [outputs, inputs]; [..., in] → [..., out].

        ``sections``: heights of blocks of outputs of which every column shard has its part, in
        the matrix that ``whole_matrices`` cuts.

        Raises ValueError for a name given twice and for a linear made after the first forward.
        """
        ...

    def norm_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        shard: ShardKind | None = None,
        sections: Sequence[int] = (),
        dtype: torch.dtype = ...,
    ) -> nn.Module:
        """RMSNorm (weights start at one), then the linear ``name``."""
        ...

    def norm_mlp(
        self,
        name: str,
        hidden: int,
        ffn: int,
        *,
        eps: float,
        smooth: bool = False,
        sharded: bool = False,
        dtype: torch.dtype = ...,
    ) -> nn.Module:
        """RMSNorm, then SwiGLU: the linears ``{name}.gate_up`` and ``{name}.down``.

        Each of the two is registered by itself and changes its precision by itself.
        ``smooth``: the variant of arXiv 2409.12517; ``sharded``: over the tensor ranks.
        """
        ...

    def whole_matrices(self) -> AbstractContextManager[bool]:
        """Around the making of a layer: its sharded linears have their whole matrices inside, and
        are cut when it is left, where it yields true."""
        ...

    def micro_batch(self) -> AbstractContextManager[None]:
        """Stands around the forward of one micro-batch, on every rank of the stage alike."""
        ...

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, its activations computed again in the backward.

        The second pass uses the scales of the first and observes nothing.
        """
        ...

    @property
    def layers(self) -> tuple[str, ...]:
        """The linears whose precision can change, in order of registration."""
        ...

    @property
    def fixed_layers(self) -> tuple[str, ...]:
        """The linears that stay in BF16 throughout, in order of registration."""
        ...

    def precision(self) -> dict[str, Precision]:
        """What each switchable linear computes in now."""
        ...

    def ordered(self) -> dict[str, Precision]:
        """What each switchable linear was last ordered to compute in.

        That is ``precision``, but for linears whose return to FP8 waits.
        """
        ...

    def set_precision(self, precision: Mapping[str, Precision]) -> None:
        """Change linears' precision at a step boundary; none of them if a name is unknown.

        With scales made of earlier steps, a linear that left FP8 returns once applied steps
        have made scales for it in BF16: an order before that waits until the ``finish_step``
        that has them. ``precision`` tells what is in force.

        Raises ValueError for unknown names, with the nearest one, and for fixed ones.
        """
        ...

    def reduce_amax(self, group: dist.ProcessGroup | None) -> None:
        """This step's amax over the tensor × data ranks of the stage, after all backwards.

        A collective where the backend has not reduced it by itself already.
        """
        ...

    def finish_step(self, applied: bool) -> None:
        """Close the step; with ``applied`` false the scaling state is as before the step."""
        ...

    def forget_weights(self) -> None:
        """Weights have changed outside a step (a rollback, a drill)."""
        ...

    def collect(self, every_counter: bool) -> None:
        """Whether the next steps take the statistics that cost extra passes over tensors."""
        ...

    def statistics(self) -> tuple[tuple[str, ...], Tensor]:
        """What the steps finished since the last call saw, and start anew.

        Names ``layer/role``, and a float32 tensor [tensors, columns] on the scope's device,
        columns as ``parallel.precision.scope.STATISTICS_COLUMNS``; what a backend
        doesn't measure is NaN.
        """
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """Live tensors that a snapshot copies out and back in place, at a step boundary."""
        ...

    def state_meta(self) -> dict[str, object]:
        """The rest of the state, for JSON."""
        ...

    def load_meta(self, meta: Mapping[str, object]) -> None:
        """Take back ``state_meta``, after the tensors were copied in place.

        Raises ValueError when it is of other linears than this rank's.
        """
        ...


def make_scope(
    choice: BackendChoice,
    precision: Precision,
    config: FP8Config,
    *,
    num_layers: int,
    device: torch.device | str,
    tensor: TensorGroup | None = None,
    stage: dist.ProcessGroup | None = None,
    built_in: bool = True,
    compiled: bool = True,
) -> LayerScope:
    """The scope of ``choice``.

    ``num_layers`` is the whole model's; ``tensor`` the ranks that share its matrices;
    ``stage`` the tensor × data ranks of this pipeline stage (None for one rank alone), which
    Transformer Engine reduces amax over by itself; the native scope is handed its group in
    ``reduce_amax``. ``built_in``: the model is ``parallel.transformer``'s, so that a pattern of
    ``high_precision_layers`` that matches none of its linears is an error.
    Raises ValueError as the scopes do, and where Transformer Engine turns out not to run.
    """
    if choice.backend == "undecided":
        raise ValueError(f"no backend is chosen yet: {choice.reason}")
    if choice.backend == "transformer_engine":
        from parallel.precision.transformer_engine_scope import TransformerEngineScope

        return TransformerEngineScope(
            precision,
            config,
            num_layers=num_layers,
            device=device,
            tensor=tensor,
            stage=stage,
            built_in=built_in,
        )
    from parallel.precision.scope import PrecisionScope

    effective: Precision = "bf16" if choice.backend == "bf16" else precision
    return PrecisionScope(
        effective,
        config,
        num_layers=num_layers,
        device=device,
        tensor=tensor,
        built_in=built_in,
        compiled=compiled,
    )
