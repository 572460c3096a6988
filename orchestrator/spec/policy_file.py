"""A policy in a file of its own: how trouble is found and answered, to try and to share.

`octavo replay JOB --policy FILE` tries it on a job's records; `policy: FILE` in a job file uses it.

    detection: {loss_sigmas: 6}
    recovery: {horizon: 400, max_rollbacks: 3}

The sections are a job file's. One that the file has is whole: keys it doesn't give have the
spec's defaults, so that a policy means the same wherever it is used; one that it doesn't have
is the job's own. Promises: refused with the same words as a job file, all problems at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from monitoring.config import DetectionConfig
from orchestrator.spec.checks import detection_findings
from orchestrator.spec.completion import complete
from orchestrator.spec.config import RecoveryConfig
from orchestrator.spec.errors import (
    Finding,
    Problem,
    Source,
    SpecError,
    pydantic_findings,
    read_text,
    read_yaml,
    type_findings,
)
from orchestrator.spec.job import JobSpec

WHAT = "a policy"


class PolicyFile(BaseModel):
    """The two sections; None: as the job has it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    detection: DetectionConfig | None = None
    recovery: RecoveryConfig | None = None

    def applied(self, spec: JobSpec) -> JobSpec:
        """``spec`` with this policy, completed as a job's own is."""
        given = {"detection": self.detection, "recovery": self.recovery}
        own = {name: section for name, section in given.items() if section is not None}
        return complete(spec.model_copy(update=own))


def load_policy(path: Path) -> PolicyFile:
    """The policy in the file at ``path``; raises ``SpecError`` with every problem."""
    return parse_policy(read_text(path), str(path))


def parse_policy(text: str, file: str) -> PolicyFile:
    """The policy of a YAML text; ``file`` is only named in messages."""
    source = read_yaml(text, file, what=WHAT, start="start with `recovery:` or `detection:`")
    findings = type_findings(PolicyFile, source.data)
    policy: PolicyFile | None = None
    try:
        policy = PolicyFile.model_validate(source.data)
    except ValidationError as error:
        seen = {finding.path for finding in findings}
        found = pydantic_findings(error, PolicyFile, source.data, what=WHAT)
        findings += [finding for finding in found if finding.path not in seen]
    if policy is not None and policy.detection is not None:
        findings += detection_findings(policy.detection)
    if findings or policy is None:
        findings.sort(key=lambda finding: source.problem(finding).line or 0)
        raise SpecError([source.problem(finding) for finding in findings])
    if policy.detection is None and policy.recovery is None:
        message = "has neither section, so it says nothing"
        raise SpecError([Problem(file, "", "", message, "give `detection:` or `recovery:`")])
    return policy


def merged(source: Source, base: Path | None) -> Source:
    """A job file with the sections of the file at its key ``policy`` in place of that key.

    ``base``: folder that a relative path refers to. Raises ``SpecError`` for a file that is
    no policy, and for a section that both give.
    """
    given = source.data["policy"]
    if not isinstance(given, str) or not given:
        raise SpecError([source.problem(Finding(("policy",), "must be the path of a file"))])
    file = (base or Path()) / Path(given).expanduser()
    policy = load_policy(file)
    sections = policy.model_dump(exclude_unset=True)
    twice = [
        Finding((name,), f"is given by {given} too", "keep one of them")
        for name in sections
        if name in source.data
    ]
    if twice:
        raise SpecError([source.problem(finding) for finding in twice])
    own = {key: value for key, value in source.data.items() if key != "policy"}
    return replace(source, data=own | sections)


def changes(before: JobSpec, after: JobSpec) -> dict[str, tuple[object, object]]:
    """Keys of the two sections whose values differ → (before, after)."""
    found: dict[str, tuple[object, object]] = {}
    for section in ("detection", "recovery"):
        old, new = getattr(before, section), getattr(after, section)
        for key in type(old).model_fields:
            pair = getattr(old, key), getattr(new, key)
            if pair[0] != pair[1]:
                found[f"{section}.{key}"] = pair
    return found
