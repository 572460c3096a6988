"""``octavo up`` and ``octavo down``: a long-lived controller and Ray on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from monitoring.wording import counted
from orchestrator.api.client import Client
from orchestrator.api.client_errors import ClientError
from orchestrator.api.stops import Stops
from orchestrator.cli.close import going_on, stands
from orchestrator.cli.interrupts import uninterruptible
from orchestrator.cli.show import FAILED, USAGE, CommandError, Output, print_json
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
    """End the jobs of ``home``, each after a checkpoint, then its host; the exit code, which is
    0 only where no job was cut off."""
    host = running_host(home)
    told = sys.stderr if output is Output.json else sys.stdout
    if host is None:
        if output is Output.json:
            print_json({"home": str(home.path), "ended": False, "jobs": []})
        else:
            print(f"nothing runs in {home.path}")
        return 0
    stops: Stops | None = None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            stops = _stops(Client.of_home(home), home, f"`octavo down` by {user}")
            _end_jobs(stops, told)
    except ClientError as error:
        # Whoever wants it down gets it down; the jobs go on from what they have saved.
        print(f"the controller can't be asked to end its jobs: {error}", file=told)
    with uninterruptible():
        end_host(host, home)
    jobs = {} if stops is None else stops.jobs
    cut_off = [] if stops is None else stops.going_on()
    code = 0 if stops is not None and not cut_off else FAILED
    if output is Output.json:
        shown = [{k: v for k, v in job.items() if k != "spec"} for job in jobs.values()]
        print_json({"home": str(home.path), "ended": True, "jobs": shown})
        return code
    for name, job in jobs.items():
        print(_last_word(job, cut_off=name in cut_off))
    again = [
        name
        for name, job in jobs.items()
        if job["state"] in ("cancelled", "cancelling")
        or (name in cut_off and job["state"] in ("paused", "failed"))
    ]
    if again:
        print("\n".join(going_on(again, home.path, host.slots)))
    print("ended")
    return code


def _stops(client: Client, home: Home, reason: str) -> Stops:
    """Of all that is not at rest; what runs is to be cancelled, and one that has ended and holds
    its nodes for a moment more is only waited for."""
    jobs = {job["id"]: job for job in client.patiently(client.jobs) if not job["settled"]}
    return Stops(
        client,
        jobs,
        asked=[name for name, job in jobs.items() if job["state"] in RUNS],
        order=lambda job: client.cancel(job, reason),
        gone=lambda: running_host(home) is None,
    )


def _end_jobs(stops: Stops, told: TextIO) -> None:
    """Cancel what runs and wait for the last checkpoints; what waits in the queue stays there."""
    if going := stops.going_on():
        print(
            f"ending {', '.join(going)}, each after a checkpoint; Ctrl-C ends them at once",
            file=told,
            flush=True,
        )
        stops.wait()


def _last_word(job: dict[str, Any], *, cut_off: bool) -> str:
    if job["state"] == "queued":
        return f"{job['id']} queued: it starts at the next `octavo up`"
    if not cut_off:
        return stands(job)
    word = f"{job['id']} was ended before its last checkpoint was written; {stands(job)}"
    again = "; it goes on from there at the next `octavo up`" if job["state"] in RUNS else ""
    return word + again
