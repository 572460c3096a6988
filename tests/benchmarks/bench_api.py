"""The API under load: listeners of events while submissions arrive, all on the loopback.

    python -m tests.benchmarks.bench_api [--listeners 50] [--jobs 20] [--submissions 200]
        [--out DIR]

A controller (real app, real store on disk, real port; stand-ins for nodes and supervisors) in a
process of its own. Fifty listeners hear the events of twenty jobs as server-sent events, while two
hundred submissions arrive, eight at a time, and each job tells fifty events more. Fails when one
event is missing, comes twice or out of order. Prints how long a submission took, from the client's
call to its answer: the spec checked, the job's directory made, the row committed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from orchestrator.api.app import create_app
from orchestrator.api.client import Client
from orchestrator.events import EventDraft
from orchestrator.protocol import SupervisorBatch
from tests.benchmarks.results import add_arguments, at_most, measured, report
from tests.unit.control_plane import TOKEN, ControlPlane

EVENTS = 50
"""That each job tells under load."""
SUBMITTERS = 8
LAST = "last"
HEARD_TIMEOUT_S = 300.0


def serve(folder: Path, jobs: int) -> None:
    """The controller: prints its address and its jobs, and tells events when it reads a line."""
    plane = ControlPlane(folder, *(4 for _ in range(jobs)))
    names = [plane.submit(f"job{n}") for n in range(jobs)]
    plane.steps(2 * jobs)
    server = uvicorn.Server(
        uvicorn.Config(create_app(plane.controller, TOKEN), port=0, log_config=None, lifespan="off")
    )
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    threading.Thread(
        target=plane.controller.run, args=(threading.Event(),), name="reconcile", daemon=True
    ).start()
    print(json.dumps({"url": f"http://127.0.0.1:{port}", "jobs": names}), flush=True)
    sys.stdin.readline()
    for number in range(1, EVENTS + 1):
        for name in names:
            message = LAST if number == EVENTS else f"event {number}"
            told = EventDraft("told", time.time(), message, {"number": number})
            plane.controller.report(name, 1, SupervisorBatch(number, events=(told,)))
        time.sleep(0.05)
    sys.stdin.readline()


def heard(url: str, job: str, listening: threading.Barrier) -> list[int]:
    """Numbers of the events that a listener of ``job`` is told under load."""
    found: list[int] = []
    headers = {"Authorization": f"Bearer {TOKEN}"}
    path = f"{url}/v1/jobs/{job}/stream"
    with httpx.stream("GET", path, headers=headers, timeout=HEARD_TIMEOUT_S) as answer:
        answer.raise_for_status()
        listening.wait()
        for event in _events(answer.iter_lines()):
            if event["kind"] == "told":
                found.append(event["detail"]["number"])
                if event["message"] == LAST:
                    break
    return found


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: ") and kind == "event":
            yield json.loads(line.removeprefix("data: "))


def submitted(url: str, number: int, text: Path) -> float:
    """Seconds that a submission took."""
    spec = {"name": f"load{number}", "slots_per_node": 4, "data": {"source": str(text)}}
    client = Client(url, TOKEN)
    began = time.monotonic()
    client.submit(spec, "load.yaml", by=f"user{number % 5}")
    took = time.monotonic() - began
    client.close()
    return took


def main() -> int:
    """Measure and print; 1 when an event went missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listeners", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--submissions", type=int, default=200)
    add_arguments(parser)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.jobs)
        return 0
    with tempfile.TemporaryDirectory(prefix="octavo-bench-api-") as folder:
        text = Path(folder) / "data.txt"
        text.write_text("x" * 65536)
        command = [sys.executable, "-m", "tests.benchmarks.bench_api", "--serve", folder]
        process = subprocess.Popen(
            [*command, "--jobs", str(asked.jobs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            return _measure(process, asked.listeners, asked.submissions, text, asked.out)
        finally:
            process.kill()
            process.wait()


def _measure(
    process: subprocess.Popen[str],
    listeners: int,
    submissions: int,
    text: Path,
    results: Path | None,
) -> int:
    assert process.stdout is not None and process.stdin is not None
    there = json.loads(process.stdout.readline())
    url, jobs = there["url"], there["jobs"]
    listening = threading.Barrier(listeners + 1, timeout=60)
    with ThreadPoolExecutor(listeners) as ears, ThreadPoolExecutor(SUBMITTERS) as hands:
        hearing = [
            ears.submit(heard, url, jobs[n % len(jobs)], listening) for n in range(listeners)
        ]
        listening.wait()
        process.stdin.write("go\n")
        process.stdin.flush()
        began = time.monotonic()
        sent = [hands.submit(submitted, url, n, text) for n in range(submissions)]
        took = sorted(one.result() for one in sent)
        over = time.monotonic() - began
        told = [one.result(HEARD_TIMEOUT_S) for one in hearing]
    whole = list(range(1, EVENTS + 1))
    wrong = sum(found != whole for found in told)
    stored = len(Client(url, TOKEN).jobs())
    centiles = statistics.quantiles(took, n=100)
    lost = submissions - (stored - len(jobs))
    setting = f"{submissions} submissions, {SUBMITTERS} at a time, {listeners} listeners"
    heard_of = f"{sum(map(len, told)):,} events of {len(jobs)} jobs were heard"
    name = "listeners that missed, doubled or mixed up events"
    rows = [
        measured("submit", setting, took, "s"),
        measured("submit, p99", setting, [centiles[98]], "s"),
        measured("submissions a second", setting, [submissions / over], ""),
        measured("submissions that are not stored", setting, [lost], "", aim=at_most(0)),
        measured(name, setting, [wrong], "", aim=at_most(0), note=heard_of),
    ]
    report("bench_api", rows, results, seconds=over)
    return int(wrong > 0 or lost != 0)


if __name__ == "__main__":
    sys.exit(main())
