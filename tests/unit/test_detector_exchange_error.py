"""The detector of coarse gradient exchange: counted steps of a window, told once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank, ExchangeError
from monitoring.records import Incident, StepRecord
from tests.unit.monitoring_traces import healthy_trace

CONFIG = DetectionConfig(exchange_error=0.04, exchange_error_steps=3, exchange_error_window=5)
TRACE = healthy_trace(60)


def record(step: int, error: float, bits: float = 8.0, **changes: object) -> StepRecord:
    comm = {"bytes": 1e6, "relative_error": error, "wire_bits": bits}
    return dataclasses.replace(TRACE[step], comm=comm, **changes)  # type: ignore[arg-type]


def found(records: Iterable[StepRecord], config: DetectionConfig = CONFIG) -> list[Incident]:
    detector = ExchangeError(config)
    state, incidents = detector.initial(), []
    for one in records:
        state, new = detector.observe(state, one)
        state = detector.load(json.loads(json.dumps(detector.dump(state))))
        incidents += new
    return incidents


def trace(errors: Iterable[float], bits: float = 8.0) -> list[StepRecord]:
    return [record(step, error, bits) for step, error in enumerate(errors)]


class TestFiresWhen:
    def test_enough_steps_of_the_window_are_coarse_and_it_says_so(self) -> None:
        (incident,) = found(trace([0.02, 0.05, 0.02, 0.06, 0.05]))
        assert (incident.kind, incident.step, incident.onset_step) == ("exchange_error", 4, 4)
        assert incident.evidence["steps"] == 3 and incident.evidence["first_step"] == 1
        assert "3 of the last 5 steps" in incident.message and "4 %" in incident.message

    def test_it_was_in_bf16_since_and_is_coarse_again(self) -> None:
        coarse, away = trace([0.05] * 10), [record(10, 0.0, 16.0)]
        again = [record(step, 0.05) for step in range(11, 20)]
        assert [i.step for i in found([*coarse, *away, *again])] == [2, 13]

    def test_a_window_was_fine_in_between(self) -> None:
        assert [i.step for i in found(trace([0.05] * 4 + [0.01] * 5 + [0.05] * 3))] == [2, 11]


class TestStaysSilentWhen:
    def test_coarse_steps_are_further_apart(self) -> None:
        assert not found(trace([0.05, 0.02, 0.02] * 12))

    def test_it_has_been_told(self) -> None:
        assert len(found(trace([0.05] * 40))) == 1

    def test_updates_were_left_out(self) -> None:
        assert not found([record(step, 0.05, skipped=True) for step in range(20)])

    def test_gradients_do_not_go_in_fp8(self) -> None:
        assert not found(trace([0.05] * 20, bits=16.0))

    def test_there_is_no_limit(self) -> None:
        assert not found(trace([0.05] * 20), DetectionConfig())


@given(st.lists(st.booleans(), max_size=40))
def test_what_it_tells_had_enough_coarse_steps_in_its_window(coarse: list[bool]) -> None:
    for incident in found(trace([0.05 if bad else 0.02 for bad in coarse])):
        window = coarse[max(0, incident.step - 4) : incident.step + 1]
        assert sum(window) >= 3 and coarse[incident.step]


def test_it_is_told_while_others_settle_and_holds_nothing_back() -> None:
    config = CONFIG.model_copy(update={"settle_steps": 20})
    bank = DetectorBank(config)
    kinds = [
        incident.kind
        for one in [*trace([0.05] * 6), record(6, 0.05, loss=float("nan"))]
        for incident in bank.observe(one)
    ]
    assert kinds == ["exchange_error", "nonfinite"]
