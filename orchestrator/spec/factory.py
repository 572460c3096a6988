"""A model of the user's own in the spec: ``model.factory`` and what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from orchestrator.spec.errors import Finding
from orchestrator.spec.job import JobSpec
from parallel.config import ModelConfig
from parallel.model_factory import FactoryError, load_factory
from parallel.parameter_names import unmatched

READ = ("factory", "options", "num_layers")
"""Keys of ``model`` that mean something with a factory."""


def built_in(check: Callable[[JobSpec], Iterator[Finding]]) -> Callable[[JobSpec], list[Finding]]:
    """``check`` for Octavo's own model alone."""

    def checked(spec: JobSpec) -> list[Finding]:
        return list(check(spec)) if spec.model.factory is None else []

    return checked


def check_model_keys(spec: JobSpec) -> Iterator[Finding]:
    """A key that nobody would read is taken for one that does something."""
    model = spec.model
    if model.factory is None:
        if model.options:
            message = "is what model.factory is given, and there is none"
            yield Finding(("model", "options"), message, "leave it out, or set model.factory")
        return
    for name, field in ModelConfig.model_fields.items():
        if name not in READ and getattr(model, name) != field.default:
            message = "belongs to the built-in model, and model.factory makes another"
            yield Finding(("model", name), message, "put it under model.options")


def check_factory(spec: JobSpec) -> Iterator[Finding]:
    """Whether the factory can be imported and called, on this machine."""
    if spec.model.factory is None:
        return
    try:
        load_factory(spec.model.factory)
    except FactoryError as error:
        yield Finding(("model", "factory"), error.message, error.remedy)


def unmatched_parameters(patterns: Sequence[str], names: Sequence[str]) -> Iterator[Finding]:
    """A pattern of ``gradient_exchange`` that means none of the model's parameters ``names``."""
    for found in unmatched(patterns, names):
        yield Finding(
            ("gradient_exchange", "high_precision_parameters", found.index),
            f"matches none of the {len(names)} parameters",
            f"did you mean {found.nearest!r}?" if found.nearest else "leave it out",
        )
