"""What is held against nodes, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launch.preflight import Failure
from monitoring.records import Incident
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.accusation import Accusation, accused, machine_addresses
from orchestrator.placement.checks import Checked
from orchestrator.placement.docket import Dismissed, Docket, Shared
from orchestrator.placement.placement import NodeCapacity
from orchestrator.placement.quarantine import Quarantine, barring
from orchestrator.spec.config import QuarantineConfig

HUNG = Failure("no answer for 20 s (preflight.timeout_s)", False, "answer")
CONFIG = QuarantineConfig()
NODES = tuple(NodeSlot(f"n{i}", f"10.0.0.{i}", i, 2) for i in range(3))
"""Ranks 0 and 1 on n0, 2 and 3 on n1, 4 and 5 on n2."""
ADDRESSES = {seat.node_id: seat.node_ip for seat in NODES}


def incident(kind: str, *ranks: int, **evidence: float) -> Incident:
    return Incident(
        kind=kind,  # type: ignore[arg-type]
        detector="supervisor",
        attempt=3,
        timeline=0,
        step=10,
        onset_step=10,
        time=1000.0,
        message=f"{kind} at step 10.",
        evidence=evidence,
        ranks=ranks,
    )


def found(*incidents: Incident, rehearsed: tuple[int, ...] = ()) -> list[tuple[str, str, bool]]:
    cases = accused(incidents, NODES, rehearsed, ADDRESSES, "job")
    return [(case.node_id, case.kind, case.rehearsed) for case in cases]


def test_the_outvoted_node_is_accused_of_corruption_and_not_where_it_cannot_be_told() -> None:
    assert found(incident("replica_disagreement", 3, outvoted=1.0)) == [("n1", "corruption", False)]
    assert found(incident("replica_disagreement", 1, 3, outvoted=0.0)) == []


def test_the_one_node_whose_ranks_died_is_accused_of_it() -> None:
    assert found(incident("rank_died", 2)) == [("n1", "ranks_lost", False)]
    assert found(incident("rank_died", 2, 3)) == [("n1", "ranks_lost", False)]
    assert found(incident("rank_hung", 4)) == [("n2", "ranks_lost", False)]


def test_errors_of_the_job_and_deaths_on_several_nodes_accuse_nobody() -> None:
    assert found(incident("rank_died", 2, raised=1.0)) == []
    assert found(incident("rank_died", 1, 2)) == []
    assert found(incident("loss_spike", 2)) == []


def test_spares_have_no_ranks_and_are_not_accused() -> None:
    nodes = (replace(NODES[0], spare=True), *NODES[1:])
    (case,) = accused([incident("rank_died", 0)], nodes, (), ADDRESSES, "job")
    assert (case.node_id, case.address) == ("n1", "10.0.0.1")


def test_what_a_drill_did_is_known() -> None:
    flipped = incident("replica_disagreement", 3, outvoted=1.0)
    assert found(flipped, rehearsed=(3,)) == [("n1", "corruption", True)]
    assert found(flipped, rehearsed=(2,)) == [("n1", "corruption", False)]


def case(kind: str = "ranks_lost", time: float = 0.0, **changes: Any) -> Accusation:
    base = Accusation("n1", "10.0.0.1", "job", 1, kind, "rank 2 died.", time)  # type: ignore[arg-type]
    return replace(base, **changes)


def cluster(size: int) -> list[NodeCapacity]:
    """n1, n2 and so on."""
    return [NodeCapacity(f"n{i}", {}, {}, f"10.0.0.{i}") for i in range(1, size + 1)]


def judged(
    accusation: Accusation,
    *past: Accusation,
    before: tuple[Quarantine, ...] = (),
    nodes: int = 40,
    checks: Sequence[Checked] = (),
) -> Quarantine | Shared | Dismissed:
    every = (*past, accusation)
    docket = Docket(
        accusation.job,
        every,
        before,
        cluster(nodes),
        CONFIG,
        now=accusation.time,
        checks=checks,
    )
    return docket.judge(accusation)


def test_a_node_is_left_out_when_its_ranks_were_lost_often_enough_in_the_window() -> None:
    deaths = [case(time=600.0 * i, attempt=i) for i in range(1, 4)]
    assert judged(deaths[0]) == Dismissed("1 of quarantine.ranks_lost = 3")
    assert isinstance(judged(deaths[1], deaths[0]), Dismissed)
    entry = judged(deaths[2], *deaths[:2])
    assert isinstance(entry, Quarantine)
    assert entry.reason == "Ranks on it were lost 3 times; the last time: rank 2 died."
    assert entry.until == 1800.0 + CONFIG.ranks_lost_s
    late = case(time=600.0 + CONFIG.window_s, attempt=9)
    assert isinstance(judged(late, *deaths[:2]), Dismissed)


def test_deaths_of_several_jobs_on_a_machine_add_up_under_its_address() -> None:
    past = [case(job="a", node_id="old"), case(job="b"), case(job="c")]
    assert isinstance(judged(past[2], *past[:2]), Quarantine)
    elsewhere = [replace(c, node_id="n2", address="10.0.0.2") for c in past[:2]]
    assert isinstance(judged(past[2], *elsewhere), Dismissed)


def test_a_job_whose_ranks_die_on_node_after_node_costs_the_cluster_one_of_them() -> None:
    first = [case(attempt=i) for i in range(3)]
    entry = judged(first[2], *first[:2])
    assert isinstance(entry, Quarantine)
    again = [case(time=60.0, node_id="n2", address="10.0.0.2", attempt=i) for i in range(3, 6)]
    answer = judged(again[2], *again[:2], before=(entry,))
    why = "ranks of this job died on another node as often: it is the job"
    assert answer == Dismissed(why, news=True)
    other = [replace(c, job="other") for c in again]
    assert isinstance(judged(other[2], *other[:2], before=(entry,)), Quarantine)


def test_corruption_and_failed_checks_count_at_once() -> None:
    for kind, seconds in (
        ("corruption", CONFIG.corruption_s),
        ("preflight", CONFIG.preflight_s),
        ("unfit", CONFIG.unfit_s),
    ):
        entry = judged(case(kind))
        assert isinstance(entry, Quarantine) and entry.until == seconds


def test_a_node_that_nothing_could_replace_stays_in_use_unless_it_failed_its_checks() -> None:
    answer = judged(case("corruption"), nodes=1)
    assert isinstance(answer, Dismissed) and answer.news
    assert "no other node has room" in answer.why
    # Then it is left to other jobs: their own preflight tells them.
    entry = judged(case("preflight"), nodes=1)
    assert isinstance(entry, Quarantine)
    assert (entry.kind, entry.until) == ("unfit", CONFIG.unfit_s)
    assert entry.reason == (
        "Rank 2 died; no other node has room for job, and it is left out for it alone."
    )


def checked(node: int, why: Failure = HUNG, **changes: Any) -> Accusation:
    """Of the machine ``node``: preflight failed on it."""
    of = {"node_id": f"n{node}", "address": f"10.0.0.{node}"}
    of |= {"message": why.reason, "check": why.check}
    return case("unfit" if why.for_this_job else "preflight", **{**of, **changes})


def test_what_one_job_cannot_use_is_known_for_each_job_by_itself() -> None:
    before = (quarantine("unfit", job="other"),)
    entry = judged(case("unfit", 50.0), before=before)
    assert isinstance(entry, Quarantine) and entry.until == 50.0 + CONFIG.unfit_s
    mine = (*before, quarantine("unfit"))
    assert isinstance(judged(case("unfit", 50.0), before=mine), Dismissed)
    longer = judged(case("unfit", 150.0), before=mine)
    assert isinstance(longer, Quarantine) and longer.until == 150.0 + 2 * CONFIG.unfit_s


def test_each_time_it_comes_back_it_is_left_out_for_longer_up_to_a_week() -> None:
    before: tuple[Quarantine, ...] = ()
    terms = []
    now = 0.0
    for attempt in range(6):
        entry = judged(case("corruption", now, attempt=attempt), before=before)
        assert isinstance(entry, Quarantine) and entry.until is not None
        terms.append((entry.until - entry.since) / 86400)
        before = (*before, entry)
        now = entry.until
    assert terms == [1, 2, 4, 7, 7, 7]


def test_what_a_job_cannot_use_is_looked_at_again_every_few_minutes_however_often_it_failed() -> (
    None
):
    before: tuple[Quarantine, ...] = ()
    rests = []
    now = 0.0
    for attempt in range(6):
        entry = judged(case("unfit", now, attempt=attempt), before=before)
        assert isinstance(entry, Quarantine) and entry.until is not None
        rests.append((entry.until - entry.since) / 60)
        before = (*before, entry)
        now = entry.until
    assert rests == [2, 4, 8, 10, 10, 10]


def test_a_second_word_of_the_same_changes_nothing_while_it_is_left_out() -> None:
    entry = judged(case("corruption"))
    assert isinstance(entry, Quarantine)
    answer = judged(case("corruption", 5.0, attempt=2), before=(entry,))
    assert answer == Dismissed("it is quarantined for that already")


def test_a_drill_costs_a_minute() -> None:
    entry = judged(case("corruption", rehearsed=True))
    assert isinstance(entry, Quarantine)
    assert entry.until == CONFIG.rehearsed_s
    assert entry.reason == "Rehearsed by a drill: rank 2 died."


def quarantine(kind: str = "corruption", **changes: Any) -> Quarantine:
    base = Quarantine("n1", "10.0.0.1", kind, "Bad.", "", "job", 0.0, 100.0)  # type: ignore[arg-type]
    return replace(base, **changes)


def test_a_machine_is_known_again_by_its_address_and_only_while_it_lasts() -> None:
    back = NodeCapacity("n1-again", {}, {}, "10.0.0.1")
    assert barring([quarantine()], [back], "any", 99.0).keys() == {"n1-again"}
    assert barring([quarantine()], [back], "any", 100.0) == {}
    assert barring([quarantine(released_at=5.0)], [back], "any", 50.0) == {}
    assert barring([quarantine(until=None)], [back], "any", 1e12)
    assert barring([quarantine(address="")], [back], "any", 50.0) == {}


def test_what_only_one_job_cannot_use_is_left_to_others_and_failed_checks_allow_no_stay() -> None:
    unfit = [quarantine("unfit")]
    assert barring(unfit, NODES, "other", 50.0) == {}
    assert not barring(unfit, NODES, "job", 50.0)["n1"].may_stay
    assert not barring([quarantine("preflight")], NODES, "other", 50.0)["n1"].may_stay
    assert barring([quarantine("ranks_lost")], NODES, "other", 50.0)["n1"].may_stay
    both = [quarantine("preflight"), quarantine("by_hand")]
    for order in (both, both[::-1]):
        assert not barring(order, NODES, "other", 50.0)["n1"].may_stay
    assert barring([quarantine("slow")], NODES, "other", 50.0)["n1"].slow
    both = [quarantine("slow"), quarantine("corruption")]
    for order in (both, both[::-1]):
        assert not barring(order, NODES, "other", 50.0)["n1"].slow


def test_an_address_that_nodes_share_is_no_machines() -> None:
    nodes = [NodeCapacity(i, {}, {}, a) for i, a in (("a", "x"), ("b", "x"), ("c", "y"))]
    assert machine_addresses(nodes) == {"c": "y"}


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.floats(1, 600)), max_size=40)
)
def test_jobs_that_lose_ranks_everywhere_never_cost_more_nodes_than_there_are_jobs(
    deaths: list[tuple[str, int, float]],
) -> None:
    now = 0.0
    past: list[Accusation] = []
    entries: list[Quarantine] = []
    for attempt, (job, number, gap) in enumerate(deaths):
        now += gap
        seat = NODES[number]
        accusation = case(
            time=now, job=job, attempt=attempt, node_id=seat.node_id, address=seat.node_ip
        )
        recent = [a for a in past if a.time > now - CONFIG.window_s]
        answer = judged(accusation, *recent, before=tuple(entries), nodes=3)
        past.append(accusation)
        if isinstance(answer, Quarantine):
            entries.append(answer)
        lately = {(q.job, q.node_id) for q in entries if q.since > now - CONFIG.window_s}
        assert len(lately) <= 2
