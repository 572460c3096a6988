"""Copies on partner nodes: where they go, whether they fit, and what the loss of a node leaves."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.digests import Payload, digest_of
from launch.keeper import Keeper, most_held
from launch.keeper_clients import ANSWER_S, REST_S, Partners
from launch.node_memory import free_bytes
from launch.replicas import (
    RankState,
    SnapshotMemoryError,
    memory_needed,
    most_in_rings,
    partners,
    refuse_too_large,
)
from launch.snapshots import SnapshotKey
from orchestrator.saved.restore import points_in_memory


def key(rank: int, step: int, attempt: int = 1, timeline: int = 0) -> SnapshotKey:
    return SnapshotKey("job", attempt, timeline, rank, step)


class TestPartners:
    @given(st.integers(1, 12), st.integers(0, 4))
    def test_are_other_nodes_and_every_node_has_as_many_as_it_serves(
        self, nodes: int, replicas: int
    ) -> None:
        chosen = [partners(place, nodes, replicas) for place in range(nodes)]
        for place, others in enumerate(chosen):
            assert place not in others and len(set(others)) == min(replicas, nodes - 1)
        served = [sum(place in others for others in chosen) for place in range(nodes)]
        assert set(served) == {min(replicas, nodes - 1)}


class Slow:
    """A partner whose keeper takes copies when the test says so."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.waiting: list[tuple[Future[Any], Any]] = []

    def send(self, key: SnapshotKey, payload: Payload, digest: str) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, (key, bytes(payload), digest)))
        return future

    def answer(self, error: Exception | None = None) -> None:
        future, put = self.waiting.pop(0)
        if error is not None:
            future.set_exception(error)
        else:
            self.keeper.put(*put, replicated=True)
            future.set_result(None)


class TestCopiesUnderWay:
    def offered(self, copies: Partners, step: int) -> list[str]:
        told: list[str] = []
        copies.offer(key(0, step), b"state", digest_of(b"state"), lambda why, _: told.append(why))
        return told

    def test_a_copy_is_told_once_it_is_held_and_not_before(self) -> None:
        partner, forgotten = Slow(Keeper()), []
        copies = Partners([partner], lambda: forgotten.append(True))
        told = self.offered(copies, 10)
        assert told == [] and copies.behind and forgotten == [True]
        partner.answer()
        assert told == [""] and not copies.behind
        assert [k.step for k in partner.keeper.keys("job")] == [10]

    def test_a_partner_that_refuses_is_told_once_and_tried_again_after_a_while(self) -> None:
        now = [0.0]
        partner = Slow(Keeper())
        copies = Partners([partner], clock=lambda: now[0])
        told = self.offered(copies, 10)
        partner.answer(ConnectionError("its node is gone"))
        assert told == ["ConnectionError: its node is gone"]
        assert self.offered(copies, 20) == [] and not partner.waiting and not copies.behind
        now[0] = REST_S + 1
        again = self.offered(copies, 30)
        partner.answer()
        assert again == [""]

    def test_one_that_does_not_answer_gets_nothing_more_and_holds_up_nobody(self) -> None:
        now = [0.0]
        partner = Slow(Keeper())
        copies = Partners([partner], clock=lambda: now[0])
        self.offered(copies, 10)
        assert copies.behind
        now[0] = ANSWER_S + 1
        assert not copies.behind, "the other ranks go on with their copies"
        (why,) = self.offered(copies, 20)
        assert "hasn't answered" in why and len(partner.waiting) == 1
        assert self.offered(copies, 25) == [], "told once"
        partner.answer()
        self.offered(copies, 30)
        assert len(partner.waiting) == 1


class Cluster:
    """Keepers and ranks of some nodes, one rank a node, with partners as slow as it happens."""

    def __init__(self, nodes: int, keep: int) -> None:
        self.keepers = [Keeper(keep) for _ in range(nodes)]
        self.links = [Slow(self.keepers[partners(n, nodes, 1)[0]]) for n in range(nodes)]
        self.copies = [Partners([link], clock=lambda: 0.0) for link in self.links]
        self.keep = keep
        self.on_partners = -1
        """Newest step that every partner holds."""

    def snapshot(self, step: int) -> None:
        """All ranks, as the loop does it: where one is behind, no rank sends a copy."""
        replicated = not any(copies.behind for copies in self.copies)
        digest = digest_of(b"state")
        for rank, keeper in enumerate(self.keepers):
            keeper.put(key(rank, step), b"state", digest, replicated=replicated)
            if replicated:
                self.copies[rank].offer(
                    key(rank, step), b"state", digest, lambda error, partner: None
                )
        if replicated:
            self.sent = step

    def arrive(self, rank: int) -> None:
        if self.links[rank].waiting:
            self.links[rank].answer()
        if not any(link.waiting for link in self.links):
            self.on_partners = self.sent

    def steps_without(self, lost: int) -> set[int]:
        keys = [k for n, kept in enumerate(self.keepers) if n != lost for k in kept.keys("job")]
        return {point.step for point in points_in_memory(keys, len(self.keepers))}


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 5), st.integers(2, 5), st.data())
def test_whatever_node_is_lost_the_newest_step_on_partners_can_be_restored(
    nodes: int, keep: int, data: st.DataObject
) -> None:
    cluster = Cluster(nodes, keep)
    cluster.snapshot(0)
    for rank in range(nodes):
        cluster.arrive(rank)
    step = 0
    arrivals = st.lists(st.integers(0, nodes - 1), max_size=4)
    for arrived in data.draw(st.lists(arrivals, max_size=25)):
        step += 10
        cluster.snapshot(step)
        for rank in arrived:
            cluster.arrive(rank)
        for lost in range(nodes):
            assert max(cluster.steps_without(lost)) >= cluster.on_partners
        for keeper in cluster.keepers:
            held = keeper.keys("job")
            for rank in {k.rank for k in held}:
                mine = [k for k in held if k.rank == rank]
                assert len(mine) <= most_held(keep)


def test_without_copies_on_partners_a_lost_node_leaves_nothing() -> None:
    cluster = Cluster(3, 4)
    for rank, keeper in enumerate(cluster.keepers):
        keeper.put(key(rank, 10), b"state", digest_of(b"state"))
    assert cluster.steps_without(-1) == {10}
    assert cluster.steps_without(1) == set()


class TestKeeper:
    def put(self, keeper: Keeper, at: SnapshotKey, replicated: bool = False) -> None:
        keeper.put(at, b"state", digest_of(b"state"), replicated=replicated)

    def test_the_newest_steps_on_partners_stay_while_newer_ones_come(self) -> None:
        keeper = Keeper(keep=3)
        for step in range(0, 100, 10):
            self.put(keeper, key(0, step), replicated=step in (10, 20))
        assert [k.step for k in keeper.keys("job")] == [10, 20, 90]

    def test_the_step_an_attempt_starts_from_stays_until_it_is_old(self) -> None:
        keeper = Keeper(keep=4)
        for step in (10, 20, 30):
            self.put(keeper, key(0, step))
        self.put(keeper, key(0, 20, attempt=2))
        assert [(k.attempt, k.step) for k in keeper.keys("job")] == [(1, 10), (1, 20), (2, 20)]

    def test_ranks_that_moved_away_are_forgotten(self) -> None:
        keeper = Keeper()
        for rank in range(4):
            self.put(keeper, key(rank, 10))
        assert keeper.inventory("job").total_nbytes == 20
        keeper.retain("job", {1, 2})
        assert [k.rank for k in keeper.keys("job")] == [1, 2]
        assert keeper.inventory("job").total_nbytes == 10


class TestMemory:
    STATES = (
        RankState(0, 100, 10_000),
        RankState(0, 100, 9_000),
        RankState(2, 300, 10_000),
        RankState(2, 300, 10_000),
    )

    def test_counts_ring_keeper_and_what_is_on_its_way(self) -> None:
        assert memory_needed(self.STATES, 0, keep=4, replicas=0) == 200 * (5 + 4 + 1)
        assert memory_needed(self.STATES, 0, keep=4, replicas=1) == 200 * 10 + 600 * 5
        assert memory_needed(self.STATES, 2, keep=2, replicas=1) == 600 * (3 + 3 + 1) + 200 * 4

    def test_what_fits_is_let_through(self) -> None:
        refuse_too_large(self.STATES, 4, 1)

    def test_what_does_not_fit_names_node_numbers_and_the_keys_that_help(self) -> None:
        tight = [replace(state, nbytes=state.nbytes * 10**7) for state in self.STATES]
        tight = [replace(state, room=52 * 10**9) for state in tight]
        with pytest.raises(SnapshotMemoryError) as refused:
            refuse_too_large(tight, 4, 1)
        assert "ranks 2-3" in str(refused.value)
        assert "takes 70 GB" in str(refused.value) and "52 GB are free" in str(refused.value)
        assert "write snapshots: {keep: 2} (50 GB)" in str(refused.value)

    def test_what_can_never_fit_says_what_else_would_help(self) -> None:
        tight = [replace(state, room=300) for state in self.STATES]
        with pytest.raises(SnapshotMemoryError, match=r"parallelism\.zero_stage"):
            refuse_too_large(tight, 4, 1)

    def test_ranks_of_a_job_that_has_trained_hold_fewer_rather_than_none(self) -> None:
        needed = {node: memory_needed(self.STATES, node, 4, 1) for node in (0, 2)}

        def most(missing: dict[int, int]) -> int:
            rooms = {node: needed[node] - missing.get(node, 0) for node in needed}
            return most_in_rings([replace(s, room=rooms[s.node]) for s in self.STATES], 4, 1)

        assert most({}) == 4
        assert most({0: 1}) == most({0: 200}) == 3
        assert most({0: 1, 2: 1200}) == most({2: 601}) == 2
        with pytest.raises(SnapshotMemoryError, match=r"snapshots\.keep: 4"):
            most({2: 1201})


class TestFreeMemory:
    def group(self, folder: Path, limit: str, used: int, cache: int) -> tuple[str, str, str]:
        files = {"max": limit, "current": str(used), "stat": f"anon 1\ninactive_file {cache}\n"}
        for name, text in files.items():
            (folder / name).write_text(text)
        return tuple(str(folder / name) for name in files)  # type: ignore[return-value]

    def test_a_containers_limit_counts_and_its_page_cache_is_free(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = self.group(tmp_path, "1000", 900, 300)
        monkeypatch.setattr("launch.node_memory._LIMITS", (limits,))
        assert free_bytes() == 100 + 300

    def test_no_limit_and_no_group_leave_the_machines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unlimited = self.group(tmp_path, "max", 900, 300)
        missing = (str(tmp_path / "none"),) * 3
        monkeypatch.setattr("launch.node_memory._LIMITS", (unlimited, missing))
        assert free_bytes() > 10**6
