"""Whether an attempt's nodes may be trained on: who is checked, when, and for what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.preflight import (
    Demand,
    Failure,
    Verdict,
)
from launch.rank_group import Seat
from orchestrator.node_slot import NodeSlot
from orchestrator.planning.memory import job_memory
from orchestrator.recovery.restart_budget import restarts_within
from orchestrator.spec.completion import complete
from orchestrator.supervision.preflight_gate import PreflightGate, demand_of
from parallel.config import FP8Config
from parallel.precision.scope import PrecisionScope
from parallel.transformer import layer_plans
from tests.unit import scripted_job
from tests.unit.scripted_job import Make, ScriptedController


class Asked:
    """Checks whose verdict a test gives."""

    def __init__(self) -> None:
        self.newcomers: list[set[str]] = []
        self.demands: list[Demand] = []
        self.said: Verdict | None = None

    def begin(self, seats: list[Seat], newcomers: set[str], demand: Demand, *_: object) -> Asked:
        self.newcomers.append(newcomers)
        self.demands.append(demand)
        return self

    def verdict(self, now: float) -> Verdict | None:
        return self.said


def test_each_node_is_checked_once_and_a_failing_one_is_named(tmp_path: Path) -> None:
    spec = complete(scripted_job.spec())
    nodes = tuple(NodeSlot(f"node{i}", f"10.0.0.{i}", i, 1) for i in range(3))
    first = replace(ScriptedController(spec, tmp_path).resume(), nodes=nodes[:2])
    asked = Asked()
    gate = PreflightGate(spec, asked.begin)  # type: ignore[arg-type]
    assert not gate.look(first, 0.0).passed
    asked.said = Verdict({}, 0.3, 2, 940.0, "cpu")
    look = gate.look(first, 0.3)
    assert look.passed and look.notice is not None
    assert look.notice.message == (
        "Preflight passed on 2 nodes in 0.3 s (cpu, slowest link 940 Mbit/s)."
    )
    assert gate.look(first, 0.4).notice is None
    moved = replace(first, attempt=2, nodes=(nodes[0], nodes[2]))
    off = Failure("its clock is off", False, "clock_ahead")
    asked.said = Verdict({"node2": off}, 0.2, 2)
    assert not asked.demands[0].snapshot_bytes
    look = gate.look(moved, 1.0)
    assert asked.demands[1].snapshot_bytes, "what joins a job holds no copies yet"
    assert not look.passed and look.notice is not None
    assert look.notice.message == "Preflight failed on 10.0.0.2 (node2): its clock is off."
    assert look.notice.detail["failed"] == {
        "node2": {"reason": "its clock is off", "for_this_job": False, "check": "clock_ahead"}
    }
    assert asked.newcomers == [{"node0", "node1"}, {"node2"}]


def test_nodes_that_have_passed_are_checked_once_more_when_their_ranks_did_not_meet(
    tmp_path: Path,
) -> None:
    spec = complete(scripted_job.spec())
    nodes = tuple(NodeSlot(f"node{i}", f"10.0.0.{i}", i, 1) for i in range(2))
    first = replace(ScriptedController(spec, tmp_path).resume(), nodes=nodes)
    asked = Asked()
    asked.said = Verdict({}, 0.3, 2)
    gate = PreflightGate(spec, asked.begin)  # type: ignore[arg-type]
    assert gate.look(first, 0.0).passed and gate.look(replace(first, attempt=2), 1.0).passed
    assert len(asked.newcomers) == 1
    gate.look_again()
    for attempt in (3, 4):
        assert gate.look(replace(first, attempt=attempt), 2.0).passed
    assert asked.newcomers == [{"node0", "node1"}] * 2
    again = asked.demands[1]
    assert not any(again.of(node).snapshot_bytes for node in ("node0", "node1")), (
        "they hold the job's copies already"
    )


def test_what_joins_a_job_has_room_for_its_snapshots_also_after_ranks_did_not_meet(
    tmp_path: Path,
) -> None:
    spec = complete(scripted_job.spec())
    nodes = tuple(NodeSlot(f"node{i}", f"10.0.0.{i}", i, 1) for i in range(3))
    first = replace(ScriptedController(spec, tmp_path).resume(), nodes=nodes[:2])
    asked = Asked()
    asked.said = Verdict({}, 0.3, 2)
    gate = PreflightGate(spec, asked.begin)  # type: ignore[arg-type]
    assert gate.look(first, 0.0).passed
    gate.look_again()
    assert gate.look(replace(first, attempt=2, nodes=(nodes[0], nodes[2])), 1.0).passed
    assert asked.newcomers[1] == {"node0", "node2"}
    demand = asked.demands[1]
    assert demand.of("node2").snapshot_bytes == job_memory(spec).host_least > 0
    assert demand.of("node0").snapshot_bytes == 0, "it holds the job's copies already"


def test_a_node_that_comes_back_to_its_job_is_checked_again(tmp_path: Path) -> None:
    spec = complete(scripted_job.spec())
    home, away, stand_in = (NodeSlot(f"node{i}", f"10.0.0.{i}", i, 1) for i in range(3))
    first = replace(ScriptedController(spec, tmp_path).resume(), nodes=(home, away))
    asked = Asked()
    asked.said = Verdict({}, 0.3, 2)
    gate = PreflightGate(spec, asked.begin)  # type: ignore[arg-type]
    for attempt, nodes in enumerate(((home, away), (home, stand_in), (home, away)), 1):
        gate.keep_to(nodes)
        assert gate.look(replace(first, attempt=attempt, nodes=nodes), float(attempt)).passed
    assert asked.newcomers == [{"node0", "node1"}, {"node2"}, {"node1"}]


def test_a_node_that_was_away_in_an_attempt_that_never_got_ready_is_checked_again(
    tmp_path: Path,
) -> None:
    spec = complete(scripted_job.spec())
    home, away, stand_in = (NodeSlot(f"node{i}", f"10.0.0.{i}", i, 1) for i in range(3))
    first = replace(ScriptedController(spec, tmp_path).resume(), nodes=(home, away))
    asked = Asked()
    asked.said = Verdict({}, 0.3, 2)
    gate = PreflightGate(spec, asked.begin)  # type: ignore[arg-type]
    assert gate.look(first, 0.0).passed
    gate.keep_to((home, stand_in))  # whose workers never come to be looked at
    gate.keep_to((home, away))
    assert gate.look(replace(first, attempt=3), 3.0).passed
    assert asked.newcomers == [{"node0", "node1"}, {"node1"}]


def test_a_job_that_has_trained_goes_on_though_its_disk_is_full(tmp_path: Path) -> None:
    spec = complete(scripted_job.spec())
    first = ScriptedController(spec, tmp_path).resume()
    asked = Asked()
    asked.said = Verdict({}, 0.3, 1)
    for recorded in (-1, 23):
        gate = PreflightGate(spec, asked.begin)  # type: ignore[arg-type]
        assert gate.look(replace(first, step=recorded), 0.0).passed
    begins, goes_on = asked.demands
    assert begins.disk_bytes > 0 == goes_on.disk_bytes
    assert goes_on.memory_bytes == begins.memory_bytes


def test_without_preflight_nobody_is_asked(tmp_path: Path) -> None:
    spec = complete(scripted_job.spec(preflight={"enabled": False}))
    asked = Asked()
    gate = PreflightGate(spec, asked.begin)  # type: ignore[arg-type]
    assert gate.look(ScriptedController(spec, tmp_path).resume(), 0.0).passed
    assert not asked.newcomers


def test_a_models_demand_is_its_state_and_what_its_ranks_write(tmp_path: Path) -> None:
    spec = complete(scripted_job.spec(precision="bf16", parallelism={"zero_stage": 1}))
    data = spec.parallelism.data
    assert data == 2
    layers = spec.model.num_layers
    scope = PrecisionScope("bf16", FP8Config(), num_layers=layers, device="meta", compiled=False)
    with torch.device("meta"):
        modules = [p.build() for p in layer_plans(spec.model, seq_len=8, seed=0, scope=scope)]
    count = sum(p.numel() for module in modules for p in module.parameters())
    demand = demand_of(spec, "/jobs/a")
    assert (demand.ranks, demand.folder) == (2, "/jobs/a")
    # Weights and gradients of each replica, masters and moments of both together.
    assert demand.memory_bytes == pytest.approx((2 + 6) * data * count + 12 * count, rel=1e-6)
    assert demand.disk_bytes == pytest.approx(2 * data * count + 12 * count, rel=1e-6)
    assert demand.snapshot_bytes == 0, "the ranks of the first attempt say what to change"
    joins = demand_of(spec, "/jobs/a", frozenset({"node0"})).snapshot_bytes
    # Of each rank ``keep`` + 1 in its ring, and ``keep`` with the keeper, and one on its way.
    assert joins == pytest.approx((2 * spec.snapshots.keep + 2) * demand.disk_bytes, rel=1e-6)


def test_ranks_start_once_their_nodes_have_passed_and_others_are_asked_for_where_not(
    bench: Make,
) -> None:
    job = bench()
    asked = Asked()
    job.supervision._starter._gate = PreflightGate(complete(scripted_job.spec()), asked.begin)  # type: ignore[arg-type]
    job.step()
    job.step()
    assert not job.ranks.running and job.controller.attempt == 1
    (node,) = job.controller.resume().nodes
    asked.said = Verdict({node.node_id: Failure("its clock is off", False)}, 0.2, 1)
    job.step()
    assert not job.ranks.running and job.controller.attempt == 2
    asked.said = Verdict({}, 0.2, 1)
    job.train(2)
    told = job.settled()
    kinds = [event.kind for event in told.events]
    assert kinds.index("preflight_failed") < kinds.index("preflight") < kinds.index("training")
    # It is no fault of the job's: its restarts are not charged for it.
    (action,) = told.actions
    assert action.kind == "restart"
    assert restarts_within(job.supervision.attempt.facts.history(job.now, ()), 1000) == 0


def test_a_job_whose_attempts_all_end_in_preflight_ends_with_the_reason(bench: Make) -> None:
    job = bench(recovery={"max_restarts": 0, "max_attempts_without_progress": 2})
    asked = Asked()
    job.supervision._starter._gate = PreflightGate(complete(scripted_job.spec()), asked.begin)  # type: ignore[arg-type]
    (node,) = job.controller.resume().nodes
    asked.said = Verdict({node.node_id: Failure("its clock is off", False)}, 0.2, 1)
    job.step()
    job.step()
    told = job.settled()
    assert told.kinds() == ["restart", "pause"] and told.attempt == 2
    assert told.states[-1] == ("paused", "BUDGET_SPENT")
    assert told.event("ended").message == (
        "Paused for a person, 2 attempts in a row ended without a new step "
        "(recovery.max_attempts_without_progress = 2): Preflight failed on 127.0.0.1 "
        "(00000000): its clock is off."
    )
