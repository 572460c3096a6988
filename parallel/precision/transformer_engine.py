"""Every call that Octavo makes into Transformer Engine; the only module that imports it.

Written against release 2.20: names, parameters and defaults as recorded from the package, and
its rules as read in its source. **It has not run on a GPU**: no machine with one was at hand.
A contract test checks each call against the recorded signatures, ``tests/gpu`` compares the
numbers with the native ones where there is a GPU.

What Transformer Engine does by itself, so that Octavo must not do it again:

- It reduces amax (maximum over ``amax_reduction_group``) and makes new delayed scales of all
  forward operands when the outermost enabled ``autocast`` is left with gradients on, and of all
  output gradients in the backward of the first FP8 module run in that ``autocast``. So with
  delayed scaling **a history row is a micro-batch**, where the native scope has one a step, and
  scales move between micro-batches. With one micro-batch a step the two are the same.
- It sums the outputs of row shards and the input gradients of column shards over ``tp_group``.

What was found in reading it, and is done about it here:

- ``calibrating=True`` observes nothing in 2.20 (a module without FP8 gets no quantizers), and
  never did for output gradients. The scope observes by itself and writes into row 0.
- ``use_f32_scales`` and ``use_power_2_scales`` given to a recipe reach no quantizer, whose
  parameters were made of the defaults when the class was. They are set on the recipe after.
- A callable ``amax_compute_algo`` takes another path, which shifts a history also when nothing
  was seen (the fused one leaves it alone). Rows of 0 are therefore left out of ``ema``, and
  recompute, which updates once more in the backward, is refused with it.
- Forward products of delayed and current scaling accumulate fast and a little less exactly on
  Hopper (``use_split_accumulator`` False, its default); backward products don't.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.config import FP8Config
from parallel.precision import scaling
from parallel.precision.choice import TransformerEngineFacts
from parallel.tensor import ShardKind, TensorGroup

_CHECKS = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""What to ask Transformer Engine for each recipe."""

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 0
"""Slots of one product: input, weight (and output) forward; grad_output (and grad_input) back."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """Delayed scaling state of one linear: live FP32 tensors that Transformer Engine updates."""

    forward_scale: Tensor
    """[3]: input, weight, output."""
    forward_history: Tensor
    """[H, 3]; row 0 gathers the present micro-batch's amax, row H - 1 is the newest update's."""
    backward_scale: Tensor
    """[2]: grad_output, grad_input."""
    backward_history: Tensor
    """[H, 2]."""


def facts() -> TransformerEngineFacts:
    """Import it and ask what it runs; call this only where there is a CUDA device.

    Never raises: what stands in the way is in the answer.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return TransformerEngineFacts()
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError) as error:
        # The bare metapackage raises RuntimeError, a library of another CUDA or torch OSError.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return TransformerEngineFacts(problem=f"Transformer Engine can't be imported: {first}")
    unsupported: dict[str, str] = {}
    try:
        for recipe, check in _CHECKS.items():
            able, why = getattr(te, check)(return_reason=True)
            if not able:
                unsupported[recipe] = why
    except (AttributeError, TypeError, RuntimeError) as error:
        problem = f"Transformer Engine can't say what it runs here: {error}"
        return TransformerEngineFacts(problem=problem)
    return TransformerEngineFacts(transformer_engine.__version__, unsupported=unsupported)


class TransformerEngine:
    """One rank's way into Transformer Engine, with one recipe and one reduction group."""

    def __init__(self, config: FP8Config, stage: dist.ProcessGroup | None) -> None:
        """``stage``: the tensor × data ranks of this pipeline stage, None when it is one rank.

        Raises ValueError when it can't be imported.
        """
        try:
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe as recipes
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager
        except (ImportError, OSError, RuntimeError) as error:
            raise ValueError(f"Transformer Engine can't be imported: {error}") from error
        self._te = te
        self._manager = FP8GlobalStateManager
        self._stage = stage
        # One object for good: it is part of the key under which scaling state is kept.
        self.recipe = _recipe_object(recipes, config, reduce_amax=stage is not None)

    def linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: ShardKind | None,
        tensor: TensorGroup | None,
    ) -> nn.Module:
        """A bias-free linear; features are the whole matrix's, its ``weight`` is the shard's."""
        module: nn.Module = self._te.Linear(
            in_features=in_features,
            out_features=out_features,
            **_common(name, dtype, device, shard, tensor),
        )
        return module

    def norm_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        shard: ShardKind | None,
        tensor: TensorGroup | None,
    ) -> nn.Module:
        """RMSNorm and linear in one; the norm's weight is ``layer_norm_weight``, of ones."""
        module: nn.Module = self._te.LayerNormLinear(
            in_features=in_features,
            out_features=out_features,
            eps=eps,
            normalization="RMSNorm",
            **_common(name, dtype, device, shard, tensor),
        )
        return module

    def enabled(self) -> AbstractContextManager[Any]:
        """Modules inside compute in FP8; leaving the outermost one updates delayed scales."""
        return self._autocast(enabled=True)

    def disabled(self) -> AbstractContextManager[Any]:
        """Modules inside compute in BF16; only ever inside ``enabled``.

        The other way round, forward scales would never be updated. Recipe and group are the
        outer one's, so that no second set of buffers comes to be.
        """
        return self._autocast(enabled=False)

    def _autocast(self, *, enabled: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._te.autocast(
            enabled=enabled, recipe=self.recipe, amax_reduction_group=self._stage
        )
        return context

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, computed again in the backward with the scales of now.

        torch's own checkpoint would run the second pass outside ``autocast``, in BF16.
        ``function`` must be no ``nn.Module``: that would be searched for Transformer Engine's
        modules, which are not in Octavo's module tree, and handed to torch's.
        """
        assert not isinstance(function, nn.Module)
        return self._te.checkpoint(function, *args)

    def lay_out(self, modules: Sequence[nn.Module]) -> list[ScalingState]:
        """Delayed scaling: create the modules' state before any of them has run.

        Otherwise state would exist, and be reduced, in the order in which modules first run in
        FP8. Every rank of the stage does this with the same modules.
        """
        # Without gradients, leaving the autocast updates nothing.
        with torch.no_grad(), self.enabled():
            for module in modules:
                module.init_fp8_metadata(num_gemms=1)  # type: ignore[operator]
                self._manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        states = []
        for module in modules:
            meta: Any = module.fp8_meta
            forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
            states.append(
                ScalingState(
                    forward.scale, forward.amax_history, backward.scale, backward.amax_history
                )
            )
        return states


def _common(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    shard: ShardKind | None,
    tensor: TensorGroup | None,
) -> dict[str, Any]:
    """What both modules are given alike."""
    shared = tensor is not None and shard is not None
    return {
        "bias": False,
        "params_dtype": dtype,
        "device": device,
        "init_method": _as_nn_linear,
        "parallel_mode": shard if shared else None,
        "tp_group": tensor.group if shared and tensor is not None else None,
        "tp_size": tensor.size if shared and tensor is not None else 1,
        # DeepSpeed accumulates ``grad`` itself, into its own FP32 buffers.
        "fuse_wgrad_accumulation": False,
        "name": name,
    }


def _as_nn_linear(weight: Tensor) -> None:
    nn.init.kaiming_uniform_(weight, a=5**0.5)


def _recipe_object(recipes: Any, config: FP8Config, *, reduce_amax: bool) -> Any:
    """The recipe of a spec's ``fp8`` section; fields have Transformer Engine's own names.

    ``reduce_amax`` False for a stage of one rank: without a group the reduction would be over
    all ranks, and hang where stages hold different numbers of tensors.
    """
    fp8_format = recipes.Format[config.format]
    if config.recipe == "delayed":
        return recipes.DelayedScaling(
            margin=config.margin,
            fp8_format=fp8_format,
            amax_history_len=config.amax_history_len,
            amax_compute_algo=_amax_algorithm(config),
            reduce_amax=reduce_amax,
        )
    if config.recipe == "current":
        power_of_two = bool(config.use_power_2_scales)
        current = recipes.Float8CurrentScaling(
            use_power_2_scales=power_of_two, fp8_format=fp8_format
        )
        return _with_rounding(recipes, current, power_of_two)
    if config.recipe == "block":
        fp32_scales = bool(config.use_f32_scales)
        block = recipes.Float8BlockScaling(
            use_f32_scales=fp32_scales,
            fp8_format=fp8_format,
            x_block_scaling_dim=1,
            w_block_scaling_dim=2,
            grad_block_scaling_dim=1,
        )
        return _with_rounding(recipes, block, not fp32_scales)
    return recipes.MXFP8BlockScaling(fp8_format=fp8_format)


def _with_rounding(recipes: Any, recipe: Any, power_of_two: bool) -> Any:
    parameters = recipes.QParams(power_2_scale=power_of_two, amax_epsilon=0.0)
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, operand, parameters)
    return recipe


def _amax_algorithm(config: FP8Config) -> str | Callable[[Tensor], Tensor]:
    if config.amax_compute_algo != "ema":
        assert config.amax_compute_algo is not None
        return config.amax_compute_algo
    factor = config.amax_ema_factor
    assert factor is not None

    def amax_compute(amax_history: Tensor) -> Tensor:
        """Signature of Transformer Engine's own: [H, tensors] → [tensors]."""
        return scaling.averaged_amax(amax_history, factor)

    return amax_compute
