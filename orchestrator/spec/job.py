"""The JobSpec: what a user submits, composed of the packages' own sections.

Reading a job file takes three steps, each pure: YAML → values (``read_yaml``), values →
``JobSpec`` (``parse_spec``, all problems at once), and ``complete``, which fills in what
follows from the rest: the number of replicas, the batch numbers, the MLP's width.

    spec = parse_spec(path.read_text(), str(path))     # raises SpecError
    print(spec_yaml(spec))                             # as `octavo submit --dry-run` does
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from launch.config import RunConfig
from monitoring.config import DetectionConfig, WandbConfig
from orchestrator.spec.config import (
    NotificationsConfig,
    PreflightConfig,
    RecoveryConfig,
    ResourcesConfig,
)
from orchestrator.spec.errors import (
    Finding,
    KeyPath,
    Source,
    SpecError,
    pydantic_findings,
    read_text,
    read_yaml,
    type_findings,
    value_at,
)

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's where it is: half of what a submission took went into writing its file."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


class JobSpec(RunConfig):
    """A job, as submitted."""

    name: str = Field(pattern=NAME_PATTERN)
    resources: ResourcesConfig = ResourcesConfig()
    detection: DetectionConfig = DetectionConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    preflight: PreflightConfig = PreflightConfig()
    wandb: WandbConfig = WandbConfig()
    notifications: NotificationsConfig = NotificationsConfig()
    envs: dict[str, str] = {}
    """Environment of the ranks; no secrets, they are stored and shown in clear."""


def load_spec(path: Path, *, check_data: bool = True) -> JobSpec:
    """The completed spec in the file at ``path``; relative paths in it become absolute.

    Relative to the folder that the command runs in. ``SpecError`` names all problems.
    """
    return parse_spec(read_text(path), str(path), base=Path.cwd(), check_data=check_data)


def parse_spec(
    text: str, file: str, *, base: Path | None = None, check_data: bool = True
) -> JobSpec:
    """The completed spec of a YAML text; ``file`` is only named in messages.

    ``policy: FILE`` in it stands for the sections of that file (``policy_file``), which the
    spec has in its place from here on.
    """
    return spec_of(_merged(read_yaml(text, file), base), base=base, check_data=check_data)


def read_source(path: Path) -> Source:
    """The values of the file at ``path``, as ``spec_of`` takes them; a policy's among them."""
    return _merged(read_yaml(read_text(path), str(path)), Path.cwd())


def _merged(source: Source, base: Path | None) -> Source:
    if "policy" not in source.data:
        return source
    from orchestrator.spec.policy_file import merged

    return merged(source, base)


def spec_of(source: Source, *, base: Path | None = None, check_data: bool = True) -> JobSpec:
    """The completed spec of values already read.

    ``base``: folder that relative paths refer to; None: they stay as they are.
    ``check_data``: look at the data source too, on this machine.
    """
    from orchestrator.planning.automatic import choose, is_auto
    from orchestrator.planning.presets import expand_preset
    from orchestrator.spec.checks import check_spec, offered

    data, findings = expand_preset(absolute_paths(source.data, base) if base else source.data)
    auto = is_auto(data)
    if auto:
        data = {**data, "parallelism": {}}
    findings += type_findings(JobSpec, data)
    try:
        spec: JobSpec | None = JobSpec.model_validate(data)
    except ValidationError as error:
        found = pydantic_findings(error, JobSpec, data)
        seen = {f.path for f in findings}
        findings += [offered(f) for f in found if f.path not in seen]
        spec = None
    if findings:
        spec, broken = _readable_part(data, findings)
    else:
        broken = set()
    chosen: JobSpec | None = None
    if spec is not None:
        # What would be said of degrees that nobody wrote is left out; a search checks its own.
        left_out = broken | {("parallelism",)} if auto else broken
        findings += check_spec(spec, left_out, check_data=check_data)
        if auto and not findings:
            chosen, findings = choose(spec, data)
    if chosen is not None:
        return chosen
    if findings or spec is None:
        findings.sort(key=lambda f: source.problem(f).line or 0)
        raise SpecError([source.problem(f, _default_at(spec, f.path)) for f in findings])
    from orchestrator.spec.completion import complete

    return complete(spec)


def absolute_paths(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """``data`` with the paths in it taken relative to ``base``."""
    result = dict(data)
    for section, key in (
        ("data", "source"),
        ("checkpoint", "storage_path"),
        ("checkpoint", "resume_from"),
    ):
        given = result.get(section)
        if not isinstance(given, Mapping):
            continue
        value = given.get(key)
        if isinstance(value, str) and value and value != "python-stdlib":
            result[section] = {**given, key: str(base / Path(value).expanduser())}
    return result


def spec_data(spec: JobSpec) -> dict[str, Any]:
    """Plain values of a spec, name first; ``JobSpec.model_validate`` reads them back."""
    data = spec.model_dump(mode="json", exclude_none=True)
    return {"name": data.pop("name"), **data}


def spec_yaml(spec: JobSpec) -> str:
    """A spec as a job file."""
    return yaml.dump(spec_data(spec), Dumper=_DUMPER, sort_keys=False, allow_unicode=True)


def _readable_part(
    data: Mapping[str, Any], findings: Sequence[Finding]
) -> tuple[JobSpec | None, set[KeyPath]]:
    """The spec with defaults in place of what is wrong, so that the rest can be checked too.

    A misspelt key is read as the one that was probably meant. Also returns the keys whose
    values are not the user's.
    """
    broken = {f.path for f in findings}
    meant = {f.meant: value_at(data, f.path) for f in findings if f.meant}
    for replaced in (meant, {}):
        trimmed = _prune(data, (), broken)
        trimmed.setdefault("name", "unnamed")
        for path, value in replaced.items():
            section = value_at(trimmed, path[:-1])
            if isinstance(section, dict):
                section.setdefault(str(path[-1]), value)
        try:
            return JobSpec.model_validate(trimmed), broken | (meant.keys() - replaced.keys())
        except ValidationError:
            continue
    return None, broken


def _prune(data: Any, path: KeyPath, broken: set[KeyPath]) -> Any:
    if isinstance(data, Mapping):
        kept = {k: v for k, v in data.items() if (*path, k) not in broken}
        return {k: _prune(v, (*path, k), broken) for k, v in kept.items()}
    if isinstance(data, list):
        # An item is kept whole or not at all: one without its required keys is no item.
        return [
            v
            for i, v in enumerate(data)
            if not any(b[: len(path) + 1] == (*path, i) for b in broken)
        ]
    return data


def _default_at(spec: JobSpec | None, path: KeyPath) -> object:
    value: object = spec
    for part in path:
        value = getattr(value, part, None) if isinstance(part, str) else None
    return value if isinstance(value, int | float | str) else None
