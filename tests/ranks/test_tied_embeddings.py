"""Embedding and head that share one matrix, on one rank and on both ends of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.config import GradientExchangeConfig
from parallel.engine import Engine
from tests.ranks.engine_runs import LR, MODEL, batches, build
from tests.ranks.launch_ranks import run_ranks
from tests.ranks.test_tensor_parallel import spied

TIED = MODEL.model_copy(update={"tie_embeddings": True})
LAYOUTS = {
    "PP1": (1, {}),
    "PP1xDP2": (2, {}),
    "PP2": (2, {"pipeline": 2}),
    "PP3": (3, {"pipeline": 3}),
    "PP2xDP2": (4, {"pipeline": 2}),
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}),
}
STEPS = 8
TOLERANCE = 0.01
"""Relative difference of losses allowed to a layout; measured: up to 0.0008."""


def copy_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.live_tensors().items()}


def train(world_size: int, degrees: dict[str, int], **options: Any) -> dict[str, Any]:
    feedback = GradientExchangeConfig(min_size=1024, error_feedback=True)
    options = {"model": TIED, "gradient_exchange": feedback, **options}
    engine = build(world_size, **degrees, **options)
    replica = degrees.get("tensor", 1) * degrees.get("pipeline", 1)
    gradients = spied(engine)

    def run(steps: range) -> list[Any]:
        return [engine.train_step(batches(engine, world_size, replica, s), LR) for s in steps]

    results = run(range(STEPS // 2))
    middle, meta = copy_of(engine), engine.meta()
    results += run(range(STEPS // 2, STEPS))
    end = copy_of(engine)
    first_norm, first_gradients = results[0].grad_norm, gradients[0]
    losses = [float(result.loss) for result in results]

    run(range(20, 22))
    for name, tensor in engine.live_tensors().items():
        tensor.copy_(middle[name])
    engine.load_meta(meta)
    replayed = [float(result.loss) for result in run(range(STEPS // 2, STEPS))]
    return {
        "losses": losses,
        "replayed": replayed,
        "same end": all(torch.equal(end[name], t) for name, t in copy_of(engine).items()),
        "norm": first_norm,
        "gradients": first_gradients,
        "tied": {n: t for n, t in end.items() if n.startswith(("tied.", "exchange.tied."))},
        "at": engine.coordinate,
        "numel": sum(view.numel() for group in engine._groups for view in group.views),
        "outputs left": sum(left is not None for left in engine._engine.pipe_buffers["outputs"]),
    }


def runs(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, dict[str, Any]]:
    return {
        "zero 1": train(world_size, degrees),
        "zero 0": train(world_size, degrees, zero_stage=0),
        "bf16": train(
            world_size, degrees, precision="bf16", communication_data_type="fp32", max_norm=1e9
        ),
    }


RUNS = ("zero 1", "zero 0", "bf16")
Ranks = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def layouts() -> dict[str, Ranks]:
    return {name: run_ranks(runs, world, degrees) for name, (world, degrees) in LAYOUTS.items()}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("run", RUNS)
class TestTiedEmbeddings:
    def test_train_as_on_one_rank(self, layouts: dict[str, Ranks], layout: str, run: str) -> None:
        expected = layouts["PP1"][0][run]["losses"]
        assert expected[-1] < 0.85 * expected[0], "nothing was learnt"
        for rank in layouts[layout]:
            for loss, wanted in zip(rank[run]["losses"], expected, strict=True):
                assert abs(loss - wanted) / wanted < TOLERANCE

    def test_stay_equal_to_the_bit_on_both_ends(
        self, layouts: dict[str, Ranks], layout: str, run: str
    ) -> None:
        by_replica: dict[int, list[dict[str, torch.Tensor]]] = {}
        for rank in layouts[layout]:
            if rank[run]["tied"]:
                by_replica.setdefault(rank[run]["at"].data, []).append(rank[run]["tied"])
        _, degrees = LAYOUTS[layout]
        ends = min(degrees.get("pipeline", 1), 2) * degrees.get("tensor", 1)
        for first, *others in by_replica.values():
            assert len(others) == ends - 1
            assert {"tied.parameters", "tied.masters", "tied.exp_avg", "tied.step"} < set(first)
            for other in others:
                assert first.keys() == other.keys()
                assert all(torch.equal(first[name], other[name]) for name in first)

    def test_replay_to_the_bit_after_a_rollback(
        self, layouts: dict[str, Ranks], layout: str, run: str
    ) -> None:
        for rank in layouts[layout]:
            assert rank[run]["replayed"] == rank[run]["losses"][STEPS // 2 :]
            assert rank[run]["same end"]

    def test_leave_no_logits_in_memory_behind_a_step(
        self, layouts: dict[str, Ranks], layout: str, run: str
    ) -> None:
        assert [rank[run]["outputs left"] for rank in layouts[layout]] == [0] * len(layouts[layout])

    def test_count_once_in_the_gradient_norm(
        self, layouts: dict[str, Ranks], layout: str, run: str
    ) -> None:
        whole = layouts["PP1"][0][run]
        total = torch.stack([g.norm() for g in whole["gradients"].values()]).norm()
        assert whole["norm"] == pytest.approx(float(total), rel=1e-4)
        embedding = whole["gradients"]["embedding.weight"].norm()
        assert torch.hypot(total, embedding) > 1.1 * total
        for rank in layouts[layout]:
            assert rank[run]["norm"] == pytest.approx(whole["norm"], rel=0.03)


def test_one_matrix_serves_embedding_and_head(layouts: dict[str, Ranks]) -> None:
    matrix = MODEL.vocab_size * MODEL.hidden_size
    (tied,) = layouts["PP1"]
    (untied,) = run_ranks(untied_size, 1)
    assert untied - tied["bf16"]["numel"] == matrix


def untied_size(rank: int, world_size: int) -> int:
    engine = build(world_size)
    return sum(view.numel() for group in engine._groups for view in group.views)


def test_the_gradient_is_the_sum_of_both_uses(layouts: dict[str, Ranks]) -> None:
    first, last = (rank["bf16"]["gradients"]["embedding.weight"] for rank in layouts["PP2"])
    alone = layouts["PP1"][0]["bf16"]["gradients"]["embedding.weight"]
    assert torch.equal(first, last)
    # One rank adds the two in BF16, the ends in FP32.
    assert float((first - alone).norm() / alone.norm()) < 0.01
