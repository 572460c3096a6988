"""What an FP8 linear costs on one CPU thread, against BF16 and against torchao's emulation.

    python -m tests.benchmarks.bench_fp8_linear --hidden 1024 4096 --tokens 512 [--out DIR]
    python -m tests.benchmarks.bench_fp8_linear --shapes transformer --hidden 128 256

Each sample is one step of a linear: ``--micro-batches`` forwards and backwards with fresh
gradients, and the end of the step, so that the weight's quantization, the update of the scales
and the taking of statistics are in it. The contestants take turns, so that a slow spell of the
machine meets all of them, and time is that of the processor on one thread, which leaves out the
turns of other processes. Told are the BF16 linear's seconds a micro-batch, the others' as
ratios to it by repeat, and what the statistics add to each recipe's step.

``torchao`` (extra ``bench``) is its FP8 training with emulated products (``torchao_linears``),
compiled or eager, whichever is faster, and with ``--plain`` the other way too: what others have for
training in FP8 without a GPU. Where it isn't installed, or can't be compiled, the table says so.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from parallel.config import RECIPE_FIELDS, FP8Config
from parallel.precision.scope import PrecisionScope
from tests.benchmarks.peers import torchao_linears
from tests.benchmarks.results import OCTAVO, Result, add_arguments, measured, report

NAME = "layers.0.mlp.down"
UNCOUNTED = " without statistics"
REFERENCE = "nn.Linear"
TORCHAO = "torchao "
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Contestant:
    """A linear, and what ends its step."""

    layer: nn.Module
    weight: nn.Parameter
    finish_step: Callable[[], object]


def bf16_linear(inputs: int, outputs: int) -> Contestant:
    """``nn.Linear`` and nothing to do at the end of a step."""
    layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    return Contestant(layer, layer.weight, lambda: None)


def fp8_linear(
    inputs: int,
    outputs: int,
    recipe: str = "delayed",
    *,
    compiled: bool = True,
    fallen: bool = False,
    counted: bool = True,
    **options: object,
) -> Contestant:
    """A linear of a scope; ``fallen`` moves it to BF16 by command."""
    config = FP8Config.model_validate({"recipe": recipe, **options})
    scope = PrecisionScope("fp8", config, num_layers=1, compiled=compiled)
    layer = scope.linear(NAME, inputs, outputs)
    assert isinstance(layer, nn.Linear)
    scope.collect(every_counter=counted)
    if fallen:
        scope.set_precision({NAME: "bf16"})

    def finish_step() -> None:
        scope.finish_step(applied=True)
        if counted:
            scope.statistics()

    return Contestant(layer, layer.weight, finish_step)


def emulated_linear(inputs: int, outputs: int, recipe: str, *, compiled: bool) -> Contestant:
    """torchao's linear, its products emulated."""
    layer = torchao_linears.plain_linear(inputs, outputs, recipe, compiled=compiled)
    return Contestant(layer, layer.weight, lambda: None)


def contestants(inputs: int, outputs: int, *, plain: bool) -> dict[str, Contestant]:
    """The reference first."""
    found = {REFERENCE: bf16_linear(inputs, outputs)}
    for recipe in RECIPE_FIELDS:
        found[recipe] = fp8_linear(inputs, outputs, recipe)
        found[recipe + UNCOUNTED] = fp8_linear(inputs, outputs, recipe, counted=False)
    found["in BF16"] = fp8_linear(inputs, outputs, fallen=True)
    if plain:
        for recipe in RECIPE_FIELDS:
            found[f"{recipe}, no compiler"] = fp8_linear(inputs, outputs, recipe, compiled=False)
        found["block, FP32 scales"] = fp8_linear(inputs, outputs, "block", use_f32_scales=True)
    if not torchao_linears.why_not():
        for recipe in torchao_linears.RECIPES:
            compiled = torchao_linears.is_compiled(recipe)
            for way in (compiled, not compiled) if plain else (compiled,):
                name = f"{TORCHAO}{recipe}, {'compiled' if way else 'eager'}"
                found[name] = emulated_linear(inputs, outputs, recipe, compiled=way)
    return found


def measure(
    inputs: int, outputs: int, tokens: int, micro_batches: int, repeats: int, *, plain: bool
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of one micro-batch in every repeat, by contestant, and why others of the peer's gave
    none."""
    subjects = contestants(inputs, outputs, plain=plain)
    x = torch.randn(tokens, inputs).bfloat16().requires_grad_()
    gradient = (torch.randn(tokens, outputs) * torch.rand(outputs) * 1e-3).bfloat16()

    def seconds(subject: Contestant) -> float:
        started = time.process_time()
        for _ in range(micro_batches):
            subject.layer(x).backward(gradient)
        subject.finish_step()
        elapsed = time.process_time() - started
        x.grad = subject.weight.grad = None
        return elapsed / micro_batches

    failed: dict[str, str] = {}
    for name, subject in subjects.items():
        try:
            for _ in range(WARM_UP):
                seconds(subject)
        except Exception as error:
            if not name.startswith(TORCHAO):
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    running = {name: subject for name, subject in subjects.items() if name not in failed}
    samples: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(repeats):
        # In another order each time: what ran before leaves its traces in the caches.
        for name in random.sample(list(running), len(running)):
            samples[name].append(seconds(running[name]))
    return samples, failed


def shapes(hidden: int, kind: str) -> Iterator[tuple[int, int]]:
    """(inputs, outputs): square, or those of a transformer layer's linears."""
    if kind == "square":
        yield hidden, hidden
        return
    ffn = -(-hidden * 8 // 3 // 32) * 32
    yield from ((hidden, 2 * hidden), (hidden, hidden), (hidden, 2 * ffn), (ffn, hidden))


def rows(setting: str, samples: dict[str, list[float]], failed: dict[str, str]) -> Iterator[Result]:
    """One shape's."""
    reference = samples[REFERENCE]
    yield measured("a linear, forward and backward", setting, reference, "s", side="BF16")
    for name, times in samples.items():
        if name != REFERENCE and not name.endswith(UNCOUNTED):
            ratios = [time / base for time, base in zip(times, reference, strict=True)]
            side = name if name.startswith(TORCHAO) else f"{OCTAVO} {name}"
            yield measured("a linear, over BF16's", setting, ratios, "×", side=side)
    for name, why in failed.items():
        yield measured("a linear, over BF16's", setting, [], "×", side=name, failures=1, note=why)
    for recipe in RECIPE_FIELDS:
        # By repeat: of so small a difference the medians apart say little.
        pairs = zip(samples[recipe], samples[recipe + UNCOUNTED], strict=True)
        surplus = [100 * (counted / uncounted - 1) for counted, uncounted in pairs]
        yield measured("… of it statistics", setting, surplus, "%", side=f"{OCTAVO} {recipe}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--shapes", choices=["square", "transformer"], default="square")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plain", action="store_true", help="also the casts in plain PyTorch")
    add_arguments(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    tokens, micro_batches = arguments.tokens, arguments.micro_batches
    numbers = (tokens, micro_batches, arguments.repeats)
    found: list[Result] = []
    for hidden in arguments.hidden:
        for inputs, outputs in shapes(hidden, arguments.shapes):
            samples, failed = measure(inputs, outputs, *numbers, plain=arguments.plain)
            median = statistics.median(samples[REFERENCE])
            print(f"{tokens} × {inputs} → {outputs}: BF16 {1e3 * median:.2f} ms", flush=True)
            each = f", {micro_batches} micro-batches a step" if micro_batches > 1 else ""
            setting = f"{tokens} tokens × {inputs} → {outputs}, one thread{each}"
            found += rows(setting, samples, failed)
    reason = torchao_linears.why_not()
    seconds = time.monotonic() - began
    left_out = {"torchao": reason} if reason else {}
    report("bench_fp8_linear", found, arguments.out, seconds=seconds, left_out=left_out)


if __name__ == "__main__":
    main()
