"""What a micro-batch keeps in memory until its backward, and what else is needed for a while.

Read off what autograd saves for the layers of ``parallel.transformer``, which
``tests/unit/test_plan_memory.py`` asks again. On CPU a norm is made of parts that each keep FP32
copies, and attention computes in FP32; on a GPU norms and attention are fused kernels that keep
BF16: read in PyTorch's code, not tried here. All in bytes; widths are those of one tensor rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.planning.shapes import Shape

_LOSS = 12
"""Bytes a logit while the loss is differentiated: log-probabilities, and the gradients of those and
of the logits, each in FP32. The logits in BF16 are gone by then."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Of one tensor rank."""

    hidden: int
    """Of the residual stream: whole on every rank."""
    queries: int
    kv: int
    heads: int
    ffn: int
    vocab: int

    @classmethod
    def of(cls, shape: Shape, tensor: int) -> Widths:
        """The shares of one of ``tensor`` ranks."""
        return cls(
            hidden=shape.hidden,
            queries=shape.hidden // tensor,
            kv=shape.kv_width // tensor,
            heads=shape.heads // tensor,
            ffn=shape.ffn // tensor,
            vocab=shape.vocab,
        )


def layer_bytes(widths: Widths, *, fp8: bool, on_gpu: bool) -> int:
    """Kept a token by one transformer layer; ``fp8``: its linears compute in FP8."""
    hidden, queries, kv, ffn = widths.hidden, widths.queries, widths.kv, widths.ffn
    # Each linear keeps its input: eight bits of it, or BF16.
    inputs = (1 if fp8 else 2) * (2 * hidden + queries + ffn)
    mlp = 2 * 2 * ffn + 2 * ffn  # gate and up, and silu(gate)
    if on_gpu:
        norms = 2 * (2 * hidden + 4)
        # Queries and keys after rotation; the values' view keeps all three from before it.
        attention = 2 * (queries + kv) + 2 * (queries + 2 * kv) + 2 * queries
    else:
        norms = 2 * (4 * hidden + 4 * hidden + 4)
        attention = 4 * (2 * queries + 2 * kv)
    return norms + inputs + attention + 4 * widths.heads + mlp


def kept_bytes(
    widths: Widths, layers: int, *, head: bool, fp8: bool, on_gpu: bool, recompute: bool
) -> int:
    """Kept a token by a stage of so many layers; with ``recompute`` each keeps its input alone."""
    of_layer = 2 * widths.hidden if recompute else layer_bytes(widths, fp8=fp8, on_gpu=on_gpu)
    total = of_layer * layers
    if head:
        # Its norm, and the normed input of the product.
        total += (2 if on_gpu else 8) * widths.hidden + 2 * widths.hidden
    return total


def working_bytes(
    widths: Widths, *, head: bool, fp8: bool, on_gpu: bool, recompute: bool
) -> tuple[int, int]:
    """(at the loss, in a layer's backward): what is there for a while beside what is kept, a token.

    With ``recompute`` a layer's backward begins with what it would have kept.
    """
    loss = _LOSS * widths.vocab if head else 0
    # Gradients of gate, up and silu(gate), the first two joined again, and the product's operands.
    mlp = 2 * 5 * widths.ffn + 2 * 2 * widths.ffn * fp8
    norm = 2 * widths.hidden + (16 * widths.hidden if not on_gpu else 4 * widths.hidden)
    again = layer_bytes(widths, fp8=fp8, on_gpu=on_gpu) if recompute else 0
    return loss, mlp + norm + again
