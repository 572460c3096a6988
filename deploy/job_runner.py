"""One job file, submitted to a controller that may not be there yet, and followed to its end.

    python -m deploy.job_runner HOME job.yaml --key MINE

What a ``RayJob`` runs, and the controller's process under Slurm. Promises: said again with the same
key it is the same job, so that a second try goes on with the first one's; one that
``deploy.serve`` paused at its end is waited for until it has resumed it; every wait for the
controller has an end; the exit code is that of `octavo watch`: 0 succeeded, 100 failed, 101 paused,
103 cancelled, 2 a wrong job file, 3 no controller.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.api.client import Client
from orchestrator.api.client_errors import ClientError
from orchestrator.api.patience import MOMENTARY
from orchestrator.cli.show import UNREACHABLE, USAGE, exit_code
from orchestrator.home.folder import Home
from orchestrator.spec.errors import SpecError
from orchestrator.spec.job import load_spec, spec_data

AWAY_S = 600.0
"""Seconds that the controller may be away, at the start and later."""
PERIOD_S = 2.0
PAUSED = "paused.json"
"""In the home: jobs that ``deploy.serve`` has paused at its end and resumes at its next start."""


class JobRunner:
    """Follows the job of ``file`` without waiting in between: ``look`` as often as one likes."""

    def __init__(self, home: Home, file: Path, key: str) -> None:
        """Raises SpecError for a job file that would be refused."""
        self._home, self._file, self._key = home, file, key
        self._spec = spec_data(load_spec(file))
        self._job = ""
        self._state = ""
        self.away_since: float | None = None
        """When the controller was missed first, of the clock that ``look`` is given."""

    def look(self, now: float) -> int | None:
        """The exit code once it is at rest; None while it goes on. Raises SpecError, ClientError
        for what another look won't mend."""
        try:
            client = Client.of_home(self._home)
            try:
                found = self._advance(client)
            finally:
                client.close()
        except MOMENTARY:
            self.away_since = now if self.away_since is None else self.away_since
            return UNREACHABLE if now - self.away_since > AWAY_S else None
        self.away_since = None
        return found

    def _advance(self, client: Client) -> int | None:
        if not self._job:
            job = client.submit(self._spec, str(self._file), key=self._key, by="deploy")
            self._job = str(job["id"])
            self._say(f"job {self._job}")
        job = client.job(self._job)
        self._tell(job)
        if job["state"] == "paused" and self._job in paused_by_host(self._home):
            return None
        return exit_code(str(job["state"])) if job["settled"] else None

    def _tell(self, job: dict[str, Any]) -> None:
        if job["state"] != self._state:
            self._state = str(job["state"])
            self._say(f"{job['id']} {self._state}" + (f": {r}" if (r := job["reason"]) else ""))

    @staticmethod
    def _say(line: str) -> None:
        print(line, flush=True)


def paused_by_host(home: Home) -> list[str]:
    """Jobs that wait for the next start of ``deploy.serve``."""
    try:
        return [str(job) for job in json.loads((home.path / PAUSED).read_text())]
    except (FileNotFoundError, ValueError):
        return []


def run_job(
    runner: JobRunner,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Look until it is at rest; the exit code."""
    while (code := runner.look(clock())) is None:
        sleep(PERIOD_S)
    return code


def main() -> int:
    """Entry of ``python -m deploy.job_runner``."""
    parser = argparse.ArgumentParser(prog="python -m deploy.job_runner")
    parser.add_argument("home", type=Path)
    parser.add_argument("job", type=Path)
    parser.add_argument("--key", required=True, help="the same for every try")
    given = parser.parse_args()
    try:
        return run_job(JobRunner(Home(given.home), given.job, given.key))
    except SpecError as error:
        print(error, file=sys.stderr)
        return USAGE
    except ClientError as error:
        print(f"deploy.job_runner: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
