"""Where the optimizer is sharded, each rank takes its part of the mean, and no copy drifts."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch

from parallel.engine import Engine
from tests.ranks.engine_runs import LR, MICRO, MODEL, SEQ_LEN, batches, build
from tests.ranks.launch_ranks import run_ranks

STEPS = 50
ODD = MODEL.model_copy(update={"vocab_size": 61, "hidden_size": 48, "ffn_size": 112})
"""No partition of its gradients is a whole number of blocks."""
TOLERANCE = 0.03
"""Relative difference of the last losses allowed to the second rounding of a whole exchange."""


def replica_batches(engine: Engine, step: int) -> Any:
    """Two micro-batches of this replica, whatever the number of replicas."""
    generator = torch.Generator().manual_seed(1000 * step + engine.coordinate.data)
    start = torch.randint(0, ODD.vocab_size, (2, MICRO, 1), generator=generator)
    stride = torch.randint(1, 4, (2, MICRO, 1), generator=generator)
    text = (start + stride * torch.arange(SEQ_LEN + 1)) % ODD.vocab_size
    return iter([(rows[:, :-1], rows[:, 1:]) for rows in text])


def numbers(**more: Any) -> Any:
    from parallel.engine import TrainingNumbers

    return TrainingNumbers(micro_batch_size=MICRO, accumulation_steps=2, seq_len=SEQ_LEN, **more)


def digest(engine: Engine) -> str:
    """Of the parameters that this rank computes with."""
    found = hashlib.blake2b()
    for name, tensor in engine.live_tensors().items():
        if name.endswith(".parameters"):
            found.update(tensor.view(dtype=torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(world_size: int, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    engine = build(world_size, model=ODD, numbers=numbers(), **options)
    results = [engine.train_step(replica_batches(engine, step), LR) for step in range(steps)]
    return {
        "losses": [float(result.loss) for result in results],
        "norms": [result.grad_norm for result in results],
        "digest": digest(engine),
        "stage": engine.coordinate.pipe,
        "comm": engine.take_exchange_statistics(),
    }


def runs(rank: int, world_size: int, pipeline: int) -> dict[str, dict[str, Any]]:
    return {
        "whole": train(world_size, pipeline=pipeline, zero_stage=0),
        "fp8": train(world_size, pipeline=pipeline),
        "bf16": train(world_size, pipeline=pipeline, communication_data_type="bf16"),
        "fp32": train(world_size, 2, pipeline=pipeline, communication_data_type="fp32"),
        "whole fp32": train(
            world_size, 2, pipeline=pipeline, communication_data_type="fp32", zero_stage=0
        ),
    }


Ranks = list[dict[str, dict[str, Any]]]
LAYOUTS = {"DP2": (2, 1), "DP3": (3, 1), "PP2xDP2": (4, 2)}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return run_ranks(runs, *LAYOUTS[request.param], timeout_s=240.0)


def test_replicas_hold_the_same_parameters_to_the_bit_after_50_steps(ranks: Ranks) -> None:
    for run in ("fp8", "bf16"):
        digests: dict[int, set[str]] = {}
        for rank in ranks:
            digests.setdefault(rank[run]["stage"], set()).add(rank[run]["digest"])
        assert all(len(stage) == 1 for stage in digests.values())


def test_losses_and_norms_are_the_same_on_every_rank(ranks: Ranks) -> None:
    for run in ranks[0]:
        assert len({tuple(rank[run]["losses"]) for rank in ranks}) == 1
        assert len({tuple(rank[run]["norms"]) for rank in ranks}) == 1


def test_it_learns_as_with_the_whole_exchange(ranks: Ranks) -> None:
    def last(run: str) -> float:
        return sum(ranks[0][run]["losses"][-10:]) / 10

    assert last("whole") < 0.6 * ranks[0]["whole"]["losses"][0], "nothing was learnt"
    for run in ("fp8", "bf16"):
        assert last(run) == pytest.approx(last("whole"), rel=TOLERANCE)


def test_the_norm_of_the_parts_is_that_of_the_whole(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["fp32"]["norms"] == pytest.approx(rank["whole fp32"]["norms"], rel=1e-5)
        assert rank["fp8"]["norms"][0] == pytest.approx(rank["whole fp32"]["norms"][0], rel=0.01)


def test_half_the_bytes_of_the_whole_exchange_cross_the_network(ranks: Ranks) -> None:
    for rank in ranks:
        fp8, whole, bf16 = (rank[run]["comm"] for run in ("fp8", "whole", "bf16"))
        assert 0 < fp8["bytes"] < 0.52 * whole["bytes"]
        assert fp8["uncompressed_bytes"] == pytest.approx(whole["uncompressed_bytes"] / 2, rel=0.01)
        assert 0 < fp8["bytes"] < 0.56 * bf16["bytes"]
        assert 0.01 < fp8["relative_error"] < 0.05


def test_parts_on_which_a_tied_or_replicated_parameter_lies_count_once() -> None:
    for (name, degrees), tied in itertools.product(
        {"PP2xDP2": (4, {"pipeline": 2}), "TP2xDP2": (4, {"tensor": 2})}.items(), (False, True)
    ):
        world_size, layout = degrees
        ranks = run_ranks(first_norms, world_size, layout, tied)
        for sharded, whole in ranks:
            assert sharded == pytest.approx(whole, rel=1e-5), (name, tied)


def first_norms(
    rank: int, world_size: int, layout: dict[str, int], tied: bool
) -> tuple[float, float]:
    """Of the first step's gradient: of the parts, and of the whole."""
    found = []
    for zero_stage in (1, 0):
        engine = build(
            world_size,
            model=MODEL.model_copy(update={"tie_embeddings": tied}),
            zero_stage=zero_stage,
            communication_data_type="fp32",
            **layout,
        )
        ranks = layout.get("pipeline", 1) * layout.get("tensor", 1)
        found.append(engine.train_step(batches(engine, world_size, ranks, 0), LR).grad_norm)
    return found[0], found[1]
