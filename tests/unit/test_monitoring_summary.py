import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.episodes import bf16_stretches, episodes
from monitoring.job_view import JobView, split_steps, split_timelines
from monitoring.report import render_report
from monitoring.report_lead import lead
from monitoring.summary import Tally, summarize
from tests.unit.monitoring_traces import FALLEN, healthy_trace, recovered_view
from tests.unit.test_monitoring_watch import shown as watched_in

VIEW = recovered_view()


def watched(view):
    return watched_in(view, 80)


class TestJobView:
    def test_round_trips_through_strict_json(self):
        text = json.dumps(VIEW.to_json(), allow_nan=False)
        again = JobView.from_json(json.loads(text))
        assert json.dumps(again.to_json(), allow_nan=False) == text
        assert len(again.steps) == len(VIEW.steps)
        assert [i.kind for i in again.parsed_incidents()] == [i["kind"] for i in VIEW.incidents]

    def test_a_section_that_is_not_there_is_none(self):
        assert VIEW.section("training", "steps") == 240
        assert VIEW.section("training", "steps", "more") is None
        assert VIEW.section("nothing") is None

    def test_kept_are_the_newest_of_each_step_and_abandoned_all_others(self):
        kept, abandoned = split_timelines(VIEW.steps)
        assert [r.step for r in kept] == list(range(240))
        assert {r.timeline for r in kept[80:]} == {1}
        assert [r.step for r in abandoned] == list(range(80, 93))

    def test_steps_beyond_the_place_gone_back_to_are_abandoned_before_they_are_run_again(self):
        steps = healthy_trace(30, layers=())
        back = [dataclasses.replace(r, timeline=1) for r in steps[10:13]]
        kept, abandoned = split_timelines([*steps, *back])
        assert [r.step for r in kept] == list(range(13))
        assert len(abandoned) == 20

    @pytest.mark.parametrize("kind", ["rollback", "restart", "pause", "fail"])
    def test_steps_that_were_given_up_are_lost_though_the_job_ended_before_any_was_redone(
        self, kind
    ):
        back = {"kind": kind, "attempt": 1, "timeline": 0, "step": 11, "time": 1_800_000_003.0,
                "reason": "Again.", "to_step": 4, "in_place": kind == "rollback"}  # fmt: skip
        view = JobView("a-000000", "failed", {}, healthy_trace(12), (), [back])
        kept, abandoned = split_steps(view)
        assert ([r.step for r in kept], len(abandoned)) == ([0, 1, 2, 3], 8)
        summary = summarize(view)
        assert (summary["steps"], summary["steps_lost"]) == (4, 8)
        assert summary["final_loss"] == view.steps[3].loss
        assert summary["goodput"]["lost_s"] > summary["goodput"]["productive_s"] > 0
        assert summary["ettr"] < 0.5
        assert lead(view, summary).startswith("4 steps, loss")
        assert "4 steps" in watched(view)
        # A step after it, and nothing more is lost than what it does again.
        again = dataclasses.replace(view.steps[4], attempt=2, timeline=1)
        followed = summarize(dataclasses.replace(view, steps=[*view.steps, again]))
        assert (followed["steps"], followed["steps_lost"]) == (5, 8)

    @given(st.lists(st.integers(0, 20), max_size=60))
    def test_every_record_is_in_one_of_both_and_kept_ones_rise(self, numbers):
        blank = healthy_trace(1, layers=())[0]
        records = [dataclasses.replace(blank, step=n, batch=i) for i, n in enumerate(numbers)]
        kept, abandoned = split_timelines(records)
        assert sorted(r.batch for r in kept + abandoned) == list(range(len(numbers)))
        assert all(a.step < b.step for a, b in itertools.pairwise(kept))


class TestSummary:
    def test_says_what_became_of_the_job(self):
        summary = summarize(VIEW)
        assert summary["job"] == "demo-4f2a9c"
        assert summary["state"] == "succeeded"
        assert summary["steps"] == summary["steps_planned"] == 240
        assert summary["final_loss"] == VIEW.steps[-1].loss
        kinds = [i["kind"] for i in summary["incidents"]]
        assert sorted(kinds) == ["amax_saturation", "amax_surge", "loss_spike", "nonfinite"]
        assert [a["kind"] for a in summary["actions"]] == [
            "layer_fallback", "return_to_fp8", "skip_step",
        ]  # fmt: skip
        assert summary["actions"][0]["precision"] == dict.fromkeys(FALLEN, "bf16")
        assert (summary["rollbacks"], summary["restarts"], summary["attempts"]) == (1, 0, 1)
        assert summary["steps_lost"] == 13
        assert summary["steps_skipped"] == 1
        assert summary["high_precision_layers"] == []

    def test_time_to_recover_runs_from_the_incident_to_the_first_step_done_again(self):
        expected = VIEW.steps[93].time - VIEW.incidents[0]["time"]
        assert VIEW.steps[93].step == 80
        assert summarize(VIEW)["time_to_recover_s"] == pytest.approx(expected)

    def test_step_time_is_the_median_of_the_kept_steps(self):
        kept, _ = split_timelines(VIEW.steps)
        below = sum(r.step_time_s < summarize(VIEW)["step_time_s"] for r in kept)
        assert below == 120

    def test_tells_what_the_gradient_exchange_came_to_a_step(self):
        comm = {"bytes": 1e6, "uncompressed_bytes": 2e6, "quantize_s": 0.1, "wire_s": 0.3}
        again = {"bytes": 2e6, "uncompressed_bytes": 2e6, "relative_error": 0.02, "wire_bits": 8.0}
        steps = [
            dataclasses.replace(record, comm=of)
            for record, of in zip(healthy_trace(3), (comm, again, {}), strict=True)
        ]
        view = dataclasses.replace(VIEW, steps=tuple(steps))
        assert summarize(view)["comm"] == pytest.approx(
            {
                "bytes": 1.5e6,
                "compression_ratio": 1.5,
                "relative_error": 0.01,
                "quantize_s": 0.1,
                "wire_s": 0.3,
                "busbw_gbps": 0.02,
            }
        )
        assert "exchange compression ratio, a step" in render_report(view)
        alone = dataclasses.replace(view, steps=tuple(steps[2:]))
        assert summarize(alone)["comm"] == {}

    def test_is_strict_json_for_any_state_of_the_job(self):
        empty = JobView("a-000000", "queued", {})
        broken = dataclasses.replace(
            VIEW, steps=(dataclasses.replace(VIEW.steps[0], loss=math.nan, grad_norm=math.inf),)
        )
        for view in (VIEW, empty, broken):
            json.dumps(summarize(view), allow_nan=False)
        assert summarize(empty)["final_loss"] is None
        assert summarize(empty)["time_to_recover_s"] is None
        assert summarize(broken)["final_loss"] == "nan"

    def test_a_skipped_last_step_does_not_give_the_final_loss(self):
        last = dataclasses.replace(VIEW.steps[-1], skipped=True, loss=math.nan)
        view = dataclasses.replace(VIEW, steps=(*VIEW.steps[:-1], last))
        assert summarize(view)["final_loss"] == VIEW.steps[-2].loss

    def test_a_restart_counts_as_one_and_its_redone_steps_are_lost(self):
        steps = healthy_trace(50, layers=())
        again = [dataclasses.replace(r, attempt=2, time=r.time + 6.0) for r in steps[40:]]
        death = {"kind": "rank_died", "attempt": 1, "timeline": 0, "step": 49, "onset_step": 49,
                 "time": steps[-1].time + 0.5, "message": "Rank 3 died.", "ranks": [3]}  # fmt: skip
        restart = {"kind": "restart", "attempt": 1, "timeline": 0, "step": 49, "to_step": None,
                   "time": steps[-1].time + 0.6, "reason": "Rank 3 died.", "in_place": False,
                   "incidents": [death]}  # fmt: skip
        started = {"kind": "attempt_started", "time": death["time"] + 2.0, "message": "",
                   "detail": {"attempt": 2, "step": 40, "tier": "memory"}}  # fmt: skip
        view = JobView("a-1", "running", {}, [*steps, *again], [death], [restart], [started])
        summary = summarize(view)
        (action,) = summary["actions"]
        assert (action["to_step"], action["tier"]) == (40, "memory")
        assert episodes(view)[0].answer == "Restarted the ranks to step 40"
        assert (summary["restarts"], summary["rollbacks"]) == (1, 0)
        assert (summary["attempts"], summary["steps_lost"]) == (2, 10)
        assert summary["time_to_recover_s"] == pytest.approx(again[0].time - death["time"])
        assert 0.5 < summary["ettr"] < 0.8


def test_a_tally_that_is_fed_step_by_step_agrees_with_the_summary():
    totals = Tally()
    actions = list(VIEW.actions)
    for record in VIEW.steps:
        if record.timeline == 1 and len(actions) == 3:
            totals.add_action(actions.pop(0))
        totals.add_step(record)
    summary = summarize(VIEW)
    assert totals.steps_lost == summary["steps_lost"]
    assert totals.time_to_recover_s == summary["time_to_recover_s"]
    assert totals.ettr == summary["ettr"]


class TestEpisodes:
    def test_each_action_stands_with_its_incidents_in_order_of_time(self):
        found = episodes(VIEW)
        assert [(e.number, e.step, e.to_step) for e in found] == [
            (1, 90, 80), (2, 150, None), (3, 200, None),
        ]  # fmt: skip
        assert found[0].answer == "Rolled back to step 80, layers to BF16"
        assert set(found[0].trouble.split(" and ")) == {
            "FP8 saturation",
            "amax surge",
            "loss spike",
        }
        assert found[1].incidents == ()

    def test_an_incident_that_nothing_answered_yet_stands_alone(self):
        view = dataclasses.replace(VIEW, actions=())
        assert [(e.step, e.answer, len(e.incidents)) for e in episodes(view)] == [
            (90, "Seen", 3), (200, "Seen", 1),
        ]  # fmt: skip

    def test_stretches_in_bf16_begin_and_end_with_the_kept_steps(self):
        kept, _ = split_timelines(VIEW.steps)
        assert bf16_stretches(kept) == {layer: [(80, 150)] for layer in FALLEN}
