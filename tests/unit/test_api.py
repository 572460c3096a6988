"""The HTTP API: its token, its errors, its pages, with stand-ins behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from httpx import Response

from launch.log_lines import LogLine, written
from monitoring.records import Incident
from orchestrator.api.client import Client
from orchestrator.api.guard import BODY_LIMIT
from orchestrator.api.problems import ProblemDetails
from orchestrator.events import EventDraft
from orchestrator.home.folder import Home
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import StepContext, SupervisorBatch
from orchestrator.store.errors import StoreUnavailableError
from tests.unit.control_plane import TOKEN, ControlPlane
from tests.unit.test_store import step


def spec(**changes: object) -> dict[str, object]:
    return {"name": "toy", "slots_per_node": 4, "parallelism": {"pipeline": 2}, **changes}


def is_problem(answer: Response) -> bool:
    """Whether it is an error as RFC 9457 has them."""
    body = answer.json()
    ProblemDetails.model_validate(body)
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["status"] == answer.status_code
    # What was there before there were problem details.
    assert body["error"] == body["detail"] and isinstance(body["problems"], list)
    return body["type"].startswith("urn:octavo:") and bool(body["title"])


ROUTES = [
    ("GET", "/v1/jobs"),
    ("POST", "/v1/jobs"),
    ("POST", "/v1/jobs:validate"),
    ("GET", "/v1/jobs/x"),
    ("GET", "/v1/jobs/x/events"),
    ("GET", "/v1/jobs/x/steps"),
    ("GET", "/v1/jobs/x/records"),
    ("GET", "/v1/jobs/x/logs"),
    ("POST", "/v1/jobs/x/cancel"),
    ("POST", "/v1/jobs/x/resume"),
    ("POST", "/v1/jobs/x/pause"),
    ("POST", "/v1/jobs/x/rollback"),
    ("POST", "/v1/jobs/x/precision"),
    ("POST", "/v1/jobs/x/exchange"),
    ("GET", "/v1/jobs/x/controls"),
    ("GET", "/metrics"),
    ("GET", "/v1/nothing"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Basic Y29ycmVjdC1ob3JzZQ==", 401),
        ("Bearer wrong", 403),
        (f"Bearer {TOKEN}x", 403),
        ("Bearer \xe4".encode("latin-1"), 403),
    ],
)
def test_no_route_answers_without_the_right_token(
    api: TestClient, method: str, path: str, header: str | bytes | None, status: int
) -> None:
    del api.headers["Authorization"]
    headers = {} if header is None else {"Authorization": header}
    answer = api.request(method, path, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == status
    assert is_problem(answer)
    assert "Traceback" not in answer.text and TOKEN not in answer.text


def test_health_needs_no_token_and_the_schema_lists_every_route(api: TestClient) -> None:
    del api.headers["Authorization"]
    assert api.get("/healthz").json() == {"status": "ok"}
    paths = api.get("/openapi.json").json()["paths"]
    for _, path in ROUTES[:-1]:
        assert path.replace("/x", "/{job}") in paths


def test_a_job_is_submitted_listed_shown_and_cancelled(api: TestClient) -> None:
    made = api.post("/v1/jobs", json={"spec": spec(), "file": "toy.yaml"})
    assert made.status_code == 201
    job = made.json()
    assert (job["state"], job["file"], job["settled"]) == ("queued", "toy.yaml", False)
    assert [j["id"] for j in api.get("/v1/jobs").json()["jobs"]] == [job["id"]]
    shown = api.get(f"/v1/jobs/{job['id']}").json()
    assert shown["spec"]["training"]["train_micro_batch_size_per_gpu"] == 4
    gone = api.post(f"/v1/jobs/{job['id']}/cancel", json={"reason": "by test"}).json()
    assert (gone["state"], gone["reason"], gone["settled"]) == ("cancelled", "by test", True)
    again = api.post(f"/v1/jobs/{job['id']}/cancel")
    assert again.status_code == 409
    assert again.json()["error"] == (
        f"{job['id']} was cancelled already; there is nothing to cancel"
    )


def test_problems_of_a_spec_come_with_file_key_value_and_remedy(
    api: TestClient, plane: ControlPlane
) -> None:
    bad = spec(parallelism={"pipeline": 9}, precison="fp8")
    for path in ("/v1/jobs", "/v1/jobs:validate"):
        answer = api.post(path, json={"spec": bad, "file": "my/job.yaml"})
        assert answer.status_code == 422
        problems = {p["key"]: p for p in answer.json()["problems"]}
        assert {"parallelism.pipeline", "precison"} <= set(problems)
        assert problems["precison"]["file"] == "my/job.yaml"
        assert "'precision'" in problems["precison"]["remedy"]
    assert plane.store.jobs() == []


def test_a_dry_run_completes_and_stores_nothing(api: TestClient, plane: ControlPlane) -> None:
    answer = api.post("/v1/jobs:validate", json={"spec": spec()})
    assert answer.json()["spec"]["parallelism"]["data"] == 2
    assert plane.store.jobs() == []


def test_every_error_is_a_problem_whoever_gives_it(api: TestClient, plane: ControlPlane) -> None:
    job = plane.submit()
    told = {
        "unknown-job": api.get("/v1/jobs/nobody"),
        "unknown-control": api.get(f"/v1/jobs/{job}/controls/none"),
        "unknown-node": api.post("/v1/nodes/none/release"),
        "not-found": api.get("/v1/nothing"),
        "method-not-allowed": api.delete("/v1/jobs"),
        "conflict": api.post(f"/v1/jobs/{job}/resume"),
        "request-invalid": api.post(f"/v1/jobs/{job}/rollback", json={"to_step": "x"}),
        "spec-invalid": api.post("/v1/jobs:validate", json={"spec": {}}),
        "wrong-media-type": api.post("/v1/jobs", content=b"spec: {}"),
    }
    for kind, answer in told.items():
        assert is_problem(answer) and answer.json()["type"] == f"urn:octavo:{kind}"
    assert "GET" in told["method-not-allowed"].headers["allow"]
    (problem,) = told["request-invalid"].json()["problems"]
    assert problem["key"] == "body.to_step" and problem["message"]
    assert "send it as application/json" in told["wrong-media-type"].json()["detail"]


def test_a_store_that_can_not_be_used_is_told_as_passing(
    api: TestClient, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        raise StoreUnavailableError("the store can't be used for now: database is locked")

    monkeypatch.setattr(plane.store.pages, "jobs", locked)
    answer = api.get("/v1/jobs")
    assert answer.status_code == 503 and is_problem(answer)
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b'{"spec": 3}', 422),
        (b'{"spec": {}, "more": 1}', 422),
        (b'{"spec": {"name": NaN}}', 422),
        (b"x" * (BODY_LIMIT + 1), 413),
    ],
)
def test_a_malformed_body_is_refused_as_json(api: TestClient, body: bytes, status: int) -> None:
    answer = api.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]


def test_a_body_without_a_length_is_measured_as_it_comes(api: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(BODY_LIMIT // 65536 + 2):
            yield b"x" * 65536

    assert api.post("/v1/jobs", content=chunks()).status_code == 413


def test_a_job_goes_by_id_name_or_unique_beginning(api: TestClient, plane: ControlPlane) -> None:
    first, second = plane.submit("alpha"), plane.submit("beta")
    assert api.get("/v1/jobs/alpha").json()["id"] == first
    assert api.get("/v1/jobs/be").json()["id"] == second
    missing = api.get("/v1/jobs/gamma")
    assert missing.status_code == 404
    assert "no job 'gamma'" in missing.json()["error"]
    nowhere = api.get("/v1/nothing")
    assert nowhere.status_code == 404 and "nothing at this path" in nowhere.json()["detail"]
    asked = api.put("/v1/jobs")
    assert (asked.status_code, asked.json()["detail"]) == (405, "PUT is not for this path")
    twin = plane.submit("alpha")
    several = api.get("/v1/jobs/alpha")
    assert several.status_code == 409
    assert first in several.json()["error"] and twin in several.json()["error"]
    plane.controller.cancel(first, "done")
    assert api.get("/v1/jobs/alpha").json()["id"] == twin


def test_an_exception_is_an_answer_without_a_traceback(
    api: TestClient, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(plane.store.pages, "jobs", broken)
    answer = api.get("/v1/jobs")
    assert answer.status_code == 500
    assert "RuntimeError" in answer.json()["error"]
    assert "secret detail" not in answer.text


def running(plane: ControlPlane) -> str:
    job = plane.submit()
    plane.steps(2)
    return job


def test_a_long_poll_answers_as_soon_as_something_is_stored(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    newest = api.get(f"/v1/jobs/{job}/events").json()["next"]

    def later() -> None:
        time.sleep(0.3)
        told = EventDraft("told", 5.0, "news", {})
        plane.controller.report(job, 1, SupervisorBatch(1, events=(told,), steps=(step(0),)))

    teller = threading.Thread(target=later)
    began = time.monotonic()
    teller.start()
    answer = api.get(f"/v1/jobs/{job}/events", params={"after": newest, "wait": 20}).json()
    assert 0.2 < time.monotonic() - began < 19, "it did not wait for its end"
    assert [e["message"] for e in answer["events"]] == ["news"]
    teller.join()
    steps = api.get(f"/v1/jobs/{job}/steps", params={"wait": 20}).json()
    assert [s["step"] for s in steps["steps"]] == [0]
    after = api.get(f"/v1/jobs/{job}/steps", params={"after": steps["next"]}).json()
    assert (after["steps"], after["next"]) == ([], steps["next"])


def test_a_long_poll_ends_with_its_time_and_with_the_job(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    newest = api.get(f"/v1/jobs/{job}/events").json()["next"]
    poll = {"after": newest, "wait": 0.3}
    assert api.get(f"/v1/jobs/{job}/events", params=poll).json()["events"] == []
    ended = SupervisorBatch(1, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    plane.controller.report(job, 1, ended)
    plane.supervisors.done.add(job)
    plane.steps()
    page = api.get(f"/v1/jobs/{job}/events").json()
    began = time.monotonic()
    poll = {"after": page["next"], "wait": 20}
    last = api.get(f"/v1/jobs/{job}/events", params=poll).json()
    assert (last["events"], last["state"], last["settled"]) == ([], "succeeded", True)
    assert time.monotonic() - began < 19, "it did not wait for its end"
    assert api.get(f"/v1/jobs/{job}/events", params={"wait": 1e9}).status_code == 422


def test_logs_come_by_rank_attempt_and_offset(api: TestClient, plane: ControlPlane) -> None:
    job = running(plane)
    folder = Path(plane.store.job(job).job_dir) / "logs" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "rank-2.log").write_text("first\n")
    path = f"/v1/jobs/{job}/logs"
    first = api.get(path, params={"rank": 2}).json()
    assert (first["text"], first["attempt"], first["exists"]) == ("first\n", 1, True)
    with (folder / "rank-2.log").open("a") as log:
        log.write("second\n")
    more = api.get(path, params={"rank": 2, "offset": first["offset"], "wait": 5}).json()
    assert more["text"] == "second\n"
    assert api.get(path, params={"rank": 3}).json()["exists"] is False
    for bad in ({"rank": -1}, {"rank": "../x"}, {"attempt": 0}, {"offset": -5}):
        assert api.get(path, params=bad).status_code == 422  # type: ignore[arg-type]


def test_a_rank_that_the_job_does_not_have_and_a_parameter_nobody_reads_are_refused(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    path = f"/v1/jobs/{job}/logs"
    absent = api.get(path, params={"rank": 99})
    assert (absent.status_code, absent.json()["error"]) == (
        422,
        f"{job} has no rank 99, only 0 to 3",
    )
    unread = api.get(path, params={"lines": -5})
    assert unread.status_code == 422
    assert "no parameter is called 'lines' here; it has attempt, offset" in unread.json()["error"]
    assert api.get("/v1/jobs", params={"states": "failed"}).status_code == 422
    twice = api.get("/v1/nodes", params={"limit": ["1", "2"]})
    assert twice.status_code == 422 and twice.json()["detail"] == (
        "limit: is given 2 times; once is meant"
    )
    assert api.get("/healthz").status_code == 200


def test_a_log_is_read_from_its_end_and_from_a_time_on(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    folder = Path(plane.store.job(job).job_dir) / "logs" / "attempt-1"
    folder.mkdir(parents=True)
    lines = [LogLine(f"line {n}", "INFO", 1000.0 + n, 1, 2, n, "test") for n in range(3)]
    (folder / "rank-2.log").write_bytes(b"".join(map(written, lines)) + b"from C\n")
    path = f"/v1/jobs/{job}/logs"
    last = api.get(path, params={"rank": 2, "tail": 2}).json()
    assert last["lines"] == [lines[2].to_json(), {**lines[2].to_json(), "level": "OUTPUT",
                             "logger": "", "message": "from C"}]  # fmt: skip
    assert last["text"] == "1970-01-01T00:16:42.000Z INFO step 2 test: line 2\nfrom C\n"
    since = api.get(path, params={"rank": 2, "since": 1001.0}).json()
    assert [line["step"] for line in since["lines"]] == [1, 2, 2]
    assert since["offset"] == last["offset"]
    with (folder / "rank-2.log").open("a") as log:
        log.write("half a line")
    assert api.get(path, params={"rank": 2, "tail": 1, "offset": 5}).status_code == 422
    new = api.get(path, params={"rank": 2, "offset": last["offset"]}).json()
    assert new["text"] == "", "it is not complete"
    ended = SupervisorBatch(1, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    plane.controller.report(job, 1, ended)
    plane.supervisors.done.add(job)
    plane.steps()
    new = api.get(path, params={"rank": 2, "offset": last["offset"]}).json()
    assert new["text"] == "half a line\n", "and never will be"


def test_what_a_library_wrote_into_a_log_is_told_without_secrets(
    api: TestClient, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted-value")
    job = running(plane)
    folder = Path(plane.store.job(job).job_dir) / "logs" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("RAW planted-value hf_abcdefghijklmnop1234\n")
    told = api.get(f"/v1/jobs/{job}/logs").text
    assert told.count("(secret, left out)") == 4 and "planted" not in told and "hf_" not in told


def test_jobs_come_in_pages_that_stay_right_while_others_are_submitted(
    api: TestClient, plane: ControlPlane
) -> None:
    made = [plane.submit(f"job{n}", by="alice" if n % 2 else "bob") for n in range(5)]
    first = api.get("/v1/jobs", params={"limit": 2}).json()
    assert [job["id"] for job in first["jobs"]] == made[:2]
    plane.controller.cancel(made[0], "enough")
    late = plane.submit("late")
    second = api.get("/v1/jobs", params={"limit": 2, "after": first["next"]}).json()
    last = api.get("/v1/jobs", params={"limit": 2, "after": second["next"]}).json()
    assert [j["id"] for page in (second, last) for j in page["jobs"]] == [*made[2:], late]
    assert last["next"] is None
    mine = api.get("/v1/jobs", params={"by": "alice"}).json()["jobs"]
    assert [job["id"] for job in mine] == [made[1], made[3]]
    ended = api.get("/v1/jobs", params={"state": ["cancelled", "failed"]}).json()["jobs"]
    assert [job["id"] for job in ended] == made[:1]
    assert api.get("/v1/jobs", params={"after": "nobody"}).status_code == 404
    assert api.get("/v1/jobs", params={"limit": 5001}).status_code == 422


def test_records_come_in_pages_of_each_kind(api: TestClient, plane: ControlPlane) -> None:
    job = running(plane)
    rows = [
        Incident("loss_spike", "loss_spike", 1, 0, n, n, 5.0, f"number {n}").to_json()
        for n in range(5)
    ]
    contexts = tuple(StepContext(1, 0, n, (n,)) for n in range(3))
    plane.controller.report(job, 1, SupervisorBatch(1, incidents=tuple(rows), contexts=contexts))
    path = f"/v1/jobs/{job}/records"
    seen, places, after = [], [], "0.0.0"
    while True:
        page = api.get(path, params={"limit": 2, "after": after}).json()
        seen += [row["message"] for row in page["incidents"]]
        places += [row["step"] for row in page["contexts"]]
        after = page["next"]
        if not page["more"]:
            break
    assert (seen, places) == ([f"number {n}" for n in range(5)], [0, 1, 2])
    alone = api.get(f"/v1/jobs/{job}/incidents", params={"limit": 3}).json()
    rest = api.get(f"/v1/jobs/{job}/incidents", params={"after": alone["next"]}).json()
    assert [r["message"] for p in (alone, rest) for r in p["incidents"]] == seen


def test_more_listeners_that_wait_than_there_are_threads_hold_up_nobody(
    home: Home, plane: ControlPlane
) -> None:
    job = running(plane)
    server = home.server()
    assert server is not None
    client = Client.of_home(home)
    newest = client.events(job)["next"]
    heard: list[str] = []

    def listen() -> None:
        page = Client.of_home(home).events(job, newest, 30)
        heard.extend(event["message"] for event in page["events"])

    threads = [threading.Thread(target=listen, daemon=True) for _ in range(60)]
    for thread in threads:
        thread.start()
    # An answer while all of them wait: with a thread each, this one would wait for theirs.
    assert client.job(job)["id"] == job and heard == []
    told = EventDraft("told", 5.0, "news", {})
    plane.controller.report(job, 1, SupervisorBatch(1, events=(told,)))
    for thread in threads:
        thread.join(30)
    assert heard == ["news"] * 60
