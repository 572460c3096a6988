"""The FP8 state of one rank's linears: who computes in what, scales, statistics.

One ``PrecisionScope`` a rank creates the linears of its pipeline stage, holds their
scaling state packed in a few tensors (one row a layer and role), and moves single layers
between FP8 and BF16 at a step boundary.

The order of a step: forward and backward of all micro-batches, ``reduce_amax`` over the
replicas, the optimizer, ``finish_step``, and then, when wanted, ``statistics``. Promises:
no host synchronization anywhere in it; after ``finish_step(applied=False)`` scales and
histories are as before the step; the tensors of ``state_tensors`` keep their identity, so
that a snapshot can be copied into them.

A model's deep copy, or a pickle of it, has a scope of its own with the state of that moment
(``convert.scope_of`` finds it), which steps of the first change no more; a copy of a part of a
model carries the whole scope, and so every linear of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.config import FP8Config, Precision
from parallel.precision import kernels, recipes
from parallel.precision.layers import NormLinear, NormMLP, Observation, RMSNorm, recomputed
from parallel.precision.linear import BF16Linear, Float8Linear
from parallel.precision.optimizer_steps import forget_weights_after_steps
from parallel.precision.packed_state import STATISTICS_COLUMNS, PackedState
from parallel.precision.quantizers import Quantizer
from parallel.precision.recipes import ROLES, Role
from parallel.precision.scaling import amax_over_shards
from parallel.precision.switching import SwitchableLinears, precision_of_state, refuse_unknown
from parallel.tensor import ShardKind, TensorGroup, WholeMatrix, note_cut, shard_of

logger = logging.getLogger(__name__)

__all__ = ["STATISTICS_COLUMNS", "PrecisionScope"]


class PrecisionScope(SwitchableLinears[Float8Linear]):
    """Creates this rank's linears and owns their precision and scaling state."""

    def __init__(
        self,
        precision: Precision,
        config: FP8Config,
        *,
        num_layers: int,
        device: torch.device | str = "cpu",
        tensor: TensorGroup | None = None,
        built_in: bool = True,
        compiled: bool = True,
    ) -> None:
        """``num_layers`` is the whole model's, ``precision`` what the job asks for, ``tensor``
        the ranks that share this rank's matrices. Without ``built_in`` the model is a user's,
        whose linears nobody knows yet.

        With ``compiled`` the casts on CPU are the C ones where a compiler is found; the
        numbers are the same. Raises ValueError for a ``high_precision_layers`` pattern that
        matches no linear.
        """
        self.recipe = recipes.expand(config)
        super().__init__(keeps_history=self.recipe.has_state, steps=1)
        self.device = torch.device(device)
        self.tensor = tensor
        self._high_precision = config.high_precision_layers
        self._job_precision: Precision = precision
        self._num_layers = num_layers
        self._observation = Observation(awaits_steps=self.recipe.has_state)
        self._state: PackedState | None = None
        self._whole: list[WholeMatrix] | None = None
        on_cpu = self.device.type == "cpu"
        self._kernels = kernels.load() if compiled and on_cpu and precision == "fp8" else None
        names = recipes.linear_names(num_layers)
        problems = recipes.unmatched_patterns(self._high_precision, names)
        if problems and built_in:
            raise ValueError("; ".join(problems))

    def linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        shard: ShardKind | None = None,
        sections: Sequence[int] = (),
    ) -> nn.Module:
        """Create and register a bias-free linear; ``name`` as ``layers.3.mlp.down``.

        The features are the whole matrix's; with ``shard`` and tensor ranks the module holds
        this rank's part of it. ``sections`` are the heights of blocks of outputs of which each
        column shard has its part (queries, keys and values): by them the whole matrix is cut.

        In a BF16 job, and where ``high_precision_layers`` says so, it is a plain one whose
        precision is fixed (``fixed_layers``). All linears are made before the first forward:
        afterwards, and for a name given twice, ValueError; for features that the recipe can't cut
        into blocks (``recipes.dimension_problems``) or the ranks can't share, UnfitLinearError.
        """
        if name in self._linears or name in self._fixed:
            raise ValueError(f"linear {name!r} is registered already")
        if sections and sum(sections) != out_features:
            raise ValueError(
                f"linear {name!r}: sections {list(sections)} of {out_features} outputs"
            )
        part = shard_of(self.tensor, shard)
        shape = out_features, in_features
        if part is not None:
            in_features, out_features = part.features(name, in_features, out_features)
        whole = part is not None and self._whole is not None
        # A shard of its own would take other draws from the generator than the matrix does.
        device = torch.device("meta") if whole else self.device
        layer: BF16Linear | Float8Linear
        if self.stays_in_bf16(name):
            self._fixed.append(name)
            layer = BF16Linear(in_features, out_features, dtype=dtype, device=device, shard=part)
        else:
            self._admit(name, in_features, out_features)
            layer = self._linears[name] = Float8Linear(
                name,
                in_features,
                out_features,
                dtype=dtype,
                device=device,
                bind=self._operands_of,
                shard=part,
                observation=self._observation,
            )
        if whole:
            assert self._whole is not None and part is not None
            layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device))
            layer.reset_parameters()
            self._whole.append(WholeMatrix(name, layer, part, shape, tuple(sections)))
        if part is not None:
            note_cut(layer.weight, part.kind, part.tensor, sections)
        return layer

    @contextmanager
    def whole_matrices(self) -> Iterator[bool]:
        """Linears made inside have the whole matrix as their weight until it is left, and this
        rank's part from then on, so that initial weights drawn inside don't depend on how many
        tensor ranks there are. Yields whether it is so: here it is.

        Their features are the part's throughout. Raises ValueError where a weight isn't the whole
        matrix any more.
        """
        self._whole = []
        try:
            yield True
            for matrix in self._whole:
                matrix.cut()
        finally:
            self._whole = None

    def adopt(self, name: str, linear: nn.Linear) -> Float8Linear:
        """An FP8 linear with the parameters of ``linear``, bias included: the same tensors.

        Raises ValueError where ``linear`` would, and for a name that stays in BF16.
        """
        if name in self._linears or self.stays_in_bf16(name):
            taken = "is registered already" if name in self._linears else "stays in BF16"
            raise ValueError(f"linear {name!r} {taken}")
        self._admit(name, linear.in_features, linear.out_features)
        layer = Float8Linear(
            name,
            linear.in_features,
            linear.out_features,
            dtype=linear.weight.dtype,
            device=torch.device("meta"),
            bind=self._operands_of,
            bias=linear.bias is not None,
            observation=self._observation,
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        self._linears[name] = layer
        # Its training loop is a user's, who may not close steps by finish_step.
        forget_weights_after_steps(self)
        return layer

    def note_fixed(self, name: str) -> None:
        """A linear that isn't made here and stays in BF16: one of ``fixed_layers`` from now on.

        Raises ValueError for a name given twice.
        """
        if name in self._linears or name in self._fixed:
            raise ValueError(f"linear {name!r} is registered already")
        self._fixed.append(name)

    def stays_in_bf16(self, name: str) -> bool:
        """Whether a linear of this name has BF16 as its fixed precision."""
        return self._job_precision == "bf16" or recipes.is_high_precision(
            name, self._high_precision, self._num_layers
        )

    def _admit(self, name: str, in_features: int, out_features: int) -> None:
        problems = recipes.dimension_problems(self.recipe.scaling, in_features, out_features)
        if problems:
            told = "; ".join(message for message, _ in problems)
            raise recipes.UnfitLinearError(name, told, problems[0][1])
        if self._state is not None:
            raise ValueError(f"linear {name!r} comes after the scaling state was laid out")

    def norm_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        shard: ShardKind | None = None,
        sections: Sequence[int] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> NormLinear:
        """RMSNorm, then the linear ``name``; as ``linear`` otherwise."""
        norm = RMSNorm(in_features, eps, dtype=dtype, device=self.device)
        linear = self.linear(
            name, in_features, out_features, dtype=dtype, shard=shard, sections=sections
        )
        return NormLinear(norm, linear)

    def norm_mlp(
        self,
        name: str,
        hidden: int,
        ffn: int,
        *,
        eps: float,
        smooth: bool = False,
        sharded: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> NormMLP:
        """RMSNorm, then SwiGLU of width ``ffn``: linears ``{name}.gate_up``, ``{name}.down``.

        ``smooth``: Smooth SwiGLU; ``sharded``: ``ffn`` is divided over the tensor ranks.
        """
        norm = RMSNorm(hidden, eps, dtype=dtype, device=self.device)
        column: ShardKind | None = "column" if sharded else None
        row: ShardKind | None = "row" if sharded else None
        gate_up = self.linear(
            f"{name}.gate_up", hidden, 2 * ffn, dtype=dtype, shard=column, sections=(ffn, ffn)
        )
        down = self.linear(f"{name}.down", ffn, hidden, dtype=dtype, shard=row)
        return NormMLP(norm, gate_up, down, smooth=smooth)

    def micro_batch(self) -> AbstractContextManager[None]:
        """Stands around the forward of one micro-batch; this backend needs nothing there."""
        return nullcontext()

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, its activations computed again in the backward, unobserved."""
        return recomputed(self._observation, function, *args)

    def _assign(self, precision: Mapping[str, Precision]) -> None:
        super()._assign(precision)
        self.forget_weights()

    def _forget(self, names: Sequence[str]) -> None:
        self._packed().forget_history(self._rows(names))

    @torch.no_grad()
    def _calibrate(self, names: Sequence[str]) -> None:
        # Shards of a matrix share its scale; replicas hold the same weights anyway.
        group = None if self.tensor is None else self.tensor.group
        amax = amax_over_shards([self._linears[name].weight for name in names], group)
        weights = self._rows(names)[ROLES.index("weight") :: len(ROLES)]
        self._packed().make_room(weights, amax)

    def _rows(self, names: Sequence[str]) -> list[int]:
        """Rows of the packed state of linears' operands, ROLES after ROLES."""
        position = {name: i for i, name in enumerate(self._linears)}
        return [position[name] * len(ROLES) + i for name in names for i in range(len(ROLES))]

    def reduce_amax(self, group: dist.ProcessGroup | None) -> None:
        """Maximum of this step's amax over ``group``; once a step, after backward.

        ``group`` is the ranks that hold the same linears (data × tensor of one stage); None
        is no other rank. A collective: every rank of the group calls it.
        """
        if group is None or not self._linears or not self.recipe.has_state:
            return
        # As integers: the order is the same for non-negative floats, and a NaN, which
        # compares as the largest, reaches every rank whatever the backend's float maximum.
        amax = self._packed().amax.view(torch.int32)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)

    def finish_step(self, applied: bool) -> None:
        """Close the step: new scales, or with ``applied`` false the amax seen is discarded.

        Once a step on every rank, after the optimizer; ``applied`` says whether it updated
        the parameters. Quantized weights are made anew afterwards either way. Linears that
        waited for scales to return to FP8 do so now.
        """
        self._observation.awaits_steps = False
        if self._linears:
            self._packed().finish_step(applied)
            self._return_the_warmed(applied)
        self.forget_weights()

    def forget_weights(self) -> None:
        """Weights have changed outside a step (a rollback, a drill)."""
        for layer in self._linears.values():
            layer.forget_weight()

    def collect(self, every_counter: bool) -> None:
        """Whether the next steps count saturated values and so on; amax is always kept.

        Counting costs plain PyTorch passes over each tensor, and the C casts next to nothing.
        """
        if not self._linears:
            return
        quantizers = self._packed().quantizers
        if quantizers[0].collect is not every_counter:  # all are set together
            for quantizer in quantizers:
                quantizer.collect = every_counter

    def statistics(self) -> tuple[tuple[str, ...], Tensor]:
        """What the steps finished since the last call saw; starts anew.

        Names ``layer/role`` and a float32 [tensors, 9] copy on the scope's device, columns
        STATISTICS_COLUMNS: the largest amax (under delayed scaling of all replicas, by
        ``reduce_amax``), the scale that the last step used or, with scales of its own, that
        of the largest amax, this rank's counts, and energies where the spec asks for SQNR. A
        layer in BF16 reports what its scale would have been; nothing of it saturates.
        """
        names = tuple(f"{name}/{role}" for name in self._linears for role in ROLES)
        if not names:
            return names, torch.zeros(
                *(0, len(STATISTICS_COLUMNS)), dtype=torch.float32, device=self.device
            )
        return names, self._packed().take_report()

    def state_tensors(self) -> dict[str, Tensor]:
        """Live tensors that a snapshot copies out and back in place, at a step boundary.

        Empty for recipes without state. After copying in, call ``load_meta``.
        """
        if not self._linears or not self.recipe.has_state:
            return {}
        state = self._packed()
        return {
            "amax_history": state.history,
            "scale": state.scale,
            "calibrated": state.calibrated,
        }

    def state_meta(self) -> dict[str, object]:
        """The rest of the state, for JSON: ``precision`` by linear, and who waits to return."""
        return {"precision": self.precision(), **self._returns.meta()}

    def load_meta(self, meta: Mapping[str, object]) -> None:
        """Take back ``state_meta``, after the tensors were copied in place; as it was stored,
        without calibration. Statistics not taken yet are dropped.

        Raises ValueError when it is of other linears than this rank's.
        """
        precision = precision_of_state(meta, self.layers)
        refuse_unknown(precision, self.layers, self._fixed)
        self._assign(precision)
        self._returns.load_meta(meta)
        # What steps showed that have now not been shall not be told of later ones.
        self.statistics()

    def _packed(self) -> PackedState:
        if self._state is None:
            with torch.inference_mode(False):
                state = PackedState(self.recipe, len(self._linears), self.device, self._kernels)
            self._state = state
            for name, layer in self._linears.items():
                layer.operands = self._operands_of(name)
        return self._state

    def _operands_of(self, name: str) -> dict[Role, Quantizer]:
        rows = self._rows([name])
        quantizers = self._packed().quantizers
        return {role: quantizers[row] for role, row in zip(ROLES, rows, strict=True)}

    def __getstate__(self) -> dict[str, object]:
        """Precision, scaling state and linears; whether casts are compiled, but not them."""
        if self.tensor is not None:
            raise TypeError(
                "a scope over tensor ranks can't be copied or pickled, as its group is this "
                "process's: copy state_tensors() and state_meta() into one made anew"
            )
        return {**self.__dict__, "_kernels": self._kernels is not None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take back ``__getstate__``, with this process's casts."""
        self.__dict__.update(state)
        self._kernels = kernels.load() if state["_kernels"] else None
        forget_weights_after_steps(self)
