"""A check that fails on many nodes: whether it is they, or what they have in common."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launch.preflight import Failure
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.accusation import Accusation
from orchestrator.placement.checks import Checked
from orchestrator.placement.docket import Docket, Shared
from orchestrator.placement.quarantine import Quarantine, barring
from tests.unit.control_plane import ControlPlane, tell, where
from tests.unit.test_preflight_blame import Supervised, go, left_out, of
from tests.unit.test_quarantine import CONFIG, HUNG, checked, cluster, judged, quarantine

SLOW = Failure("1 of its 1 links failed: 3 Mbit/s", False, "links")
CLOCK = Failure("its clock is +42.0 s off the controller's", False, "clock_ahead")
NO_DRIVER = Failure("device: no driver", False, "device")
WRONG = Failure("matmul gave a wrong result: 3 of 9", False, "matmul")


def checking(*nodes: int, attempt: int = 1, **failed: Failure) -> Checked:
    """A preflight of these machines."""
    return Checked(attempt, 0.0, tuple(f"n{i}" for i in nodes), failed)


class TestWhatNodesHaveInCommon:
    def test_a_group_that_fails_alike_is_left_to_other_jobs_and_a_person_told_where_to_look(
        self,
    ) -> None:
        answer = judged(checked(1), checked(2))
        assert isinstance(answer, Shared)
        assert (answer.entry.kind, answer.entry.until) == ("unfit", CONFIG.unfit_s)
        assert (answer.nodes, answer.taken_back) == (2, ())
        assert "left out for job alone: look at the job's storage" in answer.entry.reason

    def test_failures_that_differ_or_are_few_are_their_nodes(self) -> None:
        for answer in (
            judged(checked(1), checked(2, NO_DRIVER)),
            judged(checked(1), checked(2), checks=[checking(1, 2, 3, 4, n1=HUNG, n2=HUNG)]),
            judged(checked(1), checked(2, job="other"), checks=[checking(1, 3, n1=HUNG)]),
            judged(checked(1), checked(2, job="other"), nodes=4),
            judged(checked(1, attempt=2), checked(1, attempt=1, node_id="before")),
        ):
            assert isinstance(answer, Quarantine) and answer.kind == "preflight"

    def test_two_machines_that_compute_wrongly_are_two_faults(self) -> None:
        for what in (WRONG, NO_DRIVER):
            answer = judged(checked(1, what), checked(2, what), nodes=3)
            assert isinstance(answer, Quarantine) and answer.kind == "preflight"
            third = judged(checked(1, what), checked(2, what), checked(3, what), nodes=4)
            assert isinstance(third, Shared), "most of a cluster: what was installed on it"

    def test_node_after_node_gives_back_what_this_alone_had_cost(self) -> None:
        first = checked(1)
        entry = judged(first, checks=[checking(0, 1, n1=HUNG)])
        assert isinstance(entry, Quarantine)
        bystanders = (
            replace(entry, job="other", node_id="n8", address="10.0.0.8"),
            replace(entry, since=-5.0, node_id="n9", address="10.0.0.9"),
            quarantine("by_hand", job="job"),
        )
        second = checked(2, attempt=2, time=30.0)
        checks = [checking(0, 1, n1=HUNG), checking(0, 2, attempt=2, n2=HUNG)]
        answer = judged(second, first, before=(*bystanders, entry), checks=checks)
        assert isinstance(answer, Shared) and answer.taken_back == (entry,)

    def test_what_was_taken_back_is_as_if_it_had_never_been(self) -> None:
        back = quarantine("preflight", released_at=0.0)
        again = judged(checked(1, time=50.0), before=(back,))
        assert isinstance(again, Quarantine)
        assert again.until == 50.0 + CONFIG.preflight_s
        by_hand = replace(back, released_at=7.0)
        longer = judged(checked(1, time=50.0), before=(by_hand,))
        assert isinstance(longer, Quarantine)
        assert longer.until == 50.0 + 2 * CONFIG.preflight_s

    def test_most_of_a_cluster_is_not_most_of_one_jobs_nodes(self) -> None:
        cases = [checked(i, job=f"job{i}", time=float(i)) for i in range(1, 4)]
        entries: list[Quarantine] = []
        for i, one in enumerate(cases[:2], 1):
            entry = judged(one, *cases[: i - 1], nodes=5)
            assert isinstance(entry, Quarantine) and entry.kind == "preflight"
            entries.append(entry)
        answer = judged(cases[2], *cases[:2], before=tuple(entries), nodes=5)
        assert isinstance(answer, Shared) and answer.taken_back == tuple(entries)

    def test_what_preflight_says_is_known_again_whatever_it_measured(self) -> None:
        for why, common in (
            (CLOCK, "the clock of the controller's machine"),
            (SLOW, "the network between the job's nodes"),
            (WRONG, "what was installed on all of them"),
        ):
            told = [replace(why, reason=f"{n} of it: whatever {n}") for n in (1, 2, 3)]
            answer = judged(*(checked(n, why) for n, why in enumerate(told, 1)), nodes=4)
            assert isinstance(answer, Shared) and common in answer.look_at

    def test_nodes_on_both_sides_of_the_controllers_clock_agree_no_more_with_each_other(
        self,
    ) -> None:
        behind = Failure("its clock is -42.0 s off the controller's", False, "clock_behind")
        assert isinstance(judged(checked(1, CLOCK), checked(2, behind)), Quarantine)

    def test_what_an_older_octavo_stored_is_alike_to_nothing(self) -> None:
        old = replace(HUNG, check="unknown")
        assert isinstance(judged(checked(1, old), checked(2, old)), Quarantine)
        freed = quarantine("preflight", job="job", released_at=0.0)
        docket = Docket("job", [checked(1, old)], [freed], cluster(8), CONFIG, now=60.0)
        assert docket.at_fault_after_all() == []


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 7), min_size=1, max_size=5), st.sets(st.integers(0, 7))),
        max_size=12,
    )
)
def test_a_check_that_fails_never_costs_other_jobs_more_nodes_than_it_passed(
    groups: list[tuple[set[int], set[int]]],
) -> None:
    past: list[Accusation] = []
    checks: list[Checked] = []
    entries: list[Quarantine] = []
    machines = [NodeSlot(f"n{i}", f"10.0.0.{i}", i, 2) for i in range(8)]
    for attempt, (wanted, bad) in enumerate(groups):
        now = 60.0 * attempt
        left_out = barring(entries, machines, "job", now)
        group = {i for i in wanted if f"n{i}" not in left_out}
        hung = {f"n{i}": HUNG for i in group & bad}
        checks.append(Checked(attempt, now, tuple(f"n{i}" for i in group), hung))
        passed = {node for check in checks for node in check.passed("answer")}
        cases = [checked(i, attempt=attempt, time=now) for i in sorted(group & bad)]
        past += cases
        for one in cases:
            others = [a for a in past if a != one]
            answer = judged(one, *others, before=tuple(entries), checks=checks)
            if isinstance(answer, Shared):
                back = answer.taken_back
                entries = [replace(q, released_at=q.since) if q in back else q for q in entries]
                entries.append(answer.entry)
            elif isinstance(answer, Quarantine):
                entries.append(answer)
        if cases:
            active = {q.node_id for q in entries if q.kind == "preflight" and q.active(now)}
            assert len(active) <= max(1, len(passed - {a.node_id for a in past}))


class TestWhatPassed:
    """Over the attempts of a job, within the window."""

    def test_a_node_that_passed_the_check_counts_whenever_that_was(self) -> None:
        before = [checking(0, 1, n1=HUNG), checking(0, 2, attempt=2)]
        now = checking(0, 3, attempt=3, n3=HUNG)
        cases = (checked(3, attempt=3), checked(1))
        assert isinstance(judged(*cases, checks=[*before, now]), Quarantine)
        assert isinstance(judged(*cases, checks=[before[0], now]), Shared)

    def test_one_that_failed_it_as_well_has_not_passed(self) -> None:
        both_pass = checking(1, 2)
        then_fail = checking(1, 2, attempt=2, n1=HUNG, n2=HUNG)
        assert isinstance(judged(checked(1), checked(2), checks=[both_pass, then_fail]), Shared)

    def test_links_that_were_not_tried_are_no_links_that_work(self) -> None:
        alone = checking(0, 3, 4, 5, n5=CLOCK)
        cases = (checked(1, SLOW), checked(2, SLOW))
        links = checking(0, 1, 2, attempt=2, n1=SLOW, n2=SLOW)
        assert isinstance(judged(*cases, checks=[alone, links]), Shared)
        assert isinstance(judged(*cases, checks=[replace(alone, failed={}), links]), Quarantine)
        late = (checked(1, CLOCK), checked(5, CLOCK))
        assert isinstance(judged(*late, checks=[alone, checking(1, n1=CLOCK)]), Quarantine)


def fails(plane: ControlPlane, job: str, node: str, why: Failure) -> None:
    """Preflight ends the attempt; the next one begins."""
    failed = {node: asdict(why)}
    told = EventDraft("preflight_failed", plane.now, "Failed.", {"failed": failed})
    moved = (JobState.RECOVERING, Cause.RANK_LOST)
    tell(plane, job, events=(told,), transition=moved)
    plane.controller.next_attempt(job, plane.store.job(job).attempt, "preflight failed")


def test_two_bad_nodes_that_a_small_job_meets_one_after_the_other_stay_left_out(
    tmp_path: Path,
) -> None:
    for why in (SLOW, CLOCK):
        folder = tmp_path / why.check
        folder.mkdir()
        plane = ControlPlane(folder, *[4] * 8)
        job = plane.submit(num_nodes=2)
        plane.steps(2)

        fails(plane, job, "node1", why)
        assert where(plane, job) == ["node0", "node2"]
        tell(plane, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))
        plane.now += 600
        plane.groups.dead.add("node2")
        tell(plane, job, transition=(JobState.RECOVERING, Cause.RANK_LOST))
        plane.controller.next_attempt(job, plane.store.job(job).attempt, "a node died")
        assert where(plane, job) == ["node0", "node3"]
        fails(plane, job, "node3", why)
        assert left_out(plane) == {"node1": "preflight", "node3": "preflight"}
        assert plane.told(job, "nodes_alike") == plane.told(job, "node_released") == []


def trains(plane: ControlPlane, job: str) -> None:
    tell(plane, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))
    plane.steps(2)


def two_in_a_row(folder: Path, why: Failure, nodes: int = 8) -> tuple[ControlPlane, str]:
    """A job of two nodes whose second one fails preflight, twice, and then trains."""
    folder.mkdir(exist_ok=True)
    plane = ControlPlane(folder, *[4] * nodes)
    job = plane.submit(num_nodes=2)
    plane.steps(2)
    for bad in ("node1", "node2"):
        fails(plane, job, bad, why)
    assert left_out(plane) == {"node2": "unfit"}, "one of two passed: it may be what they share"
    assert where(plane, job) == ["node0", "node3"]
    return plane, job


class TestTwoBadNodesInDirectSuccession:
    def test_both_are_left_out_once_the_job_trains_without_them(self, tmp_path: Path) -> None:
        for why in (SLOW, CLOCK, HUNG):
            plane, job = two_in_a_row(tmp_path / why.check, why)
            trains(plane, job)
            assert left_out(plane) == {"node1": "preflight", "node2": "preflight"}
            told = plane.told(job, "node_quarantined")
            assert told[-1].startswith("Node 10.0.0.3 (node2) is quarantined for 15 min: ")
            assert told[-1].endswith("to other jobs at first, and as many nodes have passed since.")
            assert len(told) == 4, "each was told when it failed, and again now"
            # Once: neither the next pass nor a controller that restarts tells it again.
            plane.controller = plane.new_controller()
            plane.steps(2)
            assert plane.told(job, "node_quarantined") == told

    def test_what_most_of_its_nodes_fail_stays_what_they_have_in_common(
        self, tmp_path: Path
    ) -> None:
        plane, job = two_in_a_row(tmp_path, CLOCK)
        fails(plane, job, "node3", CLOCK)
        trains(plane, job)
        assert set(left_out(plane).values()) == {"unfit"}

    def test_what_most_of_the_cluster_fails_stays_so_as_well(self, tmp_path: Path) -> None:
        plane, job = two_in_a_row(tmp_path, CLOCK, nodes=6)
        other = plane.submit("other", by="bob", num_nodes=2)
        plane.steps(2)
        failed = {n: asdict(CLOCK) for n in where(plane, other)}
        event = EventDraft("preflight_failed", plane.now, "Failed.", {"failed": failed})
        tell(plane, other, events=(event,), transition=(JobState.RECOVERING, Cause.RANK_LOST))
        plane.controller.desk.settling.settle(plane.store.job(other), plane.now)
        trains(plane, job)
        assert "preflight" not in left_out(plane).values()

    def test_who_a_person_let_back_is_not_taken_again(self, tmp_path: Path) -> None:
        plane, job = two_in_a_row(tmp_path, CLOCK)
        plane.controller.roll.release("node2", "ada", plane.now + 0.1)
        trains(plane, job)
        assert left_out(plane) == {"node1": "preflight"}

    def test_one_that_has_passed_since_is_not_taken_again(self) -> None:
        freed = quarantine("preflight", released_at=0.0)
        for trained_on, found in ((3, ["n1"]), (1, [])):
            docket = Docket(
                "job",
                [checked(1)],
                [freed],
                cluster(8),
                CONFIG,
                now=60.0,
                checks=[checking(0, 1, n1=HUNG), checking(0, trained_on, attempt=2)],
            )
            assert [entry.node_id for entry in docket.at_fault_after_all()] == found

    def test_links_whose_other_end_is_at_fault_stay_forgiven(self) -> None:
        first, second = checked(1, SLOW), checked(2, SLOW, attempt=2, time=30.0)
        freed = quarantine("preflight", released_at=0.0)
        docket = Docket(
            "job",
            [first, second],
            [freed],
            cluster(8),
            CONFIG,
            now=60.0,
            checks=[checking(0, 3, attempt=3)],
            cleared={(1, "n1")},
        )
        assert docket.at_fault_after_all() == []


class TestWhatOneJobCannotUse:
    FOLDER = Failure("/shared/toy-1 can't be written: Read-only file system", True, "folder")
    DISK = Failure("0.1 GB free for /shared, and a checkpoint takes 98 GB", True, "disk")
    MEMORY = Failure("1.2 GB of memory free, and its state takes 98 GB", True, "memory")

    def test_a_folder_that_no_node_can_write_is_the_jobs_storage(self) -> None:
        for why, common in (
            (self.FOLDER, "the job's storage"),
            (self.DISK, "the job's storage"),
            (self.MEMORY, "what the job brings to its nodes"),
        ):
            answer = judged(checked(1, why), checked(2, replace(why, reason="0.2 GB")))
            assert isinstance(answer, Shared) and answer.look_at.startswith(common)
            assert (answer.nodes, answer.taken_back) == (2, ())
            assert (answer.entry.kind, answer.entry.until) == ("unfit", CONFIG.unfit_s)

    def test_one_that_others_can_write_is_its_nodes_and_other_jobs_are_nothing_to_it(self) -> None:
        first = checked(1, self.FOLDER)
        others = [checked(i, self.FOLDER, job="other") for i in range(2, 6)]
        for answer in (
            judged(first),
            judged(first, *others, nodes=6),
            judged(first, checked(2, self.FOLDER), checks=[checking(1, 2, 3, 4)]),
            judged(first, checks=[checking(1, 2, n1=self.FOLDER)]),
        ):
            assert isinstance(answer, Quarantine) and answer.kind == "unfit"


def test_a_folder_that_all_nodes_find_unwritable_is_told_as_what_they_have_in_common(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, *[4] * 4)
    job = plane.submit(num_nodes=3, training={"train_batch_size": 24})
    full = Failure("/shared/toy can't be written: No space left on device", True, "folder")
    go(plane, Supervised(plane, job, of(dict.fromkeys(("node0", "node1", "node2"), full))))
    told = plane.told(job, "nodes_alike")[0]
    assert told == (
        "Preflight failed alike on 3 nodes, which is hardly their fault: they are left out for "
        f"{job} alone. Look at the job's storage."
    )
    assert set(left_out(plane).values()) == {"unfit"}
