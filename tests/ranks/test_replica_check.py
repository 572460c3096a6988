"""Two replicas that train: their parameters' sums are the same, until a bit of one flips."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monitoring.replicas import RankSums, compare
from parallel.engine import Engine
from parallel.replica_check import ReplicaCheck
from tests.ranks.engine_runs import LR, batches, build
from tests.ranks.launch_ranks import run_ranks


def told(rank: int, check: ReplicaCheck) -> RankSums:
    return RankSums(rank, check.replicas, check.names, check.sums().numpy().tobytes())


def flip(engine: Engine, name: str) -> str:
    """Flip the lowest bit of one value; the parameter's name for people."""
    check = engine.replica_check()
    (found,) = [i for i, known in enumerate(check.names) if known == name]
    parameter: Tensor = check._parameters[found]
    with torch.no_grad():
        parameter.view(torch.int16).view(-1)[parameter.numel() // 2] ^= 1
    return name


def training(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank would report of its parameters, at the points that the test names."""
    engine = build(world_size, zero_stage=1)
    check = engine.replica_check()
    at: dict[str, Any] = {"names": check.names, "start": told(rank, check)}
    for step in range(3):
        engine.train_step(batches(engine, world_size, 1, step), LR)
    at["trained"] = told(rank, check)
    for name in (check.names[0], check.names[-1]):
        if rank == 1:
            flip(engine, name)
        at[name] = told(rank, check)
    engine.train_step(batches(engine, world_size, 1, 3), LR)
    at["updated"] = told(rank, check)
    # A drill's outlier is in the master weights too, of whichever rank holds them.
    engine.faults.add_outlier("layers.1.mlp.down/weight", 1000.0)
    engine.train_step(batches(engine, world_size, 1, 4), LR)
    at["outlier"] = told(rank, check)
    (found,) = [i for i, name in enumerate(check.names) if name == "layers.1.mlp.down.weight"]
    at["largest"] = float(check._parameters[found].abs().max())
    engine.faults.flip_bit(check.names[found], replica=1, bit=6)
    at["flipped"] = told(rank, check)
    return at


def test_sums_are_the_same_on_replicas_until_a_bit_of_one_flips() -> None:
    ranks = run_ranks(training, 2)
    names = ranks[0]["names"]
    assert "layers.1.mlp.down.weight" in names and len(set(names)) == len(names)

    def compared(at: str) -> Any:
        found = compare(rank[at] for rank in ranks)
        assert found is not None
        return found.parameters, found.ranks

    assert compared("start") == compared("trained") == ((), ())
    assert ranks[0]["start"].sums != ranks[0]["trained"].sums
    assert compared(names[0]) == ((names[0],), (0, 1))
    assert compared(names[-1]) == ((names[0], names[-1]), (0, 1))
    # Parameters are made anew from the masters, so that nothing is left of the flips.
    assert compared("updated") == ((), ())
    # The layer's weights begin below 0.1, and what a drill made of one outlasts an update.
    assert compared("outlier") == ((), ())
    assert min(rank["largest"] for rank in ranks) > 20
    assert compared("flipped") == (("layers.1.mlp.down.weight",), (0, 1))


def test_any_bit_and_rows_that_changed_places_change_a_sum() -> None:
    (sums,) = run_ranks(local_sums, 1)
    base = sums.pop("base")
    assert all(not torch.equal(other[0], base[0]) for other in sums.values())
    assert all(torch.equal(other[1], base[1]) for other in sums.values())


def local_sums(rank: int, world_size: int) -> dict[str, Tensor]:
    """Sums of a matrix and a vector as they are, and after each change of the matrix."""
    matrix = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    vector = torch.randn(3, generator=torch.Generator().manual_seed(1))
    group = torch.distributed.group.WORLD
    assert group is not None
    check = ReplicaCheck([("matrix", matrix), ("vector", vector)], group)
    found = {"base": check.sums()}
    bits = matrix.view(torch.int16).view(-1)
    for bit in range(15):
        bits[11] ^= 1 << bit
        found[f"bit {bit}"] = check.sums()
        bits[11] ^= 1 << bit
    matrix.copy_(matrix[[1, 0, 2, 3, 4]].clone())
    found["rows"] = check.sums()
    return found
