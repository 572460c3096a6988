"""Preflight: what a node is found to be, what is made of it, whom a failing link is laid to."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch import preflight_probes, preflight_run
from launch.preflight import (
    SPEC_FILE,
    Answer,
    Demand,
    Failure,
    Limits,
    Link,
    Probe,
    Verdict,
    apart,
    blame,
    clock_skew_s,
    judge,
    rounds,
)
from launch.preflight_probes import Meeting, meet, probe_node
from launch.preflight_run import PreflightRun
from launch.rank_group import Seat
from orchestrator.instant import Instant

LIMITS = Limits(5.0, None)
DEMAND = Demand(2, 1000, 5000, "/jobs/a", False, False)
HEALTHY = Probe(100.0, 4242, 2000, 9000, 0, "cpu")


def found(demand: Demand = DEMAND, **changes: Any) -> Failure | None:
    probe = replace(HEALTHY, **changes)
    return judge(Answer(probe, 99.9, 100.1), demand, LIMITS)


def test_a_healthy_node_passes() -> None:
    assert found() is None


@pytest.mark.parametrize(
    ("check", "changes", "for_this_job", "says"),
    [
        ("device", {"device_error": "no driver"}, False, "device: no driver"),
        ("matmul", {"matmul_error": "3 of 9"}, False, "matmul gave a wrong result: 3 of 9"),
        ("cast", {"cast_error": "1 is 0x39"}, False, "FP8 cast gave a wrong result"),
        ("clock_ahead", {"clock": 120.0}, False, "its clock is +19.9 s off the controller's"),
        ("clock_behind", {"clock": 80.0}, False, "its clock is -19.9 s off the controller's"),
        ("engine", {"backend_error": "not installed"}, True, "Transformer Engine: not installed"),
        ("folder", {"folder_error": "Read-only"}, True, "/jobs/a can't be written: Read-only"),
        ("disk", {"disk_bytes": 4999}, True, "free for /jobs/a, and a checkpoint takes"),
        ("memory", {"memory_bytes": 999}, True, "of memory free"),
    ],
)
def test_a_fault_is_told_with_its_check_what_was_found_and_whether_other_jobs_may_run_there(
    check: str, changes: dict[str, Any], for_this_job: bool, says: str
) -> None:
    failure = found(**changes)
    assert failure is not None and says in failure.reason
    assert (failure.check, failure.for_this_job) == (check, for_this_job)
    assert Failure.from_json(asdict(failure)) == failure


def test_a_failure_of_an_older_octavo_or_of_a_later_ones_check_is_of_an_unknown_one() -> None:
    told = {"reason": "device: no driver", "for_this_job": False}
    assert Failure.from_json(told).check == "unknown"
    assert Failure.from_json({**told, "check": "tea"}).check == "unknown"


def test_a_node_that_joins_has_room_for_the_snapshots_beside_the_state() -> None:
    joining = replace(DEMAND, snapshot_bytes=500)
    failure = found(joining, host_bytes=1499)
    assert failure is not None and failure.for_this_job and "their snapshots take" in failure.reason
    assert failure.check == "snapshot_memory"
    assert found(joining, host_bytes=1500) is None
    on_gpu = replace(joining, on_gpu=True)
    assert found(on_gpu, devices=2, host_bytes=500) is None, "the state is on the devices"
    assert found(on_gpu, devices=2, host_bytes=499) is not None


def test_too_few_devices_are_this_jobs_trouble() -> None:
    failure = found(replace(DEMAND, on_gpu=True), devices=1)
    assert failure == Failure("1 devices for 2 ranks", True, "devices")


def test_half_a_round_trip_of_clock_skew_is_not_held_against_a_node() -> None:
    assert clock_skew_s(Answer(replace(HEALTHY, clock=108.0), 100.0, 110.0)) == 0.0
    assert clock_skew_s(Answer(replace(HEALTHY, clock=118.0), 100.0, 110.0)) == 8.0
    assert clock_skew_s(Answer(replace(HEALTHY, clock=92.0), 100.0, 110.0)) == -8.0


@pytest.mark.parametrize("by", [120.0, -3600.0, 3600.0])
def test_our_own_clock_that_is_set_meanwhile_is_not_held_against_a_node(by: float) -> None:
    asked, answered = Instant(1000.0, 0.0), Instant(1000.5 + by, 0.5)
    for right in (1000.25, 1000.25 + by):
        skew = clock_skew_s(Answer(replace(HEALTHY, clock=right), asked, answered))
        assert abs(skew) <= 0.25
    ahead = max(float(asked), float(answered)) + 9.0
    assert clock_skew_s(Answer(replace(HEALTHY, clock=ahead), asked, answered)) == 9.0


def test_what_a_probe_takes_hides_no_skew() -> None:
    slow = replace(HEALTHY, seconds=8.0)
    assert clock_skew_s(Answer(replace(slow, clock=107.0), 100.0, 108.0)) == 7.0
    assert clock_skew_s(Answer(replace(slow, clock=93.0), 100.0, 108.0)) == -7.0


@given(st.integers(0, 32))
def test_every_two_nodes_meet_once_and_no_node_is_in_two_places(nodes: int) -> None:
    met = rounds(nodes)
    for pairs in met:
        places = [place for pair in pairs for place in pair]
        assert len(set(places)) == len(places)
    every = sorted(pair for pairs in met for pair in pairs)
    assert every == sorted(itertools.combinations(range(nodes), 2))


@given(st.sets(st.sampled_from(list(itertools.combinations(range(7), 2)))), st.integers(1, 8))
def test_meetings_that_are_tried_again_put_no_node_in_two_places(
    pairs: set[tuple[int, int]], most: int
) -> None:
    met = apart(pairs, most)
    assert len(met) <= most
    for of_round in met:
        places = [place for pair in of_round for place in pair]
        assert len(set(places)) == len(places)
    tried = [pair for of_round in met for pair in of_round]
    assert len(set(tried)) == len(tried) and set(tried) <= pairs
    assert set(tried) == pairs or len(met) == most


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
    assert failures[2] == Failure("3 of its 3 links failed: timed out", False, "links")


def test_of_two_nodes_whose_link_fails_the_newcomer_is_named() -> None:
    assert list(blame(links(2, {0}), [0], LIMITS)) == [0]
    assert list(blame(links(2, {0}), [0, 1], LIMITS)) == [1]


def test_a_newcomer_some_of_whose_links_fail_is_named_and_not_those_that_have_worked() -> None:
    told = [Link(0, n, 900.0, "timed out" if n in (2, 3) else "") for n in range(1, 8)]
    assert list(blame(told, [0], LIMITS)) == [0]
    slow = [Link(0, n, 900.0 if n == 1 else 40.0) for n in range(1, 8)]
    assert list(blame(slow, [0], replace(LIMITS, min_bandwidth_mbit_s=100))) == [0]


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
    (tmp_path / SPEC_FILE).touch()
    probe = probe_node(Demand(1, 0, 0, str(tmp_path), False, False), "127.0.0.1")
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


def test_a_folder_in_which_the_controller_has_not_written_is_another_one(tmp_path: Path) -> None:
    error, free = preflight_probes._folder(tmp_path / "mount" / "job")
    assert "isn't there: is the shared storage mounted here?" in error and free == 0
    assert not (tmp_path / "mount").exists(), "made here it would be this node's alone"


def test_a_folder_that_never_answers_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(preflight_probes, "_folder", lambda folder: (str(waiting.wait()), 0))
    monkeypatch.setattr(preflight_probes, "FOLDER_S", 0.05)
    probe = probe_node(replace(DEMAND, folder=str(tmp_path)), "127.0.0.1")
    waiting.set()
    assert "has not answered for 0 s" in probe.folder_error
    failure = judge(Answer(probe, probe.clock, probe.clock), DEMAND, LIMITS)
    assert failure is not None and failure.for_this_job, "the machine may be whole"


class Nodes:
    """Workers in threads of this process, on loopback; what those in ``cut`` send is lost, those in
    ``frozen`` never answer."""

    def __init__(self, nodes: int, cut: Collection[int] = (), frozen: Collection[int] = ()) -> None:
        self.seats = [Seat(f"node{n}", "127.0.0.1", 1, f"keeper{n}") for n in range(nodes)]
        self._cut, self._frozen = set(cut), set(frozen)
        self.trouble: set[frozenset[int]] = set()
        """Pairs whose next meeting fails."""
        self.hang: frozenset[int] = frozenset()
        """The pair that never comes back from its meeting."""
        self._pool = ThreadPoolExecutor(2 * nodes)

    def workers(self) -> dict[str, Any]:
        return {s.node_id: self._worker(n) for n, s in enumerate(self.seats)}

    def _worker(self, number: int) -> Any:
        def ask(function: Any, *arguments: Any) -> Any:
            if function is meet and (
                number in self._frozen or frozenset(arguments[0].pair) == self.hang
            ):
                return SimpleNamespace(future=Future)
            if function is meet and (number in self._cut or self._troubled(arguments[0])):
                return self._asked(self._lost, *arguments)
            if function is probe_node:
                return self._asked(lambda *_: replace(HEALTHY, clock=0.0, port=_port()))
            return self._asked(function, *arguments)

        return SimpleNamespace(call=SimpleNamespace(remote=ask))

    def _asked(self, function: Any, *arguments: Any) -> Any:
        future = self._pool.submit(function, *arguments)
        return SimpleNamespace(future=lambda: future)

    def _troubled(self, meeting: Meeting) -> bool:
        pair = frozenset(meeting.pair)
        if pair not in self.trouble:
            return False
        if meeting.place == meeting.pair[1]:  # who is asked last
            self.trouble.remove(pair)
        return True

    def _lost(self, meeting: Meeting) -> Link:
        time.sleep(meeting.timeout_s)
        other = meeting.pair[1 - meeting.pair.index(meeting.place)]
        return Link(meeting.place, other, 0.0, "timed out")


def _port() -> int:
    return preflight_probes._free_port("127.0.0.1")


def preflight_of(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 30.0, **demand: Any
) -> Verdict:
    monkeypatch.setattr(preflight_run, "LINK_TIMEOUT_S", 1.0)
    monkeypatch.setattr(preflight_run, "MEETING_S", 6.0)
    monkeypatch.setattr(preflight_run, "_result", lambda asked: (asked.future().result(), ""))
    run = PreflightRun(
        nodes.seats,
        nodes.workers(),
        {seat.node_id for seat in nodes.seats},
        replace(DEMAND, **{"memory_bytes": 0, "disk_bytes": 0, **demand}),
        replace(LIMITS, max_clock_skew_s=1e12),
        now=time.monotonic(),
        timeout_s=timeout_s,
        clock=time.monotonic,
    )
    while (verdict := run.verdict(time.monotonic())) is None:
        time.sleep(0.01)
    return verdict


def test_whole_nodes_meet_each_other_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = preflight_of(Nodes(4), monkeypatch)
    assert not verdict.failed and verdict.nodes == 4
    assert verdict.slowest_mbit_s is not None and verdict.slowest_mbit_s > 0


def test_room_for_snapshots_is_asked_of_a_node_that_joins_and_not_of_one_that_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {"snapshot_bytes": 1 << 60, "holders": frozenset({"node0"})}
    (failed,) = preflight_of(Nodes(2), monkeypatch, **asked).failed.items()
    assert failed[0] == "node1" and "their snapshots take" in failed[1].reason


@pytest.mark.parametrize(
    ("nodes", "cut"), [(3, {0}), (3, {1}), (3, {2}), (6, {4}), (4, {0, 1}), (6, {1, 3})]
)
def test_of_nodes_that_meet_those_without_a_network_are_named_and_no_other(
    nodes: int, cut: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = preflight_of(Nodes(nodes, cut=cut), monkeypatch).failed
    assert failed.keys() == {f"node{place}" for place in cut}
    assert all("links failed" in failure.reason for failure in failed.values())


def test_a_link_that_fails_once_keeps_no_node_from_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = Nodes(4)
    nodes.trouble.add(frozenset((1, 3)))
    assert not preflight_of(nodes, monkeypatch).failed
    assert not nodes.trouble, "it did fail"


def test_a_frozen_node_is_named_and_the_others_meet_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = preflight_of(Nodes(4, frozen={1}), monkeypatch)
    assert list(verdict.failed) == ["node1"]
    assert verdict.failed["node1"].reason == "no answer for 6 s while its links were tried"
    assert verdict.slowest_mbit_s is not None


def test_two_that_hold_up_each_other_are_not_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(4)
    nodes.hang = frozenset((0, 3))  # the first pair
    verdict = preflight_of(nodes, monkeypatch)
    assert len(verdict.failed) == 1 and verdict.failed.keys() < {"node0", "node3"}
    (ends,) = verdict.far_ends.values()
    assert {*verdict.failed, *ends} == {"node0", "node3"}


def test_what_was_not_tried_for_want_of_time_is_not_held_against_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = preflight_of(Nodes(8, cut={2}), monkeypatch, timeout_s=0.5)
    assert list(told.failed) == ["node2"]
