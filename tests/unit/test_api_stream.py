"""Events, steps and logs as server-sent events: in order, each once, whenever one connects."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from orchestrator.events import EventDraft
from orchestrator.home.folder import Home
from orchestrator.protocol import SupervisorBatch
from tests.unit.control_plane import ControlPlane
from tests.unit.test_store import step

Sent = tuple[str, str, dict[str, Any]]
"""Kind, id and data of what was sent."""


def sent(lines: Iterator[str]) -> Iterator[Sent]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], fields["id"], json.loads(fields["data"])
            fields = {}


def whole(api: TestClient, path: str, **asked: Any) -> list[Sent]:
    with api.stream("GET", path, **asked) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(sent(answer.iter_lines()))


def running(plane: ControlPlane, steps: int = 0) -> str:
    job = plane.submit()
    plane.steps(2)
    batch = SupervisorBatch(1, steps=tuple(step(n) for n in range(steps)))
    plane.controller.report(job, 1, batch)
    return job


def ended(plane: ControlPlane, steps: int) -> str:
    job = running(plane, steps)
    plane.controller.cancel(job, "enough")
    plane.steps(30, seconds=5.0)
    assert plane.state(job) == "cancelled"
    return job


def test_all_of_a_job_is_told_and_then_that_it_is_settled(
    api: TestClient, plane: ControlPlane
) -> None:
    job = ended(plane, steps=3)
    told = whole(api, f"/v1/jobs/{job}/stream")
    assert [data["step"] for kind, _, data in told if kind == "step"] == [0, 1, 2]
    events = [data["message"] for kind, _, data in told if kind == "event"]
    assert events == [e["message"] for e in plane.store.past.events(job)]
    assert told[-1][0] == "settled" and told[-1][2] == {"state": "cancelled"}
    assert not [
        kind for kind, _, _ in whole(api, f"/v1/jobs/{job}/stream?steps=0") if kind == "step"
    ]


@pytest.mark.parametrize("how", ["header", "query"])
def test_from_any_id_on_the_rest_is_told_each_once(
    api: TestClient, plane: ControlPlane, how: str
) -> None:
    job = ended(plane, steps=4)
    path = f"/v1/jobs/{job}/stream"
    told = whole(api, path)
    for at, (_, place, _) in enumerate(told[:-1]):
        asked = (
            {"headers": {"Last-Event-ID": place}}
            if how == "header"
            else {"params": {"after": place}}
        )
        assert whole(api, path, **asked) == told[at + 1 :]


@pytest.mark.parametrize("place", ["x", "1", "1.", "-1.2", "1.2.3", "9" * 30 + ".1"])
def test_an_id_that_is_none_is_refused(api: TestClient, plane: ControlPlane, place: str) -> None:
    job = ended(plane, steps=1)
    for path in ("stream", "logs/stream"):
        asked = api.get(f"/v1/jobs/{job}/{path}", headers={"Last-Event-ID": place})
        assert asked.status_code == 422 and asked.json()["error"]
        assert api.get(f"/v1/jobs/{job}/{path}", params={"after": place}).status_code == 422


def test_an_unknown_job_or_parameter_is_an_answer_and_no_stream(api: TestClient) -> None:
    for path in ("stream", "logs/stream"):
        assert api.get(f"/v1/jobs/nobody/{path}").status_code == 404
        assert api.get(f"/v1/jobs/nobody/{path}", params={"nonsense": 1}).status_code == 422


def test_a_log_is_followed_through_the_attempts(api: TestClient, plane: ControlPlane) -> None:
    job = ended(plane, steps=1)
    logs = Path(plane.store.job(job).job_dir) / "logs"
    for attempt, text in ((1, "grüße\n" * 100_000), (2, "again\n")):
        file = logs / f"attempt-{attempt}" / "rank-1.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    path = f"/v1/jobs/{job}/logs/stream"
    told = whole(api, path, params={"rank": 1})
    assert "".join(data["text"] for kind, _, data in told if kind == "log") == "grüße\n" * 100_000
    assert len(told) > 3, "in pieces"
    assert whole(api, path, params={"rank": 1, "after": told[1][1]}) == told[2:]
    second = whole(api, path, params={"rank": 1, "attempt": 2})
    assert [data.get("text") for _, _, data in second] == ["again\n", None]
    assert api.get(path, params={"rank": 9}).status_code == 422


def test_many_listeners_hear_of_everything_as_it_happens(home: Home, plane: ControlPlane) -> None:
    """More than there are threads to wait in: fifty, each with all events in order."""
    job, count = running(plane), 60
    heard: dict[int, list[str]] = {}
    listening = threading.Barrier(51, timeout=60)
    server = home.server()
    token = home.token()
    assert server is not None

    def listen(number: int) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        url = f"{server.url}/v1/jobs/{job}/stream"
        mine: list[str] = heard.setdefault(number, [])
        with httpx.stream("GET", url, headers=headers, timeout=60) as answer:
            for kind, _, data in sent(answer.iter_lines()):
                if kind == "event" and data["kind"] == "ready":
                    listening.wait()
                if kind == "event" and data["kind"] == "told":
                    mine.append(data["message"])
                if len(mine) == count:
                    return

    threads = [threading.Thread(target=listen, args=(n,), daemon=True) for n in range(50)]
    for thread in threads:
        thread.start()
    ready = EventDraft("ready", 1.0, "go", {})
    plane.controller.report(job, 1, SupervisorBatch(2, events=(ready,)))
    listening.wait()
    for number in range(count):
        told = EventDraft("told", 2.0, str(number), {})
        plane.controller.report(job, 1, SupervisorBatch(3 + number, events=(told,)))
    for thread in threads:
        thread.join(60)
    assert list(heard.values()) == [[str(n) for n in range(count)]] * 50
