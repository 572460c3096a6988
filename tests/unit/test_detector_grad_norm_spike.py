import dataclasses
import json
import math

import numpy as np
import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import GradNormSpike
from tests.unit.monitoring_traces import healthy_trace, with_loss, with_norm


def incidents_of(records, config=None):
    detector = GradNormSpike(config or DetectionConfig())
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        found += new
    return found


class TestFiresWhen:
    @pytest.mark.parametrize("step", [60, 100, 199])
    def test_the_norm_leaps_to_forty_times_its_median(self, step):
        records = healthy_trace(200)
        records[step] = with_norm(records[step], 40.0)
        found = incidents_of(records)
        assert [(i.step, i.onset_step) for i in found] == [(step, step)]
        assert found[0].evidence["ratio"] > 20

    def test_it_leaps_to_twelve_times_and_the_loss_in_the_same_step(self):
        records = healthy_trace(120)
        records[100] = with_loss(with_norm(records[100], 12.0), 1.5)
        assert [(i.step, i.onset_step) for i in incidents_of(records)] == [(100, 100)]

    def test_a_batch_that_is_harder_in_loss_and_norm_is_waited_for(self):
        records = healthy_trace(120)
        records[100] = with_loss(with_norm(records[100], 7.0), 1.4)
        assert not incidents_of(records)

    def test_it_leaps_and_the_loss_after_its_update(self):
        records = healthy_trace(120)
        records[100] = with_norm(records[100], 12.0)
        records[101] = with_loss(records[101], 1.5)
        (incident,) = incidents_of(records)
        assert (incident.step, incident.onset_step) == (101, 100)
        assert (
            "in step 100" in incident.message and "the loss leapt in step 101" in incident.message
        )

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

    @pytest.mark.parametrize("seed", range(3))
    def test_one_step_in_300_is_clipped_to_a_twelfth_and_its_loss_goes_on(self, seed):
        records = healthy_trace(2000, seed=seed, layers=())
        rng = np.random.default_rng(seed)
        for step in rng.choice(range(60, 2000), 6, replace=False).tolist():
            records[step] = with_norm(records[step], 12.0)
        assert not incidents_of(records)

    @pytest.mark.parametrize("length", [1, 6, 8, 20, 31])
    def test_a_stretch_of_batches_without_a_gradient_ends(self, length):
        records = healthy_trace(300, layers=())
        small = [with_norm(r, 0.02) for r in records[150 : 150 + length]]
        records[150 : 150 + length] = small
        assert not incidents_of(records)

    def test_it_falls_to_a_hundredth_or_to_zero_or_is_not_finite(self):
        records = healthy_trace(120)
        for step, norm in ((60, 0.005), (61, 0.0), (62, math.nan), (63, math.inf)):
            records[step] = dataclasses.replace(records[step], grad_norm=norm)
        assert not incidents_of(records)


def test_the_state_of_a_leap_beyond_all_numbers_goes_through_json():
    detector = GradNormSpike(DetectionConfig())
    state = detector.initial()
    for record in healthy_trace(60, layers=()):
        norm = 1e-300 if record.step < 59 else 1e300
        state, found = detector.observe(state, dataclasses.replace(record, grad_norm=norm))
    assert found
    assert detector.load(json.loads(json.dumps(detector.dump(state), allow_nan=False))) == state


def test_the_state_goes_through_json_exactly():
    detector = GradNormSpike(DetectionConfig())
    state = detector.initial()
    for record in healthy_trace(90):
        state, _ = detector.observe(state, record)
    assert detector.load(json.loads(json.dumps(detector.dump(state)))) == state
