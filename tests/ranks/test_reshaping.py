"""Checkpoints of four ranks taken up by two of other degrees, and back: the same state."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launch.attempt_folder import open_attempt
from launch.checkpoints import commit_checkpoint, list_checkpoints, write_rank_file
from launch.digests import digest_of
from launch.random_state import RandomState
from launch.reshaping import MASTERS, reshaped, state_on_disk
from launch.saved_state import SavedState
from launch.snapshots import MismatchedSnapshotError, SnapshotKey
from launch.state_block import StateLayout, load_into
from launch.state_header import LAYOUT
from parallel.config import GradientExchangeConfig
from parallel.engine import Engine
from parallel.layout import Group, Place, RankLayout
from tests.ranks.engine_runs import LR, MODEL, batches, build, model_for
from tests.ranks.launch_ranks import run_ranks

SAVED, STEPS = 4, 7
"""Steps before the checkpoint, and in all."""
TOLERANCE = 0.002
"""Relative difference of a step's loss that another order of sums makes, rounded to FP8 anew; up to
0.0008 was measured over ten steps."""

POLICIES: dict[str, dict[str, Any]] = {
    "zero 1, delayed, error feedback": {
        "zero_stage": 1,
        "gradient_exchange": GradientExchangeConfig(min_size=1024, error_feedback=True),
    },
    "zero 0, delayed, tied embeddings": {
        "zero_stage": 0,
        "model": MODEL.model_copy(update={"tie_embeddings": True}),
    },
    "zero 1 in buckets, block": {
        "zero_stage": 1,
        "recipe": "block",
        "model": model_for("block"),
        "deepspeed": {"data_types": {"grad_accum_dtype": "bf16"}},
    },
}
FIRST = {"pipeline": 2}
"""On four ranks: PP2×DP2."""
OTHERS: dict[str, dict[str, Any]] = {"DP2": {}, "PP2": {"pipeline": 2}, "TP2": {"tensor": 2}}
"""On two ranks."""


@dataclass
class Run:
    """One rank's engine, and what a checkpoint of it holds."""

    engine: Engine
    world_size: int
    model_ranks: int
    random: RandomState

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.engine.live_tensors(), **self.random.tensors}

    def train(self, steps: range) -> list[float]:
        found = (
            self.engine.train_step(
                batches(self.engine, self.world_size, self.model_ranks, step), LR
            )
            for step in steps
        )
        return [float(result.loss) for result in found]

    def save(self, folder: Path, step: int) -> None:
        """One checkpoint, committed by rank 0 once all have written."""
        rank = dist.get_rank()
        if rank == 0:
            open_attempt(folder, 1)
        dist.barrier()
        tensors = self.tensors
        meta = {"step": step, "engine": self.engine.meta(), LAYOUT: self.engine.layout.to_json()}
        layout = StateLayout(tensors, len(str(meta)))
        block = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for name, view in layout.views(block).items():
            view.copy_(tensors[name])
        header = layout.header(meta)
        block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        data = block.numpy()
        write_rank_file(folder, SnapshotKey("job", 1, 0, rank, step), data, digest_of(data))
        dist.barrier()
        if rank == 0:
            commit_checkpoint(folder, step, 1, range(self.world_size))
        dist.barrier()

    def load(self, folder: Path, step: int) -> None:
        rank = dist.get_rank()
        path = folder / "checkpoints" / f"step-{step:08d}"
        meta, tensors = state_on_disk(path, rank, step, self.engine.layout, self.tensors)
        load_into(self.tensors, tensors)
        self.engine.load_meta(meta["engine"])


def run_of(world_size: int, policy: str, degrees: dict[str, Any]) -> Run:
    engine = build(world_size, **POLICIES[policy], **degrees)
    model_ranks = math.prod(degrees.values())
    return Run(engine, world_size, model_ranks, RandomState())


def save_and_go_on(rank: int, world_size: int, folder: Path) -> dict[str, list[float]]:
    losses = {}
    for policy in POLICIES:
        run = run_of(world_size, policy, FIRST)
        run.train(range(SAVED))
        run.save(folder / policy, SAVED)
        if policy.startswith("zero 1, delayed"):
            run.engine._engine.save_checkpoint(str(folder / "deepspeed"), tag="saved")
        losses[policy] = run.train(range(SAVED, STEPS))
    return losses


def take_up(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str], list[float]]:
    losses = {}
    losses["zero 2", "DP2"] = shard_gradients(world_size, folder / "zero 2")
    # A process that has had stages can't build DeepSpeed's plain engine any more.
    for name, degrees in OTHERS.items():
        for policy in sorted(POLICIES, key=lambda policy: "tied" in policy):
            run = run_of(world_size, policy, degrees)
            run.load(folder / policy, SAVED)
            run.save(folder / policy / name, SAVED)
            losses[policy, name] = run.train(range(SAVED, STEPS - 1))
            run.save(folder / policy / name, STEPS - 1)
    losses["zero 2", "PP2"] = take_up_as_stages(world_size, folder / "zero 2")
    return losses


def shard_gradients(world_size: int, folder: Path) -> list[float]:
    """Losses of two replicas under ZeRO 2, with a checkpoint on the way."""
    run = Run(build(world_size, zero_stage=2), world_size, 1, RandomState())
    run.train(range(SAVED))
    run.save(folder, SAVED)
    return run.train(range(SAVED, STEPS))


def take_up_as_stages(world_size: int, folder: Path) -> list[float]:
    """Losses of two stages from that checkpoint."""
    run = Run(build(world_size, pipeline=2), world_size, 2, RandomState())
    run.load(folder, SAVED)
    return run.train(range(SAVED, STEPS))


def same(left: Tensor, right: Tensor) -> bool:
    """To the bit, NaN included."""
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


def return_to_four(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str], Any]:
    """What is not as it was after there and back without a step; the losses of going on."""
    found: dict[tuple[str, str], Any] = {}
    for policy in POLICIES:
        run = run_of(world_size, policy, FIRST)
        run.load(folder / policy, SAVED)
        before = {name: tensor.clone() for name, tensor in run.tensors.items()}
        meta = json.dumps(run.engine.meta())
        for name in OTHERS:
            for tensor in run.tensors.values():
                tensor.zero_()
            run.load(folder / policy / name, SAVED)
            differing = [n for n, t in run.tensors.items() if not same(t, before[n])]
            assert json.dumps(run.engine.meta()) == meta
            run.load(folder / policy / name, STEPS - 1)
            found[policy, name] = differing, run.train(range(STEPS - 1, STEPS))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, list[float]]:
    return run_ranks(save_and_go_on, 4, folder)[0]


@pytest.fixture(scope="module")
def taken_up(folder: Path, undisturbed: object) -> dict[tuple[str, str], list[float]]:
    return run_ranks(take_up, 2, folder)[0]


@pytest.fixture(scope="module")
def returned(folder: Path, taken_up: object) -> list[dict[tuple[str, str], Any]]:
    return run_ranks(return_to_four, 4, folder)


def far(found: list[float], expected: list[float]) -> float:
    """Largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("degrees", OTHERS)
def test_losses_go_on_as_on_the_first_degrees(
    undisturbed: dict[str, list[float]],
    taken_up: dict[tuple[str, str], list[float]],
    policy: str,
    degrees: str,
) -> None:
    expected = undisturbed[policy]
    assert far(taken_up[policy, degrees], expected[:-1]) < TOLERANCE
    assert abs(expected[1] / expected[0] - 1) > 2 * TOLERANCE, "a step would not be missed"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("degrees", OTHERS)
def test_there_and_back_is_the_same_state_to_the_bit_and_training_goes_on(
    undisturbed: dict[str, list[float]],
    returned: list[dict[tuple[str, str], Any]],
    policy: str,
    degrees: str,
) -> None:
    for rank, found in enumerate(returned):
        differing, losses = found[policy, degrees]
        gone = rank not in {"PP2": (0, 2), "DP2": (0, 1), "TP2": (0,)}[degrees]
        kept = {n for n in differing if not (gone and n.startswith("rng."))}
        # Error feedback is kept where the replicas stay as many.
        anew = {n for n in kept if n.startswith("exchange.") and degrees != "DP2"}
        assert kept == anew
        assert far(losses, undisturbed[policy][-1:]) < TOLERANCE


def test_sharded_gradients_become_stages(taken_up: dict[tuple[str, str], list[float]]) -> None:
    assert far(taken_up["zero 2", "PP2"], taken_up["zero 2", "DP2"]) < TOLERANCE


def one_rank_of(saved: SavedState) -> tuple[RankLayout, dict[str, Tensor]]:
    """The layout of a rank that has the whole model, and tensors of its shapes."""
    first = saved.header(0).layout
    headers = [saved.header(first.rank_at(pipe, 0, 0)) for pipe in range(first.degrees[0])]
    places: dict[str, Place] = {}
    at = 0
    for header in headers:
        for name, (_, place) in header.layout.places.items():
            if name not in places:
                shape = place.whole if len(place.shape) > 1 else place.shape
                places[name] = Place(name, shape, at)
                at += place.numel if place.cut is None else math.prod(shape)
    linears = tuple(linear for header in headers for linear in header.layout.linears)
    group = Group("all", tuple(places.values()), at)
    layout = RankLayout((1, 1, 1), (0, 0, 0), 4, (group,), linears)
    live = {f"all.{what}": torch.zeros(at) for what in MASTERS}
    live |= {"all.parameters": torch.zeros(at, dtype=torch.bfloat16), "all.step": torch.zeros(())}
    return layout, live


@pytest.mark.parametrize("degrees", ["first", "PP2", "TP2"])
def test_it_is_what_deepspeeds_universal_checkpoint_says_of_the_same_engine(
    folder: Path, taken_up: object, degrees: str
) -> None:
    """Converted by DeepSpeed once; ours by way of other degrees too."""
    from tests.ranks.universal import universal_state

    policy = "zero 1, delayed, error feedback"
    job = folder / policy if degrees == "first" else folder / policy / degrees
    path = next(c.path for c in list_checkpoints(job) if c.step == SAVED)
    with SavedState(path) as saved:
        layout, live = one_rank_of(saved)
        _, tensors = reshaped(saved, layout, live)
    theirs = universal_state(folder / "deepspeed", MODEL.num_layers)
    assert theirs.keys() == layout.places.keys()
    for name, states in theirs.items():
        _, place = layout.places[name]
        for what, state in states.items():
            ours = tensors[f"all.{what}"][place.start : place.start + place.numel]
            assert torch.equal(ours, state.flatten()), f"{name}: {what}"
    assert tensors["all.exp_avg_sq"].count_nonzero() > 0.9 * tensors["all.exp_avg_sq"].numel()
    masters = tensors["all.masters"].bfloat16()
    assert torch.equal(masters, tensors["all.parameters"])


def test_a_state_of_another_model_is_refused_by_the_parameter_that_differs(
    folder: Path, undisturbed: object
) -> None:
    path = list_checkpoints(folder / "zero 1 in buckets, block")[0].path
    with SavedState(path) as saved:
        layout, live = one_rank_of(saved)
    places = layout.groups[0].places
    wider = Place(places[1].name, (places[1].rows * 2, places[1].columns), 0)
    other = RankLayout((1, 1, 1), (0, 0, 0), 4, (Group("all", (wider,), wider.numel),), ())
    more = RankLayout(
        (1, 1, 1), (0, 0, 0), 4, (Group("all", (Place("layers.9.w", (2,), 0),), 2),), ()
    )
    for wrong, told in ((other, places[1].name), (more, "layers.9.w")):
        with pytest.raises(MismatchedSnapshotError, match=f"step {SAVED} in tier disk.*{told}"):
            state_on_disk(path, 0, SAVED, wrong, live)
