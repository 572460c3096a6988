"""The command on a terminal of 80 columns, and in a pipe: tables that fit, and no colours."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from orchestrator.cli.tables import columns, table_lines
from orchestrator.home.folder import Home
from tests.unit.control_plane import ControlPlane

LONG = "a-name-that-is-as-long-as-a-name-can-be-which-is-63-characters"


def on_terminal(home: Home, *words: str, width: int = 80) -> list[str]:
    """What stands on a terminal of that width after the command."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-m", "orchestrator.cli.main", *words]
    environment |= {"OCTAVO_HOME": str(home.path), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    told = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            # The other side is closed (Linux).
            break
        if not piece:
            break
        told += piece
    os.close(ours)
    process.wait(30)
    return told.decode().replace("\r\n", "\n").splitlines()


def test_lists_fit_a_terminal_and_the_ids_in_them_stay_whole(
    home: Home, plane: ControlPlane
) -> None:
    long, short = plane.submit(LONG, by="alice"), plane.submit("short", slots_per_node=64)
    plane.steps(2)
    lines = on_terminal(home, "list")
    assert lines[0].startswith("JOB") and "STATE" in lines[0] and "REASON" in lines[0]
    assert max(map(len, lines)) <= 80
    assert long in lines, "on a line of its own, to be copied"
    after = lines[lines.index(long) + 1]
    assert after.startswith(" " * len(short)) and "starting" in after
    (line,) = (line for line in lines if line.startswith(short))
    assert line.index("failed") == after.index("starting") == lines[0].index("STATE")
    assert line.endswith("…")
    nodes = on_terminal(home, "nodes")
    assert max(map(len, nodes)) <= 80 and nodes[0].split()[0] == "NODE"
    assert nodes[1].startswith("10.0.0.1 ") and "ready" in nodes[1]
    assert not any("\x1b" in line for line in (*lines, *nodes))


def test_in_a_pipe_nothing_is_cut(home: Home, plane: ControlPlane) -> None:
    job = plane.submit(LONG, slots_per_node=64)
    plane.steps(1)
    command = [sys.executable, "-m", "orchestrator.cli.main", "list"]
    environment = {**os.environ, "OCTAVO_HOME": str(home.path), "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(job))
    assert plane.store.job(job).reason in line
    assert "\x1b" not in done.stdout


def test_errors_have_no_colours_on_a_terminal_either(home: Home) -> None:
    told = "\n".join(on_terminal(home, "status", "nobody") + on_terminal(home, "lst"))
    assert "no job 'nobody'" in told and "No such command" in told and "\x1b" not in told


@pytest.mark.parametrize("width", [20, 40, 80, 200, None])
def test_a_table_is_never_wider_than_it_may_be_but_for_what_is_to_be_copied(
    width: int | None,
) -> None:
    rows = [
        ("JOB", "STATE", "REASON"),
        ("x" * 90, "running", "a reason\x1b[31m " * 20),
        ("短い名前", "failed", "理由" * 60),
        ("y", "queued", ""),
    ]
    lines = table_lines(rows, ("REASON",), width)
    assert "\x1b" not in "".join(lines)
    if width is None:
        assert len(lines) == 4 and not any("…" in line for line in lines)
        return
    assert all(columns(line) <= width for line in lines if line != "x" * 90)
    assert ("x" * 90 in lines) == (width < 200)
