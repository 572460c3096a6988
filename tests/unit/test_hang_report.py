"""What the stacks of hung ranks tell: who did not come to the collective."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.stacks import Frame, Stack, parse_faulthandler
from monitoring.records import Incident
from orchestrator.supervision.hang_report import MOST_BYTES, culprits, place_of, with_stacks, write
from tests.unit.scripted_job import Bench, Make

LOOP = (
    Frame("TrainingLoop._train_step", "/o/launch/training.py", 120),
    Frame("TrainingLoop.run", "/o/launch/training.py", 104),
    Frame("Worker.run", "/o/launch/worker.py", 130),
)
IN_COLLECTIVE = (
    Frame("all_reduce", "/site/torch/distributed/distributed_c10d.py", 2810),
    Frame("wrapper", "/site/torch/distributed/c10d_logger.py", 83),
    Frame("agree", "/o/launch/process_group.py", 104),
    *LOOP,
)
IN_EXCHANGE = (Frame("GradientExchange._wait", "/o/parallel/gradients.py", 293), *LOOP)
IN_DATA = (
    Frame("_read", "/site/fsspec/core.py", 7),
    Frame("TokenStream.micro_batches", "/o/launch/data.py", 88),
    *LOOP,
)


def stack(frames: tuple[Frame, ...], **more: object) -> Stack:
    other = ("Thread-1 (reporter)", (Frame("wait", "/lib/threading.py", 320),))
    return replace(Stack("py-spy", (other, ("Thread-7 (run)", frames))), **more)  # type: ignore[arg-type]


HUNG = Incident("rank_hung", "supervisor", 1, 0, 7, 7, 5.0, "No new step for 61 s.", ranks=(0, 1))


def test_the_rank_outside_communication_is_named_with_its_frame_and_its_call() -> None:
    stacks = {0: stack(IN_COLLECTIVE), 1: stack(IN_DATA), 2: stack(IN_EXCHANGE)}
    told = with_stacks(HUNG, stacks, Path("/job/stacks/hang.txt"))
    assert told.ranks == (1,)
    assert "rank 1 did not come to the collective: _read (core.py:7), called by" in told.message
    assert "TokenStream.micro_batches (data.py:88)" in told.message
    assert "rank 0 waits in all_reduce (distributed_c10d.py:2810), called by agree" in told.message
    assert told.message.endswith("all stacks (py-spy): /job/stacks/hang.txt.")
    assert told.message.startswith(HUNG.message) and told.evidence["stacks"] == 3.0


def test_a_stopped_process_is_named_wherever_it_was() -> None:
    stacks = {0: stack(IN_COLLECTIVE), 1: stack(IN_COLLECTIVE, stopped=True)}
    told = with_stacks(HUNG, stacks, None)
    assert told.ranks == (
        1,
    ) and "rank 1 did not come to the collective: stopped in all_reduce" in (told.message)


def test_nobody_is_named_where_all_wait_or_nobody_does() -> None:
    for frames, verb in ((IN_COLLECTIVE, "wait in"), (IN_DATA, "are in")):
        places = {rank: place_of(stack(frames)) for rank in range(3)}
        assert culprits(places) == ()
        told = with_stacks(HUNG, {rank: stack(frames) for rank in range(3)}, None)
        assert told.ranks == HUNG.ranks and f"ranks 0, 1, 2 {verb} " in told.message


def test_a_rank_without_a_stack_is_not_blamed_for_that() -> None:
    silent = Stack("none", why="its node does not answer")
    places = {0: place_of(stack(IN_COLLECTIVE)), 1: place_of(silent), 2: place_of(stack(IN_DATA))}
    assert culprits(places) == (2,)


def test_ranks_that_never_became_ready_are_named_and_not_those_that_did() -> None:
    idle = stack((Frame("main_loop", "/site/ray/_private/worker.py", 1009),))
    late = Stack("none", why="it has not said that it is ready", ready=False)
    told = with_stacks(HUNG, {0: idle, 1: idle, 2: late, 3: late}, None)
    assert told.ranks == (2, 3)
    assert "ranks 2, 3 never became ready to start" in told.message
    assert "ranks 0, 1 are in " in told.message
    # Where none did it is nobody's fault alone.
    assert with_stacks(HUNG, {0: late, 1: late}, None).ranks == HUNG.ranks


def test_many_places_are_told_in_a_few_words() -> None:
    stacks = {rank: stack((Frame(f"f{rank}", "/x.py", rank), *LOOP)) for rank in range(100)} | {
        100: stack(IN_COLLECTIVE)
    }
    told = with_stacks(HUNG, stacks, None)
    assert len(told.message) < 1500 and "other places" in told.message


def test_the_file_has_every_rank_and_a_bound(tmp_path: Path) -> None:
    deep = tuple(Frame("f" * 100, "/x.py", n) for n in range(3000))
    path = write(tmp_path / "stacks", 1, 7, {rank: stack(deep) for rank in range(100)})
    assert path is not None and path.name == "hang-attempt-1-step-7.txt"
    assert path.stat().st_size <= MOST_BYTES + 1
    assert "rank 5 (taken with py-spy)" in path.read_text()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("in the way")
    assert write(tmp_path / "stacks", 1, 7, {0: stack(IN_DATA)}) is None


def test_faulthandlers_dump_is_read_like_py_spys() -> None:
    text = (
        "2026-11-30 12:00:00 INFO something of the log\n"
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/lib/threading.py", line 320 in wait\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/site/torch/distributed/distributed_c10d.py", line 2810 in all_reduce\n'
        '  File "/o/launch/training.py", line 104 in run\n'
    )
    threads = parse_faulthandler(text)
    assert [name for name, _ in threads] == ["Thread 0x00007f01", "0x00007f02"]
    place = place_of(Stack("faulthandler", threads))
    assert place.waits and place.words.startswith("all_reduce (distributed_c10d.py:2810)")


def test_a_hang_is_told_with_its_stacks_and_restarted(bench: Make) -> None:
    job: Bench = bench(recovery={"step_timeout_s": 30.0})
    job.train(3)
    job.ranks.seen = {0: stack(IN_COLLECTIVE), 1: stack(IN_DATA)}
    job.step(31.0)
    (action,) = job.settled().actions
    assert action.kind == "restart" and action.incidents[0].ranks == (1,)
    message = job.controller.event("incident").message
    assert "rank 1 did not come to the collective" in message
    file = next((job.controller.job_dir / "stacks").iterdir())
    assert str(file) in message and "rank 0 (taken with py-spy)" in file.read_text()
