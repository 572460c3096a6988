"""The process that holds a cluster's controller: in a pod, a unit, an allocation, on a head.

    python -m deploy.serve HOME --address HOST:6379 [--once]
    python -m deploy.serve HOME --address HOST:6379 --job job.yaml --key MINE
    python -m deploy.serve HOME --address HOST:6379 --head -- RAY START OPTIONS

The second trains one job and ends with its exit code; the third starts Ray's head too, through
``cluster.head`` where the environment names a Redis. Promises: the controller is started when
Ray answers, and again when it hasn't answered for ``AWAY_S``; on SIGTERM, or when HOME/stop
appears, every job is paused after a checkpoint, for ``--grace`` seconds at most, though single
requests are refused meanwhile, and the next start resumes just those, each until it was answered;
when Ray's head ends this ends with it, for whoever watches it to start both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.job_runner import PAUSED, JobRunner, paused_by_host
from orchestrator.api.client import Client
from orchestrator.api.client_errors import (
    ClientError,
    NotFoundError,
    RefusedError,
    ServerError,
    TooManyRequestsError,
)
from orchestrator.api.patience import Patience
from orchestrator.api.stops import Stops, at_rest
from orchestrator.cli.show import USAGE
from orchestrator.home.folder import Home, HomeConfig, replace_file
from orchestrator.home.listening import ListeningError, check_listening
from orchestrator.spec.errors import SpecError

PERIOD_S = 1.0
AWAY_S = 60.0
"""Seconds without an answer after which the controller is started again; Ray does it in two."""
HEAD_S = 180.0
"""Seconds that Ray's head may take until it listens."""
START_S = 420.0
"""Seconds that a start of the controller may take: hosts that join, then its imports."""
END_S = 20.0
STOP = "stop"
RUNS = ("starting", "running", "recovering")
REASON = "the controller's host ends"


class ServeError(RuntimeError):
    """It can't go on; the message says why, and what to do."""


class Service:
    """The controller of ``home`` on the Ray at ``address``, held."""

    def __init__(self, home: Home, address: str, hosts: int, grace_s: float) -> None:
        self._home, self._address, self._hosts, self._grace_s = home, address, hosts, grace_s
        self._head: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._told: set[str] = set()

    def end(self, *_: object) -> None:
        """Ask for the end; of a signal."""
        self._ended.set()

    def start_head(self, options: Sequence[str]) -> None:
        """Ray's head as a child; returns when it listens. Raises ServeError."""
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--head", "--block"]
        if os.environ.get("RAY_REDIS_ADDRESS"):
            command = [sys.executable, "-m", "orchestrator.cluster.head"]
        # A group of its own: a Ctrl-C is for this process, which then ends it in order.
        self._head = subprocess.Popen([*command, *options], process_group=0)
        host, _, port = self._address.rpartition(":")
        deadline = time.monotonic() + HEAD_S
        while not _listens(host.strip("[]"), int(port)):
            if self._head.poll() is not None:
                raise ServeError(
                    f"Ray's head ended with {self._head.returncode}; it says why above"
                )
            if time.monotonic() > deadline or self._ended.wait(0.1):
                raise ServeError(f"Ray's head did not listen at {self._address} in {HEAD_S:.0f} s")

    def start_controller(self) -> None:
        """Start it, or find it; returns when it answers. Raises ServeError."""
        command = [sys.executable, "-m", "orchestrator.cluster.on_ray", str(self._home.path)]
        command += ["--address", self._address, "--hosts", str(self._hosts)]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=START_S
            )
        except subprocess.TimeoutExpired:
            told = f"the controller was not there after {START_S:.0f} s, on Ray at {self._address}"
            raise ServeError(told) from None
        said = done.stdout.decode(errors="replace").strip()
        if done.returncode != 0:
            raise ServeError(f"the controller did not start:\n{said[-4000:]}")
        print(said.splitlines()[-1], flush=True)
        self._resume_paused()

    def hold(self, runner: JobRunner | None = None) -> int:
        """Until asked to end, Ray's head ends, or ``runner``'s job does; the exit code."""
        heard = time.monotonic()
        code: int | None = None
        while not self._stops():
            now = time.monotonic()
            if self._head is not None and self._head_ended():
                print(f"Ray's head ended with {self._head.returncode}", flush=True)
                return 1
            if runner is not None and (code := runner.look(now)) is not None:
                return code
            if self._answers():
                heard = now
                self._resume_paused()
            elif now - heard > AWAY_S:
                print(f"no answer for {AWAY_S:.0f} s: the controller is started again", flush=True)
                with contextlib.suppress(ServeError):
                    self.start_controller()
                heard = time.monotonic()
            self._ended.wait(PERIOD_S)
        self._pause_all()
        # For the next start.
        (self._home.path / STOP).unlink(missing_ok=True)
        return 0 if runner is None else 101

    def close(self) -> None:
        """End Ray's head, if it is ours."""
        if self._head is None or self._head.poll() is not None:
            return
        self._head.terminate()
        try:
            self._head.wait(END_S)
        except subprocess.TimeoutExpired:
            self._head.kill()
            self._head.wait(END_S)

    def _head_ended(self) -> bool:
        """Whether it is known to have: of one that isn't ours nobody knows."""
        return self._head is not None and self._head.poll() is not None

    def _stops(self) -> bool:
        return self._ended.is_set() or (self._home.path / STOP).exists()

    def _answers(self) -> bool:
        try:
            client = Client.of_home(self._home)
        except (ClientError, OSError):
            return False
        try:
            return client.healthy()
        finally:
            client.close()

    def _pause_all(self) -> None:
        """Pause what runs, and keep whose jobs they were; what stops already is waited for too."""
        deadline = time.monotonic() + self._grace_s
        patience = Patience(deadline, self._head_ended)
        key = secrets.token_hex(8)
        try:
            client = Client.of_home(self._home)
            jobs = {str(job["id"]): job for job in patience.ask(client.jobs) if not at_rest(job)}
            if not jobs:
                return
            running = [name for name, job in jobs.items() if job["state"] in RUNS]
            if running:
                print(f"pausing {', '.join(running)}, each after a checkpoint", flush=True)
                # Beside those that the start of before has not resumed yet.
                kept = paused_by_host(self._home)
                self._keep([*kept, *(name for name in running if name not in kept)])
            stops = Stops(
                client,
                jobs,
                asked=running,
                order=lambda job: client.pause(job, by="deploy", reason=REASON, key=key),
                gone=self._head_ended,
                bound=deadline,
            )
            stops.wait()
            for name in stops.going_on():
                print(self._lost(name, stops.given.get(name)), flush=True)
        except (ClientError, OSError) as error:
            print(f"jobs can't be paused, they go on from what is saved: {error}", flush=True)

    def _lost(self, job: str, given_s: float | None) -> str:
        told = f"{job} is not at rest after {self._grace_s:.0f} s: it goes on from what is saved"
        if given_s is None or given_s <= self._grace_s:
            return told
        return f"{told}; by its own word it needed up to {given_s:.0f} s for its last checkpoint"

    def _resume_paused(self) -> None:
        """Resume what an earlier end has paused, once; those without an answer in ``AWAY_S`` stay
        for the next call."""
        left = paused_by_host(self._home)
        if not left:
            return
        patience = Patience(time.monotonic() + AWAY_S, lambda: self._stops() or self._head_ended())
        try:
            client = Client.of_home(self._home)
            for job in tuple(left):
                try:
                    patience.ask(client.resume, job, "the controller's host is there again")
                except (ServerError, TooManyRequestsError) as error:
                    # One that the controller fails on keeps no other from its turn.
                    self._tell_once(f"{job} can't be resumed yet: {error}")
                    continue
                except (RefusedError, NotFoundError, SpecError) as refused:
                    if self._pause_is_open(client, job):
                        # Its host ended before its pause: that comes yet, and then its resume.
                        continue
                    # As where a person has resumed or cancelled it, or it was never paused.
                    print(f"{job} is not resumed: {refused}", flush=True)
                left.remove(job)
                self._keep(left)
        except (ClientError, OSError) as error:
            self._tell_once(f"{', '.join(left)} can't be resumed yet: {error}")

    def _pause_is_open(self, client: Client, job: str) -> bool:
        """Whether a pause that a host's end asked for has no answer yet: it outlives the host."""
        try:
            asked = client.controls(job)
        except NotFoundError:
            return False
        return any(
            each["state"] == "accepted" and each["kind"] == "pause" and each["reason"] == REASON
            for each in asked
        )

    def _tell_once(self, line: str) -> None:
        """What is tried every second isn't told every second."""
        if line not in self._told:
            self._told.add(line)
            print(line, flush=True)

    def _keep(self, jobs: Sequence[str]) -> None:
        """Jobs that the next start, or this one, has to resume."""
        if jobs:
            replace_file(self._home.path / PAUSED, json.dumps(list(jobs)))
        else:
            (self._home.path / PAUSED).unlink(missing_ok=True)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _settings(home: Home, given: argparse.Namespace) -> HomeConfig:
    """The home's with what was given; ``check_listening`` has looked at them."""
    asked = {
        "jobs_dir": given.jobs_dir,
        "host": given.listen,
        "port": given.port,
        "tls_cert": given.tls_cert,
        "tls_key": given.tls_key,
        "plain_http": given.plain_http,
        # A node that is lost may come back, and an autoscaler adds some.
        "fixed_cluster": False,
    }
    config = home.config().model_copy(update=asked)
    check_listening(config)
    return config


def _arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m deploy.serve", description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("--address", required=True, help="of Ray's head, as 10.0.0.1:6379")
    parser.add_argument("--hosts", type=int, default=1, help="wait for so many at the start")
    parser.add_argument("--jobs-dir", type=Path, help="folder of jobs' directories, on every node")
    parser.add_argument("--listen", default="127.0.0.1", help="address of the API")
    parser.add_argument("--port", type=int, default=0, help="of the API")
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--plain-http", action="store_true")
    parser.add_argument("--once", action="store_true", help="start the controller, and end")
    parser.add_argument("--job", type=Path, help="train this, and end with its exit code")
    parser.add_argument("--key", default="", help="of the job: the same for every try")
    parser.add_argument("--grace", type=float, default=120.0, help="seconds for last checkpoints")
    parser.add_argument("--head", action="store_true", help="start Ray's head, options after --")
    given = parser.parse_args(words[:split])
    if given.job is not None and not given.key:
        parser.error("--job wants a --key, by which a second try finds the job")
    return given, list(words[split + 1 :])


def serve(words: Sequence[str]) -> int:
    """Entry; the exit code."""
    given, options = _arguments(words)
    home = Home(given.home)
    try:
        home.create(_settings(home, given))
        service = Service(home, given.address, given.hosts, given.grace)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, service.end)
        runner = None if given.job is None else JobRunner(home, given.job, given.key)
        try:
            if given.head:
                service.start_head(options)
            service.start_controller()
            return 0 if given.once else service.hold(runner)
        finally:
            service.close()
    except SpecError as error:
        print(error, file=sys.stderr)
        return USAGE
    except ListeningError as error:
        print(f"deploy.serve: {error}", file=sys.stderr)
        return USAGE
    except (ServeError, ClientError, OSError) as error:
        print(f"deploy.serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
