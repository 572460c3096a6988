"""``octavo up`` and ``octavo down``: a long-lived controller and Ray on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from monitoring.wording import counted
from orchestrator.api.client import Client
from orchestrator.api.client_errors import ClientError, RefusedError
from orchestrator.cli.close import going_on, stands
from orchestrator.cli.interrupts import uninterruptible
from orchestrator.cli.show import USAGE, CommandError, Output, print_json
from orchestrator.cluster.local import (
    AnotherHostError,
    Host,
    LocalError,
    Starting,
    end_host,
    host_soon,
    running_host,
)
from orchestrator.home.folder import HOME_VARIABLE, Home, HomeConfig, TokenExposedError
from orchestrator.home.listening import ListeningError, check_listening
from orchestrator.home.redis_tables import RedisError, RedisTables
from orchestrator.lifecycle import LONGEST_STOP_S

FEWEST_SLOTS = 4
NO_REDIS = "none"
CHANGE = "`octavo down` first to change that"
ELSEWHERE = f"name a folder that you may write to, with --home or ${HOME_VARIABLE}"
RUNS = ("starting", "running", "recovering")
"""States of jobs that have something to end."""


def bring_up(
    home: Home,
    slots: int | None,
    standby: int | None,
    redis: str | None,
    output: Output,
    listening: Mapping[str, Any] | None = None,
) -> int:
    """Start the host of ``home``, or find it running; the exit code.

    What is None stays as the home has it; ``redis`` is an address, or "none"; ``listening``: how
    the API is to listen, as ``HomeConfig`` has it.
    """
    with _kept_in(home):
        found = running_host(home)
    wanted = slots or max(FEWEST_SLOTS, os.cpu_count() or 1)
    asked: dict[str, Any] = {} if standby is None else {"standby": standby}
    if redis is not None:
        asked["redis"] = None if redis == NO_REDIS else redis
    asked |= listening or {}
    started = False
    if found is None:
        with _kept_in(home):
            config = home.config().model_copy(update=asked)
            if config.redis is not None:
                _check(home, config.redis)
            _check_listening(config)
            home.create(config if asked else None)
            starting = Starting(home, wanted, tied=False)
        try:
            starting.wait()
            found, started = running_host(home), True
        except AnotherHostError as error:
            if (found := host_soon(home)) is None:
                raise CommandError(f"{error}; it isn't ready yet", "try again") from None
        except LocalError as error:
            raise CommandError(str(error)) from None
        assert found is not None, "a host writes its record before it says ready"
    if not started:
        _check_is_as_asked(found, home.config(), slots, asked)
    if output is Output.json:
        print_json({"url": found.url, "slots": found.slots, "home": str(home.path)})
    else:
        print(f"controller at {found.url}, {counted(found.slots, 'slot')}, home {home.path}")
    return 0


def _check_is_as_asked(
    found: Host, config: HomeConfig, slots: int | None, asked: Mapping[str, Any]
) -> None:
    """Refuse what a host that runs already would have to be started anew for."""
    differing = [name for name, value in asked.items() if getattr(config, name) != value]
    if slots is not None and found.slots != slots:
        raise CommandError(f"it runs with {found.slots} slots", CHANGE)
    if "standby" in differing:
        raise CommandError(f"it runs with {config.standby} standby workers", CHANGE)
    if "redis" in differing:
        has = f"the Redis {config.redis}" if config.redis else "no Redis"
        raise CommandError(f"it runs with {has}", CHANGE)
    if differing:
        raise CommandError(f"it listens at {found.url} otherwise than that", CHANGE)


def _check_listening(config: HomeConfig) -> None:
    try:
        check_listening(config)
    except ListeningError as error:
        raise CommandError(error.message, error.remedy, USAGE) from None


def _check(home: Home, redis: str) -> None:
    """Refuse a Redis that Ray could not keep its tables in."""
    try:
        RedisTables.of(redis, "check", home.redis_password()).check()
    except (ValueError, RedisError) as error:
        raise CommandError(str(error)) from None


@contextlib.contextmanager
def _kept_in(home: Home) -> Iterator[None]:
    """A folder that can't be read or written is told with what to do."""
    try:
        yield
    except TokenExposedError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        message = f"no controller can be kept in {home.path}: {error.strerror or error}"
        raise CommandError(message, ELSEWHERE) from None


def bring_down(home: Home, user: str, output: Output) -> int:
    """End the jobs of ``home``, each after a checkpoint, then its host; the exit code."""
    host = running_host(home)
    told = sys.stderr if output is Output.json else sys.stdout
    if host is None:
        if output is Output.json:
            print_json({"home": str(home.path), "ended": False, "jobs": []})
        else:
            print(f"nothing runs in {home.path}")
        return 0
    jobs: list[dict[str, Any]] = []
    try:
        jobs = _end_jobs(Client.of_home(home), f"`octavo down` by {user}", told)
    except ClientError as error:
        # Whoever wants it down gets it down; the jobs go on from what they have saved.
        print(f"the controller can't be asked to end its jobs: {error}", file=told)
    with uninterruptible():
        end_host(host, home)
    if output is Output.json:
        print_json({"home": str(home.path), "ended": True, "jobs": jobs})
        return 0
    for job in jobs:
        print(_last_word(job))
    again = [job["id"] for job in jobs if job["state"] in ("cancelled", "cancelling")]
    if again:
        print("\n".join(going_on(again, home.path, host.slots)))
    print("ended")
    return 0


def _end_jobs(client: Client, reason: str, told: TextIO) -> list[dict[str, Any]]:
    """Cancel what runs and wait for the last checkpoints, for ``LONGEST_STOP_S`` at most.

    The jobs that were not at rest, as last seen; those that wait in the queue stay there.
    """
    jobs = {job["id"]: job for job in client.jobs() if not job["settled"]}
    going = [name for name, job in jobs.items() if job["state"] != "queued"]
    if not going:
        return list(jobs.values())
    print(
        f"ending {', '.join(going)}, each after a checkpoint; Ctrl-C ends them at once",
        file=told,
        flush=True,
    )
    deadline = time.monotonic() + LONGEST_STOP_S
    with contextlib.suppress(KeyboardInterrupt):
        for name in going:
            # One that has ended and holds its nodes for a moment more is only waited for.
            if jobs[name]["state"] not in RUNS:
                continue
            # Refused: it came to its end meanwhile.
            with contextlib.suppress(RefusedError):
                jobs[name] = client.cancel(name, reason)
        left = going
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            jobs |= {name: client.job(name) for name in left}
            left = [name for name in left if not jobs[name]["settled"]]
    return [{k: v for k, v in job.items() if k != "spec"} for job in jobs.values()]


def _last_word(job: dict[str, Any]) -> str:
    if job["state"] == "queued":
        return f"{job['id']} queued: it starts at the next `octavo up`"
    if job["state"] == "cancelling":
        return f"{job['id']} was ended before its last checkpoint was written; " + stands(job)
    return stands(job)
