"""The API under requests that nobody would think of: no failure of its own, and answers as told.

Schemathesis makes them from the OpenAPI description, right ones and wrong ones: values at and
beyond their bounds, missing and surplus ones, odd bodies. They go to the real app on a real port,
over a real store on disk, with jobs in it that have events, steps, incidents, actions and controls.
They are always the same ones, so that what fails fails again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from monitoring.records import Incident
from orchestrator.actions import Action
from orchestrator.api.app import create_app
from orchestrator.home.rate_limit import RateLimit
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import StepContext, SupervisorBatch
from tests.unit.control_plane import TOKEN, ControlPlane
from tests.unit.test_store import step

EXAMPLES = 4
"""Requests of each kind (right and wrong, to what is there and to what isn't) an operation."""
UNLIMITED = RateLimit(per_second=1e6, burst=10**6)
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def settled_job(plane: ControlPlane, name: str, by: str) -> str:
    """A job that ran, failed, and has something of everything."""
    job = plane.submit(name, by=by)
    plane.steps(2)
    incident = Incident("loss_spike", "loss_spike", 1, 0, 1, 1, 5.0, "a spike", {"loss": 7.0})
    nonfinite = Incident("nonfinite", "nonfinite", 1, 0, 2, 2, 5.0, "nan", {"loss": float("nan")})
    action = Action("rollback", 1, 0, 2, 5.0, "go back", (incident,), to_step=0)
    batch = SupervisorBatch(
        1,
        steps=tuple(step(n, loss=float("nan") if n == 2 else 4.0) for n in range(4)),
        incidents=(incident.to_json(), nonfinite.to_json()),
        actions=(action,),
        contexts=(StepContext(1, 0, 1, (0, 1)),),
        transition=(JobState.RUNNING, Cause.FIRST_STEP),
    )
    assert plane.controller.report(job, 1, batch).accepted
    ended = SupervisorBatch(2, transition=(JobState.FAILED, Cause.ERROR))
    assert plane.controller.report(job, 1, ended).accepted
    plane.supervisors.done.add(job)
    plane.steps()
    return job


@contextmanager
def serving(plane: ControlPlane) -> Iterator[str]:
    """The API on a port of the loopback; its URL."""
    app = create_app(plane.controller, TOKEN, UNLIMITED)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(5)


def refused_for_good_reason(response: Any, path: str) -> bool:
    """Whether a request was refused for what no schema tells: a job file has rules of its own, a
    log is read from one place, and not all that is JSON can be kept."""
    if response.status_code != 422:
        return False
    kind = response.json()["type"]
    return kind in ("urn:octavo:spec-invalid", "urn:octavo:body-unfit") or "/logs" in path


def test_no_request_breaks_it_and_every_answer_is_as_it_is_told(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 8)
    looked_at, acted_on = settled_job(plane, "one", "alice"), settled_job(plane, "two", "bob")
    with serving(plane) as url, requests.Session() as session:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) > 25
        for operation in operations:
            there = {"job": looked_at if operation.method == "get" else acted_on}
            there |= {"node": "10.0.0.1", "token": "ci", "key": "c0ffee"}
            known = {p.name: there[p.name] for p in operation.path_parameters}
            fuzz(operation, known, session)


def fuzz(operation: Any, known: dict[str, str], session: requests.Session) -> None:
    """Ask right and wrong, for what is there (``known``) and for what isn't."""
    kinds = [
        operation.as_strategy(mode, path_parameters=parameters)
        for mode in GenerationMode
        for parameters in ((known, None) if known else (None,))
    ]

    @settings(
        max_examples=EXAMPLES * len(kinds),
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(kinds))
    def ask(case: Any) -> None:
        if "wait" in case.query:
            case.query["wait"] = 0
        response = case.call(session=session, headers=HEADERS)
        # Every route is asked without a token and with wrong ones in ``test_api``.
        excluded = [ignored_auth]
        if refused_for_good_reason(response, case.path):
            excluded.append(positive_data_acceptance)
        case.validate_response(response, excluded_checks=excluded, headers=HEADERS)

    ask()
