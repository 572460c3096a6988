"""An idle worker that has lost its supervisor waits for the next one, and not for ever."""

from __future__ import annotations

import threading

import pytest

from launch import worker as worker_module
from launch.mailbox import Mailbox
from launch.standby import job_prefix
from launch.worker import Worker


class EndedError(Exception):
    """In place of the process' end."""


@pytest.fixture
def orphan(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker without its imports, whose end is an error."""

    def end(why: str) -> None:
        raise EndedError(why)

    monkeypatch.setattr(worker_module, "_exit", end)
    monkeypatch.setattr(worker_module, "ADOPTION_POLL_S", 0.01)
    monkeypatch.setattr(worker_module, "import_ahead", lambda: None)
    monkeypatch.setattr(Worker, "_keep_watch", lambda self: None)
    return Worker("the first supervisor")


def test_the_next_supervisor_takes_it_over(orphan: Worker) -> None:
    adopting = threading.Timer(0.05, orphan.adopt, ("the next",))
    adopting.start()
    orphan._end_unless_adopted("the first supervisor", "is gone")
    adopting.join()
    assert orphan._watched == "the next" and not orphan.claim("a stranger")


def test_nobody_comes(orphan: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "ORPHAN_S", 0.05)
    with pytest.raises(EndedError, match="the owner is gone"):
        orphan._end_unless_adopted("the first supervisor", "is gone")


def test_one_that_has_a_rank_waits_for_nobody_and_is_nobodys(orphan: Worker) -> None:
    orphan._mailbox = Mailbox(1)
    assert not orphan.adopt("the next")
    with pytest.raises(EndedError):
        orphan._end_unless_adopted("the first supervisor", "is gone")


def test_no_job_takes_over_the_workers_of_one_whose_name_goes_on() -> None:
    assert not job_prefix("llama-123abc-456def").startswith(job_prefix("llama-123abc"))
