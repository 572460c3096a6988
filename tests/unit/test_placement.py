"""Which nodes a job gets, and which stand in for those it lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.node_slot import NodeSlot
from orchestrator.placement.placement import (
    Barred,
    Mended,
    Need,
    NodeCapacity,
    Short,
    fill,
    fit,
    mend,
    place,
    wish,
)

NEED = Need(2, 4, "CPU")
OUT = Barred("replicas differed")


def node(number: int, free: float = 4, total: float = 4, **changes: Any) -> NodeCapacity:
    resources = {"CPU": float(total)}
    base = NodeCapacity(f"n{number}", resources, {"CPU": float(free)}, f"10.0.0.{number}")
    return replace(base, **changes)


def held(*numbers: int, spares: int = 0) -> tuple[NodeSlot, ...]:
    """Seats on these nodes in order, the last ``spares`` of them spares."""
    last = len(numbers) - spares
    return tuple(
        NodeSlot(f"n{number}", f"10.0.0.{number}", bundle, 4, bundle >= last)
        for bundle, number in enumerate(numbers)
    )


def where(seats: Any) -> list[str]:
    return [seat.node_id for seat in seats]


def test_ranks_fill_nodes_in_the_order_of_addresses_as_numbers() -> None:
    seats = place(replace(NEED, nodes=3), [node(10), node(9), node(2)])
    assert seats is not None and where(seats) == ["n2", "n9", "n10"]


def test_the_tightest_nodes_are_taken_and_gpus_are_left_to_those_who_need_them() -> None:
    with_gpu = node(1, total=4)
    with_gpu = replace(with_gpu, total={"CPU": 4.0, "GPU": 8.0})
    seats = place(NEED, [with_gpu, node(2, free=64, total=64), node(3), node(4)])
    assert seats is not None and where(seats) == ["n3", "n4"]


def test_spares_are_taken_where_they_are_free_and_hold_up_nobody() -> None:
    need = replace(NEED, spares=2)
    seats = place(need, [node(1), node(2), node(3)])
    assert seats is not None
    assert [(s.node_id, s.bundle, s.spare) for s in seats] == [
        ("n1", 0, False),
        ("n2", 1, False),
        ("n3", 2, True),
    ]
    assert place(need, [node(1)]) is None


def test_a_node_left_out_is_named_with_why_and_is_no_reason_to_give_up() -> None:
    nodes = [node(1), node(2)]
    answer = fit(NEED, nodes, {"n2": OUT})
    assert (answer.now, answer.ever, answer.once_free) == (False, True, False)
    assert answer.reason == (
        "needs 2 nodes with 4 CPU slots; 1 of 2 such can be used; "
        "left out: 10.0.0.2 (n2) (replicas differed)"
    )
    assert place(NEED, nodes, {"n2"}) is None


def test_ranks_of_a_lost_node_move_to_the_spare_and_the_others_stay() -> None:
    group = held(1, 2, 3, spares=1)
    plan = mend(group, NEED, [node(1, 0), node(3, 0), node(4)], lost={1})
    assert isinstance(plan, Mended)
    assert where(plan.nodes) == ["n1", "n3"] and not any(s.spare for s in plan.nodes)
    assert plan.taken == () and where(plan.dropped) == ["n2"]
    # Rank order: the spare has the lost node's place.
    first = mend(group, NEED, [node(2, 0), node(3, 0)], lost={0})
    assert isinstance(first, Mended) and where(first.nodes) == ["n3", "n2"]


def test_without_spares_another_node_is_taken_under_a_number_never_used() -> None:
    plan = mend(held(1, 2), NEED, [node(1, 0), node(3)], lost={1})
    assert isinstance(plan, Mended)
    assert [(s.node_id, s.bundle) for s in plan.taken] == [("n3", 2)]
    assert where(plan.nodes) == ["n1", "n3"]


def test_what_is_short_is_told_in_numbers() -> None:
    plan = mend(held(1, 2), NEED, [node(1, 0), node(3, 2)], lost={1})
    assert isinstance(plan, Short) and plan.missing == 1
    assert plan.reason == (
        "needs 1 other node with 4 CPU slots in place of what it lost; free now: 2 CPU slots"
    )


def test_a_quarantined_node_is_left_where_another_is_free_and_else_used_on_or_waited_for() -> None:
    nodes = [node(1, 0), node(2, 0)]
    barred = {"n2": OUT}
    moved = mend(held(1, 2), NEED, [*nodes, node(3)], barred=barred)
    assert isinstance(moved, Mended) and where(moved.nodes) == ["n1", "n3"]
    stays = mend(held(1, 2), NEED, nodes, barred=barred)
    assert isinstance(stays, Mended)
    assert (stays.nodes, where(stays.stayed)) == (held(1, 2), ["n2"])
    waits = mend(held(1, 2), NEED, nodes, barred=barred, waits=True)
    assert isinstance(waits, Short) and "left out: 10.0.0.2 (n2) (replicas" in waits.reason
    # One that failed its checks can't be used on.
    unfit = {"n2": replace(OUT, may_stay=False)}
    assert isinstance(mend(held(1, 2), NEED, nodes, barred=unfit), Short)


def test_a_lost_node_is_replaced_before_a_quarantined_one() -> None:
    plan = mend(held(1, 2), NEED, [node(1, 0), node(3)], lost={1}, barred={"n1": OUT})
    assert isinstance(plan, Mended)
    assert where(plan.nodes) == ["n1", "n3"] and where(plan.stayed) == ["n1"]


def test_missing_spares_are_taken_on_nodes_of_their_own() -> None:
    need = replace(NEED, spares=2)
    assert where(fill(held(1, 2), need, [node(1), node(2), node(3)])) == ["n3"]
    assert fill(held(1, 2, 3, spares=1), replace(NEED, spares=1), [node(4)]) == ()
    assert fill(held(1, 2), need, [node(3)], {"n3"}) == ()


def test_the_autoscaler_is_asked_for_all_that_is_held_and_waited_for() -> None:
    waiting, running = Need(2, 4, "CPU"), Need(1, 8, "GPU")
    assert wish([], [running], [node(1)], ()) == []
    shapes = wish([waiting], [running], [node(1), node(2)], {"n2"})
    # What a node left out has counts for the autoscaler, and not for the job.
    assert shapes == [{"CPU": 4.0}] * 3 + [{"GPU": 8.0}]
    assert wish([], [waiting], [], (), short=True) == [{"CPU": 4.0}] * 2


@given(data=st.data())
def test_a_mended_group_is_whole_on_nodes_that_can_be_used(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    spares = data.draw(st.integers(0, 2))
    group = held(*range(ranks + spares), spares=spares)
    more = data.draw(st.lists(st.sampled_from([0.0, 3.0, 4.0, 8.0]), max_size=3))
    nodes = [node(n, 0) for n in range(ranks + spares)]
    nodes += [node(ranks + spares + i, free, 8) for i, free in enumerate(more)]
    lost = data.draw(st.sets(st.integers(0, ranks + spares - 1)))
    stay = data.draw(st.booleans())
    barred = {
        n.node_id: Barred("bad", stay)
        for n in data.draw(st.lists(st.sampled_from(nodes), unique_by=lambda n: n.node_id))
    }
    need = Need(ranks, 4, "CPU", spares)
    waits = data.draw(st.booleans())
    plan = mend(group, need, nodes, lost=lost, barred=barred, waits=waits)
    good_spares = [s for s in group if s.spare and s.bundle not in lost]
    good_spares = [s for s in good_spares if s.node_id not in barred]
    free = [n for n in nodes[ranks + spares :] if n.free["CPU"] >= 4 and n.node_id not in barred]
    gone = [s for s in group[:ranks] if s.bundle in lost]
    bad = [s for s in group[:ranks] if s.bundle not in lost and s.node_id in barred]
    room = len(good_spares) + len(free)
    must = len(gone) + (len(bad) if waits or not stay else 0)
    assert isinstance(plan, Short) == (must > room)
    if isinstance(plan, Short):
        assert plan.missing == must - room
        return
    working = [s for s in plan.nodes if not s.spare]
    assert len(working) == ranks
    assert len({s.node_id for s in plan.nodes}) == len(plan.nodes)
    assert len({s.bundle for s in plan.nodes}) == len(plan.nodes)
    for before, after in zip(group, working, strict=False):
        usable = before.bundle not in lost and before.node_id not in barred
        assert not usable or after == before, "a good node was moved"
        assert after in plan.stayed or after.bundle not in lost
        assert after in plan.stayed or after.node_id not in barred
    assert {*plan.nodes} - {*plan.taken} <= {replace(s, spare=f) for s in group for f in (0, 1)}
    assert {s.bundle for s in plan.dropped} == {s.bundle for s in group} - {
        s.bundle for s in plan.nodes
    }
