"""Stored records of a supervisor's real decisions, replayed: to the last digit, or told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.api.app import create_app
from orchestrator.api.client import Client
from orchestrator.cli import main as cli
from orchestrator.cli.replay import replay_lines
from orchestrator.controller.controller import Controller
from orchestrator.lifecycle import Cause
from orchestrator.recovery.controls import Control
from orchestrator.replay.job_trace import trace_of_client
from orchestrator.replay.replay import replay
from orchestrator.replay.verdicts import ASSUMPTION, Replayed, Verdict
from orchestrator.spec.errors import SpecError
from orchestrator.spec.job import parse_spec, spec_yaml
from orchestrator.spec.policy_file import changes, parse_policy
from tests.unit.control_plane import FakeGroups, FakeSupervisors
from tests.unit.scripted_job import LAYERS, Script
from tests.unit.stored_job import JOB, StoredJob, with_step

Make = Callable[..., StoredJob]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Make]:
    made: list[StoredJob] = []

    def make(script: Script | None = None, **sections: Any) -> StoredJob:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(StoredJob(folder, script, **sections))
        return made[-1]

    yield make
    for job in made:
        job.close()


def verdicts(found: Replayed) -> list[tuple[int, int, int, str, str]]:
    """(attempt, timeline, step, verdict, kind) of every decision."""
    shown = [(j, j.replayed or j.stored) for j in found.decisions]
    return [(j.attempt, j.timeline, j.step, j.verdict.value, a.kind) for j, a in shown if a]


TROUBLE = Script(
    spike=lambda step, batch: batch == 47,
    nonfinite=frozenset({31, 33}),
    saturated=lambda step, layer: 60 <= step < 75 and layer == LAYERS[0],
    coarse=lambda step: 85 <= step < 110,
)


def troubled(stored: Make) -> StoredJob:
    """A life with every kind of decision, two lost ranks and a lost supervisor."""
    job = stored(TROUBLE)
    job.train(60)
    job.ranks.lose(1)
    job.step()
    job.step(1.0)
    job.train(40)
    job.lose_supervisor()
    job.train(45)
    job.ranks.lose(0)
    job.step()
    job.step(1.0)
    job.train(60)
    return job


class TestOwnPolicy:
    def test_a_troubled_life_comes_out_as_it_is_stored(self, stored: Make) -> None:
        job = troubled(stored)
        trace = job.trace()
        kinds = {action.kind for action in trace.actions}
        assert {"skip_step", "rollback", "layer_fallback", "return_to_fp8", "restart"} <= kinds
        assert {"exchange_bf16"} <= kinds
        found = replay(trace)
        assert found.exact, list(replay_lines(found, None, {}))
        assert [j.stored for j in found.decisions] != []
        assert [j.replayed.to_json() for j in found.decisions if j.replayed] == [
            action.to_json() for action in trace.actions
        ]
        assert found.not_kept == ()

    @settings(
        max_examples=5,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data())
    def test_whatever_happens_is_replayed(self, stored: Make, data: st.DataObject) -> None:
        steps = st.integers(8, 60)
        spikes = data.draw(st.sets(steps, max_size=3))
        broken = data.draw(st.frozensets(steps, max_size=6))
        layers = data.draw(st.dictionaries(steps, st.sampled_from(LAYERS), max_size=3))
        coarse = data.draw(st.integers(8, 40))
        script = Script(
            spike=lambda step, batch: batch in spikes,
            nonfinite=broken,
            saturated=lambda step, layer: layers.get(step) == layer,
            coarse=lambda step: coarse <= step < coarse + 12,
        )
        job = stored(script, recovery={"calm_steps": 15, "max_rollbacks": 1})
        for _ in range(3):
            job.train(data.draw(st.integers(1, 30)))
            if job.supervision.phase.value == "over":
                break
            match data.draw(st.sampled_from(["rank", "supervisor", "nothing"])):
                case "rank" if job.ranks.running:
                    job.ranks.lose(1)
                    job.step()
                    job.step(1.0)
                case "supervisor" if job.supervision.phase.value == "training":
                    job.lose_supervisor()
        trace = job.trace()
        found = replay(trace)
        assert found.exact, list(replay_lines(found, None, {}))
        assert len([j for j in found.decisions if j.stored]) == len(trace.actions)

    def test_a_leap_that_was_accepted_is_the_usual_level_in_the_replay_too(
        self, stored: Make
    ) -> None:
        job = stored(Script(loss=lambda step: 1.0 if step < 22 else 3.0))
        job.train(90)
        found = replay(job.trace())
        assert found.exact and "accept" in [v[4] for v in verdicts(found)]

    def test_a_job_that_goes_on_is_replayed_up_to_what_is_certainly_decided(
        self, stored: Make
    ) -> None:
        job = stored(Script(spike=lambda step, batch: batch in (30, 47)))
        job.train(31)
        while len(job.store.past.actions(JOB)) < 2:
            job.train(1)
        # The newest record's action might as well have been stored a moment later.
        trace = job.trace(goes_on=True)
        assert [action.step for action in trace.actions] == [30, 46]
        for known in (trace.actions, trace.actions[:1]):
            found = replay(replace(job.trace(goes_on=True), actions=known))
            assert found.exact and found.goes_on
            assert [judged.step for judged in found.decisions] == [30]

    def test_steps_recorded_twice_belong_to_two_timelines(self, stored: Make) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(80)
        first, second = replay(job.trace()).stretches
        assert (first.timeline, first.first, first.last, first.again) == (0, 0, 47, None)
        assert (second.timeline, second.first, second.again) == (1, 40, 47)
        assert [judged.step for judged in first.decisions] == [47]

    def test_what_was_not_decided_any_more_is_not_replayed_either(self, stored: Make) -> None:
        job = stored(Script(nonfinite=frozenset({22, 24})))
        job.train(23)
        job.store.change(JOB, Cause.CANCEL_ASKED, "enough", job.now)
        job.supervision.ask_stop("enough")
        job.step()
        # The ranks do two steps more before they hear of it.
        waiting, job.ranks.waiting = job.ranks.waiting, []
        job.train(2)
        job.ranks.waiting = waiting
        job.train(1)
        trace = job.trace()
        assert [action.step for action in trace.actions] == [22]
        assert 24 in [context.step for context in trace.contexts if not context.decides]
        assert replay(trace).exact

    def test_what_a_person_asked_for_is_given_and_the_rest_is_decided_around_it(
        self, stored: Make
    ) -> None:
        job = stored(TROUBLE)
        job.train(35)
        for key, control in {
            "precision": {"kind": "precision", "layers": ("layers.0.*",), "to": "bf16"},
            "rollback": {"kind": "rollback", "to_step": 35, "skip_batches": (40,)},
            "exchange": {"kind": "exchange", "to": "bf16"},
        }.items():
            asked = Control(key=key, by="ada", time=job.now, **control)  # type: ignore[arg-type]
            job.store.controls.ask(JOB, asked)
            job.supervision.ask([asked])
            job.train(7)
        job.lose_supervisor()
        job.train(60)
        trace = job.trace()
        assert [a.asked.key for a in trace.actions if a.asked] == [
            "precision",
            "rollback",
            "exchange",
        ]
        found = replay(trace)
        assert found.exact, list(replay_lines(found, None, {}))
        given = [j for j in found.decisions if j.verdict is Verdict.GIVEN]
        assert len(given) == 3 and len(found.decisions) > 5

    def test_the_api_tells_the_same_records_as_the_store(
        self, stored: Make, tmp_path: Path
    ) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        own = replay(job.trace())
        job.store.change(JOB, Cause.ERROR, "over", job.now)
        controller = Controller(
            job.store,
            FakeGroups(4),
            FakeSupervisors(),
            tmp_path,
            fixed_cluster=True,
            clock=lambda: job.now,
        )
        client = Client("http://testserver", "token")
        client.close()
        headers = {"Authorization": "Bearer token"}
        client._connection._http = TestClient(create_app(controller, "token"), headers=headers)
        over_api = replay(trace_of_client(client, "scripted"))
        assert over_api.exact
        assert [j.to_json() for j in over_api.decisions] == [j.to_json() for j in own.decisions]

    def test_a_record_that_is_not_the_one_of_then_is_found_out(self, stored: Make) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        found = replay(with_step(job.trace(), 47, loss=4.0))
        assert not found.exact and found.departs
        assert verdicts(found)[0] == (1, 0, 47, "missing", "rollback")

    def test_an_action_that_says_something_else_is_found_out(self, stored: Make) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        trace = job.trace()
        other = replace(trace.actions[0], skip_batches=(46, 47))
        (judged,) = replay(replace(trace, actions=(other,))).decisions
        assert judged.verdict is Verdict.CHANGED
        assert judged.differing == ("skip_batches",)

    def test_layers_in_another_order_are_the_same_and_another_version_is_told(
        self, stored: Make
    ) -> None:
        job = stored(Script(saturated=lambda step, layer: 40 <= step < 42))
        job.train(60)
        trace = job.trace()
        (action,) = (a for a in trace.actions if a.kind == "layer_fallback")
        assert len(action.precision) == 2
        turned = replace(action, precision=dict(reversed(action.precision.items())))
        actions = tuple(turned if a is action else a for a in trace.actions)
        found = replay(replace(trace, actions=actions, decided_by=("0.0.1",)))
        assert found.exact
        lines = list(replay_lines(found, None, {}))
        assert lines[1].startswith("  decided by Octavo 0.0.1, replayed by ")

    def test_an_incident_that_nothing_answers_is_found_out(self, stored: Make) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        trace = job.trace()
        stray = replace(trace.incidents[0], step=12)
        found = replay(replace(trace, incidents=(*trace.incidents, stray)))
        assert found.unanswered == (stray,) and not found.exact


class TestOtherPolicy:
    def test_a_stricter_limit_shows_what_is_new_and_says_what_is_assumed(
        self, stored: Make
    ) -> None:
        job = stored(
            Script(
                spike=lambda step, batch: batch == 70,
                loss=lambda step: 5.0 * (1.15 if step == 40 else 1.0),
            )
        )
        job.train(80)
        trace = job.trace()
        assert [action.step for action in trace.actions] == [70]
        strict = (
            "{detection: {min_history: 6, loss_min_rise: 0.1, loss_patience: 1}, recovery: {%s}}"
        )
        policy = parse_policy(strict % "max_consecutive_rollbacks: 1, batch_horizon: 200", "p.yaml")
        spec = policy.applied(trace.spec)
        found = replay(trace, spec)
        assert verdicts(found) == [
            (1, 0, 40, "new", "rollback"),
            (1, 0, 70, "changed", "rollback"),
        ] or [v[:4] for v in verdicts(found)] == [(1, 0, 40, "new"), (1, 0, 70, "changed")]
        new, changed = found.decisions
        assert not new.assumed and changed.assumed
        # Within the horizon of the rollback that this policy would have made at 40.
        assert changed.replayed is not None and changed.replayed.kind != "rollback"
        lines = list(replay_lines(found, Path("p.yaml"), changes(trace.spec, spec)))
        assert lines.count(f"  -- {ASSUMPTION}") == 1
        assert "  detection.loss_min_rise: 0.3 → 0.1" in lines

    def test_a_policy_that_only_words_differ_in_is_the_same(self, stored: Make) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        trace = job.trace()
        policy = parse_policy("detection: {min_history: 6, loss_sigmas: 9, settle_steps: 2}", "p")
        found = replay(trace, policy.applied(trace.spec))
        assert [v[3] for v in verdicts(found)] == ["same"]
        assert found.decisions[0].differing == ("reason", "incidents") and not found.departs

    def test_a_blind_policy_misses_what_is_stored(self, stored: Make) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        trace = job.trace()
        policy = parse_policy("detection: {loss_sigmas: 1000000}", "p")
        assert [v[3] for v in verdicts(replay(trace, policy.applied(trace.spec)))] == ["missing"]

    def test_smaller_budgets_change_the_answer_to_a_lost_rank(self, stored: Make) -> None:
        job = stored()
        job.train(20)
        job.ranks.lose(1)
        job.step()
        job.step(1.0)
        job.train(5)
        trace = job.trace()
        policy = parse_policy("recovery: {max_restarts: 0}", "p")
        (judged,) = replay(trace, policy.applied(trace.spec)).decisions
        assert (judged.verdict, judged.deeds_differ) == (Verdict.CHANGED, True)
        assert judged.replayed is not None and judged.replayed.kind == "pause"


class TestPolicyFile:
    def test_problems_are_told_as_in_a_job_file(self) -> None:
        text = "detection:\n  loss_sigma: 4\n  window: 8\n  min_history: 12\nrecover: {}\n"
        with pytest.raises(SpecError) as caught:
            parse_policy(text, "p.yaml")
        told = str(caught.value)
        assert "p.yaml:2: detection.loss_sigma: 4: detection has no such key" in told
        assert "did you mean 'loss_sigmas'?" in told
        assert "p.yaml:5: recover" in told and "a policy has no such key" in told
        assert "did you mean 'recovery'?" in told

    def test_a_section_is_checked_against_itself(self) -> None:
        with pytest.raises(SpecError, match="min_history"):
            parse_policy("detection: {window: 8, min_history: 12}", "p.yaml")

    @pytest.mark.parametrize("text", ["", "recovery:\n", "[]", "recovery: {max_restarts: true}"])
    def test_what_says_nothing_is_refused(self, text: str) -> None:
        with pytest.raises(SpecError, match=r"p\.yaml"):
            parse_policy(text, "p.yaml")

    def test_a_section_that_is_not_given_is_the_jobs_own(self, stored: Make) -> None:
        spec = stored(recovery={"horizon": 77}).spec
        after = parse_policy("detection: {loss_sigmas: 5}", "p").applied(spec)
        assert after.recovery == spec.recovery
        assert after.detection.min_history == 16, "a section given is whole"

    def test_a_job_file_may_name_a_policy(self, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text("recovery: {horizon: 99}")
        text = "name: toy\nslots_per_node: 2\npolicy: p.yaml\ndetection: {window: 32}\n"
        spec = parse_spec(text, "job.yaml", base=tmp_path, check_data=False)
        assert (spec.recovery.horizon, spec.detection.window) == (99, 32)
        assert spec == parse_spec(spec_yaml(spec), "again.yaml", check_data=False)

    @pytest.mark.parametrize(
        ("policy", "told"),
        [
            ("absent.yaml", "can't be read"),
            ("3", "must be the path of a file"),
            ("p.yaml", r"job.yaml:4: recovery: .*is given by p.yaml too"),
        ],
    )
    def test_a_policy_that_can_not_be_used_is_refused(
        self, tmp_path: Path, policy: str, told: str
    ) -> None:
        (tmp_path / "p.yaml").write_text("recovery: {horizon: 99}")
        text = f"name: toy\nslots_per_node: 2\npolicy: {policy}\nrecovery: {{horizon: 9}}\n"
        with pytest.raises(SpecError, match=told):
            parse_spec(text, "job.yaml", base=tmp_path, check_data=False)


class TestCommand:
    def octavo(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
        code = cli.call(["replay", *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    def test_from_the_store_of_a_home(
        self, stored: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        job.trace()
        job.store.change(JOB, Cause.ERROR, "over", job.now)
        home = ("--home", str(tmp_path / "0"))
        code, out, _ = self.octavo(capsys, "scripted", *home)
        assert code == 0
        assert "attempt 1, timeline 1: steps 40 to 51, 40 to 47 once more" in out
        assert "same     rollback, to step 40, without batch 47" in out
        assert out.endswith("all that is stored came out again, to the last digit\n")
        policy = tmp_path / "p.yaml"
        policy.write_text("detection: {loss_sigmas: 1000000}")
        code, out, _ = self.octavo(capsys, JOB, "--policy", str(policy), "-o", "json", *home)
        assert code == 0
        document = json.loads(out)
        assert document["departs"] and document["assumption"] == ASSUMPTION
        assert document["changed"]["detection.loss_sigmas"] == {"stored": 8.0, "policy": 1e6}

    def test_a_difference_is_printed_and_has_its_exit_code(
        self,
        stored: Make,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        job = stored(Script(spike=lambda step, batch: batch == 47))
        job.train(60)
        trace = with_step(job.trace(), 47, loss=4.0)
        monkeypatch.setattr("orchestrator.cli.replay.read_trace", lambda home, job: trace)
        code, out, _ = self.octavo(capsys, JOB, "--home", str(tmp_path / "0"))
        assert code == 104
        assert "missing  rollback, to step 40, without batch 47" in out
        assert out.endswith("this is not what is stored\n")

    def test_without_records_it_says_what_to_do(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code, _, err = self.octavo(capsys, "some", "--home", str(tmp_path))
        assert code == 102 and "--keep-home" in err
