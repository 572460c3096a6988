"""The scope whose linears are Transformer Engine's; ``LayerScope`` on NVIDIA GPUs.

The same names, parameters, statistics and commands as the native scope; how Transformer
Engine is called, and what of it has been tried, says ``parallel.precision.transformer_engine``.
Its modules stay out of Octavo's module tree, which holds their parameters under the native
names: initialization, checkpoints and messages are then the same for both.

Promises: no wait for the device; precision is changed for one linear by an inner disabled
``autocast`` in an outer enabled one; while a linear is in BF16 its operands' amax go on into
the histories, so that its scales are fresh when it returns; after
``finish_step(applied=False)`` scales and histories are as before the step; state leaves and
comes back as plain tensors, never as a module's ``_extra_state``, which is a pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from parallel.config import FP8Config, Precision
from parallel.precision import recipes, scaling
from parallel.precision.choice import Workload, misfit
from parallel.precision.operand_statistics import OperandStatistics
from parallel.precision.recipes import ROLES
from parallel.precision.switching import SwitchableLinears, precision_of_state, refuse_unknown
from parallel.precision.transformer_engine import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    TransformerEngine,
)
from parallel.precision.transformer_engine_layers import (
    Forward,
    LinearHandle,
    SwitchedLinear,
    SwitchedMLP,
    SwitchedNormLinear,
)
from parallel.precision.transformer_engine_state import DelayedStates
from parallel.tensor import ShardKind, TensorGroup, note_cut


class TransformerEngineScope(SwitchableLinears[LinearHandle]):
    """Creates this rank's linears in Transformer Engine and owns their precision and state."""

    def __init__(
        self,
        precision: Precision,
        config: FP8Config,
        *,
        num_layers: int,
        device: torch.device | str = "cuda",
        tensor: TensorGroup | None = None,
        stage: dist.ProcessGroup | None = None,
        built_in: bool = True,
    ) -> None:
        """As ``make_scope``. Raises ValueError where Transformer Engine can't be imported, and
        for a ``high_precision_layers`` pattern that matches no linear.
        """
        names = recipes.linear_names(num_layers)
        problems = recipes.unmatched_patterns(config.high_precision_layers, names)
        if problems and built_in:
            raise ValueError("; ".join(problems))
        self.device = torch.device(device)
        self._config = config
        self._job_precision = precision
        self._num_layers = num_layers
        self._tensor = tensor
        self._engine = TransformerEngine(config, stage)
        self._delayed = config.recipe == "delayed"
        # Two steps: gradients of the linears before the first FP8 one reach the scales with
        # the next step's update.
        super().__init__(keeps_history=self._delayed, steps=2)
        self._states: DelayedStates | None = None
        self._observed: OperandStatistics | None = None
        self._in_step = False
        self._micro_batches = 0
        """Micro-batches since the last statistics, each one update of the histories."""
        self._sampling = False
        self._forward = Forward(self._engine.disabled)

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
        """Create and register a bias-free linear, see ``LayerScope``.

        Raises ValueError also for a shard whose sides Transformer Engine can't quantize.
        """
        self._check(name, in_features, out_features, shard)
        module = self._engine.linear(
            name,
            in_features,
            out_features,
            dtype=dtype,
            device=self.device,
            shard=shard,
            tensor=self._tensor,
        )
        return SwitchedLinear(
            self._register(name, module, eps=None, shard=shard, sections=sections)
        )

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
    ) -> nn.Module:
        """RMSNorm and the linear ``name`` in one module, see ``LayerScope``."""
        handle = self._norm_linear(name, in_features, out_features, eps, shard, dtype, sections)
        return SwitchedNormLinear(handle)

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
    ) -> nn.Module:
        """RMSNorm and SwiGLU of two linears, see ``LayerScope``.

        Not ``LayerNormMLP``, whose two products can't be of different precision. Raises
        ValueError for ``smooth``, whose folding into the quantized weight is not offered there.
        """
        if smooth:
            raise ValueError(
                f"{name}: smooth SwiGLU isn't built on Transformer Engine; use backend: native"
            )
        column: ShardKind | None = "column" if sharded else None
        row: ShardKind | None = "row" if sharded else None
        gate_up = self._norm_linear(
            f"{name}.gate_up", hidden, 2 * ffn, eps, column, dtype, (ffn, ffn)
        )
        self._check(f"{name}.down", ffn, hidden, row)
        down = self._engine.linear(
            f"{name}.down",
            ffn,
            hidden,
            dtype=dtype,
            device=self.device,
            shard=row,
            tensor=self._tensor,
        )
        return SwitchedMLP(gate_up, self._register(f"{name}.down", down, eps=None, shard=row))

    def whole_matrices(self) -> AbstractContextManager[bool]:
        """False: Transformer Engine makes shards, each with its own initial weights."""
        return nullcontext(False)

    def _norm_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        eps: float,
        shard: ShardKind | None,
        dtype: torch.dtype,
        sections: Sequence[int],
    ) -> LinearHandle:
        self._check(name, in_features, out_features, shard)
        module = self._engine.norm_linear(
            name,
            in_features,
            out_features,
            eps=eps,
            dtype=dtype,
            device=self.device,
            shard=shard,
            tensor=self._tensor,
        )
        return self._register(name, module, eps=eps, shard=shard, sections=sections)

    def _check(
        self, name: str, in_features: int, out_features: int, shard: ShardKind | None
    ) -> None:
        if name in self._linears or name in self._fixed:
            raise ValueError(f"linear {name!r} is registered already")
        if self._observed is not None:
            raise ValueError(f"linear {name!r} comes after the scaling state was laid out")
        size = self._tensor.size if self._tensor is not None and shard is not None else 1
        sides = (
            in_features // size if shard == "row" else in_features,
            out_features // size if shard == "column" else out_features,
        )
        if not self._is_fixed(name) and (wrong := misfit(self._config, Workload(widths=sides))):
            raise ValueError(f"linear {name!r}: {wrong}")

    def _is_fixed(self, name: str) -> bool:
        return self._job_precision == "bf16" or recipes.is_high_precision(
            name, self._config.high_precision_layers, self._num_layers
        )

    def _register(
        self,
        name: str,
        module: nn.Module,
        *,
        eps: float | None,
        shard: ShardKind | None,
        sections: Sequence[int] = (),
    ) -> LinearHandle:
        handle = LinearHandle(name, module, eps=eps, config=self._config, forward=self._forward)
        if self._tensor is not None and shard is not None:
            handle.mark_sharded()
            note_cut(handle.weight, shard, self._tensor, sections)
        if self._is_fixed(name):
            handle.current = "bf16"
            self._fixed.append(name)
        else:
            self._linears[name] = handle
        return handle

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around the forward of one micro-batch; leaving it reduces the forward amax.

        Every rank of the stage enters and leaves it equally often, with the same layers in it.
        """
        if not self._linears:
            with self._forward.within(nullcontext()):
                yield
            return
        self._laid_out()
        if not self._in_step:
            self._in_step = True
            if self._states is not None:
                self._states.remember()
        self._micro_batches += 1
        with self._forward.within(self._engine.enabled()):
            yield

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, computed again in the backward; inside ``micro_batch`` only.

        One of ``args`` must need a gradient, or nothing inside would get one: ValueError.
        """
        if not self._linears:
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
        if self._config.amax_compute_algo == "ema":
            raise ValueError("Transformer Engine can't recompute with amax_compute_algo: ema")
        needs = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if torch.is_grad_enabled() and not needs:
            raise ValueError("recompute needs an argument that needs a gradient")
        return self._engine.checkpoint(self._forward.recomputed(function), *args)

    def _forget(self, names: Sequence[str]) -> None:
        self._laid_out()
        assert self._states is not None
        for name in names:
            self._states.forget(self.layers.index(name))

    @torch.no_grad()
    def _calibrate(self, names: Sequence[str]) -> None:
        self._laid_out()
        assert self._states is not None
        group = None if self._tensor is None else self._tensor.group
        amax = scaling.amax_over_shards([self._linears[name].weight for name in names], group)
        self._states.make_room([self.layers.index(name) for name in names], amax)

    def reduce_amax(self, group: dist.ProcessGroup | None) -> None:
        """Nothing: Transformer Engine has reduced in every micro-batch already."""

    def finish_step(self, applied: bool) -> None:
        """Close the step; with ``applied`` false, scales and histories go back to its start."""
        if not applied and self._states is not None and self._in_step:
            # What the step saw would go with it, and it is what an incident is told by.
            self._note_amax(self._states)
            self._states.bring_back()
        self._in_step = False
        self._return_the_warmed(applied)
        self.forget_weights()

    def forget_weights(self) -> None:
        """Weights are quantized in every micro-batch, so that there is nothing to forget."""
        for handle in self._linears.values():
            handle.weight_seen = False

    def collect(self, every_counter: bool) -> None:
        """Whether operands are looked at before Transformer Engine quantizes them.

        Without it delayed scaling still reports amax and scale, out of its histories; the
        other recipes keep nothing that could be read.
        """
        self._sampling = every_counter
        for handle in self._linears.values():
            handle.sampling = every_counter

    def statistics(self) -> tuple[tuple[str, ...], Tensor]:
        """See ``LayerScope``. Without state and without ``collect``: no tensors at all.

        Under delayed scaling the amax is the largest of the updates since the last call, the
        scale that of the last step's start.
        """
        observed = self._laid_out()
        if not self._linears or not (self._delayed or observed.seen):
            return (), observed.empty()
        if self._states is not None:
            self._note_amax(self._states)
            observed.scale.copy_(self._states.scales_before())
            observed.calibrated.copy_(self._states.calibrated_before())
        names = tuple(f"{name}/{role}" for name in self._linears for role in ROLES)
        return names, observed.take()

    def state_tensors(self) -> dict[str, Tensor]:
        """``{layer}/{forward|backward}.{scale|amax_history}``, live; empty without state."""
        self._laid_out()
        tensors: dict[str, Tensor] = {}
        if self._states is None:
            return tensors
        for name, state in zip(self._linears, self._states.states, strict=True):
            tensors[f"{name}/forward.scale"] = state.forward_scale
            tensors[f"{name}/forward.amax_history"] = state.forward_history
            tensors[f"{name}/backward.scale"] = state.backward_scale
            tensors[f"{name}/backward.amax_history"] = state.backward_history
        return tensors

    def state_meta(self) -> dict[str, object]:
        """The rest of the state, for JSON: ``precision`` by linear, and who waits to return."""
        return {"precision": self.precision(), **self._returns.meta()}

    def load_meta(self, meta: Mapping[str, object]) -> None:
        """Take back ``state_meta``, after the tensors were copied in place; as it was stored,
        nothing is forgotten or measured. Statistics not taken yet are dropped.
        """
        precision = precision_of_state(meta, self.layers)
        refuse_unknown(precision, self.layers, self.fixed_layers)
        self._assign(precision)
        self._returns.load_meta(meta)
        self._in_step = False
        self.forget_weights()
        # What steps showed that have now not been shall not be told of later ones.
        self.statistics()

    def _laid_out(self) -> OperandStatistics:
        if self._observed is not None:
            return self._observed
        # What inference mode makes, training could not change.
        with torch.inference_mode(False):
            return self._lay_out()

    def _lay_out(self) -> OperandStatistics:
        self._observed = OperandStatistics(self._config, len(self._linears), self.device)
        handles = list(self._linears.values())
        if self._delayed and handles:
            states = self._engine.lay_out([handle.module for handle in handles])
            self._states = DelayedStates(states, self._config)
        for index, handle in enumerate(handles):
            handle.observed = self._observed.rows(index * len(ROLES))
            if self._states is not None:
                state = self._states.states[index]
                handle.observed["input"].feed(state.forward_history[0], state.forward_scale, INPUT)
                handle.observed["weight"].feed(
                    state.forward_history[0], state.forward_scale, WEIGHT
                )
                handle.observed["grad_output"].feed(
                    state.backward_history[0], state.backward_scale, GRAD_OUTPUT
                )
        return self._observed

    def _note_amax(self, states: DelayedStates) -> None:
        """What the updates since the last call brought, into what is reported."""
        observed = self._laid_out()
        newest = states.newest_amax(self._micro_batches, observed.fp8_max)
        torch.maximum(observed.amax, newest, out=observed.amax)
        self._micro_batches = 0
