"""Every way by which DeepSpeed hands over gradients: both classes of its optimizer, all stages.

One run of each goes through what a job may meet: a NaN on one rank, BF16 by order and back, a
rollback; ranks are compared at the end of 50 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.config import ExchangeDtype, GradientExchangeConfig
from parallel.engine import Engine, StepResult
from parallel.exchange_choice import REPEATS
from parallel.gradients import GradientExchange, take_statistics
from parallel.model_plan import parameter_name
from tests.ranks.engine_runs import LR, MODEL, build
from tests.ranks.launch_ranks import run_ranks
from tests.ranks.test_sharded_optimizer import ODD, digest, numbers, replica_batches

STEPS = {1: 24, 2: 50, 3: 50, 4: 50}
"""By world size: on one rank there are no replicas to drift apart."""
BF16 = {"data_types": {"grad_accum_dtype": "bf16"}}
CUT = {"zero_optimization": {"reduce_bucket_size": 10_000}}
"""Several buckets, none of which ends where a partition does."""
FEEDBACK = GradientExchangeConfig(min_size=1024, bucket=4096, error_feedback=True)
"""In several buckets of the exchange."""
KEPT = FEEDBACK.model_copy(
    # On one stage of a pipeline alone, so that stages have different groups.
    update={"high_precision_parameters": ("embedding.weight", "layers.0.mlp.*")}
)

NORM = "head.norm.weight"
"""One that the last rank holds in every layout, and DeepSpeed counts on another tensor rank."""

FLAT = "BF16_Optimizer"
BUCKETS = "DeepSpeedZeroOptimizer"
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "0": (FLAT, {"zero_stage": 0, "gradient_exchange": KEPT}),
    "0 bf16": (FLAT, {"zero_stage": 0, "deepspeed": BF16}),
    "1": (FLAT, {"zero_stage": 1, "gradient_exchange": KEPT}),
    "1 bf16": (BUCKETS, {"zero_stage": 1, "deepspeed": BF16, "gradient_exchange": KEPT}),
    "1 bf16 cut": (BUCKETS, {"zero_stage": 1, "deepspeed": BF16 | CUT}),
    "2": (BUCKETS, {"zero_stage": 2, "gradient_exchange": KEPT}),
    "2 cut": (BUCKETS, {"zero_stage": 2, "deepspeed": CUT}),
    "2 bf16": (BUCKETS, {"zero_stage": 2, "deepspeed": BF16}),
}
COPY = GradientExchange.another
TIED: dict[str, Any] = {"model": MODEL.model_copy(update={"tie_embeddings": True})}
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "DP1": (1, {}, ("1", "1 bf16", "2")),
    "DP2": (2, {}, ("0 bf16", "1 bf16 cut", "2", "2 cut", "2 bf16")),
    "DP3": (3, {}, ("0", "1", "1 bf16", "2 cut")),
    "PP2xDP2": (4, {"pipeline": 2, **TIED}, ("0 bf16", "1", "1 bf16")),
    "TP2xDP2": (4, {"tensor": 2, **TIED}, ("1 bf16",)),
}
TOLERANCE = 0.03
"""Relative difference of losses to an exchange in FP32 without any of what happens here."""


def residuals(engine: Engine) -> dict[str, torch.Tensor]:
    found = engine.live_tensors().items()
    return {name: tensor.clone() for name, tensor in found if name.startswith("exchange.")}


def copied(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.live_tensors().items()}


def differing(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def with_inf(engine: Engine, here: bool, batches: Any) -> StepResult:
    """A step in which a norm's gradient has an Inf as its last element, on this rank."""

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat([gradient[:-1], gradient.new_tensor([torch.inf])])

    parameters = dict(engine._engine.module.named_parameters())
    (name,) = [n for n in parameters if parameter_name(n, engine._plan.layers) == NORM] or [None]
    assert name is not None or not here
    hook = parameters[name].register_hook(plant) if here and name else None
    result = engine.train_step(batches, LR)
    if hook is not None:
        hook.remove()
    return result


def journey(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    engine = build(world_size, numbers=numbers(), **({"model": ODD} | options))
    losses: list[str] = []

    def run(first: int, end: int) -> list[str]:
        results = [engine.train_step(replica_batches(engine, i), LR) for i in range(first, end)]
        assert not any(result.skipped for result in results)
        return [float(result.loss).hex() for result in results]

    losses += run(0, 8)
    fp8 = engine.take_exchange_statistics()

    before = copied(engine)
    if rank == world_size - 1:
        engine.faults.poison_gradient()
    poisoned = engine.train_step(replica_batches(engine, 8), LR)
    nan: dict[str, Any] = {
        "skipped": poisoned.skipped,
        "norm": poisoned.grad_norm,
        "names": poisoned.nonfinite_parameters,
        "changed": differing(before, copied(engine)),
    }

    planted = with_inf(engine, rank == world_size - 1, replica_batches(engine, 8))
    nan["changed"] += differing(before, copied(engine))

    engine.take_exchange_statistics()
    engine.set_exchange("bf16")
    before_bf16 = residuals(engine)
    losses += run(8, 10)
    bf16 = engine.take_exchange_statistics()
    away = differing(before_bf16, residuals(engine))
    engine.set_exchange("fp8")
    back = [name for name, tensor in residuals(engine).items() if tensor.any()]
    losses += run(10, 16)

    kept, meta = copied(engine), engine.meta()
    expected, end = run(16, 20), copied(engine)
    engine.faults.surge_mlp(1, 16.0)
    engine.set_exchange("bf16")
    run(16, 18)
    for name, tensor in engine.live_tensors().items():
        tensor.copy_(kept[name])
    engine.load_meta(meta)
    replayed = run(16, 20)
    same_end = not differing(end, copied(engine))
    losses += replayed + run(20, STEPS[world_size])
    return {
        "class": type(engine._engine.optimizer).__name__,
        "at": (engine.coordinate.pipe, engine.coordinate.tensor),
        "losses": losses,
        "digest": digest(engine),
        "residuals": {name: bool(tensor.any()) for name, tensor in residuals(engine).items()},
        "fp8": fp8,
        "bf16": bf16,
        "nan": nan,
        "planted": (planted.skipped, planted.nonfinite_parameters),
        "away": away,
        "back": back,
        "replayed": (replayed == expected, same_end),
        "groups": {group.name: (group.least, group.parameters) for group in engine._groups},
    }


def exact(world_size: int, **options: Any) -> tuple[list[float], float]:
    """Losses of the same steps without FP8 on the wire, and the first step's norm."""
    options = {"communication_data_type": "fp32", "zero_stage": 0} | options
    engine = build(world_size, numbers=numbers(), **({"model": ODD} | options))
    results = [
        engine.train_step(replica_batches(engine, step), LR) for step in range(STEPS[world_size])
    ]
    return [float(result.loss) for result in results], results[0].grad_norm


def first_norm(world_size: int, **options: Any) -> float:
    options = options | {"communication_data_type": "fp32"}
    engine = build(world_size, numbers=numbers(), **({"model": ODD} | options))
    return engine.train_step(replica_batches(engine, 0), LR).grad_norm


def runs(
    rank: int, world_size: int, layout: dict[str, Any], paths: tuple[str, ...]
) -> dict[str, Any]:
    results: dict[str, Any] = {"exact": exact(world_size, **layout)}
    for path in paths:
        options = {"gradient_exchange": FEEDBACK} | PATHS[path][1] | layout
        results[path] = journey(rank, world_size, **options)
        results[path]["first norm"] = first_norm(world_size, **options)
    return results


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=list(LAYOUTS))
def launched(request: pytest.FixtureRequest) -> tuple[Ranks, tuple[str, ...]]:
    world_size, layout, paths = LAYOUTS[request.param]
    return run_ranks(runs, world_size, layout, paths, timeout_s=400.0), paths


class TestEveryPath:
    def test_runs_on_the_class_that_the_spec_chose(self, launched: Any) -> None:
        ranks, paths = launched
        for path in paths:
            assert {rank[path]["class"] for rank in ranks} == {PATHS[path][0]}

    def test_ends_with_the_same_parameters_on_all_replicas(self, launched: Any) -> None:
        ranks, paths = launched
        for path in paths:
            by_place: dict[Any, set[str]] = {}
            for rank in ranks:
                by_place.setdefault(rank[path]["at"], set()).add(rank[path]["digest"])
            assert all(len(digests) == 1 for digests in by_place.values()), path
            assert len({tuple(rank[path]["losses"]) for rank in ranks}) == 1, path

    def test_learns_as_without_any_compression(self, launched: Any) -> None:
        ranks, paths = launched
        expected, norm = ranks[0]["exact"]
        assert expected[-1] < 0.75 * expected[0], "nothing was learnt"
        for path in paths:
            losses = [float.fromhex(loss) for loss in ranks[0][path]["losses"]]
            assert sum(losses[-8:]) == pytest.approx(sum(expected[-8:]), rel=TOLERANCE), path
            assert ranks[0][path]["first norm"] == pytest.approx(norm, rel=3e-3), path

    def test_names_a_nan_where_it_is_and_leaves_the_step_out_everywhere(
        self, launched: Any
    ) -> None:
        ranks, paths = launched
        for path in paths:
            for number, rank in enumerate(ranks):
                nan = rank[path]["nan"]
                assert (nan["skipped"], nan["norm"]) == (True, float("inf")), path
                assert len(nan["names"]) == (number == len(ranks) - 1), path
                assert nan["changed"] == [], path
                where = (NORM,) if number == len(ranks) - 1 else ()
                assert rank[path]["planted"] == (True, where), path

    def test_replays_to_the_bit_after_a_rollback(self, launched: Any) -> None:
        ranks, paths = launched
        for path in paths:
            assert {rank[path]["replayed"] for rank in ranks} == {(True, True)}, path

    def test_goes_to_bf16_and_back_with_error_feedback_that_begins_with_nothing(
        self, launched: Any
    ) -> None:
        ranks, paths = launched
        for path in paths:
            for rank in ranks:
                found = rank[path]
                assert found["away"] == [], "nothing is rounded to FP8, so nothing is left over"
                assert found["back"] == []
                compressed = [
                    name for name, (least, _) in found["groups"].items() if least == "fp8"
                ]
                expected = [f"exchange.{n}.residual" for n in compressed if len(ranks) > 1]
                assert found["residuals"] == dict.fromkeys(expected, True), path
                assert (found["fp8"]["wire_bits"], found["bf16"]["wire_bits"]) == (8, 16)
                assert found["bf16"]["relative_error"] == 0.0
                if len(ranks) == 1:
                    assert found["fp8"]["bytes"] == found["fp8"]["relative_error"] == 0.0
                else:
                    assert 0.01 < found["fp8"]["relative_error"] < 0.05
                    per_step = found["fp8"]["bytes"] / 8, found["bf16"]["bytes"] / 2
                    assert 0 < per_step[0] < 0.85 * per_step[1], path
                    assert min(found["fp8"][f"{p}_s"] for p in ("quantize", "wire", "dequantize"))

    def test_keeps_the_parameters_that_the_spec_names_out_of_fp8(self, launched: Any) -> None:
        ranks, paths = launched
        for path in paths:
            if PATHS[path][1].get("gradient_exchange") is not KEPT:
                continue
            kept: set[str] = set()
            others: set[str] = set()
            for rank in ranks:
                for least, names in rank[path]["groups"].values():
                    assert least in ("fp8", "bf16", "fp32")
                    (kept if least == "bf16" else others).update(names)
            assert kept == {
                "embedding.weight",
                "layers.0.mlp.gate_up.weight",
                "layers.0.mlp.down.weight",
            }
            assert not kept & others


def misnamed(rank: int, world_size: int) -> None:
    for patterns in (("layers.9.*",), ("embedding.weight", "layers.0.attn.qkv")):
        config = GradientExchangeConfig(high_precision_parameters=patterns)
        with pytest.raises(ValueError, match=r"matches no parameter; did you mean 'layers\."):
            build(world_size, pipeline=2, gradient_exchange=config)


def test_a_pattern_that_no_stage_has_is_refused_on_every_rank() -> None:
    run_ranks(misnamed, 2)


def measured(
    rank: int, world_size: int, layout: dict[str, Any], paths: tuple[str, ...]
) -> list[tuple[float, ...]]:
    """What FP8 sends in a step, and in one of the rounds by which ``auto`` chooses."""
    world = dist.new_group(backend="gloo")
    assert world is not None
    found: list[tuple[float, ...]] = []
    for path in paths:
        options = {"gradient_exchange": FEEDBACK} | PATHS[path][1] | layout
        engine = build(world_size, numbers=numbers(), **({"model": ODD} | options))
        made: list[GradientExchange] = []

        def another(
            exchange: GradientExchange, dtype: ExchangeDtype, made: Any = made
        ) -> GradientExchange:
            made.append(COPY(exchange, dtype))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradientExchange, "another", another)
            choice = engine.choose_exchange(world)
        rounds = take_statistics([e for e in made if e.dtype == "fp8"])["bytes"] / (REPEATS + 1)
        assert not any(tensor.any() for tensor in residuals(engine).values())
        assert engine.take_exchange_statistics()["bytes"] == 0.0
        engine.set_exchange("fp8")
        engine.train_step(replica_batches(engine, 0), LR)
        compressed = [group.exchange for group in engine._groups if group.least == "fp8"]
        step = take_statistics(compressed)["bytes"]
        often = 2 if path.startswith("2") else 1  # in each of two micro-batches
        found.append((rounds, step / often, choice.dtype == "fp8"))
    return found


@pytest.mark.parametrize("layout", ["DP2", "PP2xDP2"])
def test_auto_measures_what_a_step_exchanges(layout: str) -> None:
    world_size, degrees, _ = LAYOUTS[layout]
    paths = ("0", "1", "1 bf16", "2") if layout == "DP2" else ("1", "1 bf16")
    ranks = run_ranks(measured, world_size, degrees, paths)
    for i, path in enumerate(paths):
        for rank in ranks:
            rounds, sent, _ = rank[i]
            assert rounds == pytest.approx(sent, rel=0.02), path
        assert len({rank[i][2] for rank in ranks}) == 1
