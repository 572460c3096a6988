"""``octavo replay``: what a policy would have done with a job's records, step by step.

Promises: without a policy file everything stored must come out as it is stored; what doesn't
is shown with both sides and gives exit code 104. With one a difference is what was asked for.
Reads the store of a local home, running or not; the API where ``$OCTAVO_URL`` names one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.actions import Action
from orchestrator.cli.show import NOT_FOUND, CommandError, Output, print_json
from orchestrator.recovery.evidence import spans
from orchestrator.recovery.restart_budget import is_restart
from orchestrator.replay.job_trace import JobTrace, trace_of_client, trace_of_store
from orchestrator.replay.replay import replay
from orchestrator.replay.verdicts import ASSUMPTION, Judged, Replayed, Stretch, Verdict
from orchestrator.spec.policy_file import changes, load_policy

DIFFERS = 104


def replay_job(home: Path | None, job: str, policy: Path | None, output: Output) -> int:
    """Replay and show; the exit code. ``home``: as ``--home`` names it."""
    file = None if policy is None else load_policy(policy)
    trace = read_trace(home, job)
    spec = None if file is None else file.applied(trace.spec)
    changed = {} if spec is None else changes(trace.spec, spec)
    found = replay(trace, spec)
    if output is Output.json:
        print_json(replay_json(found, policy, changed))
    else:
        for line in replay_lines(found, policy, changed):
            print(line)
    return DIFFERS if policy is None and not found.exact else 0


def read_trace(named: Path | None, job: str) -> JobTrace:
    """The job's records; by id, name or unique beginning."""
    from orchestrator.cli.options import client_elsewhere, home_of

    remote = client_elsewhere(named)
    if remote is not None:
        return trace_of_client(remote, job)
    home = home_of(named)
    from orchestrator.store.database import Store
    from orchestrator.store.pages import AmbiguousJobError
    from orchestrator.store.rows import UnknownJobError

    url = home.store_url
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        raise CommandError(
            f"{home.path} has no store, so no job's records",
            "name another with --home; `octavo run` leaves its store behind with --keep-home",
            NOT_FOUND,
        )
    store = Store(url)
    try:
        return trace_of_store(store, store.pages.job(job))
    except UnknownJobError as error:
        raise CommandError(
            str(error), "`octavo list` shows the jobs there are", NOT_FOUND
        ) from None
    except AmbiguousJobError as error:
        raise CommandError(str(error), "give more of its id") from None


def replay_json(
    found: Replayed, policy: Path | None, changed: Mapping[str, tuple[object, object]]
) -> dict[str, Any]:
    """One document; a decision's ``assumed`` says that ``assumption`` is in force."""
    return {
        "job": found.job,
        "policy": None if policy is None else str(policy),
        "changed": {key: {"stored": old, "policy": new} for key, (old, new) in changed.items()},
        "records": found.records,
        "exact": found.exact,
        "departs": found.departs,
        "assumption": ASSUMPTION if found.departs else None,
        "goes_on": found.goes_on,
        "not_kept": list(found.not_kept),
        "decided_by": list(found.decided_by),
        "stretches": [stretch.to_json() for stretch in found.stretches],
        "unanswered_incidents": [incident.to_json() for incident in found.unanswered],
    }


def replay_lines(
    found: Replayed, policy: Path | None, changed: Mapping[str, tuple[object, object]]
) -> Iterator[str]:
    """What a person reads."""
    whose = "the job's own policy" if policy is None else str(policy)
    yield f"{found.job}: {_many(found.records, 'recorded step')}, replayed with {whose}"
    for key, (old, new) in changed.items():
        yield f"  {key}: {_value(old)} → {_value(new)}"
    if policy is not None and not changed:
        yield "  nothing in it differs from the job's own"
    if found.goes_on:
        yield "  the job goes on: this is up to its last step but one"
    if found.decided_by:
        others = ", ".join(found.decided_by)
        yield f"  decided by Octavo {others}, replayed by {version('octavo')}: rules may differ"
    for reason in found.not_kept:
        yield f"  not exact: {reason}"
    departed = False
    for stretch in found.stretches:
        yield _heading(stretch)
        for judged in stretch.decisions:
            yield from _decision(judged)
            if judged.deeds_differ and not departed:
                departed = True
                yield f"  -- {ASSUMPTION}"
    for incident in found.unanswered:
        yield f"  stored, and answered by no stored action: {incident.message}"
    yield _sum(found, policy)


def _heading(stretch: Stretch) -> str:
    place = f"attempt {stretch.attempt}, timeline {stretch.timeline}"
    if stretch.first is None:
        return f"{place}: no step recorded"
    again = ""
    if stretch.again is not None:
        again = f", {stretch.first} to {stretch.again} once more"
    return f"{place}: steps {stretch.first} to {stretch.last}{again}"


def _decision(judged: Judged) -> Iterator[str]:
    mark = "~" if judged.assumed else " "
    head = f" {mark} step {judged.step:<6} {judged.verdict:<8}"
    stored, replayed = judged.stored, judged.replayed
    shown = replayed or stored
    assert shown is not None
    if judged.verdict is Verdict.CHANGED:
        assert stored is not None and replayed is not None
        yield f"{head} {deeds(stored)} → {deeds(replayed)} (differs: {', '.join(judged.differing)})"
        yield f"      stored:   {stored.reason}"
        yield f"      replayed: {replayed.reason}"
        old, new = stored.to_json(), replayed.to_json()
        for name in judged.differing:
            if name not in ("reason", "time"):
                yield f"      {name}: {_short(old[name])} → {_short(new[name])}"
        return
    yield f"{head} {deeds(shown)}"
    yield f"      {shown.reason}"


def deeds(action: Action) -> str:
    """What an action does, in a line."""
    told: list[str] = [action.kind]
    if action.to_step is not None:
        told.append(f"to step {action.to_step}")
    if is_restart(action) and action.kind != "restart":
        told.append("by a restart")
    if action.skip_batches:
        told.append(f"without {spans(action.skip_batches, 'batch', 'batches')}")
    told += [f"{layer} in {to.upper()}" for layer, to in action.precision.items()]
    if action.lr_scale is not None:
        told.append(f"learning rate × {action.lr_scale:.3g}")
    if action.exchange is not None:
        told.append(f"gradients in {action.exchange.upper()}")
    return ", ".join(told)


def _sum(found: Replayed, policy: Path | None) -> str:
    counts = dict.fromkeys(Verdict, 0)
    for judged in found.decisions:
        counts[judged.verdict] += 1
    told = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n) or "no decisions"
    if policy is not None:
        return told
    if found.exact:
        return f"{told}: all that is stored came out again, to the last digit"
    return f"{told}: this is not what is stored"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _value(value: object) -> str:
    return "unset" if value is None else str(value)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:159]}…"
