"""Reading a cluster profile, and what is wrong with one, for any target and for a certain one.

Promises: all problems of a file are told at once, each with file, key, value, line and what to do,
the nearest right name for a typo; what a target needs and the profile lacks is refused before
anything is rendered, and so is what a target would not use; a value written where the name of a
secret belongs is not repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from deploy.cluster_profile import TARGETS, ClusterProfile, Target
from deploy.profile_checks import check_profile, check_target
from monitoring.secrets import SECRET_VALUE
from orchestrator.spec.errors import (
    Finding,
    KeyPath,
    Problem,
    Source,
    SpecError,
    pydantic_findings,
    read_text,
    read_yaml,
    type_findings,
)

WHAT = "a cluster profile"
_USER_AND_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]*@")
_GIVEN = re.compile(
    r"(?i)(password|passwd|token|(api|account|access|secret)_?key)\s*=\s*['\"]?[^\s'\"$/~<]"
)
"""A secret given to a command; not a variable, nor a file that has it."""


def load_profile(path: Path, target: Target | None = None) -> tuple[ClusterProfile, Target]:
    """The profile in a file, and what it is for; raises ``SpecError`` with every problem."""
    return parse_profile(read_text(path), str(path), target)


def parse_profile(
    text: str, file: str, target: Target | None = None
) -> tuple[ClusterProfile, Target]:
    """The profile of a YAML text; ``file`` is only named in messages."""
    start = "start with `name: my-cluster` and `node_groups:`"
    source = read_yaml(text, file, what=WHAT, start=start)
    findings = type_findings(ClusterProfile, source.data)
    secrets = list(_secrets(source.data))
    findings += secrets
    profile: ClusterProfile | None = None
    try:
        profile = ClusterProfile.model_validate(source.data)
    except ValidationError as error:
        seen = {finding.path for finding in findings}
        found = pydantic_findings(error, ClusterProfile, source.data, what=WHAT)
        findings += [finding for finding in found if finding.path not in seen]
    wanted = target
    if profile is not None:
        wanted = target or profile.target
        findings += list(check_profile(profile))
        if wanted is None:
            remedy = f"give `target:`, or --target; one of {', '.join(TARGETS)}"
            findings.append(Finding(("target",), "is missing", remedy))
        else:
            findings += list(check_target(profile, wanted))
    if findings or profile is None or wanted is None:
        findings.sort(key=lambda finding: source.problem(finding).line or 0)
        veiled = [secret.path for secret in secrets]
        # What is no address may be one with a password in it.
        veiled += [finding.path for finding in findings if finding.path == ("redis", "address")]
        raise SpecError([_problem(source, finding, veiled) for finding in findings])
    return profile, wanted


def _secrets(value: object, path: KeyPath = ()) -> Iterator[Finding]:
    """Values of a file that are secrets themselves, wherever they stand."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _secrets(part, (*path, str(key)))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _secrets(part, (*path, i))
    elif isinstance(value, str) and _secret(value):
        told = "has a secret in it, and what is rendered of it is stored and shown in clear"
        yield Finding(path, told, "name a Kubernetes secret, or a file of mode 0600 that has it")


def _secret(text: str) -> bool:
    return bool(SECRET_VALUE.search(text) or _USER_AND_PASSWORD.search(text) or _GIVEN.search(text))


def _problem(source: Source, finding: Finding, veiled: Sequence[KeyPath]) -> Problem:
    """Without its value where that has a secret, or somebody may have written one for its name."""
    problem = source.problem(finding)
    has = any(path[: len(finding.path)] == finding.path for path in veiled)
    if problem.value and (has or problem.key.endswith("_secret")):
        return replace(problem, value="***")
    return problem
