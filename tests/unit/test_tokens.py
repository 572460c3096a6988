"""Tokens: what each role may do, whose jobs are whose, rotation, and how often one may ask."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.access import Caller, Role, token_id
from orchestrator.api.access import STRANGERS
from orchestrator.api.app import create_app
from orchestrator.api.client import Client
from orchestrator.api.client_errors import NotAllowedError
from orchestrator.events import EventDraft
from orchestrator.home.folder import Home
from orchestrator.home.rate_limit import RateLimit, RateLimiter
from orchestrator.protocol import SupervisorBatch
from orchestrator.store.database import Store
from orchestrator.store.tokens import TokenConflictError, UnknownTokenError
from tests.unit.control_plane import TOKEN, ControlPlane
from tests.unit.test_api import is_problem, spec


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def made(api: TestClient, name: str, role: str, **body: Any) -> dict[str, str]:
    """The header of a new token."""
    answer = api.post("/v1/tokens", json={"name": name, "role": role, **body})
    assert answer.status_code == 201, answer.text
    return bearer(answer.json()["token"])


READS = [
    "/v1/jobs",
    "/v1/jobs/{job}",
    "/v1/jobs/{job}/events",
    "/v1/nodes",
    "/v1/whoami",
    "/metrics",
]
CONTROLS: list[tuple[str, dict[str, Any]]] = [
    ("cancel", {}),
    ("resume", {}),
    ("pause", {}),
    ("rollback", {"to_step": 0}),
    ("precision", {"layers": ["*"], "to": "bf16"}),
    ("exchange", {"to": "bf16"}),
]
ADMIN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/nodes/none/quarantine", {"reason": "x"}),
    ("/v1/nodes/none/release", {}),
    ("/v1/tokens", {"name": "new", "role": "admin"}),
    ("/v1/tokens/reader/rotate", {}),
    ("/v1/tokens/reader/revoke", {}),
]


class TestRoles:
    @pytest.mark.parametrize("role", ["read", "submit", "admin"])
    def test_every_role_may_look_at_everything(
        self, api: TestClient, plane: ControlPlane, role: str
    ) -> None:
        job, mine = plane.submit(by="bob"), made(api, "someone", role)
        for path in READS:
            assert api.get(path.format(job=job), headers=mine).status_code == 200

    def test_a_reader_may_change_nothing(self, api: TestClient, plane: ControlPlane) -> None:
        job, mine = plane.submit(by="reader"), made(api, "reader", "read")
        asked = [(f"/v1/jobs/{job}/{path}", body) for path, body in CONTROLS]
        asked += [("/v1/jobs", {"spec": spec()}), ("/v1/jobs:validate", {"spec": spec()}), *ADMIN]
        for path, body in asked:
            answer = api.post(path, json=body, headers=mine)
            assert answer.status_code == 403 and is_problem(answer), path
            assert answer.json()["type"] == "urn:octavo:role-too-low"
            assert "'reader' has the role read; this needs" in answer.json()["detail"]
        assert plane.state(job) == "queued" and plane.store.controls.of(job) == []

    def test_only_an_admin_may_change_nodes_and_tokens(self, api: TestClient) -> None:
        made(api, "reader", "read")
        mine = made(api, "worker", "submit")
        for path, body in ADMIN:
            answer = api.post(path, json=body, headers=mine)
            assert answer.status_code == 403 and "this needs admin" in answer.json()["detail"]
        assert api.get("/v1/tokens", headers=mine).status_code == 403
        assert api.get("/v1/tokens", headers=made(api, "root", "admin")).status_code == 200


class TestOwnership:
    def test_a_submitter_may_control_its_own_jobs_alone(
        self, api: TestClient, plane: ControlPlane
    ) -> None:
        alice = made(api, "alice", "submit")
        own = api.post("/v1/jobs", json={"spec": spec(), "by": "bob"}, headers=alice).json()
        assert own["submitted_by"] == "alice", "who they are, not who they say"
        for other in (plane.submit("other", by="bob"), plane.submit("nobodys")):
            for path, body in CONTROLS:
                answer = api.post(f"/v1/jobs/{other}/{path}", json=body, headers=alice)
                assert answer.status_code == 403 and is_problem(answer)
                assert answer.json()["type"] == "urn:octavo:not-your-job"
            assert plane.store.controls.of(other) == [] and plane.state(other) == "queued"
        paused = api.post(f"/v1/jobs/{own['id']}/pause", json={"by": "bob"}, headers=alice)
        assert paused.status_code == 200 and paused.json()["by"] == "alice"
        gone = api.post(f"/v1/jobs/{own['id']}/cancel", json={"reason": "done"}, headers=alice)
        assert gone.json()["reason"] == "done (asked by alice)"
        assert api.post(f"/v1/jobs/{other}/cancel").status_code == 200, "an admin may"

    def test_a_key_is_its_owners_and_gives_nobody_anothers_job(self, api: TestClient) -> None:
        alice, bob = made(api, "alice", "submit"), made(api, "bob", "submit")
        body = {"spec": spec(), "key": "same"}
        first = api.post("/v1/jobs", json=body, headers=alice)
        assert first.status_code == 201
        assert api.post("/v1/jobs", json=body, headers=alice).json()["id"] == first.json()["id"]
        own = api.post("/v1/jobs", json=body, headers=bob)
        assert own.status_code == 201 and own.json()["id"] != first.json()["id"]
        assert own.json()["submitted_by"] == "bob"

    def test_an_admin_speaks_for_others_and_everybody_else_for_themselves(self) -> None:
        admin = Caller("root", Role.ADMIN, "1")
        assert (admin.speaks_as("bob"), admin.speaks_as("")) == ("bob", "root")
        assert Caller("home", Role.ADMIN, "home").speaks_as("") == ""
        assert Caller("alice", Role.SUBMIT, "2").speaks_as("bob") == "alice"


class TestLife:
    def test_a_token_is_told_once_and_only_its_hash_is_kept(
        self, api: TestClient, plane: ControlPlane, tmp_path: Path
    ) -> None:
        answer = api.post("/v1/tokens", json={"name": "ci", "role": "read"})
        token = answer.json()["token"]
        assert answer.headers["cache-control"] == "no-store"
        listed = api.get("/v1/tokens")
        assert [t["name"] for t in listed.json()["tokens"]] == ["ci"]
        assert token not in listed.text and "hash" not in listed.text
        secret = token.rpartition(f"{token_id(token)}_")[2].encode()
        kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        assert token_id(token).encode() in kept and secret not in kept

    def test_it_is_accepted_by_the_controller_after_a_restart(
        self, api: TestClient, plane: ControlPlane, tmp_path: Path
    ) -> None:
        mine, ended = made(api, "ci", "read"), made(api, "old", "read")
        api.post("/v1/tokens/old/revoke")
        plane.store.close()
        plane.store = Store(f"sqlite:///{tmp_path}/store.db")
        with TestClient(create_app(plane.new_controller(), "another-home-token")) as again:
            assert again.get("/v1/jobs", headers=mine).status_code == 200
            assert again.get("/v1/jobs", headers=ended).status_code == 403
            assert again.get("/v1/jobs", headers=bearer(TOKEN)).status_code == 403

    def test_one_that_ends_is_told_so_to_its_holder_alone(self, api: TestClient) -> None:
        short = made(api, "short", "read", seconds=1e-3)
        told = api.get("/v1/jobs", headers=short)
        assert told.status_code == 403 and "'short' is expired" in told.json()["detail"]
        guessed = {"Authorization": short["Authorization"][:-4] + "AAAA"}
        assert api.get("/v1/jobs", headers=guessed).json()["detail"] == (
            "the token is not this controller's"
        )
        long = made(api, "long", "read")
        (row,) = api.post("/v1/tokens/long/revoke").json()["revoked"]
        assert row["state"] == "revoked"
        assert "'long' is revoked" in api.get("/v1/jobs", headers=long).json()["detail"]
        assert api.post("/v1/tokens/long/revoke").status_code == 404
        names = [t["name"] for t in api.get("/v1/tokens", params={"ended": True}).json()["tokens"]]
        assert names == ["short", "long"]
        assert api.get("/v1/tokens").json()["tokens"] == []

    def test_a_rotation_keeps_name_role_and_jobs_and_ends_the_one_before(
        self, api: TestClient
    ) -> None:
        first = made(api, "alice", "submit")
        job = api.post("/v1/jobs", json={"spec": spec()}, headers=first).json()["id"]
        answer = api.post("/v1/tokens/alice/rotate", json={"overlap_s": 3600})
        second = bearer(answer.json()["token"])
        assert answer.json()["role"] == "submit"
        assert [api.get("/v1/whoami", headers=h).status_code for h in (first, second)] == [200, 200]
        third = bearer(api.post("/v1/tokens/alice/rotate").json()["token"])
        codes = [api.get("/v1/whoami", headers=h).status_code for h in (first, second, third)]
        assert codes == [403, 403, 200]
        assert api.post(f"/v1/jobs/{job}/cancel", headers=third).status_code == 200

    def test_times_of_tokens_in_the_store(self, plane: ControlPlane) -> None:
        records = plane.store.tokens
        _, old = records.create("ci", Role.READ, "home", 100.0, 200.0)
        assert isinstance(records.caller(old, 199.0), Caller)
        assert records.caller(old, 200.0) == "the token 'ci' is expired: an admin makes another one"
        with pytest.raises(TokenConflictError, match="rotate or revoke"):
            records.create("ci", Role.ADMIN, "home", 150.0, None)
        _, new = records.rotate("ci", "home", 150.0, None, 60.0)
        assert isinstance(records.caller(old, 199.0), Caller), "neither longer nor shorter"
        assert records.caller(old, 200.0) != records.caller(new, 200.0)
        assert isinstance(records.caller(new, 249.0), Caller), "made for 100 s, as the one before"
        assert records.caller(new, 250.0) == "the token 'ci' is expired: an admin makes another one"
        _, longer = records.rotate("ci", "home", 200.0, 1000.0, 0.0)
        assert isinstance(records.caller(longer, 999.0), Caller)
        with pytest.raises(UnknownTokenError):
            records.rotate("nobody", "home", 150.0, None, 0.0)
        with pytest.raises(TokenConflictError, match="own home"):
            records.create("home", Role.READ, "home", 1.0, None)

    def test_no_token_is_logged(self, api: TestClient, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        headers = made(api, "ci", "read")
        token = headers["Authorization"].removeprefix("Bearer ")
        api.get("/v1/nothing", headers=headers)
        api.get("/v1/jobs", headers=bearer(token + "x"))
        api.post("/v1/tokens/ci/revoke")
        api.get("/v1/jobs", headers=headers)
        assert token not in caplog.text and TOKEN not in caplog.text

    def test_a_stream_ends_when_its_token_does(
        self, home: Home, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("orchestrator.api.guard.LOOK_S", 0.05)
        job, server = plane.submit(), home.server()
        plane.steps(2)
        assert server is not None
        _, token = plane.store.tokens.create("ci", Role.READ, "home", 1.0, None)
        heard: list[str] = []
        listening = threading.Event()

        def listen() -> None:
            url = f"{server.url}/v1/jobs/{job}/stream"
            with httpx.stream("GET", url, headers=bearer(token), timeout=30) as answer:
                for line in answer.iter_lines():
                    heard.append(line)
                    listening.set()

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        assert listening.wait(30)
        plane.store.tokens.revoke("ci", 2.0)
        thread.join(30)
        assert not thread.is_alive(), "it ended, cleanly"
        told = EventDraft("told", 5.0, "not for them", {})
        plane.controller.report(job, 1, SupervisorBatch(1, events=(told,)))
        assert not any("settled" in line or "not for them" in line for line in heard)


@pytest.fixture
def scarce(plane: ControlPlane) -> Iterator[TestClient]:
    """An API that a token may ask three times at once, and once a second."""
    app = create_app(plane.controller, TOKEN, RateLimit(per_second=1, burst=3))
    with TestClient(app) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield client


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, nothing is let in again meanwhile."""
    monkeypatch.setattr("orchestrator.api.access.monotonic", lambda: 5.0)


class TestRates:
    @pytest.mark.usefixtures("no_time_passes")
    def test_who_asks_too_often_is_told_when_to_come_again_and_others_are_not_held_up(
        self, scarce: TestClient
    ) -> None:
        other = made(scarce, "other", "read")
        codes = [scarce.get("/v1/jobs").status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        answer = scarce.get("/v1/jobs")
        assert is_problem(answer) and answer.headers["retry-after"] == "1"
        assert "'home' asks more than 1 times a second" in answer.json()["detail"]
        assert scarce.get("/v1/jobs", headers=other).status_code == 200
        assert scarce.get("/healthz").status_code == 200

    @pytest.mark.usefixtures("no_time_passes")
    def test_who_guesses_is_slowed_down_and_nobody_else(self, api: TestClient) -> None:
        answers = [api.get("/v1/jobs", headers=bearer("no")) for _ in range(STRANGERS.burst + 5)]
        assert [a.status_code for a in answers] == [403] * STRANGERS.burst + [429] * 5
        assert "retry-after" in answers[-1].headers and is_problem(answers[-1])
        assert api.get("/v1/jobs").status_code == 200

    def test_the_client_comes_again_when_it_is_told_to(
        self, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        app = create_app(plane.controller, TOKEN, RateLimit(per_second=1, burst=1))
        client, slept = Client("http://testserver", TOKEN), list[float]()
        monkeypatch.setattr("orchestrator.api.access.monotonic", lambda: 5.0 + sum(slept))
        with TestClient(app) as api:
            api.headers["Authorization"] = f"Bearer {TOKEN}"
            client._connection._http = api

            monkeypatch.setattr("orchestrator.api.connection.time.sleep", slept.append)
            assert [client.jobs() for _ in range(4)] == [[]] * 4
        assert slept == [1.0] * 3, "as Retry-After says, in whole seconds"

    @given(
        st.lists(st.floats(0, 3), min_size=1, max_size=60),
        st.floats(0.1, 20),
        st.integers(1, 10),
    )
    def test_in_no_stretch_of_time_more_is_let_in_than_a_burst_and_the_rate(
        self, gaps: list[float], rate: float, burst: int
    ) -> None:
        limiter = RateLimiter(RateLimit(per_second=rate, burst=burst))
        now, admitted = 0.0, []
        for gap in gaps:
            now += gap
            wait = limiter.admit("a", now)
            if not wait:
                admitted.append(now)
            else:
                assert 0 < wait <= 1 / rate + 1e-9
                assert not RateLimiter(limiter.limit).admit("other", now)
        for first in range(len(admitted)):
            for last in range(first, len(admitted)):
                stretch = admitted[last] - admitted[first]
                assert last - first + 1 <= burst + stretch * rate + 1e-6


def test_the_client_tells_apart_who_is_not_known_and_who_may_not(
    home: Home, plane: ControlPlane
) -> None:
    server = home.server()
    assert server is not None
    _, token = plane.store.tokens.create("ci", Role.READ, "home", 1.0, None)
    with pytest.raises(NotAllowedError, match="has the role read; this needs submit") as refused:
        Client(server.url, token).submit({"name": "toy"}, "toy.yaml")
    assert refused.value.needed == "submit"
