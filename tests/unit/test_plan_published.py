"""Published training runs, and how near a plan's roofline comes to each.

Three shares of a device's peak (products in BF16 and FP8, attention) were fitted to these runs of
each device, so this shows that one set of them explains models from 7 to 405 billion parameters on
8 to 16,384 devices, with and without tensor and pipeline ranks. How far a forecast is off shows in
runs that nothing was fitted to (``HELD_OUT``): a newer container of the same system, another
system, a device whose shares are a guess. A plan's range is theirs.

These systems hide the gradient exchange and passing on between stages, and interleave their
pipelines, which Octavo doesn't; context-parallel ranks are taken as a share of the tokens, and what
is computed again selectively isn't counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from orchestrator.planning.devices import device_named, network_named
from orchestrator.planning.estimate import FASTER, SLOWER
from orchestrator.planning.presets import PRESETS
from orchestrator.planning.shapes import Shape, Stage, shape_of
from orchestrator.planning.step_time import Hidden, Layout, StepTime, Wire, step_time
from parallel.config import ModelConfig

NEMO_2407 = "NVIDIA NeMo, docs/source/performance/performance_summary.md, container 24.07"
NEMO_2502 = "NVIDIA NeMo Framework user guide, performance summary, container 25.02"
LLAMA_3 = "arXiv 2407.21783, table 4; a chunk of one layer is assumed for its interleaved schedule"

NEMO_2511 = "NVIDIA Megatron Bridge, docs/performance-summary.md, container 25.11"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; H100s at 500 W"
TITAN_H200 = "pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"

STATED_ERROR = 0.08
"""Of each run's tokens a second."""


@dataclass(frozen=True)
class Published:
    preset: str
    device: str
    gpus: int
    tensor: int
    pipeline: int
    context: int
    interleave: int
    batch: int
    """Sequences a step."""
    micro: int
    seq_len: int
    fp8: bool
    source: str
    tokens_s: float = 0.0
    """A device."""
    tflops: float = 0.0
    """A device, where tokens aren't published; counted as ``Shape.flops_per_token`` does."""
    recompute: bool = False

    def __str__(self) -> str:
        return f"{self.preset}, {self.gpus} {self.device}, {'FP8' if self.fp8 else 'BF16'}"


RUNS = (
    Published("llama-405b", "h100", 8192, 8, 16, 1, 8, 2048, 1, 8192, False, LLAMA_3, tflops=430),
    Published("llama-405b", "h100", 16384, 8, 16, 1, 8, 2048, 1, 8192, False, LLAMA_3, tflops=400),
    Published("llama-70b", "h100", 64, 4, 4, 2, 5, 128, 1, 8192, True, NEMO_2407, 1533),
    Published("llama-8b", "h100", 8, 1, 1, 2, 1, 128, 1, 8192, True, NEMO_2407, 12036),
    Published("llama2-70b", "h100", 64, 4, 4, 1, 20, 128, 1, 4096, True, NEMO_2407, 1707),
    Published("llama2-13b", "h100", 16, 1, 4, 1, 10, 128, 1, 4096, True, NEMO_2407, 8646),
    Published("llama2-7b", "h100", 8, 1, 1, 1, 1, 128, 1, 4096, True, NEMO_2407, 16847),
    Published("llama-70b", "b200", 64, 2, 4, 2, 5, 128, 1, 8192, True, NEMO_2502, 3062),
    Published("llama-405b", "b200", 128, 4, 8, 2, 8, 64, 1, 8192, True, NEMO_2502, 625),
    Published("llama-8b", "b200", 8, 1, 1, 1, 1, 128, 2, 8192, True, NEMO_2502, 26006),
)

HELD_OUT = (
    Published("llama-8b", "h100", 8, 1, 1, 1, 1, 128, 1, 8192, True, NEMO_2511, 14451),
    Published("llama-70b", "h100", 64, 4, 8, 1, 5, 128, 1, 8192, True, NEMO_2511, 1602),
    Published("llama-405b", "h100", 1024, 8, 8, 2, 8, 512, 1, 8192, True, NEMO_2511, 292),
    Published("llama-8b", "b200", 8, 1, 1, 1, 1, 128, 2, 8192, True, NEMO_2511, 30624),
    Published("llama-405b", "b200", 128, 4, 8, 2, 8, 64, 1, 8192, True, NEMO_2511, 661),
    Published("llama-8b", "h100", 8, 1, 1, 1, 1, 16, 2, 8192, False, TITAN, 6667),
    Published("llama-8b", "h100", 128, 1, 1, 1, 1, 256, 2, 8192, False, TITAN, 6514),
    Published("llama-8b", "h100", 8, 1, 1, 1, 1, 16, 2, 8192, True, TITAN, 8532),
    Published("llama-8b", "h100", 128, 1, 1, 1, 1, 256, 2, 8192, True, TITAN, 8380),
    Published("llama-70b", "h100", 256, 8, 1, 1, 1, 512, 16, 8192, True, TITAN, 829, 0.0, True),
    Published("llama-8b", "h200", 32, 1, 1, 1, 1, 64, 2, 8192, True, TITAN_H200, 10938),
    Published("llama-8b", "h200", 64, 1, 1, 1, 1, 128, 2, 8192, True, TITAN_H200, 10753),
)


def shape_named(name: str) -> Shape:
    return shape_of(ModelConfig.model_validate(PRESETS[name].model))


def foretold(run: Published) -> StepTime:
    shape = shape_named(run.preset)
    model_ranks = run.tensor * run.pipeline * run.context
    data = run.gpus // model_ranks
    micro_batches = run.batch // data // run.micro
    tokens = run.micro * run.seq_len // run.context
    # The busiest stage; with one, it has embedding and head.
    alone = run.pipeline == 1
    stage = Stage(-(-shape.layers // run.pipeline), alone, alone)
    layout = Layout(
        tensor=run.tensor,
        pipeline=run.pipeline,
        data=data * run.context,
        per_node=8,
        micro_batches=micro_batches,
        tokens=tokens,
        interleave=run.interleave,
        recompute=run.recompute,
    )
    stream = 2 * tokens * shape.hidden
    sums = 2 * (run.tensor - 1) * stream * 4 * stage.layers * micro_batches // run.tensor
    return step_time(
        shape,
        stage,
        run.seq_len,
        layout,
        Wire(exchange=0, gather=0, tensor=sums, pipeline=0),
        device_named(run.device),
        network_named("ib400"),
        fp8=run.fp8,
        hidden=Hidden(pipeline=1.0, exchange=1.0),
    )


def told_over_published(run: Published) -> float:
    """Tokens a second that the roofline tells, over those of the run."""
    per_token = shape_named(run.preset).flops_per_token(run.seq_len)
    published = run.tokens_s or 1e12 * run.tflops / per_token
    return run.batch * run.seq_len / foretold(run).total / run.gpus / published


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_published_run_is_met_within_the_stated_error(run: Published) -> None:
    assert told_over_published(run) == pytest.approx(1.0, abs=STATED_ERROR), run.source


@pytest.mark.parametrize("run", HELD_OUT, ids=lambda run: f"{run}, {run.source[:20]}")
def test_a_run_that_nothing_was_fitted_to_lies_in_the_range_that_a_plan_tells(
    run: Published,
) -> None:
    assert FASTER <= told_over_published(run) <= SLOWER, run.source


def test_the_range_is_no_wider_than_those_runs() -> None:
    found = [told_over_published(run) for run in HELD_OUT]
    assert min(found) < FASTER + 0.02 and max(found) > SLOWER - 0.02


def test_more_replicas_of_one_batch_lose_as_much_to_the_bubble_as_published():
    """From 8,192 to 16,384 devices, micro-batches halve: 430 to 400 TFLOP/s, arXiv 2407.21783."""
    fewer, more = (foretold(run).total for run in RUNS[:2])
    assert more / fewer == pytest.approx(430 / 400 / 2, rel=0.03)
