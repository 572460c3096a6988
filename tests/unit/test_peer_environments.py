"""What a benchmark's peer needs is there, or the peer is told as not to be had, never as failed."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.peers.environments import OURS, Peer, _why_not_whole


def test_an_environment_without_a_module_of_the_script_is_not_whole(tmp_path: Path) -> None:
    log = tmp_path / "install.log"
    lacking = Peer("lacking", (), ("json", "no_such_module"), ())
    assert "No module named 'no_such_module'" in _why_not_whole(lacking, OURS, log)


def test_one_that_loads_it_all_and_the_job_is_whole(tmp_path: Path) -> None:
    whole = Peer("whole", (), ("tests.benchmarks.plain_deepspeed",), ())
    assert _why_not_whole(whole, OURS, tmp_path / "install.log") == ""
