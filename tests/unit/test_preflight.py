"""Preflight: what a node is found to be, what is made of it, whom a failing link is laid to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch import preflight_probes
from launch.preflight import (
    Answer,
    Demand,
    Failure,
    Limits,
    Link,
    Probe,
    Verdict,
    blame,
    clock_skew_s,
    judge,
    rounds,
)
from launch.preflight_probes import Meeting, probe_links, probe_node
from launch.rank_group import Seat
from orchestrator.node_slot import NodeSlot
from orchestrator.spec.completion import complete
from orchestrator.supervision.preflight_gate import PreflightGate, demand_of
from parallel.config import FP8Config
from parallel.precision.scope import PrecisionScope
from parallel.transformer import layer_plans
from tests.unit import scripted_job
from tests.unit.scripted_job import Make, ScriptedController

LIMITS = Limits(5.0, None)
DEMAND = Demand(2, 1000, 5000, "/jobs/a", False, False)
HEALTHY = Probe(100.0, 4242, 2000, 9000, 0, "cpu")


def found(demand: Demand = DEMAND, **changes: Any) -> Failure | None:
    probe = replace(HEALTHY, **changes)
    return judge(Answer(probe, 99.9, 100.1), demand, LIMITS)


def test_a_healthy_node_passes() -> None:
    assert found() is None


@pytest.mark.parametrize(
    ("changes", "for_this_job", "says"),
    [
        ({"device_error": "no driver"}, False, "device: no driver"),
        ({"matmul_error": "3 of 9"}, False, "matmul gave a wrong result: 3 of 9"),
        ({"cast_error": "1 is 0x39"}, False, "FP8 cast gave a wrong result"),
        ({"clock": 120.0}, False, "its clock is +19.9 s off the controller's"),
        ({"backend_error": "not installed"}, True, "Transformer Engine: not installed"),
        ({"folder_error": "Read-only file system"}, True, "/jobs/a can't be written: Read-only"),
        ({"disk_bytes": 4999}, True, "free for /jobs/a, and a checkpoint takes"),
        ({"memory_bytes": 999}, True, "of memory free"),
    ],
)
def test_a_fault_is_told_with_what_was_found_and_whether_other_jobs_may_run_there(
    changes: dict[str, Any], for_this_job: bool, says: str
) -> None:
    failure = found(**changes)
    assert failure is not None and says in failure.reason
    assert failure.for_this_job is for_this_job


def test_too_few_devices_are_this_jobs_trouble() -> None:
    failure = found(replace(DEMAND, on_gpu=True), devices=1)
    assert failure == Failure("1 devices for 2 ranks", True)


def test_half_a_round_trip_of_clock_skew_is_not_held_against_a_node() -> None:
    assert clock_skew_s(Answer(replace(HEALTHY, clock=108.0), 100.0, 110.0)) == 0.0
    assert clock_skew_s(Answer(replace(HEALTHY, clock=118.0), 100.0, 110.0)) == 8.0
    assert clock_skew_s(Answer(replace(HEALTHY, clock=92.0), 100.0, 110.0)) == -8.0


@given(st.integers(0, 32))
def test_every_two_nodes_meet_once_and_no_node_is_in_two_places(nodes: int) -> None:
    met = rounds(nodes)
    for pairs in met:
        places = [place for pair in pairs for place in pair]
        assert len(set(places)) == len(places)
    every = sorted(pair for pairs in met for pair in pairs)
    assert every == sorted(itertools.combinations(range(nodes), 2))


def links(
    nodes: int, broken: Collection[int], pairs: Collection[frozenset[int]] = ()
) -> list[Link]:
    told = []
    for pairs_of_round in rounds(nodes):
        for a, b in pairs_of_round:
            bad = not {a, b}.isdisjoint(broken) or frozenset((a, b)) in pairs
            for one, other in ((a, b), (b, a)):
                told.append(Link(one, other, 0.0 if bad else 900.0, "timed out" if bad else ""))
    return told


def test_the_node_whose_links_all_fail_is_named_and_not_its_peers() -> None:
    failures = blame(links(4, {2}), range(4), LIMITS)
    assert list(failures) == [2]
    assert failures[2] == Failure("3 of its 3 links failed: timed out", False)


def test_of_two_nodes_whose_link_fails_the_newcomer_is_named() -> None:
    assert list(blame(links(2, {0}), [0], LIMITS)) == [0]
    assert list(blame(links(2, {0}), [0, 1], LIMITS)) == [1]


def test_a_link_that_is_too_slow_fails_only_where_a_limit_is_set() -> None:
    slow = [Link(0, 1, 40.0), Link(1, 0, 41.0)]
    assert blame(slow, [0, 1], LIMITS) == {}
    (failure,) = blame(slow, [0, 1], replace(LIMITS, min_bandwidth_mbit_s=100)).values()
    assert "40 Mbit/s, and preflight.min_bandwidth_mbit_s is 100" in failure.reason


@given(nodes=st.integers(2, 9), data=st.data())
def test_what_is_left_has_only_links_that_work(nodes: int, data: st.DataObject) -> None:
    every = [frozenset(p) for p in itertools.combinations(range(nodes), 2)]
    bad = data.draw(st.sets(st.sampled_from(every)))
    named = blame(links(nodes, set(), bad), range(nodes), LIMITS)
    assert all(pair & named.keys() for pair in bad)
    assert bad or not named


def test_this_machine_computes_what_it_should(tmp_path: Path) -> None:
    probe = probe_node(Demand(1, 0, 0, str(tmp_path / "job"), False, False), "127.0.0.1")
    errors = (probe.device_error, probe.folder_error, probe.matmul_error, probe.cast_error)
    assert errors == ("", "", "", "")
    assert probe.memory_bytes > 0 and probe.disk_bytes > 0 and probe.port > 0


def test_a_wrong_product_and_a_wrong_cast_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    true_product = torch.Tensor.__matmul__

    def flipped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = true_product(left, right).clone()
        if out.is_floating_point():
            out[17, 5] += 1
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", flipped)
    assert preflight_probes._wrong_product("cpu") == "1 of 262144 elements in float32 on cpu"
    monkeypatch.setattr(preflight_probes, "KNOWN_CASTS", {"float8_e4m3fn": {1.0: 0x39}})
    assert preflight_probes._wrong_cast("cpu") == "1 to float8_e4m3fn is 0x38 on cpu, not 0x39"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    error, free = preflight_probes._folder(tmp_path / "file" / "job")
    assert (error, free) == ("Not a directory", 0)


def test_nodes_meet_in_pairs_over_gloo_and_one_that_does_not_come_is_told_by_its_peers() -> None:
    def meet(nodes: int, present: int, timeout_s: float) -> dict[int, list[Link]]:
        port = preflight_probes._free_port("127.0.0.1")
        told: dict[int, list[Link]] = {}

        def node(place: int) -> None:
            newcomers = tuple(range(nodes))
            told[place] = probe_links(
                Meeting("127.0.0.1", port, place, nodes, "127.0.0.1", timeout_s, False, newcomers)
            )

        threads = [threading.Thread(target=node, args=(place,)) for place in range(present)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told

    whole = meet(3, 3, 30.0)
    assert {len(links) for links in whole.values()} == {2}
    assert all(not link.error and link.mbit_s > 0 for links in whole.values() for link in links)
    short = [link for links in meet(3, 2, 2.0).values() for link in links]
    assert {(x.one, x.other) for x in short if x.error} == {(0, 2), (1, 2)}
    assert list(blame(short, range(3), LIMITS)) == [2]


class Asked:
    """Checks whose verdict a test gives."""

    def __init__(self) -> None:
        self.newcomers: list[set[str]] = []
        self.said: Verdict | None = None

    def begin(self, seats: list[Seat], newcomers: set[str], *_: object) -> Asked:
        self.newcomers.append(newcomers)
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
    asked.said = Verdict({"node2": Failure("its clock is off", False)}, 0.2, 2)
    look = gate.look(moved, 1.0)
    assert not look.passed and look.notice is not None
    assert look.notice.message == "Preflight failed on 10.0.0.2 (node2): its clock is off."
    assert look.notice.detail["failed"] == {
        "node2": {"reason": "its clock is off", "for_this_job": False}
    }
    assert asked.newcomers == [{"node0", "node1"}, {"node2"}]


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
    # It is no fault of the job's: no budget of its recovery is charged.
    assert told.actions == []
