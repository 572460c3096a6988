import dataclasses
import io
import math
import re
import time
from datetime import UTC, datetime

import pytest
from rich.cells import cell_len
from rich.console import Console

from monitoring.charts import duration
from monitoring.job_view import JobView
from monitoring.watch import eta_s, plain_line, sparkline, watch_panel
from tests.unit.monitoring_traces import eventful_view, healthy_trace, recovered_view

VIEW = recovered_view("running")


NODES = [{"node_ip": "10.0.0.1", "slots": 2}, {"node_ip": "10.0.0.9", "slots": 2, "spare": True}]
EVENTS = eventful_view().events
EVENTFUL = dataclasses.replace(
    eventful_view(),
    state="running",
    steps=VIEW.steps[:130],
    events=[e for e in EVENTS if e["message"] not in ("", "succeeded")],
    extra={"attempt": 2, "nodes": NODES},
)


def shown(view, width, height=None):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(watch_panel(view, width, height))
    return console.file.getvalue()


def cut(count):
    return dataclasses.replace(VIEW, steps=VIEW.steps[:count])


class TestPanel:
    @pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
    def test_fits_any_width(self, width):
        for count in (0, 1, 92, 130, len(VIEW.steps)):
            lines = shown(cut(count), width).splitlines()
            assert {cell_len(line) for line in lines} == {width}

    def test_shows_progress_values_layers_and_what_happened(self):
        text = shown(cut(130), 110)
        assert "117/240 steps" in text
        assert "left" in text
        assert f"loss {VIEW.steps[129].loss:.4f}" in text
        assert "in BF16 layers.2.mlp.down, layers.2.mlp.gate_up" in text
        assert "Step 90: " in text
        assert "Rolled back to step 80, layers to BF16" in text

    @pytest.mark.parametrize("height", [12, 18, 24, 40, 80])
    def test_fits_any_height_and_what_happened_comes_first(self, height):
        lines = shown(EVENTFUL, 80, height).splitlines()
        assert len(lines) <= height
        assert "running" in lines[-2], "the last event"
        told = "\n".join(lines)
        assert ("octaves" in told) == (height >= 18)
        assert ("88BB" in told) == (height >= 24)

    def test_says_of_every_linear_whether_it_is_in_fp8_or_bf16(self):
        text = shown(cut(130), 110)
        assert "precision: 14 linears in FP8 (8), 2 in BF16 (B)" in text
        assert "0 8888 1 8888 2 88BB 3 8888" in text

    def test_of_many_blocks_shows_those_that_are_not_as_they_began(self):
        record = VIEW.steps[129]
        layers = [f"layers.{i}.mlp.down" for i in range(2000)]
        tensors = {f"{name}/input": record.tensors["layers.0.mlp.down/input"] for name in layers}
        moved = ("layers.7.mlp.down", "layers.1234.mlp.down")
        steps = [dataclasses.replace(record, tensors=tensors, high_precision_layers=moved)]
        text = shown(dataclasses.replace(VIEW, steps=steps), 100, 40)
        assert "1,998 linears in FP8 (8), 2 in BF16" in text
        assert "7 B    1234 B" in text

    def test_shows_nodes_and_how_ranks_divide_the_work(self):
        text = shown(EVENTFUL, 80, 24)
        assert "ranks 4  2 pipeline × 2 data  attempt 2" in text
        assert "nodes 2  10.0.0.1 2 ranks  10.0.0.9 spare" in text

    def test_shows_the_tensors_nearest_to_their_maximum_clamped_ones_first(self):
        text = shown(cut(92), 110)
        assert " 88.0 % clamped " in text
        names = [n for n in VIEW.steps[91].tensors if n in text]
        assert len(names) == 8
        assert "layers.2.mlp.down/input" in names
        assert len({name.rpartition("/")[0] for name in names}) == 8, "each layer once"

    @pytest.mark.parametrize("width", [40, 44, 52, 60, 80])
    def test_no_number_is_cut_to_another_one(self, width):
        steps = [dataclasses.replace(r, tokens=102_044, step_time_s=1.0) for r in EVENTFUL.steps]
        view = dataclasses.replace(EVENTFUL, steps=steps)
        text = shown(view, width)
        for numbers in re.findall(r"tokens/s (\S+)(?:  median (\S+))?", text):
            assert set(numbers) <= {"102,044", ""}
        assert "tokens/s 102,044" in text
        for loss in re.findall(r"(?:loss|best) (\S+)", text):
            assert re.fullmatch(r"\d+\.\d{4}", loss)
        assert re.search(r"\d+/240 steps", text)
        assert "102,044 tokens/s" in plain_line(steps[0])

    def test_checkpoints_push_no_trouble_from_the_screen(self):
        last = EVENTS[-1]["time"] + 100
        written = [
            {"kind": "checkpoint_written", "time": last + i, "message": f"Checkpoint {i} written."}
            for i in range(20)
        ]
        view = dataclasses.replace(EVENTFUL, events=(*EVENTFUL.events, *written))
        text = shown(view, 80, 24)
        assert text.count("written.") == 1 and "Checkpoint 19 written." in text
        others = [{**e, "kind": f"k{i}", "message": f"other {i}"} for i, e in enumerate(written)]
        text = shown(dataclasses.replace(view, events=(*view.events, *others)), 80, 24)
        assert "other 19" in text and "rank died → Restarted the ranks" in text

    def test_what_recovery_came_to_stays_on_the_screen(self):
        assert "so far 3 troubles  1 rollback  1 restart  13 steps lost" in shown(EVENTFUL, 80, 24)
        assert "so far 3 troubles  1 rollback …" in shown(EVENTFUL, 40, 24)
        assert "so far" not in shown(JobView("a-000000", "running", {}, VIEW.steps[:9]), 80)

    def test_says_why_a_job_stands_still(self):
        view = dataclasses.replace(EVENTFUL, state="paused", extra={"reason": "No restart left."})
        assert "No restart left." in shown(view, 80, 24)

    def test_times_are_local_their_zone_is_told_once_and_the_date_where_there_are_two(
        self, monkeypatch
    ):
        monkeypatch.setenv("TZ", "America/New_York")
        time.tzset()
        try:
            midnight = datetime(2026, 11, 30, 5, tzinfo=UTC).timestamp()
            events = [{"kind": "x", "time": midnight + 60 * i, "message": f"{i}"} for i in (1, 2)]
            view = JobView("a-000000", "running", {}, events=events)
            text = shown(view, 60)
            assert "│ 00:01:00 1" in text and text.count("times in EST (UTC-05:00)") == 1
            events.insert(0, {"kind": "x", "time": midnight - 60, "message": "0"})
            text = shown(dataclasses.replace(view, events=events), 60)
            assert "│ 11-29 23:59:00 0" in text and "│ 11-30 00:01:00 1" in text
        finally:
            monkeypatch.undo()
            time.tzset()

    def test_shows_the_layers_whose_amax_grows_for_room_says_nothing_of_a_healthy_job(self):
        steady = healthy_trace(40)
        name = "layers.1.mlp.down/input"
        steps = []
        for record in steady:
            old = record.tensors[name]
            tensors = dict(record.tensors)
            tensors[name] = dataclasses.replace(
                # Its scale follows it, so that it has as much room as ever.
                old,
                amax=old.amax * 2 ** (record.step / 10),
                scale=old.scale / 2 ** (record.step / 10),
            )
            steps.append(dataclasses.replace(record, tensors=tensors))
        text = shown(JobView("a-000000", "running", {}, steps), 100)
        bars = [line for line in text.splitlines() if " octaves " in line]
        assert "layers whose amax grew most in 39 steps" in text
        (grown,) = re.findall(r"\+(\d\.\d) octaves +[█·]+ layers.1.mlp.down/input", bars[0])
        assert 1.7 < float(grown) < 2.3
        assert len(bars) == 8 and all(" +0." in line for line in bars[1:])
        assert "-0.0" not in text
        alone = shown(JobView("a-000000", "running", {}, steps[-1:]), 100)
        assert "layers nearest to the FP8 maximum" in alone and "-0.0" not in alone

    def test_text_of_a_run_is_not_markup(self):
        event = {"kind": "x", "time": 1.0, "message": "[bold red]loud[/] \x1b[31mred"}
        view = dataclasses.replace(VIEW, job="[link=http://x]job[/link]", events=(event,),
                                   actions=(), incidents=())  # fmt: skip
        text = shown(view, 110)
        assert "[bold red]loud[/]" in text
        assert "[link=http://x]job[/link]" in text
        assert "\x1b" not in text

    def test_a_job_without_a_step_or_a_spec_has_a_panel(self):
        assert "0 steps" in shown(JobView("a-000000", "queued", {}), 60)


class TestPlainLine:
    def test_is_one_line_with_the_values(self):
        line = plain_line(VIEW.steps[100])
        assert "\n" not in line
        assert line.startswith("step    87  loss ")
        assert "2 linears in BF16" in line
        assert line.endswith("attempt 1, timeline 1")

    def test_says_when_the_update_was_left_out(self):
        record = next(r for r in VIEW.steps if r.skipped)
        assert "update left out" in plain_line(record)
        assert "grad norm nan" in plain_line(record)


def test_the_eta_is_the_recent_median_times_the_steps_left():
    steps = [dataclasses.replace(r, step_time_s=2.0) for r in VIEW.steps[:60]]
    assert eta_s(VIEW, steps) == 180 * 2.0
    assert eta_s(VIEW, steps[:1]) is None
    assert eta_s(JobView("a", "running", {}), steps) is None


class TestSparkline:
    def test_spans_from_lowest_to_highest(self):
        assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"

    def test_keeps_a_single_bad_step_visible(self):
        values = [1.0] * 1000
        values[777] = 9.0
        assert sparkline(values, 50).count("█") == 1

    def test_bears_missing_values(self):
        assert sparkline([], 10) == ""
        assert sparkline([math.nan, math.inf], 10) == "  "
        assert sparkline([1.0, math.nan, 2.0], 10) == "▁ █"
        assert sparkline([3.0, 3.0], 10) == "▁▁"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0 s"),
        (0.4, "0.4 s"),
        (2.04, "2 s"),
        (42, "42 s"),
        (185, "3 m 05 s"),
        (7800, "2 h 10 m"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_are_told_in_two_units(seconds, text):
    assert duration(seconds) == text
