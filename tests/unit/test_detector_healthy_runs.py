"""Healthy runs of every kind are silent; wherever a trace is cut, the detectors go on the same."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank
from monitoring.records import Incident, ReplicaComparison, StepRecord
from tests.unit.healthy_runs import HEALTHY_KINDS, SCALING, HealthyKind, healthy_run

CONFIG = DetectionConfig(exchange_error=0.04)
KNOWN: dict[str, Any] = {"scaling": SCALING, "guessing_loss": math.log(256)}


def feed(bank: DetectorBank, records: Iterable[StepRecord]) -> list[Incident]:
    return [incident for record in records for incident in bank.observe(record)]


class TestHealthyRuns:
    @pytest.mark.parametrize("kind", HEALTHY_KINDS)
    def test_are_silent(self, kind: HealthyKind) -> None:
        assert not feed(DetectorBank(CONFIG, **KNOWN), healthy_run(kind, 600, seed=1))

    @settings(max_examples=4, deadline=None)
    @given(st.sampled_from(HEALTHY_KINDS), st.integers(2, 2**31), st.integers(1, 5))
    def test_are_silent_whatever_the_seed_and_the_interval_of_statistics(
        self, kind: HealthyKind, seed: int, every: int
    ) -> None:
        records = (
            record if (record.step + 1) % every == 0 else dataclasses.replace(record, tensors={})
            for record in healthy_run(kind, 300, seed)
        )
        assert not feed(DetectorBank(CONFIG, **KNOWN), records)


BASE = list(healthy_run("domain_shift", 150, seed=5))
NAME = "layers.0.mlp.down/input"


def louder(record: StepRecord) -> StepRecord:
    return dataclasses.replace(record, loss=3 * record.loss, grad_norm=30 * record.grad_norm)


def tensor(record: StepRecord, **changes: float) -> StepRecord:
    if NAME not in record.tensors:
        return record
    stats = dataclasses.replace(record.tensors[NAME], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(record, tensors={**record.tensors, NAME: stats})


TROUBLES: tuple[Callable[[StepRecord], StepRecord], ...] = (
    louder,
    lambda r: tensor(r, amax=1e4),
    lambda r: tensor(r, saturated_pct=30.0),
    lambda r: tensor(r, underflow_pct=80.0),
    lambda r: tensor(r, amax=math.nan),
    lambda r: tensor(r, scale=900.0),
    lambda r: dataclasses.replace(r, grad_norm=math.nan, skipped=True),
    lambda r: dataclasses.replace(r, tensors={}),
    lambda r: dataclasses.replace(r, high_precision_layers=("layers.0.mlp.down",)),
    lambda r: dataclasses.replace(r, lr=10 * r.lr),
    lambda r: dataclasses.replace(r, tensors=dict(reversed(list(r.tensors.items())))),
    lambda r: dataclasses.replace(r, replicas=ReplicaComparison(("a.weight",), (0, 1))),
)


@st.composite
def disturbed(draw: st.DrawFn) -> list[StepRecord]:
    """The base run with stretches of trouble."""
    records = list(BASE)
    for _ in range(draw(st.integers(1, 5))):
        first, length = draw(st.integers(0, 149)), draw(st.integers(1, 12))
        trouble = draw(st.sampled_from(TROUBLES))
        records[first : first + length] = [trouble(r) for r in records[first : first + length]]
    return records


# Shrinking a trace takes minutes and tells no more than the step that differs.
@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(disturbed(), st.lists(st.integers(0, 149), min_size=1, max_size=4))
def test_a_trace_cut_anywhere_and_reloaded_gives_the_same_incidents(
    records: list[StepRecord], cuts: list[int]
) -> None:
    whole, bank = DetectorBank(CONFIG, **KNOWN), DetectorBank(CONFIG, **KNOWN)
    for record in records:
        if record.step in cuts:
            stored = json.dumps(bank.state_dict(), allow_nan=False)
            bank = DetectorBank(CONFIG, **KNOWN)
            bank.load_state_dict(json.loads(stored))
        assert repr(bank.observe(record)) == repr(whole.observe(record))
    assert bank.state_dict()["now"] == whole.state_dict()["now"]
