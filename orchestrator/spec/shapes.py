"""Whether the model's matrices can be cut and multiplied as the spec asks: tensor ranks, FP8.

One generator a question, each finding with what to change. They assume that the model's own
numbers agree (heads divide the hidden size, key and value heads divide the heads) and say
nothing where they don't: other checks do.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.spec.completion import ffn_size, slots_per_node
from orchestrator.spec.errors import Finding, KeyPath
from orchestrator.spec.job import JobSpec
from parallel.precision.recipes import multiple_of

TENSOR: KeyPath = ("parallelism", "tensor")


def check_tensor_slots(spec: JobSpec) -> Iterator[Finding]:
    """Tensor ranks exchange activations in every layer: they share a node."""
    tensor, per_node = spec.parallelism.tensor, slots_per_node(spec)
    if per_node % tensor:
        fitting = [n for n in range(1, per_node + 1) if per_node % n == 0]
        near = max(n for n in fitting if n <= tensor)
        message = f"tensor ranks share a node, and {tensor} don't divide its {per_node} slots"
        yield Finding(TENSOR, message, f"make it {near}, for example")


def check_tensor_shards(spec: JobSpec) -> Iterator[Finding]:
    """Tensor ranks take whole heads and equal parts of the MLP."""
    model, tensor = spec.model, spec.parallelism.tensor
    kv_heads = model.num_kv_heads or model.num_heads
    if model.num_heads % tensor:
        message = f"can't be divided over {tensor} tensor ranks"
        yield Finding(("model", "num_heads"), message, _divisors(model.num_heads, tensor))
    elif kv_heads % tensor:
        message = f"{kv_heads} can't be divided over {tensor} tensor ranks"
        yield Finding(("model", "num_kv_heads"), message, _divisors(kv_heads, tensor))
    inner = ffn_size(model)
    if inner % tensor:
        message = f"{inner} can't be divided over {tensor} tensor ranks"
        step = tensor * multiple_of(spec.fp8.recipe)
        near = -(-inner // step) * step
        yield Finding(("model", "ffn_size"), message, f"make it {near}, for example")


def check_fp8_sizes(spec: JobSpec) -> Iterator[Finding]:
    """What a rank multiplies in FP8 has sides that the format's products can take."""
    if spec.precision != "fp8":
        return
    model, tensor = spec.model, spec.parallelism.tensor
    multiple = multiple_of(spec.fp8.recipe)
    rule = f"FP8 products need multiples of {multiple} under recipe {spec.fp8.recipe}"
    if model.hidden_size % multiple:
        below = model.hidden_size // multiple * multiple
        remedy = f"make it {below or multiple} or {below + multiple}"
        yield Finding(("model", "hidden_size"), rule, remedy)
        return
    inner, step = ffn_size(model), multiple * tensor
    if inner % step and inner % tensor == 0:
        below = inner // step * step
        share = f"{inner // tensor} on each of {tensor} tensor ranks; " if tensor > 1 else ""
        yield Finding(
            ("model", "ffn_size"), share + rule, f"make it {below or step} or {below + step}"
        )
    kv_heads = model.num_kv_heads or model.num_heads
    if model.hidden_size % model.num_heads or model.num_heads % tensor or kv_heads % tensor:
        return
    size = model.hidden_size // model.num_heads
    queries = model.num_heads // tensor * size
    if queries % multiple:
        message = f"leaves each tensor rank queries {queries} wide; {rule}"
        yield Finding(TENSOR, message, "lower it, or use larger heads")
        return
    kv_width = 2 * (kv_heads // tensor) * size
    if kv_width % multiple:
        where = " on each tensor rank" if tensor > 1 else ""
        message = f"makes keys and values {kv_width} wide{where}; {rule}"
        yield Finding(("model", "num_kv_heads"), message, "use more of them, or larger heads")


def _divisors(count: int, tensor: int) -> str:
    fitting = max(n for n in range(1, count + 1) if count % n == 0 and n <= tensor)
    above = -(-count // tensor) * tensor
    return f"make it {above}, or parallelism.tensor {fitting}"
