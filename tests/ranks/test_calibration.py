"""A layer's return to FP8 on several ranks: one scale for all shards, nothing saturates, and what
a rollback makes of a return that waits for its scales.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.config import FP8Config, Precision
from parallel.engine import Engine
from parallel.precision.scope import STATISTICS_COLUMNS, PrecisionScope
from parallel.tensor import TensorGroup
from tests.ranks.engine_runs import LR, batches, build
from tests.ranks.launch_ranks import run_ranks

WORLD, WIDTH = 2, 64
NAMES = ("layers.0.attn.qkv", "layers.0.attn.out")
SATURATED, COUNT = map(STATISTICS_COLUMNS.index, ("saturated", "count"))


def _body(rank: int, world_size: int) -> dict[str, list[float]]:
    group = dist.group.WORLD
    assert group is not None
    shared = TensorGroup(group, rank, world_size)
    scope = PrecisionScope("fp8", FP8Config(), num_layers=1, tensor=shared)
    torch.manual_seed(rank)
    column = scope.linear(NAMES[0], WIDTH, WIDTH, shard="column")
    row = scope.linear(NAMES[1], WIDTH, WIDTH, shard="row")

    def step(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, WIDTH, generator=generator).bfloat16().requires_grad_()
        row(column(x)).backward(torch.randn(8, WIDTH, generator=generator).bfloat16())
        scope.reduce_amax(group)
        scope.finish_step(applied=True)

    step(0), step(1)
    scope.set_precision(dict.fromkeys(NAMES, "bf16"))
    step(2)
    with torch.no_grad():
        # One shard outgrows the other while nobody looks.
        column.weight.mul_(10 if rank == 1 else 1)
    scope.statistics()
    scope.set_precision(dict.fromkeys(NAMES, "fp8"))
    scales = scope.state_tensors()["scale"].tolist()
    step(2)
    _, statistics = scope.statistics()
    return {"scales": scales, "weights": statistics[1::3, SATURATED].tolist()}


@pytest.fixture(scope="module")
def returned() -> list[dict[str, list[float]]]:
    return run_ranks(_body, WORLD)


def test_a_return_gives_all_shards_of_a_matrix_one_scale(
    returned: list[dict[str, list[float]]],
) -> None:
    first, second = returned
    assert first["scales"] == second["scales"]
    assert 1.0 not in first["scales"]


def test_a_shard_that_outgrew_the_others_does_not_saturate_on_return(
    returned: list[dict[str, list[float]]],
) -> None:
    assert [rank["weights"] for rank in returned] == [[0, 0], [0, 0]]


AWAY = ("layers.0.attn.qkv", "layers.2.mlp.down")
"""They leave FP8, one in each stage of two."""
LEAVE: dict[str, Precision] = dict.fromkeys(AWAY, "bf16")
RETURN: dict[str, Precision] = dict.fromkeys(AWAY, "fp8")
LAYOUTS = {"PP2": 2, "DP2": 1}
"""Stages, of two ranks."""
FIRST = 4
"""The step before which the layers leave, with a history that is full."""
STEPS = 3
"""Steps from there on in each of the cases."""


@dataclass
class Told:
    """What some steps came to on one rank."""

    losses: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    precision: list[dict[str, Precision]] = field(default_factory=list)
    """In force in each step."""
    scales: list[list[float]] = field(default_factory=list)
    saturated: list[float] = field(default_factory=list)
    """Share of the values of ``AWAY`` in each step, of this rank."""


State = tuple[dict[str, Tensor], str]


class Job:
    """One rank's engine, as the training loop drives it."""

    def __init__(self, world_size: int, pipeline: int) -> None:
        self.world_size, self.pipeline = world_size, pipeline
        self.engine: Engine = build(world_size, pipeline=pipeline)

    def run(self, steps: range) -> Told:
        told, scope = Told(), self.engine.scope
        scope.statistics()
        for step in steps:
            told.precision.append({n: p for n, p in scope.precision().items() if n in AWAY})
            data = batches(self.engine, self.world_size, self.pipeline, step)
            result = self.engine.train_step(data, LR)
            names, rows = scope.statistics()
            away = [i for i, name in enumerate(names) if name.rpartition("/")[0] in AWAY]
            told.losses.append(float(result.loss).hex())
            told.norms.append(result.grad_norm)
            told.saturated.append(float(rows[away, SATURATED].sum() / rows[away, COUNT].sum()))
            told.scales.append(scope.state_tensors()["scale"].tolist())
        return told

    def skip(self, step: int) -> None:
        """A step that is not applied."""
        if self.engine.coordinate.data == 0:
            self.engine.faults.poison_gradient()
        data = batches(self.engine, self.world_size, self.pipeline, step)
        assert self.engine.train_step(data, LR).skipped

    def snapshot(self) -> State:
        live = self.engine.live_tensors()
        return {n: t.clone() for n, t in live.items()}, json.dumps(self.engine.meta())

    def restore(self, state: State) -> None:
        """As a restart: everything is as it was stored."""
        tensors, meta = state
        for name, tensor in self.engine.live_tensors().items():
            tensor.copy_(tensors[name])
        self.engine.load_meta(json.loads(meta))

    def roll_back(self, state: State) -> None:
        """As the training loop: what was ordered in this timeline stays ordered."""
        ordered = self.engine.scope.ordered()
        self.restore(state)
        self.engine.set_precision(ordered)


def _returns(rank: int, world_size: int, pipeline: int) -> dict[str, Told]:
    job = Job(world_size, pipeline)
    end = range(FIRST, FIRST + STEPS)
    told: dict[str, Told] = {}
    job.run(range(FIRST))
    in_fp8 = job.snapshot()
    told["never left"] = job.run(end)

    job.restore(in_fp8)
    job.engine.set_precision(LEAVE)
    # What made them leave is in the state: weights outgrew their scales while they were away.
    for layer in (0, 2):
        job.engine.faults.surge_mlp(layer, 2.0)
    cold = job.snapshot()
    told["stays away"] = job.run(end)

    job.restore(cold)
    job.engine.set_precision(RETURN)
    waiting = job.snapshot()
    told["asked"] = job.run(end)

    # The return waits for a step that is not applied, and the rollback comes.
    job.restore(cold)
    job.skip(FIRST)
    job.engine.set_precision(RETURN)
    job.skip(FIRST + 1)
    job.roll_back(cold)
    told["rolled back to before it was asked"] = job.run(end)

    job.restore(waiting)
    job.skip(FIRST)
    job.roll_back(waiting)
    told["rolled back to where it waits"] = job.run(end)

    job.restore(waiting)
    job.roll_back(in_fp8)
    told["rolled back to before they left"] = job.run(end)

    # Called off while it waits: the rollback brings no order back that was taken back.
    job.restore(waiting)
    job.engine.set_precision(LEAVE)
    job.roll_back(waiting)
    told["called off"] = job.run(end)

    job = Job(world_size, pipeline)
    job.restore(waiting)
    told["restarted where it waits"] = job.run(end)
    return told


@pytest.fixture(scope="module", params=list(LAYOUTS))
def waited(request: pytest.FixtureRequest) -> list[dict[str, Told]]:
    return run_ranks(_returns, WORLD, LAYOUTS[request.param])


Waited = list[dict[str, Told]]


class TestAReturnThatWaitsWhileARollbackComes:
    def test_comes_to_the_bits_of_a_run_in_which_it_was_asked_once(self, waited: Waited) -> None:
        for rank in waited:
            for case in (
                "rolled back to before it was asked",
                "rolled back to where it waits",
                "restarted where it waits",
            ):
                assert rank[case] == rank["asked"], case
            assert rank["rolled back to before they left"] == rank["never left"]
            assert rank["called off"] == rank["stays away"]
            different = ("asked", "never left", "stays away")
            assert len({tuple(rank[case].losses) for case in different}) == 3

    def test_is_granted_on_all_ranks_after_the_first_applied_step(self, waited: Waited) -> None:
        first, second = waited
        for case, told in first.items():
            timeline = [
                here | there
                for here, there in zip(told.precision, second[case].precision, strict=True)
            ]
            steps = {
                **dict.fromkeys(("never left", "rolled back to before they left"), 0),
                **dict.fromkeys(("stays away", "called off"), STEPS),
            }.get(case, 1)
            assert timeline == [LEAVE] * steps + [RETURN] * (STEPS - steps), case
            assert told.losses == second[case].losses
            if told.precision[0].keys() == second[case].precision[0].keys():
                # Replicas: they agree on each layer, and share its scales.
                assert told.precision == second[case].precision
                assert told.scales == second[case].scales

    def test_makes_no_spike(self, waited: Waited) -> None:
        for rank in waited:
            for case in ("asked", "rolled back to before it was asked"):
                # Of scales made of one step's amax: a few values of the next step may pass it.
                assert max(rank[case].saturated) < 1e-3
            losses, calm = (
                [float.fromhex(loss) for loss in rank[case].losses]
                for case in ("asked", "stays away")
            )
            assert losses == pytest.approx(calm, rel=0.01)
            assert rank["asked"].norms == pytest.approx(rank["stays away"].norms, rel=0.1)
