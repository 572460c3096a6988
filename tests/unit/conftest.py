"""What several files of tests need: a control plane, its API, a home on a port, scripted jobs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from orchestrator.api.app import create_app
from orchestrator.home.folder import Home, Server
from tests.unit.control_plane import TOKEN, ControlPlane
from tests.unit.scripted_job import Bench, Make, Script
from tests.unit.storage_away import Storage

if TYPE_CHECKING:
    from tests.unit.transformer_engine_stand_in import StandIn


STORAGE_ANSWERS = [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EACCES, errno.ETIMEDOUT]


@pytest.fixture
def plane(tmp_path: Path) -> ControlPlane:
    return ControlPlane(tmp_path, 4)


@pytest.fixture
def api(plane: ControlPlane) -> Iterator[TestClient]:
    app = create_app(plane.controller, TOKEN)
    # As the real server does: an exception becomes an answer, not a crash of the client.
    with TestClient(app, raise_server_exceptions=False) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield client


@pytest.fixture
def home(tmp_path: Path, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home whose controller answers on a real port."""
    home = Home(tmp_path / "home")
    home.create()
    token = home.token(create=True)
    assert token
    settings = uvicorn.Config(
        create_app(plane.controller, token), port=0, log_config=None, lifespan="off"
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    home.write_server(Server(f"http://127.0.0.1:{port}", port, 0))
    monkeypatch.setenv("OCTAVO_HOME", str(home.path))
    monkeypatch.delenv("OCTAVO_URL", raising=False)
    yield home
    server.should_exit = True
    thread.join(5)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Make]:
    made: list[Bench] = []

    def make(script: Script | None = None, **sections: Any) -> Bench:
        made.append(Bench(tmp_path, script, **sections))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A ``transformer_engine`` of the recorded signatures."""
    # Imports torch, which most tests do without.
    from tests.unit.transformer_engine_stand_in import StandIn

    stand_in = StandIn()
    stand_in.install(monkeypatch)
    return stand_in


@pytest.fixture(params=STORAGE_ANSWERS, ids=lambda number: errno.errorcode[number])
def storage_answer(request: pytest.FixtureRequest) -> int:
    """What a storage answers every look with that is away, or refuses."""
    return int(request.param)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    return Storage(monkeypatch)
