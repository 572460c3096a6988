"""``octavo token``, whose jobs ``--mine`` shows, and what a submitter is told about others'."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from orchestrator.api.access import TokenFile
from orchestrator.cli.main import call
from orchestrator.home.folder import Home
from tests.unit.control_plane import ControlPlane
from tests.unit.test_cli import job_file


@pytest.fixture
def elsewhere(home: Home, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on another machine: the controller's address and a token are all there is."""
    server = home.server()
    assert server is not None
    monkeypatch.setenv("OCTAVO_URL", server.url)
    monkeypatch.setenv("OCTAVO_TOKEN", home.token() or "")
    return monkeypatch


def test_a_token_is_made_used_rotated_and_revoked(
    elsewhere: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["token", "create", "alice", "--role", "submit", "--expires", "90d"]) == 0
    made = capsys.readouterr()
    token = made.out.strip()
    assert token.startswith("octavo_") and token not in made.err
    assert "alice, role submit, until " in made.err and "shown once" in made.err
    assert call(["token", "create", "alice", "--role", "read"]) == 1
    assert "there is a token 'alice'" in capsys.readouterr().err
    assert call(["token", "list"]) == 0
    listed = capsys.readouterr().out
    assert "alice submit" in listed and token not in listed
    with elsewhere.context() as alice:
        alice.setenv("OCTAVO_TOKEN", token)
        assert call(["token", "whoami"]) == 0
        assert capsys.readouterr().out.startswith("alice, role submit, until ")
        assert call(["token", "list"]) == 1
        told = capsys.readouterr().err
        assert "has the role submit; this needs admin" in told and "--role admin`" in told
    assert call(["token", "rotate", "alice"]) == 0
    assert "alice, role submit, until " in capsys.readouterr().err
    assert call(["token", "rotate", "alice", "-o", "json"]) == 0
    rotated = json.loads(capsys.readouterr().out)
    assert (rotated["name"], rotated["role"]) == ("alice", "submit")
    assert call(["token", "revoke", rotated["id"]]) == 0
    assert call(["token", "revoke", "alice"]) == 102
    assert call(["token", "list", "--all", "-o", "json"]) == 0
    everything = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert [row["state"] for row in everything] == ["revoked"] * 3
    assert call(["token", "create", "x y", "--role", "read"]) == 2
    assert call(["token", "create", "x", "--role", "read", "--expires", "soon"]) == 2


def test_a_submitter_sees_all_jobs_finds_its_own_and_controls_them_alone(
    elsewhere: pytest.MonkeyPatch,
    plane: ControlPlane,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(["token", "create", "alice", "--role", "submit"]) == 0
    elsewhere.setenv("OCTAVO_TOKEN", capsys.readouterr().out.strip())
    other = plane.submit("other", by="bob")
    assert call(["submit", job_file(tmp_path)]) == 0
    own = capsys.readouterr().out.strip()
    assert call(["list", "--mine", "-o", "json"]) == 0
    assert [job["id"] for job in json.loads(capsys.readouterr().out)] == [own]
    assert call(["jobs"]) == 0
    assert other in capsys.readouterr().out
    assert call(["cancel", other]) == 1
    told = capsys.readouterr().err
    assert f"{other} is bob's" in told and "`octavo list --mine`" in told
    assert call(["cancel", own]) == 0
    assert plane.store.job(own).reason.startswith("cancelled by ")
    assert plane.store.job(own).reason.endswith("(asked by alice)")


def test_jobs_of_who_is_logged_in_are_theirs_with_the_homes_token(
    home: Home, plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.submit("other", by="bob")
    assert call(["submit", job_file(tmp_path)]) == 0
    own = capsys.readouterr().out.strip()
    assert call(["list", "--mine", "--state", "queued", "-o", "json"]) == 0
    assert [job["id"] for job in json.loads(capsys.readouterr().out)] == [own]
    assert call(["list", "--state", "walking"]) == 2


def test_the_token_of_the_home_is_made_anew_and_the_controller_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path / "home")
    assert call(["token", "rotate", "home", "--home", str(home.path)]) == 102
    first = home.token(create=True)
    current = TokenFile(home)
    assert current() == first
    assert call(["token", "rotate", "home", "--home", str(home.path)]) == 0
    second = home.token()
    assert second != first and current() == second
    assert second and second not in capsys.readouterr().out
    assert stat.S_IMODE((home.path / "token").stat().st_mode) == 0o600
    (home.path / "token").chmod(0o644)
    assert current() == second, "one that others can read is not taken"
    (home.path / "token").unlink()
    assert current() == second
