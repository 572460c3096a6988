"""The benchmark of the detectors measures what it says."""

from __future__ import annotations

from monitoring.config import DetectionConfig
from tests.benchmarks.bench_detectors import cost, false_alarms


def test_cost_is_of_as_many_tensors_and_steps_as_asked_for() -> None:
    measured = cost(tensors=10, steps=3, config=DetectionConfig(window=8))
    assert (measured.tensors, len(measured.observe)) == (12, 3)
    assert measured.state_bytes > 1000


def test_false_alarms_are_counted() -> None:
    assert not false_alarms("warm_up", 40, DetectionConfig(), [0])
    jumpy = DetectionConfig(settle_steps=0, min_history=4, loss_sigmas=0.5, loss_min_rise=1e-4)
    assert false_alarms("warm_up", 40, jumpy, [0])
