"""Another job's storage that doesn't say what it holds: a job that goes on from it waits."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from orchestrator.saved.checkpoint_shelf import STORAGE_S
from tests.unit.scripted_job import Bench, Make
from tests.unit.storage_away import Storage, restarted
from tests.unit.test_resume_from import checkpoint


class TestAnotherJobsStorage:
    """Of ``checkpoint.resume_from``, which may be another mount than the job's own."""

    @pytest.fixture
    def storage(self, monkeypatch: pytest.MonkeyPatch) -> Storage:
        return Storage(monkeypatch, within="/first")

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        checkpoint(tmp_path / "first", 20)
        checkpoint(tmp_path / "first", 50)
        return tmp_path / "first"

    def begins_at(self, source: Path, bench: Make) -> Bench:
        return bench(checkpoint={"resume_from": str(source)})

    def test_the_first_start_waits_for_it(
        self, bench: Make, source: Path, storage: Storage, storage_answer: int
    ) -> None:
        job = self.begins_at(source, bench)
        storage.number = storage_answer
        for _ in range(20):
            job.step(5.0)
        told = job.settled()
        assert job.ranks.attempts == [] and told.states == []
        (awaited,) = [e for e in told.events if e.kind == "storage_awaited"]
        assert awaited.message.startswith(f"{source} can't be looked at: ")
        storage.number = 0
        job.step(5.0)
        restore = job.ranks.attempts[0][0].restore
        assert restore is not None and restore.step == 50
        assert "copy_refused" not in [e.kind for e in job.settled().events]

    def test_so_does_one_after_it_while_the_job_has_saved_nothing(
        self, bench: Make, source: Path, storage: Storage
    ) -> None:
        job = self.begins_at(source, bench)
        job.train(1)
        job.ranks.held.clear()
        job.supervision._job.starts._foreign.clear()
        storage.number = errno.EIO
        restarted(job, passes=20, seconds=5.0)
        assert len(job.ranks.attempts) == 1 and job.controller.attempt == 2
        storage.number = 0
        job.step(5.0)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and restore.step == 50

    def test_where_it_stays_away_the_job_is_paused_and_says_why(
        self, bench: Make, source: Path, storage: Storage, storage_answer: int
    ) -> None:
        job = self.begins_at(source, bench)
        storage.number = storage_answer
        for _ in range(int(STORAGE_S / 10) + 3):
            job.step(10.0)
        told = job.settled()
        assert told.states[-1] == ("paused", "STATE_GONE") and job.ranks.attempts == []
        assert (
            f"it can't be looked at: {os.strerror(storage_answer)}" in told.event("ended").message
        )

    @pytest.mark.parametrize("file", ["", "/manifest.json", "/rank-00001.safetensors"])
    def test_an_older_one_is_taken_once_the_newest_was_waited_for(
        self, bench: Make, source: Path, storage: Storage, file: str
    ) -> None:
        job = self.begins_at(source, bench)
        storage.within, storage.number = f"step-00000050{file}", errno.EIO
        for _ in range(10):
            job.step(5.0)
        assert job.ranks.attempts == []
        for _ in range(int(STORAGE_S / 10)):
            job.step(10.0)
        restore = job.ranks.attempts[0][0].restore
        assert restore is not None and restore.step == 20
        assert "step-00000050 is left out" in job.settled().event("copy_refused").message

    def test_an_older_one_that_cannot_be_looked_at_holds_up_nobody(
        self, bench: Make, source: Path, storage: Storage
    ) -> None:
        job = self.begins_at(source, bench)
        storage.within, storage.number = "step-00000020", errno.EIO
        job.step()
        restore = job.ranks.attempts[0][0].restore
        assert restore is not None and restore.step == 50
