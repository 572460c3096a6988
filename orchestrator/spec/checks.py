"""Combinations of a spec's sections that can't run, each with what to change.

One function a question. A check that reads a key which is wrong in itself is left out:
what it would say is about a default that the user never chose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from monitoring.config import DetectionConfig
from monitoring.secrets import SECRET_NAME, SECRET_VALUE
from orchestrator.planning.device_check import check_device
from orchestrator.spec.backend import check_backend, check_backend_model
from orchestrator.spec.completion import (
    BatchRefusedError,
    batch_numbers,
    slots_per_node,
)
from orchestrator.spec.deepspeed import check_deepspeed
from orchestrator.spec.degrees import check_min_nodes
from orchestrator.spec.drills import check_drills
from orchestrator.spec.errors import Finding, KeyPath, nearest
from orchestrator.spec.factory import (
    built_in,
    check_factory,
    check_model_keys,
    unmatched_parameters,
)
from orchestrator.spec.job import JobSpec
from orchestrator.spec.shapes import (
    TENSOR,
    check_fp8_sizes,
    check_tensor_shards,
    check_tensor_slots,
)
from parallel.parameter_names import built_in_names, is_matched
from parallel.precision.recipes import is_high_precision, linear_names

ZERO_STAGE: KeyPath = ("parallelism", "zero_stage")

_OWN_ENVS = frozenset(
    [
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "DS_ACCELERATOR",
    ]
)

Check = Callable[[JobSpec], Iterable[Finding]]


def check_spec(spec: JobSpec, broken: set[KeyPath], *, check_data: bool) -> list[Finding]:
    """Findings of all checks whose keys are not among the ``broken`` ones.

    ``check_data``: also look at the data source and the model's factory, on this machine.
    """
    found: list[Finding] = []
    for reads, check in CHECKS:
        if not any(_overlap(key, path) for key in reads for path in broken):
            found += check(spec)
    # These look at each of their entries by itself, so one that is wrong hides no other.
    found += check_drills(spec, broken)
    found += _envs(spec)
    if ("deepspeed",) not in broken:
        batch = (*_SLOT_KEYS, *_DEGREES, *_BATCH)
        batch_known = not any(_overlap(key, path) for key in batch for path in broken)
        found += check_deepspeed(spec, broken, batch_known=batch_known)
    keys: tuple[KeyPath, ...] = (("data",), ("training", "seq_len"))
    if check_data and not any(_overlap(key, path) for key in keys for path in broken):
        found += _data(spec)
    if check_data and ("model", "factory") not in broken:
        found += check_factory(spec)
    return found


def offered(finding: Finding) -> Finding:
    """``finding`` of a value that its section refuses, told by what can be run at all.

    The section's own bounds are wider: whoever followed them would be refused again.
    """
    if finding.path == ZERO_STAGE:
        return replace(finding, message="is not offered", remedy="make it 0, 1 or 2")
    return finding


def _overlap(a: KeyPath, b: KeyPath) -> bool:
    n = min(len(a), len(b))
    return a[:n] == b[:n]


def _slots(spec: JobSpec) -> Iterator[Finding]:
    if spec.gpus_per_node and spec.slots_per_node:
        yield Finding(
            ("slots_per_node",),
            "is for nodes without GPUs, and gpus_per_node is given too",
            "keep one of the two",
        )


def _degrees(spec: JobSpec) -> Iterator[Finding]:
    degrees = spec.parallelism
    per_node = slots_per_node(spec)
    slots = spec.num_nodes * per_node
    model_ranks = degrees.tensor * degrees.pipeline
    have = f"{spec.num_nodes} node{'s' * (spec.num_nodes > 1)} × {per_node} slots = {slots}"
    wanted = f"tensor {degrees.tensor} × pipeline {degrees.pipeline}"
    fits = slots // model_ranks
    key: KeyPath = ("parallelism", "data" if degrees.data else "pipeline")
    if degrees.data:
        ranks = model_ranks * degrees.data
        if ranks != slots:
            relation = "more than" if ranks > slots else "less than"
            remedy = (
                f"make it {fits}, or leave it out"
                if slots % model_ranks == 0
                else f"make the product of the degrees {slots}"
            )
            yield Finding(
                key, f"{wanted} × data {degrees.data} = {ranks}, {relation} {have}", remedy
            )
    elif model_ranks > slots:
        yield Finding(key, f"{wanted} = {model_ranks}, more than {have}", "lower it, or add slots")
    elif slots % model_ranks:
        remedy = "choose degrees that divide the slots"
        yield Finding(key, f"{wanted} = {model_ranks} doesn't divide {have}", remedy)


def _zero_stage(spec: JobSpec) -> Iterator[Finding]:
    stage = spec.parallelism.zero_stage
    if stage == 3:
        message = (
            "ZeRO 3 shards the parameters too, and gathers and frees them in every layer: FP8 "
            "layers, snapshots and the gradient exchange take whole ones"
        )
        remedy = "make it 1, and raise parallelism.tensor or parallelism.pipeline to save memory"
        yield Finding(ZERO_STAGE, message, remedy)
    elif stage == 2:
        reduced = "ZeRO 2 averages gradients in every micro-batch, in buckets that DeepSpeed cuts"
        against = {
            "pipeline stages, whose engine averages once a step": spec.parallelism.pipeline > 1,
            "tensor ranks, which run on the pipeline engine": spec.parallelism.tensor > 1,
            "tied embeddings, which run on the pipeline engine": spec.model.tie_embeddings,
        }
        for what, present in against.items():
            if present:
                yield Finding(ZERO_STAGE, f"{reduced}: it doesn't go with {what}", "make it 1")


def _stages(spec: JobSpec) -> Iterator[Finding]:
    layers, stages = spec.model.num_layers, spec.parallelism.pipeline
    if stages > layers:
        message = f"{stages} pipeline stages for {layers} layers leave a stage empty"
        yield Finding(("parallelism", "pipeline"), message, f"make it at most {layers}")


def _heads(spec: JobSpec) -> Iterator[Finding]:
    model = spec.model
    if model.hidden_size % model.num_heads:
        message = f"doesn't divide hidden_size {model.hidden_size}"
        near = [n for n in range(1, model.hidden_size + 1) if model.hidden_size % n == 0]
        best = min(near, key=lambda n: abs(n - model.num_heads))
        yield Finding(("model", "num_heads"), message, f"make it {best}, for example")
    elif model.hidden_size // model.num_heads % 2:
        size = model.hidden_size // model.num_heads
        message = f"gives heads of {size}, and rotary positions need an even size"
        yield Finding(("model", "num_heads"), message, "choose another number of heads")


def _kv_heads(spec: JobSpec) -> Iterator[Finding]:
    model = spec.model
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        near = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
        best = min(near, key=lambda n: abs(n - (model.num_kv_heads or 1)))
        message = f"doesn't divide num_heads {model.num_heads}"
        yield Finding(("model", "num_kv_heads"), message, f"make it {best}, for example")


def _batch(spec: JobSpec) -> Iterator[Finding]:
    degrees = spec.parallelism
    fitting, rest = divmod(spec.num_nodes * slots_per_node(spec), degrees.tensor * degrees.pipeline)
    # Where the replicas given don't fit, a batch that suits those that do is not wrong too.
    candidates = [degrees.data] if degrees.data else []
    candidates += [fitting] if fitting and not rest else []
    refusals: list[BatchRefusedError] = []
    for data in candidates:
        try:
            batch_numbers(spec.training, data, degrees.pipeline)
        except BatchRefusedError as refused:
            refusals.append(refused)
    if refusals and len(refusals) == len(candidates):
        first = refusals[0]
        yield Finding(("training", first.key), first.message, first.remedy)


def _schedule(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if training.warmup_steps >= training.steps:
        message = f"the learning rate never reaches its peak within {training.steps} steps"
        yield Finding(("training", "warmup_steps"), message, f"make it below {training.steps}")


def _betas(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if not all(0 <= beta < 1 for beta in training.betas):
        yield Finding(("training", "betas"), "must lie in [0, 1)", "the usual are [0.9, 0.95]")


def _snapshots(spec: JobSpec) -> Iterator[Finding]:
    kept = spec.snapshots
    reach = (kept.keep - 1) * kept.every
    if kept.certify_after > reach:
        message = (
            f"a snapshot is dropped before it is {kept.certify_after} healthy steps old: "
            f"{kept.keep} are kept, one every {kept.every} steps"
        )
        need = -(-kept.certify_after // kept.every) + 1
        yield Finding(("snapshots", "certify_after"), message, f"at most {reach}, or keep: {need}")


def _replicas(spec: JobSpec) -> Iterator[Finding]:
    replicas, others = spec.snapshots.replicas or 0, spec.num_nodes - 1
    if replicas > others:
        message = (
            f"a copy is never on its own node, and num_nodes {spec.num_nodes} leaves {others} other"
            f"{'s' * (others != 1)}"
        )
        yield Finding(("snapshots", "replicas"), message, f"make it at most {others}")


def detection_findings(limits: DetectionConfig) -> Iterator[Finding]:
    """What contradicts itself in a ``detection`` section, a job's or a policy's."""
    if limits.min_history > limits.window:
        message = f"a baseline holds only window = {limits.window} steps, so none is ever trusted"
        yield Finding(("detection", "min_history"), message, f"make it at most {limits.window}")
    window = limits.exchange_error_window
    if limits.exchange_error_steps > window:
        message = f"more than the exchange_error_window = {window} steps that are looked at"
        yield Finding(("detection", "exchange_error_steps"), message, f"make it at most {window}")


def _detection(spec: JobSpec) -> Iterator[Finding]:
    return detection_findings(spec.detection)


def _high_precision(spec: JobSpec) -> Iterator[Finding]:
    kept = spec.fp8.high_precision_layers
    layers = spec.model.num_layers
    section: KeyPath = ("fp8", "high_precision_layers")
    if kept.first + kept.last > layers:
        key = (*section, "first" if kept.first > layers or not kept.last else "last")
        message = f"first {kept.first} and last {kept.last} are more than {layers} layers"
        yield Finding(key, message, "lower it, or set precision: bf16")
    if spec.model.factory is not None:
        return  # a user's linears are known once they are built
    names = linear_names(layers)
    for i, pattern in enumerate(kept.names):
        if not any(fnmatchcase(name, pattern) for name in names):
            remedy = nearest(pattern, names) or "names are as layers.3.mlp.down"
            message = f"matches none of the {len(names)} linears"
            yield Finding((*section, "names", i), message, remedy)
    nothing_left = all(is_high_precision(name, kept, layers) for name in names)
    if nothing_left and kept.first + kept.last <= layers and spec.precision == "fp8":
        message = f"keeps all {len(names)} linears in BF16, so that nothing computes in FP8"
        yield Finding(section, message, "keep fewer, or set precision: bf16")


def _high_precision_parameters(spec: JobSpec) -> Iterator[Finding]:
    """Of the built-in model; a factory's parameters are known once they are made."""
    kept = spec.gradient_exchange.high_precision_parameters
    names = built_in_names(spec.model)
    yield from unmatched_parameters(kept, names)
    matrices = [name for name in names if not name.endswith("norm.weight")]
    nothing_left = all(is_matched(name, kept) for name in matrices)
    if nothing_left and spec.communication_data_type == "fp8":
        path = ("gradient_exchange", "high_precision_parameters")
        message = f"keeps all {len(matrices)} matrices out of FP8, so that nothing travels in it"
        yield Finding(path, message, "keep fewer, or set communication_data_type: bf16")


def _envs(spec: JobSpec) -> Iterator[Finding]:
    for name, value in spec.envs.items():
        path: KeyPath = ("envs", name)
        if SECRET_NAME.search(name) or SECRET_VALUE.search(value):
            remedy = "leave it out, and have it in the environment that the nodes start with"
            yield Finding(
                path, "looks like a secret, and envs are stored and shown in clear", remedy
            )
        elif name in _OWN_ENVS:
            yield Finding(path, "is set by Octavo for every rank", "leave it out")
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Finding(path, "is no name of an environment variable", "letters, digits and _")
        elif "\0" in value:
            yield Finding(path, "has a null character in it", "")


def _data(spec: JobSpec) -> Iterator[Finding]:
    from launch.data import check_source

    for message in check_source(spec.data, spec.training.seq_len):
        yield Finding(("data", "source"), message)


_SLOT_KEYS: tuple[KeyPath, ...] = (("num_nodes",), ("slots_per_node",), ("gpus_per_node",))
_DEGREES: tuple[KeyPath, ...] = tuple(("parallelism", k) for k in ("tensor", "pipeline", "data"))
_BATCH: tuple[KeyPath, ...] = tuple(
    ("training", k)
    for k in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
)
_WIDTHS: tuple[KeyPath, ...] = tuple(("model", k) for k in ("hidden_size", "num_heads"))
_EXCHANGE_ERROR = ("exchange_error_steps", "exchange_error_window")
_SHAPES: tuple[KeyPath, ...] = (*_WIDTHS, ("model", "num_kv_heads"), ("model", "ffn_size"))

CHECKS: tuple[tuple[tuple[KeyPath, ...], Check], ...] = (
    ((("slots_per_node",), ("gpus_per_node",)), _slots),
    ((("resources", "device"), ("gpus_per_node",)), check_device),
    ((*_SLOT_KEYS, *_DEGREES), _degrees),
    ((*_SLOT_KEYS, TENSOR), check_tensor_slots),
    ((*_SHAPES, TENSOR), built_in(check_tensor_shards)),
    ((ZERO_STAGE, *_DEGREES, ("model", "tie_embeddings")), _zero_stage),
    ((("parallelism", "pipeline"), ("model", "num_layers")), _stages),
    ((("model",),), check_model_keys),
    (_WIDTHS, built_in(_heads)),
    ((("model", "num_heads"), ("model", "num_kv_heads")), built_in(_kv_heads)),
    ((*_SHAPES, TENSOR, ("precision",), ("fp8", "recipe")), built_in(check_fp8_sizes)),
    ((*_SLOT_KEYS, *_DEGREES, *_BATCH), _batch),
    ((*_SLOT_KEYS, *_DEGREES, *_BATCH, ("resources",), ("deepspeed",)), check_min_nodes),
    ((("training", "steps"), ("training", "warmup_steps")), _schedule),
    ((("training", "betas"),), _betas),
    (tuple(("snapshots", k) for k in ("every", "keep", "certify_after")), _snapshots),
    ((("snapshots", "replicas"), ("num_nodes",)), _replicas),
    (tuple(("detection", k) for k in ("window", "min_history", *_EXCHANGE_ERROR)), _detection),
    ((("fp8", "high_precision_layers"), ("model", "num_layers")), _high_precision),
    (
        (("gradient_exchange",), ("model",), ("communication_data_type",)),
        built_in(_high_precision_parameters),
    ),
    ((("fp8", "backend"), ("gpus_per_node",), ("precision",)), check_backend),
    ((("fp8",), ("model",), ("training",), ("precision",)), check_backend_model),
)
"""Each check with the keys it reads."""
