"""Who is next for nodes, and who makes room."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement.fair_queue import Ticket, first, in_order, victims


def ticket(job: str, user: str = "a", priority: int = 0, since: float = 0.0) -> Ticket:
    return Ticket(job, user, priority, since, 4)


def names(tickets: list[Ticket]) -> list[str]:
    return [t.job for t in tickets]


def test_users_of_equal_priority_take_turns_however_many_jobs_one_submits() -> None:
    waiting = [ticket(f"a{i}", "a", since=i) for i in range(4)]
    waiting += [ticket(f"b{i}", "b", since=10 + i) for i in range(2)]
    assert names(in_order(waiting, [], {})) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_who_holds_less_comes_first_and_of_equals_who_was_served_longer_ago() -> None:
    waiting = [ticket("a0", "a", since=0), ticket("b0", "b", since=1)]
    assert names(in_order(waiting, [ticket("a-runs", "a")], {})) == ["b0", "a0"]
    assert names(in_order(waiting, [], {"a": 50.0, "b": 20.0})) == ["b0", "a0"]


def test_priority_comes_before_turns() -> None:
    waiting = [ticket("a0", "a", 5, 9), ticket("a1", "a", 5, 10), ticket("b0", "b", 0, 0)]
    assert names(in_order(waiting, [], {})) == ["a0", "a1", "b0"]


def test_who_can_never_fit_is_not_the_first() -> None:
    huge, next_one = ticket("huge", since=0), ticket("b0", since=1)
    assert first([huge, next_one], [], {}, lambda t: t is not huge) is next_one
    assert first([huge], [], {}, lambda t: False) is None


tickets = st.builds(
    Ticket,
    job=st.uuids().map(str),
    user=st.sampled_from("abc"),
    priority=st.integers(0, 2),
    since=st.floats(0, 100),
    slots=st.integers(1, 4),
    preemptible=st.booleans(),
)


@given(st.lists(tickets, max_size=12), st.lists(tickets, max_size=4))
def test_the_order_is_by_priority_and_keeps_each_users_own(
    waiting: list[Ticket], holding: list[Ticket]
) -> None:
    order = in_order(waiting, holding, {})
    assert sorted(names(order)) == sorted(names(waiting))
    assert [t.priority for t in order] == sorted((t.priority for t in waiting), reverse=True)
    for user in "abc":
        for priority in range(3):
            own = [t for t in order if (t.user, t.priority) == (user, priority)]
            assert own == sorted(own, key=lambda t: (t.since, t.job))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_nobody_with_a_job_waits_longer_than_one_turn_of_each_other_user(users: list[str]) -> None:
    waiting = [ticket(f"{i:02}", user, since=i) for i, user in enumerate(users)]
    order = [t.user for t in in_order(waiting, [], {})]
    for i in range(len(order) - 1):
        # Two in a row only where nobody else is left.
        assert order[i] != order[i + 1] or set(order[i:]) == {order[i]}


def fits_with(slots: int, holding: list[Ticket]):  # type: ignore[no-untyped-def]
    freed = {t.job: t.slots for t in holding}
    return lambda jobs: sum(freed[j] for j in jobs) >= slots


def test_the_least_important_and_youngest_makes_room_and_no_more_than_is_needed() -> None:
    holding = [
        ticket("old", priority=0, since=1),
        ticket("young", priority=0, since=9),
        ticket("mid", priority=1, since=5),
    ]
    high = ticket("high", priority=5)
    assert names(victims(high, holding, fits_with(4, holding))) == ["young"]
    assert names(victims(high, holding, fits_with(8, holding))) == ["young", "old"]
    big = [*holding, replace(ticket("wide", priority=2), slots=8)]
    assert names(victims(high, big, fits_with(20, big))) == ["young", "old", "mid", "wide"]
    # The wide one alone is enough, so those that were taken before it are spared.
    wide_only = [ticket("young", since=9), replace(ticket("wide", priority=1), slots=8)]
    assert names(victims(high, wide_only, fits_with(8, wide_only))) == ["wide"]


def test_equals_and_the_unpreemptible_are_left_alone_and_nothing_is_done_in_vain() -> None:
    holding = [ticket("same", priority=5), replace(ticket("low"), preemptible=False)]
    high = ticket("high", priority=5)
    assert victims(high, holding, lambda jobs: bool(jobs)) == []
    low = [ticket("low")]
    assert victims(high, low, lambda jobs: False) == []


@given(st.lists(tickets, max_size=6), st.integers(1, 16), st.integers(0, 3))
def test_victims_are_lower_enough_and_none_too_many(
    holding: list[Ticket], slots: int, priority: int
) -> None:
    fits = fits_with(slots, holding)
    chosen = victims(ticket("high", priority=priority), holding, fits)
    able = [t for t in holding if t.priority < priority and t.preemptible]
    enough = sum(t.slots for t in able) >= slots
    assert bool(chosen) == enough
    if chosen:
        assert {t.job for t in chosen} <= {t.job for t in able}
        assert fits(frozenset(names(chosen)))
        for spared in chosen:
            assert not fits(frozenset(t.job for t in chosen if t is not spared))
