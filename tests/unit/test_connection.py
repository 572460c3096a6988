"""The way to a controller: what is told where there is none, and what is said to one again."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from orchestrator.api.client import Client
from orchestrator.api.client_errors import (
    ClientError,
    NotAuthorizedError,
    RefusedError,
    ServerError,
    TooManyRequestsError,
    UnreachableError,
)
from orchestrator.api.connection import TIMEOUT_S
from orchestrator.api.patience import Patience
from orchestrator.cli.main import call
from orchestrator.home.folder import Home, Server
from tests.unit.control_plane import ControlPlane

AWAY = UnreachableError("the controller doesn't answer")
OFTEN = TooManyRequestsError("the controller is asked too often")


def test_an_absent_controller_is_unreachable_and_the_remedy_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    commands = (["list"], ["status", "x"], ["cancel", "x"], ["watch", "x"], ["logs", "x"])
    for command in commands:
        assert call([*command, "--home", str(tmp_path)]) == 3
    home.write_server(Server("http://127.0.0.1:9", 9, 0))
    assert call(["list", "--home", str(tmp_path)]) == 3
    told = capsys.readouterr().err
    assert "octavo up" in told and "Traceback" not in told


def test_nothing_that_listens_is_unreachable() -> None:
    assert not Client("http://127.0.0.1:9", None).healthy()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
        Client("http://127.0.0.1:9", None).jobs()


@pytest.mark.parametrize(
    ("url", "token", "code", "says"),
    [
        ("http://head:port", "", 3, "'http://head:port' is no address of a controller"),
        ("http://[::1", "", 3, "'http://[::1' is no address of a controller"),
        ("head:8420", "", 3, "'head:8420' is no address of a controller"),
        ("http://127.0.0.1:9", "tök", 1, "the token has characters that no token has"),
        ("http://127.0.0.1:9", "a\nb", 1, "the token has characters that no token has"),
    ],
)
def test_an_address_or_token_that_can_be_none_is_told_in_a_line(
    url: str,
    token: str,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_URL", url)
    monkeypatch.setenv("OCTAVO_TOKEN", token)
    assert call(["list"]) == code
    told = capsys.readouterr().err
    assert says in told and (not token or token not in told)


def test_a_wrong_or_exposed_token_is_told_without_a_traceback(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = home.server()
    assert server
    for token, says in ((None, "needs the controller's bearer token"), ("no", "is not this")):
        with pytest.raises(NotAuthorizedError, match=says):
            Client(server.url, token).jobs()
    (home.path / "token").chmod(0o644)
    assert call(["list"]) == 1
    assert "chmod 600" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_URL", server.url)
    monkeypatch.setenv("OCTAVO_TOKEN", "wrong")
    assert call(["list"]) == 1
    assert "not this controller's" in capsys.readouterr().err


def test_a_controller_that_restarts_is_waited_for_and_followed_to_its_new_address(
    home: Home, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cluster.local.running_host", lambda _: object())
    server = home.server()
    assert server
    home.write_server(Server("http://127.0.0.1:9", 9, 0))
    client = Client.of_home(home)
    threading.Timer(0.5, home.write_server, [server]).start()
    assert client.jobs() == []


def test_a_controller_that_stays_away_is_told_apart_from_one_that_was_never_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cluster.local.running_host", lambda _: object())
    monkeypatch.setattr("orchestrator.api.connection.RESTART_S", 0.3)
    Home(tmp_path).write_server(Server("http://127.0.0.1:9", 9, 0))
    assert call(["list", "--home", str(tmp_path)]) == 3
    told = capsys.readouterr().err
    assert "though its host runs" in told and "start one" not in told


def test_a_controller_on_a_cluster_is_waited_for_and_then_told_how_to_start_it_again(
    home: Home, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_ray_address("10.0.0.1:6379")
    server = home.server()
    assert server
    home.write_server(Server("http://127.0.0.1:9", 9, 0))
    client = Client.of_home(home)
    threading.Timer(0.5, home.write_server, [server]).start()
    assert client.jobs() == []
    monkeypatch.setattr("orchestrator.api.connection.RESTART_S", 0.3)
    home.write_server(Server("http://127.0.0.1:9", 9, 0))
    with pytest.raises(UnreachableError, match=r"on the Ray of 10\.0\.0\.1:6379") as error:
        Client.of_home(home).jobs()
    assert "orchestrator.cluster.on_ray HOME --address 10.0.0.1:6379" in error.value.remedy
    home.write_ray_address("")
    with pytest.raises(UnreachableError, match="no controller answers"):
        Client.of_home(home).jobs()


def test_an_order_that_may_have_been_heard_is_not_to_be_repeated_blindly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cluster.local.running_host", lambda _: object())
    monkeypatch.setattr("orchestrator.api.connection.TIMEOUT_S", 0.2)
    monkeypatch.setattr("orchestrator.api.connection.RESTART_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        Home(tmp_path).write_server(Server(f"http://127.0.0.1:{port}", port, 0))
        client = Client.of_home(Home(tmp_path))
        with pytest.raises(UnreachableError) as order:
            client.submit({}, "job.yaml")
        with pytest.raises(UnreachableError) as question:
            client.jobs()
    assert "`octavo list` before you repeat it" in order.value.remedy
    assert question.value.remedy.startswith("try again")


@pytest.mark.parametrize("moment", [ServerError("the store is locked; try again"), AWAY, OFTEN])
def test_who_has_time_asks_again_what_is_refused_for_a_moment(moment: ClientError) -> None:
    refusals = [moment, moment]

    def ask(job: str) -> str:
        if refusals:
            raise refusals.pop()
        return job

    assert Patience(time.monotonic() + 60.0).ask(ask, "toy") == "toy"
    refusals = [moment] * 3
    with pytest.raises(type(moment)):
        Patience(time.monotonic() + 60.0, gone=lambda: True).ask(ask, "toy")
    assert len(refusals) == 2


def test_what_is_refused_for_good_is_not_asked_again() -> None:
    asked: list[str] = []

    def ask(job: str) -> None:
        asked.append(job)
        raise RefusedError("the job has ended")

    with pytest.raises(RefusedError):
        Patience(time.monotonic() + 60.0).ask(ask, "toy")
    assert asked == ["toy"]


def test_who_waits_at_a_prompt_does_not_wait_for_a_controller_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", None)
        client.hurry()
        refused: list[Exception] = []

        def ask() -> None:
            try:
                client.jobs()
            except UnreachableError as error:
                refused.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(TIMEOUT_S / 2)
        assert refused, "it waits as any other command would"


def test_a_named_home_and_what_has_a_controller_of_its_own_dont_ask_the_one_elsewhere(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_URL", "http://127.0.0.1:9")
    assert call(["list"]) == 3
    assert "$OCTAVO_URL" in capsys.readouterr().err
    assert call(["list", "--home", str(home.path)]) == 0
    # `run`, `drill` and `down` are this: a cancel for all of another controller's jobs otherwise.
    assert Client.of_home(home).jobs() == []
