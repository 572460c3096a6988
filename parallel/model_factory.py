"""A model of your own: ``model.factory: "package.module:function"``.

The function is called once on every rank and returns the model as layers that are not built
yet, and its loss. Octavo builds a stage's layers on its ranks, trains their linears in FP8,
watches, snapshots and recovers as with the built-in model::

    # my_models/lm.py; in the spec: model: {factory: "my_models.lm:make", num_layers: 6,
    #                                       options: {width: 256}}
    def make(*, options, seq_len, seed, scope):
        width = options["width"]

        class Block(nn.Module):
            def __init__(self, i):
                super().__init__()
                self.mlp = scope.norm_mlp(f"layers.{i}.mlp", width, 4 * width, eps=1e-5)

            def forward(self, x):
                return x + self.mlp(x)

        embedding = partial(nn.Embedding, 256, width, dtype=torch.bfloat16)
        head = partial(nn.Linear, width, 256, dtype=torch.bfloat16)
        blocks = [LayerPlan(f"layers.{i}", partial(Block, i)) for i in range(6)]
        first = LayerPlan("embedding", embedding, transformer=False)
        last = LayerPlan("head", head, transformer=False)
        return ModelPlan([first, *blocks, last], loss)

The contract:

- The first layer takes token ids int64 [B, T], each layer the one tensor that the layer before
  it returned, and ``loss(output, targets)`` gives the scalar mean over the micro-batch.
- As many layers as ``model.num_layers`` have ``transformer=True``; pipeline stages, drills and
  ``high_precision_layers: {first, last}`` count those. Give their linears names that start with
  ``layers.{i}.``.
- Linears made by ``scope`` (``linear``, ``norm_linear``, ``norm_mlp``) compute in FP8; a
  name is given once. With ``shard=`` they are cut over tensor ranks, what lies between a column
  and a row shard being this rank's part. Other parameters are held whole by every tensor rank,
  and what is computed from them must be the same on each.
- Initial weights may be drawn from torch's global generator: it is seeded by (seed, layer)
  before each layer is built, so they are the same on every layout. While a layer is built the
  weights of its sharded linears are the whole matrices (their features this rank's part's), so
  whatever is written to them is cut afterwards; outputs of several kinds in one column shard
  (queries, keys and values) are told as ``sections=``, or a rank's part would be the next
  outputs in a row. Only Transformer Engine's modules draw their shards each by itself: there
  the tensor degree changes the initial weights.
- Nothing a layer does may depend on the rank. Dropout is replayed by a rollback like the rest.

A layer written with ``nn.Linear`` is converted where it is built::

    from parallel.precision import convert

    def block(i):
        module = MyBlock(width)
        convert(module, scope, prefix=f"layers.{i}.")
        return module

Its linears then are the scope's like those that it made: they have statistics, orders may move
them, ``high_precision_layers`` may name them. They are native on every device (``backend:
native`` where Transformer Engine would be taken) and whole on every tensor rank.

Promises: what is wrong with a factory is told with what to do, at submit already where making
its model on the meta device shows it. Importing this needs no torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parallel.config import ModelConfig
from parallel.model_plan import LayerPlan, ModelPlan

if TYPE_CHECKING:
    from torch import nn

    from parallel.precision.backend import LayerScope
    from parallel.tensor import TensorGroup

ARGUMENTS = ("options", "seq_len", "seed", "scope")
"""What a factory is called with, by keyword."""


class FactoryError(ValueError):
    """``model.factory`` can't make the model; ``remedy`` is what to do."""

    def __init__(self, factory: str, message: str, remedy: str) -> None:
        super().__init__(f"model.factory {factory!r}: {message} ({remedy})")
        self.factory, self.message, self.remedy = factory, message, remedy

    def __reduce__(self) -> tuple[type[FactoryError], tuple[str, str, str]]:
        return (type(self), (self.factory, self.message, self.remedy))


def load_factory(factory: str) -> Callable[..., ModelPlan]:
    """The function that ``package.module:function`` names, its signature checked.

    Imports the module. Raises FactoryError.
    """
    module_name, _, path = factory.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise FactoryError(
            factory,
            f"importing {module_name} raised {type(error).__name__}: {error}",
            "install it where Octavo runs, or set PYTHONPATH before `octavo up` or `octavo run`",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise FactoryError(
                factory, f"{module_name} has no {path}", "name a function of that module"
            )
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise FactoryError(factory, f"is of type {kind}", "name a function")
    wanted = "def make(*, " + ", ".join(ARGUMENTS) + ")"
    try:
        inspect.signature(found).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise FactoryError(factory, f"can't be called: {error}", f"write it as {wanted}") from error
    except ValueError:
        pass  # a callable without a signature, as some of C are: the call will tell
    result: Callable[..., ModelPlan] = found
    return result


def factory_plan(
    model: ModelConfig,
    *,
    seq_len: int,
    seed: int,
    scope: LayerScope,
    tensor: TensorGroup | None,
) -> ModelPlan:
    """The plan of ``model.factory``, checked, its layers seeded.

    Raises FactoryError for a plan that breaks the contract; what the factory raises goes on.
    """
    assert model.factory is not None
    make = load_factory(model.factory)
    plan = make(options=dict(model.options), seq_len=seq_len, seed=seed, scope=scope)
    _check(model, plan)
    first_of = {layer.tied: i for i, layer in reversed(list(enumerate(plan.layers)))}
    layers = [
        # Copies of one module start from the same bits.
        _seeded(layer, seed, i if layer.tied is None else first_of[layer.tied], scope, tensor)
        for i, layer in enumerate(plan.layers)
    ]
    return ModelPlan(layers, plan.loss)


def _check(model: ModelConfig, plan: object) -> None:
    factory = model.factory or ""
    if not isinstance(plan, ModelPlan):
        kind = type(plan).__name__
        raise FactoryError(factory, f"returned a {kind}", "return a parallel.model_plan.ModelPlan")
    odd = [layer for layer in plan.layers if not isinstance(layer, LayerPlan)]
    if odd or not plan.layers:
        what = f"a {type(odd[0]).__name__} among its layers" if odd else "no layers"
        raise FactoryError(factory, f"has {what}", "make each a parallel.model_plan.LayerPlan")
    if not callable(plan.loss):
        raise FactoryError(factory, "its loss can't be called", "give loss(output, targets)")
    repeated = sum(layer.transformer for layer in plan.layers)
    if repeated != model.num_layers:
        raise FactoryError(
            factory,
            f"made {repeated} layers with transformer=True, model.num_layers is {model.num_layers}",
            f"set model.num_layers to {repeated}",
        )
    names = [layer.name for layer in plan.layers if layer.tied is None]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FactoryError(factory, f"has two layers named {twice[0]!r}", "give each its own name")


def _seeded(
    layer: LayerPlan, seed: int, index: int, scope: LayerScope, tensor: TensorGroup | None
) -> LayerPlan:
    def build() -> nn.Module:
        import torch

        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices), scope.whole_matrices() as whole:
            # Shards that draw their own weights must not draw the same ones.
            shard = 0 if whole or tensor is None else tensor.index
            torch.manual_seed(((seed * 1_000_003 + index) * 4099 + shard) % 2**63)
            module = layer.build()
        if tensor is not None:
            _share(module, tensor)
        return module

    return replace(layer, build=build)


def _share(module: nn.Module, tensor: TensorGroup) -> None:
    """Give what isn't sharded the first tensor rank's values."""
    import torch
    import torch.distributed as dist

    from parallel.tensor import is_sharded

    source = dist.get_global_rank(tensor.group, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            if not is_sharded(parameter):
                dist.broadcast(parameter, source, group=tensor.group)
