"""The detector of replicas whose parameters differ."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping

import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank, ReplicaDisagreement
from monitoring.records import Incident, ReplicaComparison, StepRecord
from tests.unit.monitoring_traces import healthy_trace

TRACE = healthy_trace(60, layers=())
SAME = ReplicaComparison()
ODD = ReplicaComparison(("layers.1.mlp.down.weight", "norm.weight"), (2,), outvoted=True)
SPLIT = ReplicaComparison(("layers.1.mlp.down.weight",), (0, 1))


def compared(at: Mapping[int, ReplicaComparison]) -> list[StepRecord]:
    return [dataclasses.replace(r, replicas=at.get(r.step)) for r in TRACE]


def run(records: Iterable[StepRecord]) -> list[Incident]:
    detector = ReplicaDisagreement(DetectionConfig())
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        state = detector.load(json.loads(json.dumps(detector.dump(state))))
        found += new
    return found


def test_a_rank_that_differs_from_most_is_named_with_the_last_good_step() -> None:
    (incident,) = run(compared({20: SAME, 30: SAME, 40: ODD}))
    assert (incident.kind, incident.step, incident.onset_step) == ("replica_disagreement", 40, 30)
    assert incident.ranks == (2,)
    assert incident.suspects[0].layer == "layers.1.mlp.down"
    assert "rank 2 differs from the other replicas in layers.1.mlp.down.weight and 1 more" in (
        incident.message
    )


def test_of_two_that_differ_both_are_named() -> None:
    (incident,) = run(compared({40: SPLIT}))
    assert incident.ranks == (0, 1) and incident.evidence["outvoted"] == 0
    assert "which of them is right can't be told" in incident.message
    # Nothing was compared before: good is what was there at the start.
    assert incident.onset_step == 0


def test_every_comparison_that_differs_is_told_and_the_good_step_stays() -> None:
    assert [(i.step, i.onset_step) for i in run(compared({10: SAME, 20: ODD, 30: ODD}))] == [
        (20, 10),
        (30, 10),
    ]


def test_replicas_that_are_the_same_are_silent() -> None:
    assert not run(compared(dict.fromkeys(range(0, 60, 5), SAME)))


def test_it_is_told_while_everything_settles_after_a_start() -> None:
    bank = DetectorBank(DetectionConfig(settle_steps=30))
    assert [i.kind for r in compared({5: ODD}) for i in bank.observe(r)] == ["replica_disagreement"]


@pytest.mark.parametrize("of_another_size", [False, True])
def test_what_was_compared_is_known_after_statistics_begin_anew(of_another_size: bool) -> None:
    bank = DetectorBank(DetectionConfig())
    records = compared({20: SAME, 30: SAME, 40: ODD})
    if of_another_size:
        records[35:] = [dataclasses.replace(r, tokens=2 * r.tokens) for r in records[35:]]
    found = [i for record in records[:35] for i in bank.observe(record)]
    if not of_another_size:
        bank.renew(35)
    found += [i for record in records[35:] for i in bank.observe(record)]
    assert [(i.step, i.onset_step) for i in found] == [(40, 30)]


def test_it_is_known_when_a_rewind_goes_back_to_before_the_new_beginning() -> None:
    bank = DetectorBank(DetectionConfig())
    for record in compared({10: SAME, 20: SAME, 30: SAME})[:36]:
        bank.observe(record)
    bank.renew(36)
    bank.rewind(28, timeline=1)
    later = [dataclasses.replace(r, timeline=1) for r in compared({32: ODD})[28:]]
    found = [i for record in later for i in bank.observe(record)]
    assert [(i.step, i.onset_step) for i in found] == [(32, 20)]


def test_a_comparison_goes_through_json_and_older_rows_have_none() -> None:
    record = compared({3: ODD})[3]
    row = json.loads(json.dumps(record.to_json()))
    assert StepRecord.from_json(row) == record
    del row["replicas"]
    assert StepRecord.from_json(row).replicas is None
