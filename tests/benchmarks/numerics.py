"""What linears can compute in: BF16, Octavo's recipes, and others' emulations of FP8.

    run = run_of("torchao rowwise", seed=0, steps=500)
    take_over(module, "torchao rowwise")    # nothing for what the run itself says

Promises: the same model, batches and schedule for all of a seed, so that the linears' numerics
alone differ; ``CONTROL`` differs from BF16 by nothing but the order of its sums, and so tells what
chance does.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from orchestrator.spec.job import JobSpec
from parallel.config import RECIPE_FIELDS, FP8Config
from tests.benchmarks import emulation
from tests.benchmarks.demo_runs import MICRO_BATCH, demo_run, demo_spec
from tests.benchmarks.peers import torchao_linears
from tests.benchmarks.results import OCTAVO

BF16 = "bf16"
CONTROL = "bf16, other sums"
RECIPES = tuple(RECIPE_FIELDS)
EMULATION = "emulation"
"""``current`` written a second time (``emulation.py``): what the format itself costs."""
TORCHAO = "torchao"
TORCHAO_RECIPES = tuple(f"{TORCHAO} {recipe}" for recipe in torchao_linears.RECIPES)
ALL = (BF16, CONTROL, *RECIPES, EMULATION, *TORCHAO_RECIPES)


def run_of(numerics: str, seed: int, steps: int) -> JobSpec:
    """The demo on one rank, its gradients exchanged with nobody."""
    return demo_run(
        seed,
        steps,
        micro_batch=MICRO_BATCH // 2 if numerics == CONTROL else MICRO_BATCH,
        precision="fp8" if numerics in RECIPES else "bf16",
        fp8=_fp8_of(numerics),
        communication_data_type="fp32",
    )


def _fp8_of(numerics: str) -> FP8Config:
    """The recipe with its defaults; delayed with the demo's history. Else it is left open."""
    if numerics == "delayed":
        length = demo_spec().fp8.amax_history_len
        return FP8Config.model_validate({"recipe": numerics, "amax_history_len": length})
    return FP8Config.model_validate({"recipe": numerics} if numerics in RECIPES else {})


def take_over(module: nn.Module, numerics: str) -> None:
    """Give the linears of ``module``, an engine's of ``run_of``, these numerics."""
    if numerics == EMULATION:
        emulation.take_over(module, emulation.Formats())
    elif numerics.startswith(TORCHAO):
        torchao_linears.take_over(module, numerics.removeprefix(f"{TORCHAO} "))


def side_of(numerics: str) -> str:
    """Whose they are, for a row."""
    if numerics in RECIPES:
        return f"{OCTAVO} {numerics}"
    return {BF16: "BF16", CONTROL: "BF16", EMULATION: "plain emulation"}.get(numerics, numerics)


def available(names: Iterable[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Those of ``names`` that can be had here, in order and once each; the others → why not."""
    wanted = tuple(dict.fromkeys(names))
    reason = torchao_linears.why_not()
    missing = {name: reason for name in wanted if reason and name.startswith(TORCHAO)}
    return tuple(name for name in wanted if name not in missing), missing
