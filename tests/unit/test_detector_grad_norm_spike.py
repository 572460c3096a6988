import dataclasses
import json
import math

import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import GradNormSpike
from tests.unit.monitoring_traces import healthy_trace, with_norm


def incidents_of(records, config=None):
    detector = GradNormSpike(config or DetectionConfig())
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        found += new
    return found


class TestFiresWhen:
    @pytest.mark.parametrize("step", [60, 100, 199])
    def test_the_norm_leaps_to_twenty_times_its_median(self, step):
        records = healthy_trace(200)
        records[step] = with_norm(records[step], 20.0)
        found = incidents_of(records)
        assert [(i.step, i.onset_step) for i in found] == [(step, step)]
        assert found[0].evidence["ratio"] > 10

    def test_each_step_of_a_lasting_leap_for_outliers_never_enter_the_baseline(self):
        records = healthy_trace(150)
        records = records[:100] + [with_norm(r, 50.0) for r in records[100:]]
        assert [i.step for i in incidents_of(records)] == list(range(100, 150))


class TestStaysSilentWhen:
    @pytest.mark.parametrize("seed", range(12))
    def test_the_norm_falls_with_the_loss_in_warm_up(self, seed):
        assert not incidents_of(healthy_trace(200, seed=seed))

    def test_the_norm_grows_slowly_over_the_run(self):
        records = [with_norm(r, math.exp(r.step / 100)) for r in healthy_trace(400)]
        assert not incidents_of(records)

    def test_the_leap_is_many_deviations_but_below_the_minimum_ratio(self):
        records = [dataclasses.replace(r, grad_norm=1.0) for r in healthy_trace(80)]
        records[70] = with_norm(records[70], 3.9)
        assert not incidents_of(records)
        records[70] = with_norm(records[70], 4.1 / 3.9)
        records[71] = with_norm(records[71], 4.1)
        assert [(i.step, i.onset_step) for i in incidents_of(records)] == [(71, 70)]

    def test_a_single_leap_is_clipped_and_heals(self):
        records = [dataclasses.replace(r, grad_norm=1.0) for r in healthy_trace(120)]
        for step in range(70, 120, 2):
            records[step] = with_norm(records[step], 9.0)
        assert not incidents_of(records)

    def test_it_falls_to_a_hundredth_or_to_zero_or_is_not_finite(self):
        records = healthy_trace(120)
        for step, norm in ((60, 0.005), (61, 0.0), (62, math.nan), (63, math.inf)):
            records[step] = dataclasses.replace(records[step], grad_norm=norm)
        assert not incidents_of(records)


def test_the_state_goes_through_json_exactly():
    detector = GradNormSpike(DetectionConfig())
    state = detector.initial()
    for record in healthy_trace(90):
        state, _ = detector.observe(state, record)
    assert detector.load(json.loads(json.dumps(detector.dump(state)))) == state
