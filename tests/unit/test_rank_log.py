"""A rank's log: what is written, what of a dying process is in it, and how it is read in pieces."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import log_files
from launch.log_files import RankLogFiles, attempts_of, start_of_last, start_since
from launch.log_lines import MOST_MESSAGE, LogLine, read_line, written
from launch.rank_log import RankLog, rank_log


def files(folder: Path, rank: int = 3, attempt: int = 2) -> RankLogFiles:
    return RankLogFiles(folder, attempt, rank)


def messages(log: RankLogFiles, place: int = 0, **how: bool) -> list[str]:
    """All of a log from a place on, read as a follower does."""
    told: list[str] = []
    while True:
        page = log.read(place, **how)
        if not page.lines:
            return told
        told += [line.message for line in page.lines]
        place = page.place


def fill(path: Path, count: int, begin: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for n in range(begin, begin + count):
            file.write(written(LogLine(f"line {n}", "INFO", 1000.0 + n, 2, 3, n, "test")))


CHILD = """
import ctypes, faulthandler, logging, os, sys, threading
from pathlib import Path
from launch.rank_log import rank_log
faulthandler.enable()  # as Ray does in its workers
apart = logging.getLogger("Apart")  # as DeepSpeed's is
apart.propagate = False
apart.setLevel("INFO")
apart.addHandler(logging.StreamHandler(sys.stdout))
with rank_log(Path(sys.argv[1]), 2, 3) as log:
    log.step = lambda: 7
    logging.getLogger("a.module").info("recorded %d", 1)
    print("printed\\nin two lines")
    print("half a line, flushed", end="", flush=True)
    os.write(2, b"from C, without an end")
    logging.warning("behind it")
    apart.info("of a library")
    if sys.argv[2] == "abort":
        os.abort()
    if sys.argv[2] == "thread":
        broken = threading.Thread(target=lambda: 1 / 0)
        broken.start()
        broken.join()
    if sys.argv[2] == "leave":
        print("last words", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    if sys.argv[2] == "raise":
        try:
            raise ValueError("wrong")
        except ValueError:
            logging.exception("it failed")
apart.info("not ours")
"""


def child(path: Path, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(path), end]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_what_a_rank_logs_and_prints_are_objects_with_attempt_step_and_rank(
    tmp_path: Path,
) -> None:
    done = child(tmp_path / "rank-3.log", "raise")
    assert (done.returncode, done.stdout, done.stderr) == (0, "not ours\n", "")
    lines = files(tmp_path).read().lines
    told = [(line.level, line.logger, line.message) for line in lines]
    assert told[:7] == [
        ("INFO", "a.module", "recorded 1"),
        ("STDOUT", "", "printed"),
        ("STDOUT", "", "in two lines"),
        ("STDOUT", "", "half a line, flushed"),
        ("OUTPUT", "", "from C, without an end"),
        ("WARNING", "root", "behind it"),
        ("INFO", "Apart", "of a library"),
    ]
    assert told[7][2].startswith("it failed\nTraceback") and "ValueError: wrong" in told[7][2]
    assert {(line.attempt, line.rank, line.step) for line in lines} == {(2, 3, 7)}
    assert lines[4].time == lines[3].time, "as the line before it"
    raw = (tmp_path / "rank-3.log").read_text().splitlines()
    assert json.loads(raw[0]) == {**lines[0].to_json()}
    assert " INFO step 7 a.module: recorded 1" in lines[0].text()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("abort", ["Fatal Python error: Aborted", 'File "<string>", line']),
        ("thread", ["Exception in thread", "ZeroDivisionError: division by zero"]),
        ("leave", ["last words"]),
    ],
)
def test_the_last_words_of_a_rank_that_dies_are_in_its_log(
    tmp_path: Path, end: str, words: list[str]
) -> None:
    child(tmp_path / "rank-3.log", end)
    told = "\n".join(line.message for line in files(tmp_path).read(ended=True).lines)
    assert all(word in told for word in words), told


def test_a_log_is_rotated_and_a_follower_misses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.log"
    log = RankLog(path, 2, 3, most_bytes=2000)
    reader, place, told = files(tmp_path), 0, []
    for n in range(200):
        log.write("INFO", f"line {n}")
        if n % 7 == 0:
            page = reader.read(place)
            told += [line.message for line in page.lines]
            place = page.place
    log.close()
    told += messages(reader, place)
    assert told == [f"line {n}" for n in range(200)]
    assert len(list(tmp_path.iterdir())) == 1 + log_files.KEPT_FILES
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5 * 2000
    # Who comes back to a place that is gone goes on with the oldest there is.
    assert messages(reader)[-1] == "line 199" and messages(reader)[0] != "line 0"


def test_what_is_written_past_python_goes_into_the_new_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.rank_log.MOST_BYTES", 300)
    with rank_log(tmp_path / "rank-3.log", 2, 3) as log:
        assert log is not None
        log._most_bytes = 300
        for n in range(6):
            logging.getLogger("x").info("record %d", n)
            subprocess.run([sys.executable, "-c", f"print('child {n}')"], check=True)
    told = messages(files(tmp_path))
    assert [m for m in told if m.startswith("child")] == [f"child {n}" for n in range(6)]
    assert capfd.readouterr().out == ""


def test_threads_that_write_at_once_tear_no_line(tmp_path: Path) -> None:
    with rank_log(tmp_path / "rank-3.log", 2, 3) as log:
        assert log is not None
        log._most_bytes = 20_000

        def speak(name: int) -> None:
            for n in range(100):
                print(f"{name}:{n}:" + "x" * 50)
                logging.getLogger("x").info("%d:%d:y", name, n)

        threads = [threading.Thread(target=speak, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = files(tmp_path).read(limit=5000).lines
    assert lines and {line.level for line in lines} <= {"STDOUT", "INFO"}


def test_a_full_disk_costs_lines_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RankLog(tmp_path / "rank-3.log", 2, 3)
    with monkeypatch.context() as full:

        def no_room(number: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        full.setattr("launch.rank_log.os.write", no_room)
        log.write("INFO", "lost")
        log.write("INFO", "lost too")
    log.write("INFO", "there")
    assert messages(files(tmp_path)) == ["there", "2 lines of this log were lost"]


def test_a_folder_that_cannot_be_written_leaves_the_output_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file")
    with rank_log(tmp_path / "logs" / "rank-3.log", 2, 3) as log:
        assert log is None
        print("seen")
    assert "seen" in capfd.readouterr().out


@given(st.text(), st.sampled_from(["INFO", "STDERR"]), st.floats(0, 1e12))
def test_any_message_is_one_line_of_a_file_and_read_as_it_was(
    message: str, level: str, time: float
) -> None:
    line = LogLine(message, level, time, 1, 2, None, "a.b")
    data = written(line)
    assert data.count(b"\n") == 1 and data.endswith(b"\n")
    (found,) = read_line(data.decode().rstrip("\n"), LogLine(""))
    spoilt = message.encode("utf-8", "backslashreplace").decode()
    assert found == LogLine(spoilt, level, time, 1, 2, None, "a.b")


def test_no_secret_of_the_environment_is_in_what_python_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "planted-in-the-environment")
    with rank_log(tmp_path / "rank-3.log", 2, 3):
        print("key", os.environ["MY_API_KEY"])
        try:
            raise ValueError(f"401 for {os.environ['MY_API_KEY']}")
        except ValueError:
            logging.getLogger("x").exception("refused")
    told = (tmp_path / "rank-3.log").read_text()
    assert "planted" not in told and "401 for (secret, left out)" in told


def test_an_endless_message_is_cut_and_says_by_how_much() -> None:
    (found,) = read_line(written(LogLine("x" * 100_000, "INFO", 1.0)).decode(), LogLine(""))
    assert found.message.endswith(f"({100_000 - MOST_MESSAGE} characters more)")


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_read_to_their_end(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("log")
    (folder / "rank-3.log").write_bytes(data)
    told = messages(files(folder), ended=True)
    lines = data.decode("utf-8", "replace").split("\n")
    assert "".join(told) == "".join(lines)


def test_a_line_longer_than_a_piece_is_cut_between_characters(tmp_path: Path) -> None:
    for shift in range(4):
        text = "a" * shift + "×€😀" * (log_files.PIECE // 8)
        (tmp_path / "rank-3.log").write_text(text + "\n")
        told = messages(files(tmp_path))
        assert len(told) > 1 and "".join(told) == text


def test_a_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.log"
    path.write_text("whole\nhal")
    page = files(tmp_path).read()
    assert [line.message for line in page.lines] == ["whole"]
    with path.open("a") as file:
        file.write("f\n")
    assert [line.message for line in files(tmp_path).read(page.place).lines] == ["half"]


def test_the_last_lines_and_those_since_a_time_are_found_without_reading_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "rank-3.log.4", 30_000)
    fill(tmp_path / "rank-3.log", 30_000, begin=30_000)
    read = 0
    real = log_files._bytes

    def counted(path: Path, start: int, count: int) -> bytes:
        nonlocal read
        data = real(path, start, count)
        read += len(data)
        return data

    monkeypatch.setattr("launch.log_files._bytes", counted)
    log = files(tmp_path)
    assert messages(log, log.last(3)) == ["line 59997", "line 59998", "line 59999"]
    assert [m.message for m in log.read(log.since(1000.0 + 31_234), 2).lines] == [
        "line 31234",
        "line 31235",
    ]
    assert [m.message for m in log.read(log.since(1000.0 + 123.5), 1).lines] == ["line 124"]
    assert log.read(log.since(99_999_999.0)).lines == ()
    assert log.since(0.0) == 4 << 32, "the oldest file that is still there"
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert read < 3_000_000 < size / 2


@pytest.mark.parametrize("count", [1, 2, 5, 9, 10, 11, 15, 16, 99])
def test_the_last_lines_reach_into_the_file_before(tmp_path: Path, count: int) -> None:
    fill(tmp_path / "rank-3.log.0", 6)
    fill(tmp_path / "rank-3.log.1", 4, begin=6)
    (tmp_path / "rank-3.log").write_text("a\nb\nc\nd\ne\n")
    log = files(tmp_path)
    whole = [*(f"line {n}" for n in range(10)), *"abcde"]
    assert messages(log, log.last(count)) == whole[-count:]


def test_times_are_found_between_lines_that_have_none(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.log"
    for n in range(50):
        fill(path, 1, begin=n)
        with path.open("a") as file:
            file.write(f"{n} " + "raw " * 2000 + "\n")
    log = files(tmp_path)
    for n in (0, 1, 17, 49):
        assert log.read(log.since(1000.0 + n), 1).lines[0].message == f"line {n}"


def test_lines_are_found_through_the_attempts_of_a_job(tmp_path: Path) -> None:
    fill(tmp_path / "attempt-1" / "rank-3.log", 10)
    fill(tmp_path / "attempt-2" / "rank-3.log", 4, begin=10)
    (tmp_path / "attempt-3").mkdir()  # has not written yet

    def read(start: tuple[int, int]) -> tuple[int, str]:
        attempt, place = start
        lines = RankLogFiles(tmp_path / f"attempt-{attempt}", attempt, 3).read(place).lines
        return attempt, lines[0].message if lines else ""

    assert read(start_of_last(tmp_path, 3, 2)) == (2, "line 12")
    assert read(start_of_last(tmp_path, 3, 6)) == (1, "line 8")
    assert read(start_of_last(tmp_path, 3, 99)) == (1, "line 0")
    assert read(start_since(tmp_path, 3, 1011.5)) == (2, "line 12")
    assert read(start_since(tmp_path, 3, 1004.0)) == (1, "line 4")
    assert read(start_since(tmp_path, 3, 1010.0)) == (1, ""), "and a follower goes on with the next"
    assert read(start_since(tmp_path, 3, 0.0)) == (1, "line 0")
    assert (
        start_since(tmp_path / "nowhere", 3, 0.0) == start_of_last(tmp_path / "x", 3, 1) == (0, 0)
    )


def test_attempts_are_those_that_have_a_folder(tmp_path: Path) -> None:
    for name in ("attempt-2", "attempt-10", "attempt-1", "attempt-x", "other"):
        (tmp_path / name).mkdir()
    assert attempts_of(tmp_path) == [1, 2, 10]
    assert attempts_of(tmp_path / "nowhere") == []
