import dataclasses
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monitoring.config import DetectionConfig
from monitoring.detectors import LossSpike
from monitoring.records import Incident, StepRecord
from tests.unit.monitoring_traces import healthy_trace, loss_at, with_loss


def incidents_of(
    records: list[StepRecord], config: DetectionConfig | None = None
) -> list[Incident]:
    detector = LossSpike(config or DetectionConfig())
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        found += new
    return found


class TestFiresWhen:
    @pytest.mark.parametrize("step", [17, 25, 40, 60, 99, 140])
    def test_the_loss_rises_by_half_at_any_time_of_the_fall_or_after_it(self, step):
        records = healthy_trace(150)
        records[step] = with_loss(records[step], 1.5)
        found = incidents_of(records)
        assert [i.step for i in found] == [step]
        assert found[0].onset_step == step
        assert found[0].evidence["rise"] == pytest.approx(0.5, abs=0.2)

    def test_the_spike_during_the_fast_fall_stays_below_the_losses_of_the_start(self):
        records = healthy_trace(60, start=5.5, half_life=12)
        records[40] = with_loss(records[40], 1.5)
        assert records[40].loss < 0.9 * records[0].loss
        assert [i.step for i in incidents_of(records)] == [40]

    def test_a_smaller_rise_lasts_and_its_first_step_is_the_onset(self):
        records = healthy_trace(120)
        for step in (100, 101):
            records[step] = with_loss(records[step], 1.38)
        assert [(i.step, i.onset_step) for i in incidents_of(records)] == [(101, 100)]

    def test_every_step_of_a_lasting_rise_for_outliers_never_enter_the_baseline(self):
        records = healthy_trace(120)
        records = records[:60] + [with_loss(r, 1.8) for r in records[60:]]
        assert [i.step for i in incidents_of(records)] == list(range(60, 120))

    def test_a_spike_that_builds_up_names_the_step_where_it_began(self):
        records = healthy_trace(120, noise=0.004)
        for step, factor in ((100, 1.0), (101, 1.2), (102, 1.6)):
            records[step] = with_loss(records[step], factor)
        found = incidents_of(records)
        assert [(i.step, i.onset_step) for i in found] == [(102, 101)]

    def test_the_loss_climbs_a_tenth_each_step_for_a_rise_is_not_taken_for_the_trend(self):
        records = healthy_trace(120)
        climbing = [with_loss(r, 1.1 ** (r.step - 99)) for r in records[100:]]
        found = incidents_of(records[:100] + climbing)
        assert found
        assert found[0].step <= 106


class TestStaysSilentWhen:
    def test_single_batches_are_harder(self):
        records = healthy_trace(200)
        for step in (100, 102, 140):
            records[step] = with_loss(records[step], 1.38)
        assert not incidents_of(records)

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("half_life", [8.0, 25.0, 60.0])
    def test_the_loss_falls_from_5_5_to_2_5_in_the_first_hundred_steps(self, seed, half_life):
        assert not incidents_of(healthy_trace(150, seed=seed, half_life=half_life, noise=0.03))

    def test_the_loss_stands_still_in_warm_up_and_then_falls_and_then_bends(self):
        records = healthy_trace(200)
        losses = [5.5] * 30 + [5.5 - 0.1 * s for s in range(30)] + [2.5] * 140
        records = [
            dataclasses.replace(r, loss=loss) for r, loss in zip(records, losses, strict=True)
        ]
        assert not incidents_of(records)

    @pytest.mark.parametrize("seed", range(6))
    def test_small_batches_make_the_loss_noisy(self, seed):
        assert not incidents_of(healthy_trace(400, seed=seed, noise=0.12))

    def test_the_text_becomes_a_little_harder(self):
        records = healthy_trace(300)
        assert not incidents_of([with_loss(r, 1.15 if r.step >= 200 else 1.0) for r in records])

    def test_the_learning_rate_decays_and_the_loss_falls_faster_again(self):
        records = healthy_trace(300)
        assert not incidents_of([with_loss(r, 0.5 ** (max(0, r.step - 200) / 40)) for r in records])

    def test_the_loss_is_not_finite_for_that_is_another_detectors(self):
        records = healthy_trace(60)
        records[40] = dataclasses.replace(records[40], loss=math.nan)
        records[41] = dataclasses.replace(records[41], loss=math.inf, skipped=True)
        assert not incidents_of(records)

    def test_less_than_the_minimum_history_was_seen(self):
        records = healthy_trace(40)
        records[10] = with_loss(records[10], 3.0)
        assert not incidents_of(records, DetectionConfig(min_history=16))


class TestState:
    def test_it_goes_through_json_exactly(self):
        import json

        detector = LossSpike(DetectionConfig())
        state = detector.initial()
        for record in healthy_trace(90):
            state, _ = detector.observe(state, record)
        text = json.dumps(detector.dump(state), allow_nan=False)
        assert detector.load(json.loads(text)) == state

    @settings(max_examples=60, deadline=None)
    @example([0.0, 0.0, 0.0, 0.0, 1e308])
    @given(
        st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=60),
    )
    def test_no_losses_whatever_break_it(self, losses):
        records = healthy_trace(len(losses), layers=())
        records = [dataclasses.replace(r, loss=x) for r, x in zip(records, losses, strict=True)]
        for incident in incidents_of(records, DetectionConfig(min_history=4)):
            assert incident.onset_step <= incident.step

    @settings(max_examples=40, deadline=None)
    @given(step=st.integers(20, 140), factor=st.floats(1.6, 1e6))
    def test_any_large_spike_after_the_minimum_history_is_seen(self, step, factor):
        records = healthy_trace(step + 1, layers=())
        records[step] = dataclasses.replace(records[step], loss=loss_at(step) * factor)
        assert [i.step for i in incidents_of(records)] == [step]
