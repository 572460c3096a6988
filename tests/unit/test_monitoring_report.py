import dataclasses
import itertools
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.charts import Frame, badges, log_ticks, short, thinned, ticks
from monitoring.job_view import JobView
from monitoring.report import recovery_picture, render_report
from monitoring.report_charts import Story, loss_chart
from monitoring.report_layers import Layers, colours_of
from monitoring.report_lead import lead
from monitoring.summary import summarize
from tests.unit.monitoring_traces import FALLEN, eventful_view, healthy_trace, recovered_view
from tests.unit.test_monitoring_watch import shown as watched

VIEW = recovered_view()
EVIL = "\"><script>alert('x')</script><img src=x onerror=alert(1)>"
VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})


class Page(HTMLParser):
    """All tags and attributes of a page, and whether they nest."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def infected(value):
    """The value with every text in it made hostile, keys included."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, dict):
        fixed = {"kind", "evidence", "suspects", "layer", "tensor", "message", "reason", "step",
                 "time", "incidents", "to_step", "passed_over", "rung", "why", "precision",
                 "attempt", "timeline", "onset_step", "skip_batches", "training", "steps",
                 "fp8", "lr_scale", "ranks", "detector", "in_place"}  # fmt: skip
        return {k if k in fixed else k + EVIL: infected(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [infected(v) for v in value]
    return value


class TestThePage:
    page = Page(render_report(VIEW))

    def test_is_well_formed_and_says_what_happened(self):
        text = " ".join(self.page.text)
        for told in ("demo-4f2a9c", "succeeded", "FP8 saturation", "layers.2.mlp.down",
                     "Rolled back to step 80, layers to BF16", "Layers back to FP8",
                     "answers non-finite steps only", "80–92", "HYBRID"):  # fmt: skip
            assert told in text

    def test_needs_nothing_outside_itself_and_runs_no_script(self):
        assert not {"script", "link", "img", "iframe", "object", "embed"} & set(self.page.tags)
        source = render_report(VIEW)
        assert not re.search(r"url\((?!#)", source)
        assert "@import" not in source
        places = [v for _, k, v in self.page.attributes if k in ("src", "href", "xlink:href")]
        assert places == []
        links = set(re.findall(r"https?://[^\"'<> ]+", source))
        assert links == {"http://www.w3.org/2000/svg"}

    def test_follows_dark_mode_and_narrow_screens(self):
        source = render_report(VIEW)
        assert "prefers-color-scheme:dark" in source
        assert "@media(max-width:640px)" in source
        assert 'name="viewport"' in source

    def test_ids_are_unique(self):
        ids = [v for _, k, v in self.page.attributes if k == "id"]
        assert ids == ["stripes", "p0", "p1", "p2", "lost", "recovering", "waiting"]

    def test_every_text_of_users_and_runs_is_escaped(self):
        steps = [
            dataclasses.replace(
                r,
                tensors={EVIL + name: s for name, s in r.tensors.items()},
                high_precision_layers=tuple(EVIL + n for n in r.high_precision_layers),
            )
            for r in VIEW.steps
        ]
        row = VIEW.to_json()
        view = JobView(
            infected(VIEW.job),
            infected(VIEW.state),
            infected(dict(VIEW.spec)),
            steps,
            infected(row["incidents"]),
            infected(row["actions"]),
            infected(row["events"]),
        )
        page = Page(render_report(view))
        assert "script" not in page.tags
        assert "img" not in page.tags
        assert not [k for _, k, _ in page.attributes if k.startswith("on")]
        assert sum("alert('x')" in text for text in page.text) > 20
        ElementTree.fromstring(recovery_picture(view))

    @pytest.mark.parametrize(
        "view",
        [
            JobView("a-000000", "queued", {}),
            JobView("a-000000", "running", {}, healthy_trace(1)),
            JobView("a-000000", "running", {}, healthy_trace(2, layers=())),
            dataclasses.replace(VIEW, actions=()),
            dataclasses.replace(
                VIEW,
                steps=[dataclasses.replace(r, loss=math.nan, grad_norm=0.0) for r in VIEW.steps],
            ),
            dataclasses.replace(
                VIEW, steps=[dataclasses.replace(r, loss=math.inf) for r in VIEW.steps[:3]]
            ),
        ],
        ids=["no step", "one step", "no tensors", "no action", "all nan", "all inf"],
    )
    def test_works_for_any_state_of_a_job(self, view):
        source = render_report(view)
        Page(source)
        assert not re.search(r'[ MLHVh"](nan|inf)', "".join(re.findall(r' d="[^"]*"', source)))
        ElementTree.fromstring(recovery_picture(view))

    def test_of_a_long_job_stays_small(self):
        records = healthy_trace(500)
        steps = [
            dataclasses.replace(records[i % 500], step=i, tensors={} if i < 19_500 else
                                records[i % 500].tensors)
            for i in range(20_000)
        ]  # fmt: skip
        source = render_report(dataclasses.replace(VIEW, steps=steps))
        assert len(source) < 1_000_000


def answered(kind, state, **changes):
    """A job whose rank died at step 11 of 40, and what was answered."""
    death = {
        "kind": "rank_died", "detector": "supervisor", "attempt": 1, "timeline": 0, "step": 11,
        "onset_step": 11, "time": 1_800_000_002.5, "message": "Rank 2 died.", "evidence": {},
        "suspects": [], "ranks": [2],
    }  # fmt: skip
    action = {
        "kind": kind, "attempt": 1, "timeline": 0, "step": 11, "time": 1_800_000_002.6,
        "reason": "No restart is left.", "incidents": [death], "to_step": None,
    }  # fmt: skip
    spec = {"training": {"steps": 40}}
    view = JobView("a-000000", state, spec, healthy_trace(12), [death], [action])
    return dataclasses.replace(view, **changes)


class TestTheLead:
    """What the page says first, and what nobody must read into it."""

    def told(self, view):
        return lead(view, summarize(view))

    def test_a_trouble_that_a_person_was_called_for_is_not_handled(self):
        text = self.told(answered("pause", "paused", extra={"reason": "Restarts are used up."}))
        assert "1 trouble not handled: paused for a person." in text
        assert text.endswith("It is paused: Restarts are used up.")
        assert "without a person" not in text

    def test_what_a_person_resumed_says_so_and_what_it_cost(self):
        again = [dataclasses.replace(r, attempt=2, time=r.time + 60) for r in healthy_trace(40)]
        view = answered("pause", "succeeded", steps=[*healthy_trace(12), *again])
        text = self.told(view)
        assert "1 trouble not handled: paused for a person, and resumed. 12 steps redone." in text

    def test_a_job_that_gave_up_says_that_it_failed(self):
        text = self.told(answered("fail", "failed"))
        assert "1 trouble not handled: the job gave up." in text and "It failed." in text

    def test_a_job_without_a_trouble_that_failed_says_why(self):
        view = JobView("a-000000", "failed", {}, healthy_trace(3), extra={"reason": "No data."})
        assert self.told(view).endswith("without an incident. It failed: No data.")

    def test_what_was_handled_still_says_so(self):
        text = self.told(VIEW)
        assert "2 troubles handled without a person: 13 steps redone" in text
        assert self.told(answered("restart", "running")).count("handled without a person") == 1

    def test_what_was_before_the_first_step_is_of_no_step(self):
        lost = answered("restart", "running")
        rows = [{**r, "step": -1} for r in lost.actions], [{**r, "step": 0} for r in lost.incidents]
        view = dataclasses.replace(lost, steps=(), actions=rows[0], incidents=rows[1])
        for shown in (render_report(view), watched(view, 80)):
            assert "efore the first step" in shown and "step -1" not in shown.lower()

    def test_giving_up_is_not_drawn_as_good_news(self):
        assert '<span class="undone">Gave up.' in render_report(answered("fail", "failed"))
        assert '<span class="done">Restarted' in render_report(answered("restart", "running"))

    def test_one_is_not_many(self):
        text = self.told(JobView("a-000000", "running", {}, healthy_trace(1)))
        assert text.startswith("1 step, loss")

    def test_the_share_of_useful_time_is_the_same_everywhere_on_the_page(self):
        text = " ".join(Page(render_report(eventful_view())).text)
        (tile,) = re.findall(r"([\d.]+) % useful time", text)
        (section,) = re.findall(r"([\d.]+) % of [^.]* made steps that were kept", text)
        assert tile == section


class TestCharts:
    def test_a_spike_that_dwarfs_the_curve_is_held_at_the_edge_and_named(self):
        steps = [
            dataclasses.replace(r, loss=400.0) if r.timeline == 0 and r.step == 91 else r
            for r in VIEW.steps
        ]
        story = Story.of(dataclasses.replace(VIEW, steps=steps))
        assert ">400<" in loss_chart(story, 900)
        assert ">400<" not in loss_chart(Story.of(VIEW), 900)

    def test_abandoned_steps_are_drawn_beside_the_kept_ones(self):
        story = Story.of(VIEW)
        assert [len(part) for part in story.lost] == [13]
        chart = loss_chart(story, 900)
        assert chart.count('class="ghost"') == 1
        assert chart.count('class="kept"') == 1
        assert chart.count('class="ghost-dot"') == 13

    def test_the_heat_map_shows_the_clamped_layer_where_it_later_was_in_bf16(self):
        cells = Story.of(VIEW).layers.cells
        row = cells["layers.2.mlp.down"]
        assert row[90] == row[92] == 0
        assert 89 not in row
        assert 120 not in row
        assert row[160] == row[79] == 6
        assert 0 not in cells["layers.3.mlp.down"].values()

    def test_colours_go_by_clamped_values_first(self):
        clamped, rises = np.array([20.0, 2.0, 0.2, 0.0]), np.array([9.0, 1.5, 0.5, -3.0])
        assert colours_of(clamped, np.full(4, 0.2)).tolist() == [0, 1, 2, 6]
        assert colours_of(np.zeros(4), rises).tolist() == [3, 4, 5, 6]

    def test_a_layer_whose_amax_rises_is_seen_though_its_scale_follows_it(self):
        steps = []
        for record in healthy_trace(120):
            name, up = "layers.1.mlp.down/input", 2 ** (max(0, record.step - 60) / 20)
            old = record.tensors[name]
            grown = dataclasses.replace(old, amax=old.amax * up, scale=old.scale / up)
            tensors = {**record.tensors, name: grown}
            steps.append(dataclasses.replace(record, tensors=tensors))
        layers = Layers.of(steps, [])
        assert set(layers.cells["layers.0.mlp.down"].values()) <= {5, 6}
        own = layers.cells["layers.1.mlp.down"]
        assert own[50] == 6 and own[85] == 4 and own[119] == 3
        assert layers.worst(1) == ["layers.1.mlp.down"]
        facts = layers.facts["layers.1.mlp.down"]
        assert re.fullmatch(r"\+[2-3]\.\d octaves in step 11\d", facts.rise_text)

    def test_the_picture_stands_alone(self):
        picture = ElementTree.fromstring(recovery_picture(VIEW))
        words = " ".join(picture.itertext())
        assert "step 90: rolled back to step 80, layers to BF16" in words
        assert f"{FALLEN[0]} and 1 more in BF16" in words

    def test_thinning_keeps_the_extremes(self):
        points = [(float(i), math.sin(i)) for i in range(50_000)]
        points[31_234] = (31_234.0, 99.0)
        kept = thinned(points, 1000)
        assert (31_234.0, 99.0) in kept
        assert len(kept) <= 1001
        assert kept == sorted(kept)

    def test_a_label_at_the_right_end_of_an_axis_stays_in_the_picture(self):
        frame = Frame(390.0, 150.0, (0.0, 480.0), (0.0, 1.0))
        label = frame.below(480.0, "8 m 00 s", 20.0)
        assert 'x="390"' in label and "end" in label
        assert "mid" in frame.below(240.0, "4 m 00 s", 20.0)

    @given(st.lists(st.floats(40, 900), min_size=1, max_size=60))
    @settings(max_examples=60, deadline=None)
    def test_badges_of_many_troubles_never_overlap_and_leave_none_out(self, places):
        places.sort()
        marks = [(x, str(i + 1), "", f"trouble {i + 1}") for i, x in enumerate(places)]
        drawn = badges(marks, 30.0)
        rect = r'<rect x="([-\d.]+)" y="[\d.]+" width="([\d.]+)"'
        found = re.findall(r'<circle cx="([\d.]+)"|' + rect, drawn)
        reach = [(float(c) - 9, float(c) + 9) if c else (float(x), float(x) + float(w))
                 for c, x, w in found]  # fmt: skip
        for (_, before), (after, _) in itertools.pairwise(reach):
            assert before <= after
        assert [f"trouble {i + 1}" in drawn for i in range(len(marks))] == [True] * len(marks)

    def test_ticks_are_round_and_inside(self):
        assert ticks(0, 239, 4) == [0, 100, 200]
        assert ticks(2.31, 5.6, 5) == [3, 4, 5]
        assert ticks(1, 1, 5) == [1]
        assert log_ticks(0.3, 4.0) == [0.5, 1, 2]
        assert log_ticks(0.01, 1000) == [0.01, 0.1, 1, 10, 100, 1000]

    @pytest.mark.parametrize(
        ("value", "label"),
        [
            (0.0, "0"),
            (2.5, "2.5"),
            (12345.6, "12,346"),
            (999.6, "1,000"),
            (3e-5, "3.0e-5"),
            (math.nan, "nan"),
        ],
    )
    def test_labels_are_short(self, value, label):
        assert short(value) == label
