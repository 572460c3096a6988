"""`octavo plan`: what a job will be and take, before anything is started.

Promises: everything that would refuse the job on this machine refuses it here, in the same words;
what is printed is a job file again, whose comments are the plan. `octavo submit --dry-run` is the
same. How far its numbers can be trusted is said in ``orchestrator.planning``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import OutputOption
from orchestrator.cli.show import USAGE, CommandError, Output, print_json

if TYPE_CHECKING:
    from orchestrator.planning.estimate import Estimate
    from orchestrator.planning.fitting import Remedy
    from orchestrator.planning.intervals import Advice
    from orchestrator.planning.search import Choice
    from orchestrator.spec.job import JobSpec


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC", help="A job file (YAML).")] = None,
    device: Annotated[
        str, typer.Option(help="What a rank computes on: h100, h200, b200, a100, l40s, cpu.")
    ] = "",
    network: Annotated[str, typer.Option(help="What joins the nodes: ib400, eth25, …")] = "",
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Of a device an hour, in any currency.")
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List known model shapes.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Check a job and print it completed, with what it will need and how long it will take."""
    if presets:
        show_presets(output)
    elif spec is None:
        raise CommandError("plan needs a job file", "octavo plan job.yaml, or --presets", USAGE)
    else:
        show_plan(spec, output, Asked(device, network, price))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of the hardware, in place of the job file."""

    device: str = ""
    network: str = ""
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is shown of one job."""

    spec: JobSpec
    linears: str
    """What they will run on, and why."""
    reasons: Mapping[tuple[str | int, ...], str]
    """Of the values that the job file doesn't give."""
    estimate: Estimate | None
    """None for a model of a factory."""
    other_recompute: Estimate | None = None
    remedies: list[Remedy] = field(default_factory=list)
    best: list[Choice] = field(default_factory=list)
    """Of ``parallelism: auto``."""
    tried: list[Choice] = field(default_factory=list)
    intervals: Advice | None = None
    """Of snapshots and checkpoints."""


def show_plan(file: Path, output: Output, asked: Asked = Asked()) -> None:
    """Raises SpecError for a file that would be refused, CommandError for unknown hardware."""
    made = make_plan(file, asked)
    if output is Output.json:
        print_json(to_json(made))
    else:
        sys.stdout.write(to_text(made))


def show_presets(output: Output) -> None:
    """Known shapes, and what their state takes."""
    from orchestrator.planning.presets import EXPERTS, PRESETS
    from orchestrator.planning.told import preset_lines

    if output is Output.table:
        print("\n".join(preset_lines()))
        return
    known = {
        name: {"parameters": p.parameters, "model": dict(p.model), "source": p.source}
        for name, p in PRESETS.items()
    }
    experts = {
        name: {"parameters": p.parameters, "active": p.active, "source": p.source}
        for name, p in EXPERTS.items()
    }
    print_json({"presets": known, "estimates_only": experts})


def make_plan(file: Path, asked: Asked) -> Plan:
    """Check a job file as `submit` would, and work out all that is told of it."""
    from orchestrator.api.client import URL_VARIABLE
    from orchestrator.planning.automatic import fixed_keys, is_auto
    from orchestrator.planning.defaults import default_reasons
    from orchestrator.planning.estimate import Hardware, estimate
    from orchestrator.planning.fitting import remedies
    from orchestrator.planning.intervals import advice, setting_of
    from orchestrator.planning.search import search
    from orchestrator.saved.resume_from import check_resume_from
    from orchestrator.spec.backend import backend_of
    from orchestrator.spec.job import read_source, spec_of
    from orchestrator.spec.storage import check_storage
    from orchestrator.spec.trial import check_factory_model

    source = _with_hardware(read_source(file), asked)
    checked = spec_of(source, base=Path.cwd())
    # A controller elsewhere has folders of its own.
    if checked.checkpoint.storage_path is not None and URL_VARIABLE not in os.environ:
        check_storage(checked.checkpoint.storage_path, str(file))
    if URL_VARIABLE not in os.environ:
        check_resume_from(checked, str(file))
    check_factory_model(checked, str(file))
    linears, reasons = str(backend_of(checked)), default_reasons(source.data, checked)
    if checked.model.factory is not None:
        return Plan(checked, linears, reasons, None)
    hardware = Hardware.of(checked)
    found = estimate(checked, hardware, asked.price)
    best: list[Choice] = []
    tried: list[Choice] = []
    if is_auto(source.data):
        best, tried = search(checked, hardware, fixed_keys(source.data))
    other = "none" if checked.training.recompute == "full" else "full"
    training = checked.training.model_copy(update={"recompute": other})
    return Plan(
        checked,
        linears,
        reasons,
        found,
        estimate(checked.model_copy(update={"training": training}), hardware),
        [] if found.fits else remedies(checked, hardware),
        best,
        tried,
        advice(setting_of(checked, found), checked.snapshots.every, checked.checkpoint.every),
    )


def _with_hardware(source: Any, asked: Asked) -> Any:
    """The job file's values with what the command line says of the hardware."""
    from dataclasses import replace

    from orchestrator.planning.devices import UnknownNameError, device_named, network_named

    given: dict[str, str] = {}
    try:
        if asked.device:
            given["device"] = device_named(asked.device).name
        if asked.network:
            given["network"] = network_named(asked.network).name
    except UnknownNameError as error:
        option = "network" if "device" in given or not asked.device else "device"
        raise CommandError(f"--{option}: {error}", "", USAGE) from None
    resources = source.data.get("resources", {})
    if not given or not isinstance(resources, Mapping):
        return source
    return replace(source, data={**source.data, "resources": {**resources, **given}})


def to_text(made: Plan) -> str:
    """A job file with the plan as its comments."""
    from orchestrator.planning.defaults import annotated_yaml
    from orchestrator.planning.told import choice_lines, estimate_lines, interval_lines

    lines = [f"linears: {made.linears}"]
    if made.estimate is None:
        lines.append("no estimate: a model of model.factory has a size that only its ranks know")
    else:
        if made.best:
            lines += choice_lines(made.best, made.tried)
        lines += estimate_lines(made.estimate, made.remedies, made.other_recompute)
        if made.intervals is not None:
            lines += interval_lines(made.intervals)
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + annotated_yaml(made.spec, made.reasons)


def to_json(made: Plan) -> dict[str, Any]:
    """Everything: the spec, why it is so, and what is foretold."""
    from orchestrator.planning.search import reasons
    from orchestrator.spec.errors import dotted
    from orchestrator.spec.job import spec_data

    def degrees(choice: Choice) -> dict[str, Any]:
        return {
            "degrees": {
                name: getattr(choice.degrees, name)
                for name in ("tensor", "pipeline", "zero_stage", "micro", "recompute")
            }
            | {"data": choice.spec.parallelism.data},
            "estimate": choice.estimate.to_json(),
        }

    other, best = made.other_recompute, made.best
    return {
        "spec": spec_data(made.spec),
        "defaults": {dotted(path): told for path, told in made.reasons.items()},
        "linears": made.linears,
        "estimate": made.estimate.to_json() if made.estimate else None,
        "other_recompute": other.to_json() if other else None,
        "remedies": [
            {"changes": list(r.changes), "estimate": r.estimate.to_json()} for r in made.remedies
        ],
        "intervals": made.intervals.to_json() if made.intervals else None,
        "auto": {
            "tried": len(made.tried),
            "best": [degrees(choice) for choice in best],
            "reasons": reasons(best[0], made.tried),
        }
        if best
        else None,
    }
