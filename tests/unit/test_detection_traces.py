"""The benchmark's troubles before the detectors, and the published rules on what they are for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank
from monitoring.records import StepRecord
from tests.benchmarks.detection_traces import LAYERS
from tests.benchmarks.published_rules import (
    PUBLISHED,
    Lightning,
    LLMFoundry,
    Megatron,
    OLMoCore,
    Rule,
    ZClip,
)
from tests.unit.monitoring_traces import healthy_trace, surged


def strikes(rule: Rule, records: list[StepRecord]) -> list[int]:
    return [record.step for record in records if rule.observe(record)]


def flat(steps: int, **odd: dict[int, float]) -> list[StepRecord]:
    """Loss 2 and norm 1, a little uneven; ``odd``: field → step → its value there."""
    (first,) = healthy_trace(1, layers=LAYERS[:1])
    records = []
    for step in range(steps):
        wave = 1 + 0.01 * math.sin(step)
        values = {"loss": 2.0 * wave, "grad_norm": 1.0 * wave}
        values |= {name: of[step] for name, of in odd.items() if step in of}
        records.append(replace(first, step=step, **values))  # type: ignore[arg-type]
    return records


def test_a_surge_that_stays_becomes_the_tensors_history_without_an_error() -> None:
    records = healthy_trace(220, layers=LAYERS)
    bank = DetectorBank(DetectionConfig())
    found = [bank.observe(surged(r, octaves=7.0) if r.step >= 100 else r) for r in records]
    assert found[100] and not any(found[:100])


@pytest.mark.parametrize("rule", PUBLISHED)
def test_no_rule_strikes_on_a_flat_loss(rule: type[Rule]) -> None:
    assert strikes(rule(), flat(300)) == []


class TestRulesDoWhatTheirOwnersSay:
    def test_llm_foundry_strikes_at_the_fifth_outlier_in_a_row(self) -> None:
        high = dict.fromkeys(range(150, 156), 4.3)
        assert strikes(LLMFoundry(), flat(200, loss=high)) == [154, 155]
        assert strikes(LLMFoundry(), flat(200, loss=dict.fromkeys(range(150, 154), 4.3))) == []
        assert strikes(LLMFoundry(), flat(100, loss=dict.fromkeys(range(50, 60), 9.0))) == []

    def test_olmo_strikes_beyond_six_deviations_of_loss_or_norm_from_64_steps_on(self) -> None:
        assert strikes(OLMoCore(), flat(200, loss={150: 2.2}, grad_norm={180: 1.1})) == [150, 180]
        assert strikes(OLMoCore(), flat(200, loss={150: 2.05}, grad_norm={40: 9.0})) == []

    def test_olmo_skips_for_as_long_as_a_nan_is_in_its_window(self) -> None:
        assert strikes(OLMoCore(), flat(300, loss={100: math.nan})) == [*range(100, 229)]

    def test_megatron_strikes_at_ten_times_the_largest_of_the_first_hundred(self) -> None:
        assert strikes(Megatron(), flat(200, loss={50: 3.0, 150: 29.0, 160: 30.0})) == [160]
        assert strikes(Megatron(), flat(60, grad_norm={50: math.inf})) == [50]

    def test_lightning_strikes_at_three_times_the_mean_of_ten(self) -> None:
        assert strikes(Lightning(), flat(60, loss={30: 5.9, 45: 6.7, 50: math.nan})) == [45, 50]

    def test_zclip_strikes_above_two_and_a_half_deviations_after_25_steps(self) -> None:
        assert strikes(ZClip(), flat(60, grad_norm={20: 5.0})) == []
        assert 40 in strikes(ZClip(), flat(60, grad_norm={40: 1.1}))
