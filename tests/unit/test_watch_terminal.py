"""`octavo watch` on a real pseudo-terminal, as another machine would run it: over HTTP alone."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pyte
import pytest
from rich.console import Console

from monitoring.watch import watch_panel
from orchestrator.api.client import Client
from orchestrator.api.client_errors import UnreachableError
from orchestrator.cli.following import Following, News, whole_view
from orchestrator.events import EventDraft
from orchestrator.home.folder import Home
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import SupervisorBatch
from tests.unit.control_plane import ControlPlane
from tests.unit.monitoring_traces import recovered_view

WITHIN_S = 60.0


def _at_a_terminal() -> None:
    """In the child, before its program."""
    # Ctrl-C is a signal to those whose controlling terminal it is typed on,
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # and nobody at a terminal ignores it, as what was started in the background does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command on a terminal, and the screen as a person sees it."""

    def __init__(self, command: list[str], env: dict[str, str], columns: int, lines: int) -> None:
        self.master, slave = pty.openpty()
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.bytes = b""
        self._size(columns, lines)
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
            preexec_fn=_at_a_terminal,
        )
        self._slave = slave

    def resize(self, columns: int, lines: int) -> None:
        self._size(columns, lines)
        self.screen.resize(lines, columns)
        os.kill(self.process.pid, signal.SIGWINCH)

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """The screen's lines once they are as wanted."""
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            over = self.process.poll() is not None
            ready, _, _ = select.select([self.master], [], [], 0.1)
            if ready:
                try:
                    data = os.read(self.master, 65536)
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    break
                self.bytes += data
                self.stream.feed(data)
            lines = [line.rstrip() for line in self.screen.display]
            if seen(lines):
                return lines
            if over and not ready:
                break
        raise AssertionError("not seen:\n" + "\n".join(self.screen.display))

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._slave)
        os.close(self.master)

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def whole(lines: list[str], columns: int) -> bool:
    """Whether the screen shows a panel as wide as it is, from its first line to its last."""
    told = [line for line in lines if line]
    return (
        len(told) > 5
        and {len(line) for line in told} == {columns}
        and told[0].endswith("╮")
        and told[-1].endswith("╯")
        and all(line.endswith("│") for line in told[1:-1])
    )


def test_a_job_is_watched_at_any_width_and_left_with_a_sane_terminal(
    home: Home, plane: ControlPlane, tmp_path: Path
) -> None:
    job = plane.submit()
    plane.steps(2)
    steps = tuple(record.to_json() for record in recovered_view().steps[:60])
    told = (EventDraft("told", 5.0, "something happened", {}),)
    batch = SupervisorBatch(1, steps=steps, events=told)
    plane.controller.report(job, 1, batch)
    server = home.server()
    token = home.token()
    assert server is not None and token is not None
    # Nothing of the controller's home: what another machine has is an address and a token.
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path.cwd()),
        "HOME": str(tmp_path),
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
        "OCTAVO_URL": server.url,
        "OCTAVO_TOKEN": token,
    }
    terminal = Terminal([sys.executable, "-m", "orchestrator.cli.main", "watch", job], env, 80, 24)
    try:
        lines = terminal.until(lambda lines: whole(lines, 80) and "octaves" in "".join(lines))
        text = "\n".join(lines)
        assert lines[0].startswith(f"╭─ {job}")
        for word in ("ranks 4", "nodes 1", "loss", "tokens/s", "octaves", "something happened"):
            assert word in text, word
        terminal.resize(200, 50)
        lines = terminal.until(lambda lines: whole(lines, 200))
        assert sum("╭─" in line for line in lines) == 1, "nothing is left of the smaller one"
        terminal.resize(60, 20)
        lines = terminal.until(lambda lines: whole(lines, 60))
        assert sum("╭─" in line for line in lines) == 1
        os.write(terminal.master, b"\x03")
        terminal.until(lambda lines: terminal.process.poll() is not None)
        terminal.until(lambda lines: any("╰" in line for line in lines))
        assert terminal.process.returncode == 130
        assert not terminal.screen.cursor.hidden
        assert terminal.settings() == terminal.before
    finally:
        terminal.close()
    # The screen that was there before is shown again, with the cursor.
    assert terminal.bytes.count(b"\x1b[?1049h") == terminal.bytes.count(b"\x1b[?1049l") == 1
    assert terminal.bytes.rfind(b"\x1b[?25h") > terminal.bytes.rfind(b"\x1b[?25l")
    assert b"Traceback" not in terminal.bytes


def test_of_a_long_job_the_newest_steps_alone_have_their_tensors(
    home: Home, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cli.following.WHOLE_STEPS", 5)
    job = plane.submit()
    plane.steps(2)
    server, token = home.server(), home.token()
    assert server is not None
    client = Client(server.url, token)
    live = Following(client, job)
    steps = tuple(record.to_json() for record in recovered_view().steps[:20])
    for n in range(4):
        batch = SupervisorBatch(n + 1, steps=steps[5 * n : 5 * n + 5])
        plane.controller.report(job, 1, batch)
        assert all(record.tensors for record in live.poll().steps), "each is told whole"
    expected = [False] * 15 + [True] * 5
    for view in (live.view(), whole_view(client, job)):
        assert [record.step for record in view.steps] == list(range(20))
        assert [bool(record.tensors) for record in view.steps] == expected
    assert whole_view(client, job).steps[-1].to_json() == steps[-1]


def test_a_controller_that_is_away_is_told_and_waited_for(
    home: Home, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.submit()
    plane.steps(2)
    steps = tuple(record.to_json() for record in recovered_view().steps[:3])
    plane.controller.report(job, 1, SupervisorBatch(1, steps=steps[:2]))
    server, token = home.server(), home.token()
    assert server is not None
    following = Following(Client(server.url, token), job, whole=False)
    assert len(following.poll().steps) == 2
    plane.controller.report(job, 1, SupervisorBatch(2, steps=steps[2:]))
    with monkeypatch.context() as gone:
        gone.setattr(
            following._client._connection._http, "base_url", httpx.URL("http://127.0.0.1:9")
        )
        assert following.poll(patient=False) == News((), ())
        panel = io.StringIO()
        Console(file=panel, width=100).print(watch_panel(following.view(), 100))
        assert "the controller doesn't answer, for" in panel.getvalue()
        gone.setattr("orchestrator.cli.following.PATIENCE_S", 0.0)
        with pytest.raises(UnreachableError):
            following.poll(patient=False)
    assert [record.step for record in following.poll(patient=False).steps] == [2]
    assert following.absent_s == 0.0
    assert [bool(record.tensors) for record in following.view().steps] == [True, True, True]


def test_a_live_view_keeps_the_tensors_of_a_few_steps_from_the_first_that_it_saw(
    home: Home, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cli.following.SAMPLES", 4)
    job = plane.submit()
    plane.steps(2)
    server = home.server()
    assert server is not None
    live = Following(Client(server.url, home.token()), job, whole=False)
    steps = [record.to_json() for record in recovered_view().steps[:12]]
    for n, row in enumerate(steps):
        plane.controller.report(job, 1, SupervisorBatch(n + 1, steps=(row,)))
        live.poll()
        seen = [record.step for record in live.view().steps if record.tensors]
        assert seen[0] == 0 and seen[-1] == n and len(seen) <= 4
    assert len(seen) > 2


@pytest.mark.parametrize("every", [1, 10])
def test_of_a_job_at_rest_the_layers_are_shown_however_many_steps_it_took(
    home: Home, plane: ControlPlane, every: int
) -> None:
    job = plane.submit(fp8={"statistics_every": every})
    plane.steps(2)
    rows = []
    for n, record in enumerate(itertools.islice(itertools.cycle(recovered_view().steps), 137)):
        row = record.to_json()
        rows.append({**row, "step": n, "tensors": {} if (n + 1) % every else row["tensors"]})
    ended = (JobState.FAILED, Cause.ERROR)
    batch = SupervisorBatch(1, steps=tuple(rows), transition=ended)
    plane.controller.report(job, 1, batch)
    plane.supervisors.done.add(job)
    plane.steps()
    server = home.server()
    assert server is not None
    at_rest = Following(Client(server.url, home.token()), job, whole=False)
    while not at_rest.settled:
        at_rest.poll()
    panel = io.StringIO()
    Console(file=panel, width=100).print(watch_panel(at_rest.view(), 100))
    assert "layers whose amax grew most in" in panel.getvalue()
    assert "precision: " in panel.getvalue() and " left" not in panel.getvalue()


def test_without_a_terminal_it_is_plain_lines_to_the_end(home: Home, plane: ControlPlane) -> None:
    job = plane.submit()
    plane.steps(2)
    steps = tuple(record.to_json() for record in recovered_view().steps[:3])
    ended = (JobState.SUCCEEDED, Cause.STEPS_DONE)
    plane.controller.report(job, 1, SupervisorBatch(1, steps=steps, transition=ended))
    plane.supervisors.done.add(job)
    plane.steps()
    command = [sys.executable, "-m", "orchestrator.cli.main", "watch", job]
    done = subprocess.run(command, capture_output=True, timeout=WITHIN_S)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout and b"step     2  loss" in done.stdout
