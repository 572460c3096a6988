import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.amax import TensorScaling
from monitoring.config import DetectionConfig
from monitoring.detectors import DETECTORS, DetectorBank, build_detectors, register
from monitoring.detectors.base import Detector
from orchestrator.recovery.detector_bank import new_bank
from orchestrator.spec.job import JobSpec
from tests.unit.monitoring_traces import healthy_trace, surged, with_loss, with_norm

CONFIG = DetectionConfig(settle_steps=8)


def kinds(incidents):
    return sorted(incident.kind for incident in incidents)


def feed(bank, records):
    return [incident for record in records for incident in bank.observe(record)]


def on(records, timeline, attempt=1):
    return [dataclasses.replace(r, timeline=timeline, attempt=attempt) for r in records]


def broken(record):
    return dataclasses.replace(record, grad_norm=math.nan, skipped=True)


class TestAnotherBatchSize:
    def test_what_was_usual_with_the_old_one_is_forgotten(self):
        records = healthy_trace(120)
        noisy = [with_norm(r, r.grad_norm * (1 + 11 * (r.step % 2))) for r in records[60:]]
        same = DetectorBank(CONFIG)
        assert "grad_norm_spike" in kinds(feed(same, records[:60] + noisy))
        other = [dataclasses.replace(r, tokens=r.tokens // 4) for r in noisy]
        assert feed(DetectorBank(CONFIG), records[:60] + other) == []

    def test_a_saved_state_knows_it(self):
        records = healthy_trace(61)
        bank = DetectorBank(CONFIG)
        feed(bank, records[:60])
        again = DetectorBank(CONFIG)
        again.load_state_dict(json.loads(json.dumps(bank.state_dict())))
        smaller = dataclasses.replace(records[60], tokens=records[60].tokens // 4)
        assert feed(again, [with_loss(smaller, 50.0)]) == [], "it settles"


class TestRenewed:
    def test_a_level_that_was_accepted_is_the_usual_one(self):
        records = healthy_trace(120)
        higher = [with_loss(r, r.loss * 4) for r in records[60:]]
        bank = DetectorBank(CONFIG)
        assert "loss_spike" in kinds(feed(bank, [*records[:60], higher[0]]))
        bank.renew(61)
        assert feed(bank, higher[1:]) == []
        following = dataclasses.replace(records[119], step=120)
        assert "loss_spike" in kinds(bank.observe(with_loss(following, 90.0)))

    def test_a_rewind_to_before_it_finds_nothing_of_before(self):
        records = healthy_trace(80)
        bank = DetectorBank(CONFIG)
        feed(bank, records[:60])
        bank.renew(60)
        feed(bank, records[60:62])
        assert bank.rewind(40) == 40
        assert feed(bank, on([with_loss(r, r.loss * 4) for r in records[40:]], 1)) == []


class TestOneReportATrouble:
    def test_several_detectors_at_one_step_give_one_list(self):
        records = healthy_trace(61)
        records[60] = with_norm(surged(records[60]), 100.0)
        bank = DetectorBank(CONFIG)
        assert feed(bank, records[:60]) == []
        assert kinds(bank.observe(records[60])) == [
            "amax_saturation", "grad_norm_spike", "loss_spike",
        ]  # fmt: skip

    def test_while_it_is_in_hand_its_later_steps_are_not_reported(self):
        records = healthy_trace(80)
        records = records[:60] + [surged(r) for r in records[60:]]
        bank = DetectorBank(CONFIG)
        assert {i.step for i in feed(bank, records[:68])} == {60}

    def test_a_trouble_nobody_dealt_with_is_reported_again_after_the_settling_time(self):
        records = healthy_trace(80)
        records = records[:60] + [surged(r) for r in records[60:]]
        bank = DetectorBank(CONFIG)
        assert {i.step for i in feed(bank, records)} == {60, 68, 76}

    def test_a_rewind_ends_the_hold(self):
        records = healthy_trace(80)
        bank = DetectorBank(CONFIG)
        assert feed(bank, [*records[:60], surged(records[60])])
        bank.rewind(50)
        replay = on(records[50:61], timeline=1)
        assert kinds(feed(bank, [*replay[:10], surged(replay[10])])) == [
            "amax_saturation", "loss_spike",
        ]  # fmt: skip

    def test_every_non_finite_step_is_reported_for_each_costs_an_update(self):
        records = healthy_trace(40)
        records = [broken(r) if r.step in (30, 31, 33) else r for r in records]
        assert [i.step for i in feed(DetectorBank(CONFIG), records)] == [30, 31, 33]

    def test_a_hold_keeps_silent_until_its_step(self):
        records = healthy_trace(60)
        bank = DetectorBank(CONFIG)
        feed(bank, records[:40])
        bank.hold(45)
        assert [i.step for i in feed(bank, [with_loss(r, 3.0) for r in records[40:50]])] == [45]


class TestEarlyTroubles:
    """Told while the state is still good."""

    name = "layers.0.mlp.down/input"

    def losing(self, record):
        stats = dataclasses.replace(record.tensors[self.name], underflow_pct=60.0)
        return dataclasses.replace(record, tensors={**record.tensors, self.name: stats})

    def test_do_not_hold_back_worse_ones(self):
        records = healthy_trace(60)
        records = records[:30] + [self.losing(r) for r in records[30:]]
        records[40] = with_loss(records[40], 3.0)
        found = feed(DetectorBank(CONFIG), records[:41])
        assert [(i.kind, i.step) for i in found] == [("underflow", 37), ("loss_spike", 40)]

    def test_are_told_again_after_the_settling_time(self):
        records = healthy_trace(60)
        found = feed(DetectorBank(CONFIG), records[:30] + [self.losing(r) for r in records[30:]])
        assert [i.step for i in found] == [37, 45, 53]


class TestSettling:
    def spike_after(self, bank, records, step):
        return kinds(feed(bank, [*records[:step], with_loss(records[step], 2.0)]))

    def test_spikes_are_silent_after_a_start_but_not_beyond_it(self):
        config = DetectionConfig(settle_steps=24, min_history=8)
        records = healthy_trace(60)
        assert self.spike_after(DetectorBank(config), records, 20) == []
        assert self.spike_after(DetectorBank(config), records, 24) == ["loss_spike"]

    @pytest.mark.parametrize(("step", "found"), [(47, []), (48, ["loss_spike"])])
    def test_spikes_are_silent_after_a_change_of_precision(self, step, found):
        records = [
            dataclasses.replace(r, high_precision_layers=("layers.2.mlp.down",))
            if r.step >= 40
            else r
            for r in healthy_trace(60)
        ]
        assert self.spike_after(DetectorBank(CONFIG), records, step) == found

    @pytest.mark.parametrize(("step", "found"), [(47, []), (48, ["loss_spike"])])
    def test_spikes_are_silent_after_a_jump_of_the_learning_rate(self, step, found):
        records = [
            dataclasses.replace(r, lr=10 * r.lr) if r.step >= 40 else r for r in healthy_trace(60)
        ]
        assert self.spike_after(DetectorBank(CONFIG), records, step) == found

    @pytest.mark.parametrize(("step", "found"), [(57, []), (58, ["loss_spike"])])
    def test_spikes_are_silent_after_a_rewind(self, step, found):
        records = healthy_trace(70)
        bank = DetectorBank(CONFIG)
        feed(bank, records[:60])
        assert bank.rewind(50) == 50
        assert self.spike_after(bank, on(records[50:], 1), step - 50) == found

    def test_non_finite_steps_and_heavy_saturation_are_reported_within_it(self):
        records = healthy_trace(10)
        records[2] = broken(records[2])
        records[4] = surged(records[4])
        assert kinds(feed(DetectorBank(CONFIG), records)) == ["amax_saturation", "nonfinite"]

    def test_light_saturation_is_not(self):
        def light(record):
            name = "layers.0.mlp.down/input"
            tensors = dict(record.tensors)
            tensors[name] = dataclasses.replace(tensors[name], saturated_pct=5.0)
            return dataclasses.replace(record, tensors=tensors)

        records = healthy_trace(40)
        assert feed(DetectorBank(CONFIG), [light(r) for r in records[:8]]) == []
        bank = DetectorBank(CONFIG)
        assert kinds(feed(bank, [*records[:8], light(records[8])])) == ["amax_saturation"]

    def test_settle_opens_a_window_and_ends_the_hold(self):
        records = healthy_trace(60)
        bank = DetectorBank(CONFIG)
        feed(bank, [*records[:40], with_loss(records[40], 3.0)])
        bank.settle(41)
        assert [i.step for i in feed(bank, [with_loss(r, 3.0) for r in records[41:52]])] == [49]


class TestRewind:
    def test_the_state_is_exactly_that_of_before_the_step(self):
        records = healthy_trace(90)
        bank, undisturbed = DetectorBank(CONFIG), DetectorBank(CONFIG)
        feed(undisturbed, records[:50])
        feed(bank, records[:70])
        assert bank.rewind(50) == 50
        own = ("detectors", "high_precision")
        now, then = bank.state_dict()["now"], undisturbed.state_dict()["now"]
        assert {k: now[k] for k in own} == {k: then[k] for k in own}

    def test_a_second_rewind_to_the_same_step_finds_the_same_state(self):
        records = healthy_trace(90)
        bank = DetectorBank(CONFIG)
        feed(bank, records[:70])
        bank.rewind(50)
        first = bank.state_dict()["now"]["detectors"]
        bank.rewind(50)
        assert bank.state_dict()["now"]["detectors"] == first
        feed(bank, on(records[50:66], 1))
        assert bank.rewind(50) == 50
        assert bank.state_dict()["now"]["detectors"] == first

    def test_late_records_of_the_old_timeline_neither_report_nor_disturb_it(self):
        records = healthy_trace(90)
        bank, plain = DetectorBank(CONFIG), DetectorBank(CONFIG)
        for b in (bank, plain):
            feed(b, records[:60])
            b.rewind(50, timeline=1)
        assert feed(bank, [surged(r) for r in records[60:63]]) == []
        replay = on(records[50:90], 1)
        assert feed(bank, replay) == feed(plain, replay)
        assert bank.state_dict() == plain.state_dict()

    def test_late_records_are_undone_when_the_new_timeline_was_not_announced(self):
        records = healthy_trace(90)
        bank, plain = DetectorBank(CONFIG), DetectorBank(CONFIG)
        for b in (bank, plain):
            feed(b, records[:60])
            b.rewind(50)
        feed(bank, records[60:63])
        replay = on(records[50:90], 1)
        feed(bank, replay)
        feed(plain, replay)
        assert bank.state_dict() == plain.state_dict()

    def test_a_record_that_goes_back_rewinds_by_itself(self):
        records = healthy_trace(90)
        bank, told = DetectorBank(CONFIG), DetectorBank(CONFIG)
        feed(bank, records[:60])
        feed(told, records[:60])
        told.rewind(50)
        replay = on(records[50:70], 0, attempt=2)
        assert feed(bank, replay) == feed(told, replay)
        assert bank.state_dict() == told.state_dict()

    def test_with_no_older_state_the_detectors_start_anew(self):
        bank = DetectorBank(CONFIG)
        feed(bank, healthy_trace(60, first=40))
        assert bank.rewind(20) == 20
        assert bank.state_dict()["now"]["detectors"] == DetectorBank(CONFIG).state_dict()["now"][
            "detectors"
        ]  # fmt: skip

    def test_records_of_a_replaced_attempt_are_refused(self):
        records = healthy_trace(60)
        bank = DetectorBank(CONFIG)
        feed(bank, on(records[:50], 0, attempt=2))
        before = bank.state_dict()
        assert feed(bank, [broken(r) for r in on(records[50:], 3, attempt=1)]) == []
        assert bank.state_dict() == before


class TestState:
    def test_a_restored_bank_decides_and_rewinds_like_the_one_that_was_saved(self):
        records = healthy_trace(90)
        records[80] = surged(records[80])
        bank, restored = DetectorBank(CONFIG), DetectorBank(CONFIG)
        feed(bank, records[:75])
        restored.load_state_dict(json.loads(json.dumps(bank.state_dict(), allow_nan=False)))
        assert restored.state_dict() == bank.state_dict()
        assert feed(restored, records[75:81]) == feed(bank, records[75:81])
        assert restored.rewind(60) == bank.rewind(60) == 60
        replay = on(records[60:], 1)
        assert feed(restored, replay) == feed(bank, replay)

    def test_it_stays_small_however_long_the_run(self):
        bank = DetectorBank(CONFIG)
        feed(bank, healthy_trace(600))
        assert len(json.dumps(bank.state_dict())) < 120_000

    def test_a_detector_that_is_new_since_then_starts_from_nothing(self):
        few = build_detectors(CONFIG)[:2]
        old = DetectorBank(CONFIG, few)
        feed(old, healthy_trace(40))
        bank = DetectorBank(CONFIG)
        bank.load_state_dict(old.state_dict())
        assert bank.state_dict()["now"]["detectors"][:2] == old.state_dict()["now"]["detectors"]

    @settings(max_examples=10, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(1, 30), st.sampled_from([1.0, 1.0, 1.0, 3.0, math.nan])),
            min_size=1,
            max_size=8,
        )
    )
    def test_any_walk_back_and_forth_replays_to_the_same_decisions(self, walk):
        base = healthy_trace(300, layers=("layers.0.mlp.down",))
        stream, at, newest = [], 0, 0
        for timeline, (length, factor) in enumerate(walk):
            part = on(base[at : at + length], timeline)
            stream += [*part[:-1], with_loss(part[-1], factor)]
            # Saved are the eight newest past states: no walk goes back beyond the oldest.
            newest = max(newest, at + length)
            at = max(0, newest - 7)
        first, second = (DetectorBank(CONFIG, save_every=1) for _ in range(2))
        found = [first.observe(r) for r in stream]
        for record, expected in zip(stream, found, strict=True):
            assert repr(second.observe(record)) == repr(expected)
            second.load_state_dict(json.loads(json.dumps(second.state_dict())))


class TestRegistry:
    def test_every_registered_detector_is_built(self):
        assert [d.name for d in build_detectors(CONFIG)] == list(DETECTORS)
        assert set(DETECTORS) == {
            "nonfinite", "loss_spike", "slow_divergence", "grad_norm_spike", "amax_saturation",
            "amax_surge", "projected_overflow", "underflow", "frozen_scale", "exchange_error",
            "replica_disagreement",
        }  # fmt: skip

    def test_a_name_that_is_taken_is_refused(self):
        class Double(Detector):
            name = "nonfinite"

        with pytest.raises(ValueError, match="two detectors are named nonfinite"):
            register(Double)
        assert DETECTORS["nonfinite"] is not Double


def test_the_detectors_of_a_job_know_its_recipe():
    fp8 = {"recipe": "delayed", "format": "E4M3", "margin": 2, "amax_history_len": 32}
    bank = new_bank(JobSpec.model_validate({"name": "job", "fp8": fp8}))
    assert {d.scaling for d in bank.detectors} == {TensorScaling("delayed", "E4M3", 2, 32)}
    bank = new_bank(JobSpec.model_validate({"name": "job", "fp8": {"recipe": "mxfp8"}}))
    assert not any(d.scaling.has_history or d.scaling.is_per_tensor for d in bank.detectors)
