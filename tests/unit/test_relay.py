"""Reports that pass relays reach the supervisor once, in order, and as the same record."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.commands import RankReport, Report, SnapshotReport
from launch.delivery import REST_S, Delivery
from launch.relay import NotOurAttemptError, Relay
from launch.report_tree import Junction, junctions
from launch.step_part import Sent, StepPart
from orchestrator.supervision.record_merger import RecordMerger, merge_reports, record_of
from tests.unit.test_step_part import plain

STEPS = 4


def copy(rank: int, step: int) -> SnapshotReport:
    return SnapshotReport(1, 0, rank, step, "ring", 10, "d")


class Top:
    """A supervisor; ``refuses``: calls that are not received, each once."""

    def __init__(self, world: int, refuses: Sequence[int] = ()) -> None:
        self.merger = RecordMerger(1, 0, world)
        self.calls: list[list[Sent]] = []
        self.whole: list[StepPart] = []
        self._refuses = set(refuses)
        self._number = 0

    async def report(self, sent: Sequence[Sent]) -> None:
        self._number += 1
        await asyncio.sleep(0)
        if self._number in self._refuses:
            raise ConnectionError("out of reach")
        self.calls.append(list(sent))
        for one in sent:
            if isinstance(one, RankReport | StepPart):
                found = self.merger.add(one)
                if found is not None:
                    self.whole.append(found)

    def arrived(self) -> list[Sent]:
        return [one for call in self.calls for one in call]


async def tree(top: Top, ranks: Sequence[int], fan_in: int) -> list[Relay]:
    """The relays of nodes with so many ranks, up to ``top``."""
    places = junctions(ranks, fan_in)
    relays = [Relay(linger_s=0.02, begin_s=0.02) for _ in places]
    for place, relay in zip(places, relays, strict=True):
        if place.above is None:
            await relay.begin(1, place.ranks, top.report)
        else:
            above = relays[place.above]
            await relay.begin(1, place.ranks, lambda sent, above=above: above.take(1, sent))
    return relays[: len(ranks)]


async def one_rank(
    rank: int, relay: Relay, top: Top, of_all: dict[tuple[int, int], RankReport], seed: int
) -> None:
    """As ``launch.reporter`` and ``launch.delivery`` send: what follows within a while in one
    batch, in order, the next one when this has arrived; straight to the top what fails."""
    chance = random.Random(seed)
    waiting: list[Report] = []
    for step in range(STEPS):
        waiting += [of_all[rank, step], copy(rank, step)]
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.4 and step < STEPS - 1:
            continue
        batch, waiting = waiting, []
        try:
            await relay.take(1, batch)
        except ConnectionError:
            while True:
                try:
                    await top.report(batch)
                    break
                except ConnectionError:
                    continue


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=9),
    st.integers(2, 4),
    st.lists(st.integers(1, 12), max_size=3),
    st.integers(0, 2**20),
)
def test_every_step_of_every_rank_arrives_in_order_whatever_is_refused_on_the_way(
    nodes: list[int], fan_in: int, refuses: list[int], seed: int
) -> None:
    world = sum(nodes)
    chance = random.Random(seed)
    of_all = {
        (rank, step): plain(rank, step, loss=chance.random(), compute_s=chance.random())
        for rank in range(world)
        for step in range(STEPS)
    }
    top = Top(world, refuses)

    async def train() -> None:
        relays = await tree(top, nodes, fan_in)
        seated = [relay for relay, count in zip(relays, nodes, strict=True) for _ in range(count)]
        tasks = [one_rank(r, relay, top, of_all, seed + r) for r, relay in enumerate(seated)]
        await asyncio.wait_for(asyncio.gather(*tasks), 30)

    asyncio.run(train())
    expected = [merge_reports([of_all[r, s] for r in range(world)]) for s in range(STEPS)]
    if not refuses:
        found = [json.dumps(record_of(part).to_json()) for part in top.whole]
        assert found == [json.dumps(record.to_json()) for record in expected]
    arrived = top.arrived()
    for rank in range(world):
        mine = [
            (one.step, isinstance(one, SnapshotReport))
            for one in arrived
            if (rank in one.ranks if isinstance(one, StepPart) else one.rank == rank)
        ]
        assert {(s, kind) for s in range(STEPS) for kind in (False, True)} <= set(mine)
        if not refuses:
            assert mine == sorted(mine), "in the order in which the rank told it, once"


def test_of_ranks_on_time_the_supervisor_hears_once_a_step() -> None:
    top = Top(8)

    async def train() -> None:
        first, second = await tree(top, [4, 4], 32)
        relays = [first] * 4 + [second] * 4
        for step in range(3):
            sent = [relay.take(1, [plain(rank, step)]) for rank, relay in enumerate(relays)]
            await asyncio.gather(*sent)

    asyncio.run(train())
    assert [len(part.ranks) for part in top.arrived() if isinstance(part, StepPart)] == [4] * 6
    assert [part.step for part in top.whole] == [0, 1, 2]


def test_a_rank_that_is_late_holds_up_the_others_no_longer_than_they_linger() -> None:
    top = Top(3)

    async def train() -> None:
        (relay,) = await tree(top, [3], 32)
        await asyncio.gather(*(relay.take(1, [plain(rank, 0)]) for rank in (0, 2)))
        assert top.merger.waiting_for() == (1,)
        await relay.take(1, [plain(1, 0)])

    asyncio.run(train())
    assert [part.ranks.tolist() for part in top.whole] == [[0, 1, 2]]


def test_the_rest_of_a_step_goes_before_a_later_one_that_is_whole() -> None:
    top = Top(3)

    async def train() -> None:
        (relay,) = await tree(top, [3], 32)
        await asyncio.gather(*(relay.take(1, [plain(rank, 0)]) for rank in (0, 1)))
        late = relay.take(1, [plain(2, 0), plain(2, 1)])
        await asyncio.gather(late, *(relay.take(1, [plain(rank, 1)]) for rank in (0, 1)))

    asyncio.run(train())
    assert [part.step for part in top.whole] == [0, 1]


def test_what_is_sent_again_is_not_counted_twice() -> None:
    top = Top(2)

    async def train() -> None:
        (relay,) = await tree(top, [2], 32)
        again = [relay.take(1, [plain(0, 0)]) for _ in range(2)]
        await asyncio.gather(*again, relay.take(1, [plain(1, 0)]))

    asyncio.run(train())
    assert [part.ranks.tolist() for part in top.whole] == [[0, 1]]


def test_reports_of_another_attempt_are_refused_and_those_of_a_new_one_wait_for_its_beginning() -> (
    None
):
    top = Top(1)

    async def train() -> None:
        (relay,) = await tree(top, [1], 32)
        with pytest.raises(NotOurAttemptError, match="nothing was told of attempt 3"):
            await relay.take(3, [plain(0, 0)])
        early = asyncio.ensure_future(relay.take(2, [plain(0, 0, attempt=2)]))
        await asyncio.sleep(0)
        top.merger = RecordMerger(2, 0, 1)
        await relay.begin(2, 1, top.report)
        await early
        with pytest.raises(NotOurAttemptError, match="attempt 2 has begun"):
            await relay.take(1, [plain(0, 1)])

    asyncio.run(train())
    assert [part.attempt for part in top.whole] == [2]


def test_who_waits_in_an_attempt_that_is_over_is_told_so() -> None:
    async def train() -> None:
        (relay,) = await tree(Top(2), [2], 32)
        sent = asyncio.ensure_future(relay.take(1, [plain(0, 0)]))
        await asyncio.sleep(0)
        await relay.begin(2, 2, Top(2).report)
        with pytest.raises(NotOurAttemptError):
            await sent

    asyncio.run(train())


class TestJunctions:
    def test_up_to_so_many_nodes_report_to_the_supervisor(self) -> None:
        assert junctions([8, 8, 4]) == [Junction(0, i, None, n) for i, n in enumerate([8, 8, 4])]

    @given(st.lists(st.integers(1, 8), min_size=1, max_size=400), st.integers(2, 32))
    def test_every_rank_passes_one_place_a_level_and_no_place_hears_too_many(
        self, ranks: list[int], fan_in: int
    ) -> None:
        places = junctions(ranks, fan_in)
        assert [(p.node, p.ranks) for p in places if p.level == 0] == list(enumerate(ranks))
        heard: dict[int | None, list[int]] = {}
        for number, place in enumerate(places):
            assert place.above is None or place.above > number
            heard.setdefault(place.above, []).append(number)
        for above, below in heard.items():
            assert len(below) <= fan_in
            total = sum(places[number].ranks for number in below)
            assert total == (sum(ranks) if above is None else places[above].ranks)
            if above is not None:
                assert {places[n].level for n in below} == {places[above].level - 1}
        assert len({(place.level, place.node) for place in places}) == len(places)


class TestDelivery:
    def test_what_a_relay_does_not_take_goes_straight_up_and_it_is_left_alone_for_a_while(
        self,
    ) -> None:
        ways: list[str] = []
        now = 100.0

        def relayed(batch: Sequence[Report]) -> None:
            ways.append("relay")
            if now < 110:
                raise TimeoutError("it hangs")

        deliver = Delivery(lambda batch: ways.append("direct"), relayed, lambda: now)
        deliver([plain(0)])
        deliver([plain(0)])
        assert ways == ["relay", "direct", "direct"]
        now += REST_S
        deliver([plain(0)])
        assert ways[3:] == ["relay"]

    def test_when_neither_way_is_open_the_batch_is_the_reporters_still(self) -> None:
        def closed(batch: Sequence[Report]) -> None:
            raise ConnectionError("out of reach")

        with pytest.raises(ConnectionError):
            Delivery(closed, closed)([plain(0)])
