"""What Prometheus scrapes: the numbers, their format, and the dashboard that draws them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

import deploy
from monitoring.prometheus import COUNTERS, GAUGES, TOTALS, JobNumbers, Numbers, exposition
from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorStats
from orchestrator.actions import Action
from orchestrator.events import EventDraft
from orchestrator.protocol import SupervisorBatch
from orchestrator.store.numbers import AFTERWARDS_S
from tests.unit.control_plane import ControlPlane
from tests.unit.test_store import action, step


def samples(text: bytes | str) -> dict[tuple[str, ...], float]:
    """(name, values of its labels in the order of their names …) → value."""
    told = text.decode() if isinstance(text, bytes) else text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(told)
        for sample in family.samples
    }


def with_tensors(tensors: dict[str, TensorStats]) -> StepRecord:
    row = step(7, tensors=tensors, high_precision_layers=("low",))
    return StepRecord.from_json(row)


def stats(amax: float, saturated: float = 0.0, underflow: float = 0.0) -> TensorStats:
    return TensorStats(amax, 448.0, saturated, underflow, nonfinite=0)


def test_a_job_is_told_with_its_newest_step_and_what_happened_to_it() -> None:
    newest = with_tensors(
        {
            "a/input": stats(1.0, saturated=2.0),
            "b/weight": stats(0.25, underflow=10.0),
            "low/input": stats(1e6, saturated=90.0),
        }
    )
    job = JobNumbers("toy-1", "toy", 100, 2, 3, "HYBRID", newest, {"loss_spike": 2}, {"pause": 1})
    told = samples(exposition(Numbers([job], {"running": 1, "failed": 4}, 5)))
    at = ("toy-1", "toy")
    assert told[("octavo_jobs", "failed")] == 4
    assert told[("octavo_quarantined_nodes",)] == 5
    assert told[("octavo_job_step", *at)] == 8 and told[("octavo_job_steps_planned", *at)] == 100
    assert told[("octavo_job_loss", *at)] == newest.loss
    assert told[("octavo_job_tokens_per_second", *at)] == 5120
    assert told[("octavo_job_incidents_total", "toy-1", "loss_spike", "toy")] == 2
    assert told[("octavo_job_actions_total", "toy-1", "pause", "toy")] == 1
    # What computes in BF16 has no part in FP8's numbers.
    assert told[("octavo_job_saturated_ratio", *at)] == 0.02
    assert told[("octavo_job_underflow_ratio", *at)] == 0.1
    assert told[("octavo_job_headroom_octaves", *at)] == math.log2(448.0 / 448.0)


def test_a_step_that_was_given_up_is_not_told_as_done() -> None:
    newest = StepRecord.from_json(step(7))
    job = JobNumbers("toy-1", "toy", 100, 2, 3, newest=newest, steps_done=5)
    told = samples(exposition(Numbers([job], {})))
    assert told[("octavo_job_step", "toy-1", "toy")] == 5
    assert ("octavo_job_loss", "toy-1", "toy") not in told


def test_mfu_is_told_where_what_the_ranks_could_is_known_and_nowhere_else() -> None:
    newest = StepRecord.from_json(step(7))
    speed = newest.tokens / newest.step_time_s
    job = JobNumbers("toy-1", "toy", 100, 2, 3, newest=newest, peak_tokens_per_s=4 * speed)
    told = samples(exposition(Numbers([job, replace(job, job="b", peak_tokens_per_s=None)], {})))
    assert told[("octavo_job_mfu_ratio", "toy-1", "toy")] == 0.25
    assert ("octavo_job_mfu_ratio", "b", "toy") not in told


def test_what_an_operator_pages_on_can_be_asked(plane: ControlPlane, api: TestClient) -> None:
    assert ("octavo_controller_pass_timestamp_seconds",) not in samples(api.get("/metrics").text)
    job = plane.submit("toy")
    plane.steps(2)
    row = step(7, comm={"bytes": 512.0})
    lost = {"steps_lost": 3, "time_to_recover_s": 2.5}
    events = [EventDraft("checkpoint_written", 50.0 + n, "", {"step": n}) for n in (8, 9)]
    events += [EventDraft("recovered", 60.0, "", lost), EventDraft("recovered", 61.0, "", lost)]
    plane.controller.report(job, 1, SupervisorBatch(1, steps=(row,), events=tuple(events)))
    told, at = samples(api.get("/metrics").text), (job, "toy")
    assert told[("octavo_job_checkpoint_timestamp_seconds", *at)] == 59.0
    assert told[("octavo_job_steps_lost_total", *at)] == 6
    assert told[("octavo_job_recovering_seconds_total", *at)] == 5.0
    left = Action("pause", 1, 0, 7, 62.0, "Again.", to_step=4)
    plane.controller.report(job, 1, SupervisorBatch(2, actions=(left,)))
    lost_since = samples(api.get("/metrics").text)[("octavo_job_steps_lost_total", *at)]
    assert lost_since == 6 + 4, "what a person is left with is lost too"
    assert told[("octavo_job_exchange_bytes", *at)] == 512
    assert told[("octavo_controller_pass_timestamp_seconds",)] == plane.now
    began = plane.store.job(job)
    assert told[("octavo_job_submitted_timestamp_seconds", *at)] == began.submitted_at
    assert told[("octavo_job_started_timestamp_seconds", *at)] == began.started_at
    waits = plane.submit("waits", num_nodes=50)
    told = samples(api.get("/metrics").text)
    assert ("octavo_job_submitted_timestamp_seconds", waits, "waits") in told
    assert ("octavo_job_started_timestamp_seconds", waits, "waits") not in told


def test_odd_names_and_numbers_are_told_as_they_are() -> None:
    newest = StepRecord.from_json(step(0, loss=math.nan, grad_norm=math.inf, step_time_s=0.0))
    job = JobNumbers('a"b\\c\n', "toy", 1, 1, 0, newest=newest)
    told = samples(exposition(Numbers([job], {})))
    assert math.isnan(told[("octavo_job_loss", 'a"b\\c\n', "toy")])
    assert told[("octavo_job_grad_norm", 'a"b\\c\n', "toy")] == math.inf


def test_a_job_without_a_step_has_no_numbers_of_one() -> None:
    told = samples(exposition(Numbers([JobNumbers("toy-1", "toy", 9, 0, 0)], {})))
    assert told[("octavo_job_step", "toy-1", "toy")] == 0
    assert ("octavo_job_loss", "toy-1", "toy") not in told


def test_the_controller_tells_what_is_under_way_and_what_has_just_ended(
    api: TestClient, plane: ControlPlane
) -> None:
    going, waiting = plane.submit("going"), plane.submit("waiting")
    plane.steps(2)
    told = (step(0), step(1, timeline=0))
    plane.controller.report(going, 1, SupervisorBatch(1, steps=told))
    plane.controller.report(going, 1, SupervisorBatch(2, actions=(action("rollback"),)))
    answer = api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    assert found[("octavo_job_step", going, "going")] == 2
    assert found[("octavo_job_actions_total", going, "rollback", "going")] == 1
    assert found[("octavo_job_step", waiting, "waiting")] == 0
    assert found[("octavo_jobs", "queued")] == 1
    plane.controller.cancel(waiting, "done")
    last = ("octavo_job_step", waiting, "waiting")
    assert last in samples(api.get("/metrics").text), "its last numbers are scraped"
    plane.now += AFTERWARDS_S
    later = samples(api.get("/metrics").text)
    assert last not in later and ("octavo_job_step", going, "going") in later


def test_the_dashboard_draws_series_that_there_are() -> None:
    text = (Path(deploy.__file__).parent / "grafana.json").read_text()
    board = json.loads(text)
    known = {"octavo_jobs", "octavo_quarantined_nodes"}
    known |= {"octavo_controller_pass_timestamp_seconds"}
    known |= {f"octavo_job_{name}" for name in GAUGES}
    known |= {f"octavo_job_{name}_total" for name in (*COUNTERS, *TOTALS)}
    drawn = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"octavo_\w+", target["expr"])
    }
    assert drawn == known
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
