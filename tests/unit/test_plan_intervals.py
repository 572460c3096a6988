"""How often snapshots and checkpoints are advised, held against a simulation with the policy."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.estimate import Hardware, estimate
from orchestrator.planning.intervals import (
    FaultShares,
    RecoveryTimes,
    Setting,
    advice,
    best_snapshots,
    ettr,
    published_mttf_s,
    setting_of,
)
from orchestrator.planning.told import interval_lines
from tests.benchmarks.bench_goodput import with_intervals
from tests.benchmarks.fault_trace import (
    LLAMA3_CAUSES,
    LLAMA3_FAULTS,
    PARTNER_TOO,
    Fault,
    share,
    trace,
)
from tests.benchmarks.goodput_simulation import (
    FromDisk,
    Octavo,
    Outcome,
    Struck,
    World,
    simulate,
)
from tests.unit.plan_jobs import job

DAY = 86400.0
SETTING = Setting(
    step_s=5.0,
    mttf_s=2 * 3600.0,
    snapshot_s=0.5,
    ship_s=2.0,
    checkpoint_s=2.0,
    write_s=100.0,
    load_s=100.0,
)


def simulated(setting: Setting, snapshots: int, checkpoints: int, seeds: int = 2) -> float:
    """Mean ETTR of some long runs."""
    world = World(20 * DAY)
    spec = with_intervals(job(), snapshots, checkpoints)
    found = []
    for seed in range(seeds):
        faults = trace(world.seconds, setting.mttf_s, 256, seed)
        found.append(simulate(Octavo(setting, spec, world), world, faults).ettr)
    return statistics.fmean(found)


@pytest.mark.parametrize("snapshots", [3, 40])
@pytest.mark.parametrize("mttf_s", [3600.0, 6 * 3600.0])
def test_the_formula_is_what_the_simulation_with_the_policy_comes_to(
    snapshots: int, mttf_s: float
) -> None:
    setting = replace(SETTING, mttf_s=mttf_s)
    assert simulated(setting, snapshots, 400) == pytest.approx(
        ettr(setting, snapshots, 400), abs=0.01
    )


def test_no_interval_is_better_in_the_simulation_than_the_advised_one() -> None:
    found = advice(SETTING, 10, 500)
    best = simulated(SETTING, found.snapshots, found.checkpoints)
    assert best > simulated(SETTING, 10, 500) or found.snapshots == 10
    for factor in (0.3, 3.0):
        other = max(1, round(factor * found.snapshots))
        assert simulated(SETTING, other, found.checkpoints) < best


@given(st.floats(0.1, 60), st.floats(600, 1e6), st.floats(0.001, 30), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_best_is_the_best_of_all_whole_numbers(
    step_s: float, mttf_s: float, snapshot_s: float, checkpoints: int
) -> None:
    setting = replace(SETTING, step_s=step_s, mttf_s=mttf_s, snapshot_s=snapshot_s)
    if not checkpoints:
        setting = replace(setting, shares=FaultShares(0.2, 0.7, 0.1, 0.0))
    found = best_snapshots(setting, checkpoints)
    least = max(1, math.ceil(setting.ship_s / step_s))
    value = ettr(setting, found, checkpoints)
    assert found >= least
    most = max(least, min(checkpoints or 20_000, int(mttf_s / step_s), 20_000))
    tried = {*range(found - 3, found + 4), 2 * found, found // 2, least, most}
    others = [other for other in tried if least <= other <= most]
    assert all(ettr(setting, other, checkpoints) <= value + 1e-12 for other in others)


def test_where_copies_are_cheap_it_is_youngs_square_root() -> None:
    setting = replace(SETTING, snapshot_s=0.05, mttf_s=12 * 3600.0, step_s=0.2)
    young = math.sqrt(2 * 0.05 * setting.mttf_s) / 0.2
    assert best_snapshots(setting, 2000) == pytest.approx(young, rel=0.1)


def test_shares_are_those_of_the_published_causes() -> None:
    assert sum(count for count, _ in LLAMA3_CAUSES.values()) == LLAMA3_FAULTS
    shares = FaultShares()
    assert sum((shares.process, shares.node, shares.hang, shares.both)) == pytest.approx(1.0)
    assert shares.hang == pytest.approx(share("hang"), abs=0.002)
    assert shares.process == pytest.approx(share("process") + share("corruption"), abs=0.002)
    assert shares.both == pytest.approx(PARTNER_TOO * share("node"), abs=0.001)
    assert shares.node + shares.both == pytest.approx(share("node"), abs=0.002)


def test_faults_are_as_rare_as_is_published() -> None:
    assert published_mttf_s(128) == pytest.approx(7.9 * 3600)
    assert published_mttf_s(2048) == pytest.approx(1.8 * 3600)
    assert published_mttf_s(16_384) == pytest.approx(0.23 * 3600, rel=0.03)
    assert published_mttf_s(1) == pytest.approx(47.7 * DAY, rel=0.15)
    found = trace(3000 * 3600.0, 3600.0, 128, 7)
    assert len(found) == pytest.approx(3000, rel=0.1)
    assert found == trace(3000 * 3600.0, 3600.0, 128, 7) != trace(3000 * 3600.0, 3600.0, 128, 8)


class TestSimulation:
    WORLD = World(4 * 3600.0)

    def run(self, *faults: Fault, setting: Setting = SETTING, **world: float):
        spec = with_intervals(job(), 10, 400)
        there = replace(self.WORLD, **world)
        return simulate(Octavo(setting, spec, there), there, faults)

    def fault(self, time: float, takes: str, both: bool = False) -> Fault:
        return Fault(time, "a cause", takes, 3, both)  # type: ignore[arg-type]

    def test_without_faults_only_the_start_and_copies_cost(self) -> None:
        out = self.run()
        steps = (4 * 3600 - SETTING.times.start_s) / (5.0 + 0.5 / 10 + 2.0 / 400)
        assert out.steps == pytest.approx(steps, abs=1) and not out.answers

    def test_a_lost_rank_costs_the_steps_since_the_last_snapshot(self) -> None:
        out = self.run(self.fault(3600.0, "process"))
        assert out.answers == {"restart from memory": 1}
        assert 0 <= out.redone_s <= 11 * 5.5

    def test_a_node_lost_with_its_partner_goes_back_to_the_disk(self) -> None:
        out = self.run(self.fault(3600.0, "node", True))
        assert out.answers == {"restart from disk": 1}
        assert 250 * 5.0 < out.redone_s < 720 * 5.5

    def test_without_partners_every_lost_node_does(self) -> None:
        out = self.run(self.fault(3600.0, "node"), setting=replace(SETTING, partners=False))
        assert out.answers == {"restart from disk": 1}

    def test_replicas_that_differ_go_back_to_before_they_did(self) -> None:
        out = self.run(self.fault(3565.0, "corruption"))
        assert out.answers == {"restart from memory": 1}
        plain = self.run(self.fault(3565.0, "process"))
        assert out.steps < plain.steps

    def test_faults_in_a_row_without_a_step_are_for_a_person_as_the_policy_has_it(self) -> None:
        row = [self.fault(3600.0 + 0.5 * n, "process") for n in range(5)]
        out = self.run(*row)
        assert out.answers["pause from disk"] == 1 and out.waiting_s == self.WORLD.person_s

    def test_without_a_spare_it_waits_for_the_first_node_that_is_mended(self) -> None:
        out = self.run(self.fault(3600.0, "node"), spares=0, repair_s=1800.0)
        assert out.waiting_s == 1800.0

    def test_a_hang_trains_nothing_until_it_is_noticed(self) -> None:
        side = Octavo(SETTING, with_intervals(job(), 10, 400), self.WORLD)
        step = side.clock.reached(0, 3600.0)
        struck = Struck(self.fault(3600.0, "hang"), 0, 3600.0, step)
        after, back = side.answer(struck, Outcome(self.WORLD.seconds, SETTING.step_s))
        assert step - 11 <= back <= step
        assert after >= SETTING.times.hang_s

    @pytest.mark.parametrize("spares", [0, 16])
    @pytest.mark.parametrize("second", ["process", "hang", "node"])
    def test_a_fault_more_while_it_waits_is_no_gain(self, second: str, spares: int) -> None:
        one = self.fault(3600.0, "node", both=spares > 0)
        more = self.fault(3610.0, second)
        alone, both = self.run(one, spares=spares), self.run(one, more, spares=spares)
        assert both.steps <= alone.steps
        # What was under way is a start from disk, of which no memory holds anything yet.
        if spares:
            assert both.answers == {"restart from disk": 2}

    def test_a_restart_from_disk_loses_more_under_the_same_faults(self) -> None:
        faults = trace(5 * DAY, SETTING.mttf_s, 256, 1)
        world = World(5 * DAY)
        disk = simulate(FromDisk(SETTING, 100, world), world, faults)
        mine = simulate(Octavo(SETTING, with_intervals(job(), 10, 400), world), world, faults)
        assert disk.ettr < mine.ettr < 1.0 and set(disk.answers) == {"restart from disk"}


class TestPlan:
    def test_it_advises_both_intervals_with_what_they_bring_and_why(self) -> None:
        spec = job(num_nodes=64, training={"train_batch_size": 1024})
        setting = setting_of(spec, estimate(spec, Hardware.of(spec)))
        found = advice(setting, spec.snapshots.every, spec.checkpoint.every)
        first, second, third = interval_lines(found)
        assert "snapshots each 10 steps and checkpoints each 500 steps" in first
        assert f"snapshots.every: {found.snapshots}" in second
        assert "because a snapshot stops training for" in third
        assert third.endswith(" 1.5% of faults leave nothing but the disk")
        assert found.ettr >= found.now_ettr

    def test_without_partners_every_lost_node_is_the_disks(self) -> None:
        spec = job(num_nodes=2, snapshots={"replicas": 0})
        setting = setting_of(spec, estimate(spec, Hardware.of(spec)))
        assert not setting.partners and setting.disk_share > 0.7

    def test_a_hang_costs_what_the_spec_waits_for_it(self) -> None:
        spec = job(recovery={"step_timeout_s": 30.0})
        setting = setting_of(spec, estimate(spec, Hardware.of(spec)))
        assert setting.times == replace(RecoveryTimes(), hang_s=30.0)
