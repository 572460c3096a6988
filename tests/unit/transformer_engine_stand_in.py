"""A ``transformer_engine`` made of the recorded signatures, which computes in high precision.

Every callable that the adapter uses is generated from ``data/transformer_engine-2.20.2.json``:
each call is bound to the recorded signature first, so that an unknown, a missing or a renamed
argument is a TypeError, as is an attribute that isn't there. Behind that it does what the
release's source does with scaling state, in the plainest way: row 0 gathers amax, leaving the
outermost enabled autocast updates forward scales, the first module's backward updates those
of gradients, checkpoint stashes scales and runs its second pass in an autocast without group.
Nothing is rounded to FP8, on purpose: what is tested is the adapter's control flow.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
import math
import sys
import types
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.tensor import TensorGroup, copy_to_shards, sum_of_shards

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "transformer_engine-2.20.2.json").read_text()
)


def signature(parameters: list[dict[str, Any]]) -> inspect.Signature:
    """The recorded signature."""
    return inspect.Signature(
        [
            inspect.Parameter(
                p["name"],
                inspect._ParameterKind[p["kind"]],
                # A default of None is recorded as the text "None".
                default=inspect.Parameter.empty if p["default"] is None else _value(p["default"]),
            )
            for p in parameters
        ]
    )


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class StandIn:
    """One installed stand-in: its modules, and ``log``, what happened in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.state = _State()
        self.modules = _modules(self)

    @property
    def pytorch(self) -> Any:
        return self.modules["transformer_engine.pytorch"]

    @property
    def recipe(self) -> Any:
        return self.modules["transformer_engine.common.recipe"]

    def install(self, monkeypatch: Any = None) -> None:
        """Importable until the test ends; without ``monkeypatch``, until the process does."""
        for name, module in self.modules.items():
            if monkeypatch is None:
                sys.modules[name] = module
            else:
                monkeypatch.setitem(sys.modules, name, module)

    def said(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] == kind]


class _State:
    """What the release keeps in ``FP8GlobalStateManager``."""

    def __init__(self) -> None:
        self.enabled = False
        self.recipe: Any = None
        self.group: Any = None
        self.depth = 0
        self.first = False
        self.recomputing = False
        self.checkpointing = False
        self.first_of_checkpoints: list[bool] = []
        self.registered: list[dict[str, Any]] = []


class _Scaling:
    def __init__(self, recipe: Any, slots: int, fp8_max: float) -> None:
        self.scale = torch.ones(slots)
        self.amax_history = torch.zeros(recipe.amax_history_len, slots)
        self.fp8_max = fp8_max


def _bound(qualified: str) -> Callable[..., dict[str, Any]]:
    recorded = signature(RECORDED["callables"][qualified])

    def bind(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            bound = recorded.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{qualified}: {error}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    return bind


def _update(recipe: Any, scaling: _Scaling) -> None:
    """One update by the fused kernel's rule, or by the other path for a callable."""
    history, scale = scaling.amax_history, scaling.scale
    rows = len(history)
    custom = recipe.amax_compute_algo if callable(recipe.amax_compute_algo) else None
    given = custom(history) if custom else None
    for i in range(len(scale)):
        column = history[:, i].tolist()
        if custom is None and column[0] == 0:
            continue
        if given is not None:
            amax = float(given[i])
        elif recipe.amax_compute_algo == "max":
            amax = max((h for h in column if not math.isnan(h)), default=math.nan)
        else:
            amax = column[0]
        if math.isfinite(amax) and amax > 0:
            new = torch.tensor(scaling.fp8_max) / torch.tensor(amax) / 2.0**recipe.margin
            scale[i] = torch.finfo(torch.float32).max if torch.isinf(new) else new
        shifted = [0.0, *column[2:], column[0]] if rows > 1 else [0.0]
        history[:, i] = torch.tensor(shifted)


def _modules(te: StandIn) -> dict[str, types.ModuleType]:
    package = types.ModuleType("transformer_engine")
    package.__version__ = RECORDED["transformer_engine"]  # type: ignore[attr-defined]
    package.__path__ = []  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("transformer_engine", None)
    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.__path__ = []  # type: ignore[attr-defined]
    quantization = types.ModuleType("transformer_engine.pytorch.quantization")
    common = types.ModuleType("transformer_engine.common")
    common.__path__ = []  # type: ignore[attr-defined]
    recipe = types.ModuleType("transformer_engine.common.recipe")
    package.pytorch, package.common = pytorch, common  # type: ignore[attr-defined]
    common.recipe = recipe  # type: ignore[attr-defined]
    _fill_recipes(recipe)
    quantization.FP8GlobalStateManager = _manager(te)  # type: ignore[attr-defined]
    pytorch.quantization = quantization  # type: ignore[attr-defined]
    pytorch.autocast = _autocast(te)  # type: ignore[attr-defined]
    pytorch.checkpoint = _checkpoint(te)  # type: ignore[attr-defined]
    base = _base(te)
    pytorch.Linear = _linear(te, base)  # type: ignore[attr-defined]
    pytorch.LayerNormLinear = _norm_linear(te, base)  # type: ignore[attr-defined]
    for check in ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available"):
        setattr(pytorch, check, _check(check))
    return {m.__name__: m for m in (package, pytorch, quantization, common, recipe)}


def _check(name: str) -> Callable[..., Any]:
    bind = _bound(f"transformer_engine.pytorch.{name}")

    def check(*args: Any, **kwargs: Any) -> Any:
        return (True, "") if bind(*args, **kwargs)["return_reason"] else True

    return check


def _fill_recipes(module: Any) -> None:
    class Format(enum.Enum):
        E4M3 = (448, 448)
        E5M2 = (57344, 57344)
        HYBRID = (448, 57344)

    module.Format = Format
    fields = RECORDED["read"]["transformer_engine.common.recipe.QParams"]
    module.QParams = _record("QParams", fields, Format)
    for name, fields in RECORDED["recipes"].items():
        recipe = _record(name, fields, Format)
        if name in ("Float8CurrentScaling", "Float8BlockScaling"):
            # Made of the defaults when the class is: the constructor doesn't reach them.
            for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                power = name == "Float8BlockScaling"
                setattr(recipe, operand, module.QParams(power_2_scale=power))
        setattr(module, name, recipe)


def _record(name: str, fields: dict[str, str], formats: Any) -> type:
    """A class with the recorded fields, each with its default."""

    def init(self: Any, **kwargs: Any) -> None:
        unknown = set(kwargs) - set(fields)
        if unknown:
            raise TypeError(f"{name} has no field {sorted(unknown)}")
        for field, default in fields.items():
            value = _value(default)
            if field == "fp8_format":
                value = formats[default.split(".")[1].split(":")[0]]
            setattr(self, field, kwargs.get(field, value))
        if "fp8_format" in fields:
            assert isinstance(self.fp8_format, formats), "fp8_format is a Format"
            assert self.fp8_format is not formats.E5M2, "Pure E5M2 training is not supported."

    return type(name, (), {"__init__": init, "__eq__": lambda a, b: a is b, "__hash__": id})


def _manager(te: StandIn) -> type:
    state = te.state

    class FP8GlobalStateManager:
        @classmethod
        def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
            if fp8_meta["scaling_fwd"] is None or "registered" in fp8_meta:
                return
            fp8_meta["registered"] = True
            state.registered.append(fp8_meta)

        @classmethod
        def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
            te.log.append(("update", "forward" if forward else "backward"))
            for meta in state.registered:
                scaling, group = meta["scaling_fwd" if forward else "scaling_bwd"], meta["group"]
                if meta["recipe"].reduce_amax and dist.is_initialized():
                    assert group is not None, "None is all ranks, and hangs under pipelines"
                    dist.all_reduce(scaling.amax_history[0], dist.ReduceOp.MAX, group=group)
                _update(meta["recipe"], scaling)

    for name in vars(FP8GlobalStateManager):
        if not name.startswith("__"):
            assert name in RECORDED["FP8GlobalStateManager"], f"{name} is not in the release"
    return FP8GlobalStateManager


def _autocast(te: StandIn) -> type:
    state = te.state
    bind = _bound("transformer_engine.pytorch.autocast")

    class autocast:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.given = bind(*args, **kwargs)

        def __enter__(self) -> Any:
            enabled = self.given["enabled"]
            te.log.append(("enter", enabled, self.given["amax_reduction_group"], state.depth))
            self.before = (state.enabled, state.recipe, state.group, state.first)
            state.enabled, state.recipe = enabled, self.given["recipe"]
            state.group = self.given["amax_reduction_group"]
            if state.depth == 0:
                state.first = True
            state.depth += 1
            return self

        def __exit__(self, *error: object) -> None:
            state.enabled, state.recipe, state.group, state.first = self.before
            state.depth -= 1
            te.log.append(("exit", self.given["enabled"], state.depth))
            if self.given["enabled"] and state.depth == 0 and torch.is_grad_enabled():
                manager = te.modules["transformer_engine.pytorch.quantization"]
                manager.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)

    return autocast


def _base(te: StandIn) -> type:
    state = te.state
    recorded = RECORDED["read"][
        "transformer_engine.pytorch.module.base.TransformerEngineBaseModule.init_fp8_metadata"
    ]
    metadata = signature(recorded)

    class Base(nn.Module):
        def __init__(self, given: dict[str, Any]) -> None:
            super().__init__()
            assert given["parallel_mode"] in (None, "column", "row")
            assert given["parallel_mode"] is not None or given["tp_size"] == 1
            self.given = given
            self.fp8 = False
            self.fp8_meta: dict[str, Any] = {"scaling_fwd": None, "scaling_bwd": None}
            rows, columns = given["out_features"], given["in_features"]
            if given["parallel_mode"] == "column":
                rows //= given["tp_size"]
            if given["parallel_mode"] == "row":
                columns //= given["tp_size"]
            weight = torch.empty(rows, columns, dtype=given["params_dtype"], device=given["device"])
            given["init_method"](weight)
            self.weight = nn.Parameter(weight)
            self.stash: deque[tuple[Tensor, Tensor]] = deque()

        def init_fp8_metadata(self, *args: Any, **kwargs: Any) -> None:
            metadata.bind(*args, **kwargs)
            self.fp8 = state.enabled
            if not state.enabled:
                return
            self.fp8_meta["recipe"] = state.recipe
            self.fp8_meta.setdefault("group", state.group)
            delayed = type(state.recipe).__name__ == "DelayedScaling"
            if delayed and self.fp8_meta["scaling_fwd"] is None:
                forward, backward = state.recipe.fp8_format.value
                self.fp8_meta["scaling_fwd"] = _Scaling(state.recipe, 3, forward)
                self.fp8_meta["scaling_bwd"] = _Scaling(state.recipe, 2, backward)

        def product(self, x: Tensor) -> Tensor:
            again = self.fp8 and state.recomputing
            forward = self.fp8_meta["scaling_fwd"]
            if again and forward is not None:
                updated = forward.scale.clone(), forward.amax_history.clone()
                scale, history = self.stash.popleft()
                forward.scale.copy_(scale)
                forward.amax_history.copy_(history)
            elif not again:
                self.init_fp8_metadata()
                forward = self.fp8_meta["scaling_fwd"] if self.fp8 else None
                if forward is not None:
                    manager = te.modules["transformer_engine.pytorch.quantization"]
                    manager.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
                    if self.training and state.checkpointing:
                        self.stash.append((forward.scale.clone(), forward.amax_history.clone()))
            scale = None if forward is None else tuple(forward.scale.tolist())
            how = "fp8" if self.fp8 else "bf16"
            te.log.append(("forward", self.given["name"], how, state.recomputing, scale))
            if self.fp8 and forward is not None:
                row = forward.amax_history[0]
                row[0] = max(row[0], x.detach().abs().amax().float())
                row[1] = max(row[1], self.weight.detach().abs().amax().float())
            y = self.sharded_product(x)
            if again and forward is not None:
                forward.scale.copy_(updated[0])
                forward.amax_history.copy_(updated[1])
            return y

        def sharded_product(self, x: Tensor) -> Tensor:
            group, mode = self.given["tp_group"], self.given["parallel_mode"]
            tensor = TensorGroup(group, 0, self.given["tp_size"])
            shared = isinstance(group, dist.ProcessGroup)
            if shared and mode == "column":
                x = copy_to_shards(x, tensor)
            y = _Product.apply(x, self.weight, self) if self.fp8 else F.linear(x, self.weight)
            return sum_of_shards(y, tensor) if shared and mode == "row" else y

    class _Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, module: Base) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.module = module
            ctx.first, state.first = state.first, False
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            backward = ctx.module.fp8_meta["scaling_bwd"]
            if backward is not None:
                row = backward.amax_history[0]
                row[0] = max(row[0], grad.abs().amax().float())
            flat = grad.reshape(-1, grad.shape[-1])
            if ctx.first:
                manager = te.modules["transformer_engine.pytorch.quantization"]
                manager.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
            return grad @ weight, flat.t() @ x.reshape(-1, x.shape[-1]), None

    return Base


def _linear(te: StandIn, base: type) -> type:
    bind = _bound("transformer_engine.pytorch.Linear")

    class Linear(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = bind(*args, **kwargs)
            te.log.append(("Linear", given))
            super().__init__(given)

        def forward(self, inp: Tensor) -> Tensor:
            return self.product(inp)

    return Linear


def _norm_linear(te: StandIn, base: type) -> type:
    bind = _bound("transformer_engine.pytorch.LayerNormLinear")

    class LayerNormLinear(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = bind(*args, **kwargs)
            te.log.append(("LayerNormLinear", given))
            super().__init__(given)
            ones = torch.ones(
                given["in_features"], dtype=given["params_dtype"], device=given["device"]
            )
            self.layer_norm_weight = nn.Parameter(ones)

        def forward(self, inp: Tensor) -> Tensor:
            weight, eps = self.layer_norm_weight, self.given["eps"]
            if self.given["normalization"] == "RMSNorm":
                return self.product(F.rms_norm(inp, weight.shape, weight, eps))
            return self.product(F.layer_norm(inp, weight.shape, weight, None, eps))

    return LayerNormLinear


def _checkpoint(te: StandIn) -> Callable[..., Any]:
    state = te.state
    bind = _bound("transformer_engine.pytorch.checkpoint")

    @contextmanager
    def region(*, second: bool) -> Any:
        state.checkpointing, state.recomputing = True, second
        if second:
            state.first = state.first_of_checkpoints.pop(0)
        else:
            state.first_of_checkpoints.append(state.first)
        try:
            yield
        finally:
            state.checkpointing = state.recomputing = False

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
            ctx.function, ctx.inputs = function, args
            ctx.fp8, ctx.recipe = state.enabled, state.recipe
            with torch.no_grad(), region(second=False):
                return function(*args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            inputs = [
                a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
                for a in ctx.inputs
            ]
            with (
                torch.enable_grad(),
                region(second=True),
                te.pytorch.autocast(enabled=ctx.fp8, recipe=ctx.recipe),
            ):
                output = ctx.function(*inputs)
            torch.autograd.backward(output, grads[0])
            return (None, *(a.grad if isinstance(a, Tensor) else None for a in inputs))

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = bind(*args, **kwargs)
        te.log.append(("checkpoint",))
        function = given["function"]
        assert not isinstance(function, nn.Module), "a module without TE's is torch's to checkpoint"
        return Checkpoint.apply(function, *given["args"])

    return checkpoint
