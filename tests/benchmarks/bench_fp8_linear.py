"""Forward and backward of the native FP8 linear against ``nn.Linear`` in BF16.

    python -m tests.benchmarks.bench_fp8_linear --hidden 128 256 --tokens 512

Each sample is one step of a linear: ``--micro-batches`` forwards and backwards with fresh
gradients, and the end of the step, so that the weight's quantization and the update of the
scales are in it. The contestants take turns, so that a slow spell of the machine meets all
of them, and time is that of the processor on one thread, which leaves out the turns of other
processes. Printed are medians a micro-batch, and the ratios of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from parallel.config import FP8Config
from parallel.precision.scope import PrecisionScope

Step = Callable[[], None]
NAME = "layers.0.mlp.down"


def bf16_linear(inputs: int, outputs: int) -> tuple[nn.Module, Step]:
    """``nn.Linear`` and nothing to do at the end of a step."""
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16), lambda: None


def fp8_linear(
    inputs: int,
    outputs: int,
    *,
    recipe: str = "delayed",
    compiled: bool = True,
    fallen: bool = False,
) -> tuple[nn.Module, Step]:
    """A linear of a scope; ``fallen`` moves it to BF16 by command."""
    config = FP8Config.model_validate({"recipe": recipe, "amax_history_len": 16})
    scope = PrecisionScope("fp8", config, num_layers=1, compiled=compiled)
    layer = scope.linear(NAME, inputs, outputs)
    if fallen:
        scope.set_precision({NAME: "bf16"})
    return layer, lambda: scope.finish_step(applied=True)


def contestants(inputs: int, outputs: int, *, plain: bool) -> dict[str, tuple[nn.Module, Step]]:
    """The reference first."""
    found = {
        "nn.Linear": bf16_linear(inputs, outputs),
        "delayed": fp8_linear(inputs, outputs),
        "current": fp8_linear(inputs, outputs, recipe="current"),
        "in BF16": fp8_linear(inputs, outputs, fallen=True),
    }
    if plain:
        found["delayed, no compiler"] = fp8_linear(inputs, outputs, compiled=False)
    return found


def measure(
    inputs: int, outputs: int, tokens: int, micro_batches: int, repeats: int, *, plain: bool
) -> dict[str, float]:
    """Median seconds of one micro-batch, by contestant."""
    subjects = contestants(inputs, outputs, plain=plain)
    x = torch.randn(tokens, inputs).bfloat16().requires_grad_()
    gradient = (torch.randn(tokens, outputs) * torch.rand(outputs) * 1e-3).bfloat16()
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for repeat in range(repeats + 3):
        for name, (layer, finish_step) in subjects.items():
            started = time.process_time()
            for _ in range(micro_batches):
                layer(x).backward(gradient)
            finish_step()
            elapsed = time.process_time() - started
            x.grad = layer.weight.grad = None
            if repeat >= 3:
                samples[name].append(elapsed / micro_batches)
    return {name: statistics.median(times) for name, times in samples.items()}


def main() -> None:
    """Print a table, one row a shape of the transformer's linears."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--plain", action="store_true", help="with the casts in plain PyTorch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    header: list[str] = []
    for hidden in arguments.hidden:
        ffn = -(-hidden * 8 // 3 // 32) * 32
        for inputs, outputs in (
            (hidden, 2 * hidden),
            (hidden, hidden),
            (hidden, 2 * ffn),
            (ffn, hidden),
        ):
            medians = measure(
                inputs,
                outputs,
                arguments.tokens,
                arguments.micro_batches,
                arguments.repeats,
                plain=arguments.plain,
            )
            reference = medians.pop("nn.Linear")
            if not header:
                header = ["tokens × in → out", "nn.Linear µs", *medians]
                print(" | ".join(f"{title:>20}" for title in header))
            shape = f"{arguments.tokens} × {inputs} → {outputs}"
            ratios = [f"{median / reference:.2f}×" for median in medians.values()]
            row = [shape, f"{reference * 1e6:.0f}", *ratios]
            print(" | ".join(f"{cell:>20}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
