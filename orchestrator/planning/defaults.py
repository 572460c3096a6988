"""Why each value of a completed spec is what it is, where the job file doesn't say it. Pure.

What follows from the rest says from what; a plain default says what its field is for, in the first
sentence of the field's own docstring. Promises: a key that the file gives has no reason; nothing
here changes a value.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import yaml
from pydantic import BaseModel

from orchestrator.planning.automatic import is_auto
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.errors import KeyPath, value_at
from orchestrator.spec.job import JobSpec, spec_data, spec_yaml

_LONGEST = 88


def default_reasons(given: Mapping[str, Any], spec: JobSpec) -> dict[KeyPath, str]:
    """Key → half a sentence, for what ``given``, a job file's values, leaves to Octavo."""
    derived = {**_plain(type(spec), spec_data(spec)), **_derived(given, spec)}
    missing = object()
    return {
        path: told
        for path, told in derived.items()
        if value_at(given, path, missing) in (missing, None)
        and value_at(spec_data(spec), path, missing) is not missing
    }


def annotated_yaml(spec: JobSpec, reasons: Mapping[KeyPath, str]) -> str:
    """The spec as a job file, each value that nobody wrote with its reason behind it."""
    plain = spec_yaml(spec)
    lines: list[str] = []
    path: list[str] = []
    for line in plain.splitlines():
        body = line.lstrip()
        depth = (len(line) - len(body)) // 2
        key, colon, _ = body.partition(":")
        if colon and not body.startswith(("-", "'", '"')):
            path[depth:] = [key]
            told = reasons.get(tuple(path))
            if told and not line.endswith(":"):
                line = f"{line:<34}  # {told}"
        lines.append(line)
    text = "\n".join(lines) + "\n"
    # A value of several lines may look like a key; the file counts for more than its comments.
    return text if yaml.safe_load(text) == yaml.safe_load(plain) else plain


def _derived(given: Mapping[str, Any], spec: JobSpec) -> dict[KeyPath, str]:
    """What follows from other values."""
    degrees, training = spec.parallelism, spec.training
    per_node = slots_per_node(spec)
    slots = spec.num_nodes * per_node
    model_ranks = degrees.tensor * degrees.pipeline
    batch = (
        f"{training.train_batch_size} = {training.train_micro_batch_size_per_gpu} a micro-batch × "
        f"{training.gradient_accumulation_steps} micro-batches × {degrees.data} replicas"
    )
    found: dict[KeyPath, str] = {
        ("slots_per_node",): "as many ranks as the degrees need",
        ("parallelism", "data"): f"{slots} ranks over tensor × pipeline = {model_ranks}",
        ("training", "train_batch_size"): batch,
        ("training", "train_micro_batch_size_per_gpu"): batch,
        ("training", "gradient_accumulation_steps"): batch,
        ("snapshots", "replicas"): "1 where there are two nodes or more",
        ("detection", "exchange_error"): f"of {spec.gradient_exchange.format}, by its rounding",
    }
    if spec.model.factory is None:
        found[("model", "num_kv_heads")] = "as num_heads"
        found[("model", "ffn_size")] = "8/3 of hidden_size, rounded up to 32"
    preset = value_at(given, ("model", "preset"))
    if preset is not None:
        from orchestrator.planning.presets import PRESETS

        of_preset = PRESETS[str(preset)].model
        found |= {("model", key): f"of preset {preset}" for key in of_preset}
    if is_auto(given):
        chosen = ("tensor", "pipeline", "data", "zero_stage")
        found |= {("parallelism", key): "chosen by auto" for key in chosen}
        found[("training", "recompute")] = "chosen by auto"
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            found["training", key] = f"chosen by auto: {batch}"
    return found


def _plain(model: type[BaseModel], data: object, path: KeyPath = ()) -> dict[KeyPath, str]:
    """What each field's docstring says, for all values of ``data`` that are no mappings."""
    if not isinstance(data, Mapping):
        return {}
    found: dict[KeyPath, str] = {}
    words = {name: told for of in reversed(model.__mro__) for name, told in _docs(of).items()}
    for name, field in model.model_fields.items():
        value = data.get(name)
        kind = field.annotation
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= _plain(kind, value, (*path, name))
        elif name in words:
            found[(*path, name)] = _shortened(words[name])
    return found


@cache
def _docs(model: type) -> dict[str, str]:
    """Field → the docstring below it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef)), [])
    found = {}
    for field, told in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant):
            found[field.target.id] = str(told.value.value)
    return found


def _shortened(text: str) -> str:
    """The first sentence, on one line, in as many words as have room."""
    words = " ".join(text.replace("``", "").split())
    for end in (". ", "; ", ": "):
        if len(words) > _LONGEST and end in words:
            words = words.partition(end)[0]
    words = words.removesuffix(".")
    return "default: " + (words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…")
