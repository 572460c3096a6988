"""Webhooks against a real HTTP server: told once it matters, again until it arrives, no secrets."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from orchestrator.actions import Action
from orchestrator.cli.show import progress
from orchestrator.controller.webhooks import MOST_TRIES, Webhooks
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import SupervisorBatch
from orchestrator.spec.config import NotificationsConfig
from orchestrator.spec.errors import SpecError
from tests.unit.control_plane import ControlPlane
from tests.unit.test_store import step

SECRET = "/services/T0/hush-hush"


@dataclass
class Receiver:
    """What arrived, and what it is answered."""

    url: str = ""
    codes: list[int] = field(default_factory=list)
    """One a request; then 204."""
    got: list[dict[str, Any]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    state = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {k: self.headers[k] for k in ("Content-Type", "Octavo-Delivery")}
            state.got.append({"path": self.path, **headers, **body})
            state.arrived.set()
            code = state.codes.pop(0) if state.codes else 204
            self.send_response(code)
            if code in (301, 307):
                self.send_header("Location", state.url + "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


def sender(plane: ControlPlane, **environ: str) -> Webhooks:
    return Webhooks(plane.store, environ, lambda: plane.now)


def paused(plane: ControlPlane, state: JobState = JobState.PAUSED, **notifications: Any) -> str:
    job = plane.submit(notifications=notifications)
    plane.steps(2)
    cause = {JobState.PAUSED: Cause.BUDGET_SPENT, JobState.SUCCEEDED: Cause.STEPS_DONE}[state]
    plane.controller.report(job, 1, SupervisorBatch(1, transition=(state, cause)))
    return job


def test_a_paused_job_is_told_once(plane: ControlPlane, receiver: Receiver) -> None:
    job = paused(plane, webhook=receiver.url + "/octavo")
    hooks = sender(plane)
    assert hooks.send_due() == 1 and hooks.send_due() == 0
    (got,) = receiver.got
    assert (got["path"], got["Content-Type"]) == ("/octavo", "application/json")
    assert (got["job"], got["state"], got["cause"]) == (job, "paused", "recovery budget spent")
    assert got["version"] == 1 and got["Octavo-Delivery"] == str(got["id"])
    assert plane.told(job, "webhook_sent") == [f"{receiver.url} was told that the job is paused."]


def test_it_says_where_a_resume_goes_on_as_the_status_does(
    plane: ControlPlane, receiver: Receiver, api: TestClient
) -> None:
    job = plane.submit(notifications={"webhook": receiver.url})
    plane.steps(2)
    back = Action("pause", 1, 0, 60, 0.0, "Paused for a person.", to_step=50)
    over = (JobState.PAUSED, Cause.BUDGET_SPENT)
    steps = tuple(step(n) for n in range(61))
    assert plane.controller.report(job, 1, SupervisorBatch(1, steps=steps)).accepted
    assert api.get(f"/v1/jobs/{job}").json()["loss"] is not None
    batch = SupervisorBatch(2, actions=(back,), transition=over)
    assert plane.controller.report(job, 1, batch).accepted
    sender(plane).send_due()
    (got,) = receiver.got
    assert (got["step"], got["steps_done"]) == (49, 50)
    shown = api.get(f"/v1/jobs/{job}").json()
    assert progress(shown).startswith("50/") and shown["loss"] is None
    assert plane.store.job(job).step == 60, "what a resume compares copies with"


def test_it_is_sent_as_soon_as_it_is_stored(plane: ControlPlane, receiver: Receiver) -> None:
    stop = threading.Event()
    arguments = (stop, plane.controller.changes.wait)
    thread = threading.Thread(target=sender(plane).run, args=arguments)
    thread.start()
    paused(plane, webhook=receiver.url)
    try:
        assert receiver.arrived.wait(30)
    finally:
        stop.set()
        thread.join()
    assert receiver.got[0]["state"] == "paused"


def test_it_comes_again_until_it_arrives_through_a_restart_too(
    plane: ControlPlane, receiver: Receiver
) -> None:
    receiver.codes = [503, 429]
    job = paused(plane, webhook=receiver.url)
    assert sender(plane).send_due() == 1
    assert sender(plane).send_due() == 0, "not at once"
    plane.now += 3
    # Another process: all it knows is stored.
    assert sender(plane).send_due() == 1
    plane.now += 5
    assert sender(plane).send_due() == 1
    assert [g["id"] for g in receiver.got] == [receiver.got[0]["id"]] * 3
    assert len(plane.told(job, "webhook_sent")) == 1


@pytest.mark.parametrize("ahead", [3600.0, 365 * 86400.0])
@pytest.mark.parametrize("tried", [False, True])
def test_it_is_sent_though_the_clock_was_ahead_when_it_was_stored_or_tried(
    plane: ControlPlane, receiver: Receiver, ahead: float, tried: bool
) -> None:
    receiver.codes = [503]
    hooks = sender(plane)
    plane.now += ahead
    paused(plane, webhook=receiver.url)
    assert not tried or hooks.send_due() == 1
    plane.now -= ahead
    assert hooks.send_due() == 1
    if not tried:
        assert hooks.send_due() == 0, "not at once"
        plane.now += 3
        assert hooks.send_due() == 1
    assert len(receiver.got) == 2


def test_where_nobody_answers_it_is_given_up_in_the_end_and_said(plane: ControlPlane) -> None:
    job = paused(plane, webhook="http://127.0.0.1:9/")
    hooks, tries = sender(plane), 0
    while hooks.send_due():
        tries += 1
        plane.now += 601
    assert tries == MOST_TRIES
    (told,) = plane.told(job, "webhook_failed")
    assert f"in {MOST_TRIES} tries" in told and "ConnectError" in told


@pytest.mark.parametrize("code", [307, 400, 404, 410])
def test_a_refusal_is_final_and_a_redirection_is_not_followed(
    plane: ControlPlane, receiver: Receiver, code: int
) -> None:
    receiver.codes = [code]
    job = paused(plane, webhook=receiver.url)
    hooks = sender(plane)
    hooks.send_due()
    plane.now += 10_000
    assert hooks.send_due() == 0 and len(receiver.got) == 1
    assert f"it answered {code}" in plane.told(job, "webhook_failed")[0]


def test_a_secret_url_comes_from_the_environment_and_is_written_nowhere(
    plane: ControlPlane,
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HOOK", receiver.url + SECRET)
    receiver.codes = [500, 204]
    job = paused(plane, webhook_env="HOOK")
    hooks = sender(plane, HOOK=receiver.url + SECRET)
    hooks.send_due()
    plane.now += 10
    hooks.send_due()
    assert [g["path"] for g in receiver.got] == [SECRET] * 2
    written = caplog.text + json.dumps(plane.store.past.events(job)) + str(plane.store.job(job))
    assert receiver.url in written and "hush-hush" not in written


def test_a_variable_that_is_not_set_is_refused_at_submit_and_told_if_it_goes_later(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="NO_SUCH_HOOK"):
        plane.submit(notifications={"webhook_env": "NO_SUCH_HOOK"})
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/")
    job = paused(plane, webhook_env="HOOK")
    sender(plane).send_due()
    assert (
        "$HOOK is not set in the controller's environment" in (plane.told(job, "webhook_failed")[0])
    )


def test_only_the_states_asked_for_are_told(plane: ControlPlane, receiver: Receiver) -> None:
    plane.supervisors.done.add(paused(plane, JobState.SUCCEEDED, webhook=receiver.url))
    assert sender(plane).send_due() == 0
    paused(plane, JobState.SUCCEEDED, webhook=receiver.url, states=["succeeded"])
    assert sender(plane).send_due() == 1


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://example.com", "begins with https://"),
        ("example.com/hook", "begins with https://"),
        ("https://", "begins with https://"),
        ("https://example.com:port/", "is no URL"),
        ("https://[::1/", "is no URL"),
        ("https://example.com/a b", "space"),
        ("https://me:word@example.com/", "holds a password"),
        ("https://hooks.slack.com/services/T/B/x", "is a secret"),
        ("https://example.com/?token=x", "is a secret"),
    ],
)
def test_a_url_that_can_not_be_posted_to_or_shown_is_refused(url: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        NotificationsConfig(webhook=url)


def test_urls_are_taken_as_they_are_and_in_one_place() -> None:
    for url in ("https://example.com", "http://10.0.0.7:8080/a?job=1", "http://[::1]:80/x"):
        assert NotificationsConfig(webhook=url).webhook == url
    with pytest.raises(ValidationError, match="keep one of the two"):
        NotificationsConfig(webhook="https://example.com", webhook_env="HOOK")


def test_a_refused_url_is_not_repeated(plane: ControlPlane) -> None:
    with pytest.raises(SpecError) as refused:
        plane.submit(notifications={"webhook": "https://example.com/?token=hush-hush"})
    (problem,) = refused.value.problems
    assert problem.key == "notifications.webhook" and problem.value == "***"
    assert "hush" not in str(problem)
