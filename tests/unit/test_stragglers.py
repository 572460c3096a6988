"""Slow ranks: named when they persist, compared with those that do the same work."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from launch.commands import RankReport
from launch.step_part import merged, part_of
from monitoring.config import DetectionConfig
from monitoring.records import Incident
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.accusation import accused
from orchestrator.placement.docket import Dismissed, Docket
from orchestrator.placement.placement import NodeCapacity
from orchestrator.placement.quarantine import Quarantine
from orchestrator.spec.config import QuarantineConfig
from orchestrator.supervision.stragglers import Slow, Stragglers, incident_of, slow_nodes
from tests.unit.scripted_job import Make, Script, spec

STEPS = 20
LIMITS = DetectionConfig(slow_rank_steps=STEPS)
NODES = tuple(NodeSlot(f"node{n}", f"10.0.0.{n}", n, 2) for n in range(2))


def report(rank: int, step: int, seconds: float, step_s: float) -> RankReport:
    measured = {"time": 0.0, "batch": step, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 1}
    rest = {"skipped": False, "nonfinite_parameters": (), "nonfinite_loss": False, "comm": {}}
    names = {"stats": b"", "stats_names": (), "high_precision_layers": (), "drills": ()}
    where = {"attempt": 1, "timeline": 0, "rank": rank, "step": step, "command": 0}
    values = {**where, **measured, **rest, **names, "step_time_s": step_s, "compute_s": seconds}
    return RankReport(**values)  # type: ignore[arg-type]


def watched(
    seconds: Callable[[int, int], float],
    steps: int,
    *,
    world: int = 4,
    pipeline: int = 1,
    step_s: float = 1.0,
) -> list[tuple[int, tuple[Slow, ...]]]:
    """(step, slow ranks) whenever there was news. ``seconds``: of a rank in a step."""
    job = spec(parallelism={"pipeline": pipeline, "data": world // pipeline}, slots_per_node=world)
    watch = Stragglers(job, LIMITS, world)
    found = []
    for step in range(steps):
        parts = [part_of(report(rank, step, seconds(rank, step), step_s)) for rank in range(world)]
        news = watch.add(merged(parts))
        if news:
            found.append((step, news))
    return found


def test_ranks_that_are_alike_are_never_told_apart() -> None:
    jitter = random.Random(0)
    noisy = [[jitter.lognormvariate(-1.0, 0.3) for _ in range(4)] for _ in range(2000)]
    assert watched(lambda rank, step: noisy[step][rank], 2000) == []
    two = [row[:2] for row in noisy]
    assert watched(lambda rank, step: two[step][rank], 2000, world=2) == []


def test_a_slow_rank_is_told_once_it_has_been_slow_for_the_steps_looked_at() -> None:
    ((step, (slow,)),) = watched(lambda rank, step: 0.8 if rank == 2 else 0.4, 100)
    assert step == STEPS - 1 and slow.rank == 2
    assert slow.ratio == pytest.approx(2.0) and slow.seconds == 0.8 and slow.reference == 0.4
    assert (slow.steps, slow.of) == (STEPS, STEPS)


def test_of_two_ranks_the_slower_one_is_named() -> None:
    ((_, (slow,)),) = watched(lambda rank, step: 0.8 if rank == 1 else 0.4, 100, world=2)
    assert slow.rank == 1


def test_slow_steps_that_do_not_persist_are_none_of_it() -> None:
    assert watched(lambda rank, step: 0.8 if rank == 2 and step % 3 else 0.4, 200) == []


def test_a_rank_that_is_slow_again_is_told_again() -> None:
    slow = {*range(30), *range(80, 120)}
    told = watched(lambda rank, step: 0.8 if rank == 2 and step in slow else 0.4, 150)
    assert [step for step, _ in told] == [19, 80 + int(0.8 * STEPS) - 1]


def test_what_costs_the_step_nothing_is_left_alone() -> None:
    seconds = lambda rank, step: 0.008 if rank == 2 else 0.004  # noqa: E731
    assert watched(seconds, 100, step_s=0.5) == []
    assert watched(seconds, 100, step_s=0.01)


def test_stages_with_more_work_are_not_slow() -> None:
    seconds = lambda rank, step: 0.8 if rank >= 2 else 0.4  # noqa: E731
    assert watched(seconds, 100, pipeline=2) == []
    ((_, (slow,)),) = watched(
        lambda rank, step: seconds(rank, step) * (2.0 if rank == 3 else 1.0), 100, pipeline=2
    )
    assert slow.rank == 3 and slow.reference == 0.8


def test_a_stage_of_one_rank_is_compared_with_what_it_was() -> None:
    def seconds(rank: int, step: int) -> float:
        return (0.2 + 0.2 * rank) * (2.0 if rank == 1 and step >= 50 else 1.0)

    ((step, (slow,)),) = watched(seconds, 150, pipeline=4)
    assert slow.rank == 1 and 50 <= step < 50 + STEPS
    everywhere = watched(lambda rank, step: 0.2 if step < 50 else 0.5, 150, pipeline=4)
    assert everywhere == [], "longer sequences are no slow node"


SLOW = tuple(Slow(rank, 2.0, 0.8, 0.4, 19, 20) for rank in (2, 3))


def incident() -> Incident:
    return incident_of(SLOW, NODES, part_of(report(3, 40, 0.8, 1.0)), 5.0)


def test_the_incident_names_ranks_node_numbers_and_steps() -> None:
    found = incident()
    assert found.ranks == (2, 3) and found.onset_step == 21
    assert found.message == (
        "Ranks 2, 3 on 10.0.0.1 are slow: 0.8 s a step outside of communication, 2.0 times the "
        "0.4 s of its peers, in 19 of the last 20 steps."
    )


def test_a_node_is_slow_when_most_of_its_ranks_are() -> None:
    assert slow_nodes(SLOW, NODES) == ("node1",)
    assert slow_nodes(SLOW[:1], NODES) == ()
    both = (*SLOW, *(replace(one, rank=one.rank - 2) for one in SLOW))
    assert slow_nodes(both, NODES) == (), "nobody is left to be faster"


def test_a_slow_node_that_is_to_be_replaced_is_quarantined_where_there_is_another() -> None:
    (case,) = accused([incident()], NODES, (), {}, "job")
    assert (case.node_id, case.kind) == ("node1", "slow")
    config = QuarantineConfig()
    nodes = [NodeCapacity(seat.node_id, {}, {}) for seat in reversed(NODES)]
    found = Docket("job", [case], [], nodes, config, now=5.0).judge(case)
    assert isinstance(found, Quarantine) and found.until == 5.0 + config.slow_s
    alone = Docket("job", [case], [], nodes[:1], config, now=5.0)
    assert isinstance(alone.judge(case), Dismissed)


class TestSupervision:
    SLOW = Script(compute=lambda rank, step: 0.08 if rank == 1 and step >= 5 else 0.04)

    def test_a_slow_rank_is_an_event_and_training_goes_on(self, bench: Make) -> None:
        job = bench(self.SLOW, detection={"slow_rank_steps": 10})
        job.train(40)
        assert job.settled().kinds() == [] and len(job.ranks.attempts) == 1
        detail = job.controller.event("slow_rank").detail
        assert detail["ranks"] == [1] and detail["ratio"] == pytest.approx(2.0)
        assert [e.kind for e in job.controller.events].count("slow_rank") == 1

    def test_its_node_is_replaced_once_where_the_spec_says_so(self, bench: Make) -> None:
        job = bench(
            self.SLOW,
            detection={"slow_rank_steps": 10},
            recovery={"replace_slow_nodes": True},
            num_nodes=2,
            slots_per_node=1,
        )
        job.train(80)
        assert job.settled().kinds() == ["restart"], "once: it is as slow after it"
        (action,) = job.controller.actions
        assert action.incidents[0].kind == "slow_rank" and action.incidents[0].ranks == (1,)
        assert [e.kind for e in job.controller.events].count("slow_rank") == 2
