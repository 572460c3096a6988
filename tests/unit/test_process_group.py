"""How ranks meet: what those say that waited for others in vain."""

from __future__ import annotations

import pickle
import threading
from typing import cast

import pytest
from torch.distributed import TCPStore

import launch.process_group
from launch.commands import Assignment
from launch.process_group import JoinError, host_store
from tests.ranks.launch_ranks import free_port


class Meeting:
    """Ranks of one attempt, as threads that only meet."""

    def __init__(self, world_size: int, *, hosted: bool = False) -> None:
        """``hosted``: rank 0's store is there before any rank comes."""
        self._hosted = host_store("127.0.0.1") if hosted else None
        self._world_size = world_size
        self._port = self._hosted.port if self._hosted else free_port()
        self.errors: dict[int, JoinError] = {}
        self.stale: dict[int, TCPStore] = {}
        """What ranks' processes opened for an attempt before."""
        self._stores: list[object] = []
        """They live on, as a rank's does."""

    def come(self, *ranks: int) -> None:
        threads = [threading.Thread(target=self._come, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _come(self, rank: int) -> None:
        class Mine:
            master_addr, master_port = "127.0.0.1", self._port
            world_size = self._world_size

        mine = Mine()
        mine.rank = rank  # type: ignore[attr-defined]
        try:
            hosted = self.stale.get(rank, None if rank else self._hosted)
            self._stores.append(launch.process_group._met(cast(Assignment, mine), hosted))
        except JoinError as error:
            self.errors[rank] = error


@pytest.mark.parametrize("hosted", [True, False])
def test_ranks_that_all_come_meet(hosted: bool) -> None:
    meeting = Meeting(3, hosted=hosted)
    meeting.come(0, 1, 2)
    assert not meeting.errors


def test_a_store_that_was_opened_for_another_attempt_is_nobodys_meeting() -> None:
    meeting = Meeting(2, hosted=True)
    meeting.stale = {1: host_store("127.0.0.1")}
    meeting.come(0, 1)
    assert not meeting.errors
    meeting = Meeting(2)
    meeting.stale = {0: host_store("127.0.0.1")}
    meeting.come(0, 1)
    assert not meeting.errors


def test_rank_0_names_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.process_group, "JOIN_TIMEOUT_S", 1.0)
    meeting = Meeting(4)
    meeting.come(0, 2)
    assert meeting.errors[0].absent == (1, 3)
    assert "ranks 1, 3 did not come to 127.0.0.1:" in str(meeting.errors[0])
    assert meeting.errors[2].absent == ()
    assert pickle.loads(pickle.dumps(meeting.errors[0])).absent == (1, 3)


def test_without_rank_0_the_others_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.process_group, "JOIN_TIMEOUT_S", 1.0)
    meeting = Meeting(2)
    meeting.come(1)
    assert meeting.errors[1].absent == (0,)
    assert "rank 0 was not reached" in str(meeting.errors[1])
