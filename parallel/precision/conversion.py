"""FP8 for a model that isn't ours: swaps the ``nn.Linear`` of any module for FP8 ones.

::

    from parallel.precision import convert

    conversion = convert(model, FP8Config(recipe="current"), filter=lambda name, _: name != "head")
    for batch in batches:
        loss(model(batch)).backward()
        optimizer.step()
        conversion.scope.finish_step(applied=True)

An FP8 layer takes over the parameters of the linear it replaces: the same tensors, so an
optimizer made before goes on, and keys and values of ``state_dict`` are as they were.
``finish_step`` closes a step: it makes the scales of delayed scaling, and the statistics.
With replicas, ``conversion.scope.reduce_amax(group)`` before it gives all of them the same
delayed scales; without it each has those of its own batches.

``state_dict`` holds no scales. Under delayed scaling a run that shall go on as it was saves
``scope.state_tensors()`` and ``scope.state_meta()`` beside it; after loading, copy the tensors
into those of the new scope and give ``scope.load_meta`` the rest. The FP8 is the native one on
every device: Transformer Engine's modules are made by a job's scope, not by converting.

Promises: a linear is converted or left with a reason, never dropped in silence; a module that is
registered in several places is converted once, for all of them; with an error nothing has
been changed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from parallel.config import FP8Config, HighPrecisionLayers
from parallel.precision import recipes
from parallel.precision.linear import BF16Linear, Float8Linear
from parallel.precision.scope import PrecisionScope

Filter = Callable[[str, nn.Linear], bool]
"""(name in the module, linear) → whether to convert it."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of a module's linears, by their names in it."""

    scope: PrecisionScope
    """Owns the FP8 state of the converted ones: precision, scales, statistics."""
    converted: tuple[str, ...]
    left: Mapping[str, str]
    """Linears left alone, and why."""

    def never_ran(self) -> tuple[str, ...]:
        """Converted linears without a forward until now, by their names in the module.

        After a step they are those that the model doesn't call through its module tree, or not
        as modules: what it reads is their weight, or a reference that was not swapped.
        """
        return tuple(name for name, layer in self._layers.items() if not layer.has_run)

    _layers: Mapping[str, Float8Linear] = field(repr=False)


def convert(
    module: nn.Module,
    fp8: FP8Config | PrecisionScope,
    *,
    filter: Filter | None = None,
    prefix: str = "",
) -> Conversion:
    """Swap the ``nn.Linear`` inside ``module`` for FP8 layers, in place.

    ``fp8``: a recipe, or a scope whose first forward hasn't come yet; names in the scope are
    ``prefix`` and the name in the module. With a recipe, ``high_precision_layers.names`` are
    patterns of names in the module; ``first`` and ``last`` count layers that it doesn't have.

    Inputs are rounded to BF16 first and to FP8 then, so FP32 and FP16 inputs lose mantissa, and
    FP32 ones above BF16's largest number become infinite; outputs are BF16's numbers in the dtype
    of the input.

    Left alone are linears that ``filter`` or the recipe's patterns keep, whose features the
    recipe can't take, whose weight is shared with another module (a tied head), whose forward
    isn't plainly ``nn.Linear``'s (subclasses, parametrizations, a method replaced on the
    instance), that have hooks, buffers or further parameters, and those directly inside an
    ``nn.TransformerEncoderLayer``, which in evaluation computes with their weights itself.
    Attributes that a program has set on a linear are carried over. References outside the
    module tree (in a list, in ``__dict__``) go on to the plain linear: ``never_ran`` tells.

    With a scope, linears that it keeps in BF16 are among its ``fixed_layers`` afterwards.

    Raises TypeError for a scope of Transformer Engine's modules, which it doesn't swap in.
    Raises ValueError where ``module`` is itself a linear, where nothing can be told apart by
    ``first`` and ``last``, for a pattern that matches nothing, and for a linear on another
    device than the scope.
    """
    if isinstance(module, nn.Linear):
        raise ValueError("a linear can't be swapped from inside: convert the module around it")
    found = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    patterns: tuple[str, ...] = ()
    if isinstance(fp8, FP8Config):
        patterns = _patterns(fp8.high_precision_layers, tuple(found))
        plain = fp8.model_copy(update={"high_precision_layers": HighPrecisionLayers()})
        device = next((m.weight.device for m in found.values()), torch.device("cpu"))
        scope = PrecisionScope("fp8", plain, num_layers=0, device=device)
    elif isinstance(fp8, PrecisionScope):
        scope = fp8
    else:
        raise TypeError(
            f"convert makes native FP8 layers and not {type(fp8).__name__}'s: set fp8.backend: "
            "native in the spec, or make the linears with scope.linear"
        )
    shared = _shared_weights(module)
    read = _read_in_evaluation(module)
    left: dict[str, str] = {}
    chosen: dict[str, nn.Linear] = {}
    for name, linear in found.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            reason: str | None = "high_precision_layers keeps it in BF16"
        else:
            reason = read.get(id(linear)) or _reason(prefix + name, linear, scope, shared)
        if reason is None and filter is not None and not filter(name, linear):
            reason = "the filter leaves it out"
        if reason is None:
            chosen[name] = linear
        else:
            left[name] = reason
    # All linears are judged before any is swapped.
    for name in left:
        made = isinstance(found[name], Float8Linear | BF16Linear)
        if not made and scope.stays_in_bf16(prefix + name):
            # So that a pattern of the spec is known to have met it.
            scope.note_fixed(prefix + name)
    adopted = {id(chosen[name]): scope.adopt(prefix + name, chosen[name]) for name in chosen}
    for linear in chosen.values():
        adopted[id(linear)].__dict__.update(_own_attributes(linear))
    for parent in list(module.modules()):
        # Not named_children: it names a child once, however often its parent has it.
        for key, child in list(parent._modules.items()):
            if id(child) in adopted:
                parent._modules[key] = adopted[id(child)]
    layers = {name: adopted[id(linear)] for name, linear in chosen.items()}
    return Conversion(scope, tuple(chosen), left, layers)


def scope_of(module: nn.Module) -> PrecisionScope:
    """The scope of a converted module: of a deep copy or of an unpickled one, its own.

    Scales of the copy of a model under delayed scaling are those of when it was made (a copy
    for evaluation, such as an average of weights, may take the first one's by copying
    ``state_tensors``). Raises ValueError where it has no FP8 linear, or those of several scopes.
    """
    scopes = {id(m.scope): m.scope for m in module.modules() if isinstance(m, Float8Linear)}
    if len(scopes) != 1:
        raise ValueError(f"the module has FP8 linears of {len(scopes)} scopes, not of one")
    scope = next(iter(scopes.values()))
    assert isinstance(scope, PrecisionScope)
    return scope


def _patterns(kept: HighPrecisionLayers, names: tuple[str, ...]) -> tuple[str, ...]:
    if kept.first or kept.last:
        raise ValueError(
            "high_precision_layers: first and last count transformer layers, which a module "
            "doesn't tell; name its linears in names, or pass a filter"
        )
    for pattern in kept.names:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = recipes.nearest(pattern, names)
            raise ValueError(f"high_precision_layers: {pattern!r} matches no linear{near}")
    return kept.names


def _shared_weights(module: nn.Module) -> dict[int, list[str]]:
    """Parameters that several modules have, by id, and those modules."""
    owners: dict[int, list[str]] = {}
    for name, each in module.named_modules():
        for parameter in each.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


_PLAIN = nn.Linear(1, 1, device="meta")
_HOOKS = tuple(name for name in _PLAIN.__dict__ if "hooks" in name)
_OURS = frozenset(
    Float8Linear(
        "", 1, 1, dtype=torch.bfloat16, device=torch.device("meta"), bind=lambda _: {}
    ).__dict__
) | frozenset(dir(Float8Linear))


def _own_attributes(linear: nn.Linear) -> dict[str, object]:
    """What a program has set on a linear, beyond what every ``nn.Linear`` has."""
    return {name: value for name, value in linear.__dict__.items() if name not in _PLAIN.__dict__}


def _read_in_evaluation(module: nn.Module) -> dict[int, str]:
    """Linears, by id, whose parents compute with their weights instead of calling them."""
    reason = "nn.TransformerEncoderLayer computes with its weight itself in evaluation"
    return {
        id(child): reason
        for parent in module.modules()
        if isinstance(parent, nn.TransformerEncoderLayer)
        for child in parent.children()
    }


def _reason(
    name: str, linear: nn.Linear, scope: PrecisionScope, shared: Mapping[int, list[str]]
) -> str | None:
    """Why a linear can't be converted, or None. Raises ValueError for a foreign device."""
    if isinstance(linear, Float8Linear):
        return "it is an FP8 linear already"
    if isinstance(linear, BF16Linear):
        return "a scope made it, to stay in BF16"
    if type(linear) is not nn.Linear:
        return f"its class {type(linear).__name__} may compute otherwise than nn.Linear"
    if any(linear.__dict__.get(hooks) for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    more = [*linear._buffers, *linear._modules, *(linear._parameters.keys() - {"weight", "bias"})]
    if more:
        return f"it has more than weight and bias: {', '.join(more)}"
    own = _own_attributes(linear)
    replaced = [name for name in own if hasattr(nn.Linear, name)]
    if replaced:
        return f"its {' and '.join(replaced)} was replaced on the instance"
    taken = [name for name in own if name in _OURS]
    if taken:
        return f"its attributes {', '.join(taken)} have another meaning in an FP8 linear"
    if not linear.weight.is_floating_point():
        return f"its weight is {linear.weight.dtype}"
    if id(linear.weight) in shared:
        return f"its weight is shared by {' and '.join(shared[id(linear.weight)])}"
    if scope.stays_in_bf16(name):
        return "the job keeps it in BF16"
    problems = recipes.dimension_problems(
        scope.recipe.scaling, linear.in_features, linear.out_features
    )
    if problems:
        return "; ".join(message for message, _ in problems)
    if linear.weight.device.type != scope.device.type:
        raise ValueError(f"linear {name!r} is on {linear.weight.device}, the scope {scope.device}")
    return None
