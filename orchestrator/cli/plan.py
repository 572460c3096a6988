"""`octavo plan`: what a job will be and take, before anything is started.

Promises: everything that would refuse the job on this machine refuses it here, in the same words;
what is printed is a job file again, whose comments are the plan. `octavo submit --dry-run` is the
same. How far its numbers can be trusted is said in ``orchestrator.planning``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.installed import loaded
from orchestrator.cli.options import OutputOption
from orchestrator.cli.show import USAGE, CommandError, Output, print_json
from orchestrator.cli.tables import print_table

if TYPE_CHECKING:
    from orchestrator.planning.cluster import Cluster, ClusterGroup
    from orchestrator.planning.estimate import Estimate
    from orchestrator.planning.fitting import Remedy
    from orchestrator.planning.intervals import Advice
    from orchestrator.planning.search import Choice
    from orchestrator.spec.errors import Finding, Source
    from orchestrator.spec.job import JobSpec

DEAREST = 1e6
"""Price of a device-hour at most: beyond it a sum would not be a number any more."""
CLUSTERS = "octavo.clusters"
"""Entry point group of what reads a cluster's profile."""


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
        float | None, typer.Option(help="Of a device an hour, in any currency.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="CLUSTER",
            help="A cluster profile (YAML): its devices, network, memory, nodes and prices.",
        ),
    ] = None,
    group: Annotated[
        str, typer.Option("--group", help="Of its node groups [default: the one that fits].")
    ] = "",
    presets: Annotated[bool, typer.Option("--presets", help="List known model shapes.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Check a job and print it completed, with what it will need and how long it will take."""
    if presets:
        show_presets(output)
    elif spec is None:
        raise CommandError("plan needs a job file", "octavo plan job.yaml, or --presets", USAGE)
    else:
        if price is not None and not 0 <= price <= DEAREST:
            told = f"--price: {price:g} is no price of a device-hour"
            raise CommandError(told, f"from 0 to {DEAREST:,.0f}", USAGE)
        if group and cluster is None:
            raise CommandError("--group is one of a cluster's", "give --cluster too", USAGE)
        show_plan(spec, output, Asked(device, network, price, cluster, group))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of the hardware, in place of the job file."""

    device: str = ""
    network: str = ""
    price: float | None = None
    cluster: Path | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class OnCluster:
    """What a plan took from a cluster profile."""

    cluster: Cluster
    group: ClusterGroup
    given: Sequence[str]
    """Keys that the job file leaves out and the cluster gave."""
    misfits: Sequence[Finding]


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
    on: OnCluster | None = None


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
    from orchestrator.planning.told import PRESETS_NOTE, preset_rows

    if output is Output.table:
        print_table(preset_rows(), flexible=("SOURCE",))
        print(PRESETS_NOTE)
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
    from dataclasses import replace

    from orchestrator.api.client import URL_VARIABLE
    from orchestrator.planning.automatic import fixed_keys, is_auto
    from orchestrator.planning.cluster import check_group, with_cluster
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

    written = read_source(file)
    source, given = written, list[str]()
    found_on = _cluster(written, asked)
    if found_on is not None:
        source, given = with_cluster(written, *found_on)
    source = _with_hardware(source, asked)
    # Of a cluster, and of a controller elsewhere, folders are not this machine's.
    checked = spec_of(source, base=Path.cwd(), check_data=asked.cluster is None)
    if not os.environ.get(URL_VARIABLE) and asked.cluster is None:
        if checked.checkpoint.storage_path is not None:
            check_storage(checked.checkpoint.storage_path, str(file))
        check_resume_from(checked, str(file))
    check_factory_model(checked, str(file))
    linears = str(backend_of(checked))
    on: OnCluster | None = None
    hardware, price = Hardware.of(checked), asked.price
    if found_on is not None:
        cluster, group = found_on
        misfits = list(check_group(cluster, group, checked, written.data))
        on = OnCluster(cluster, group, given, misfits)
        hardware = replace(hardware, node_memory=group.memory)
        price = group.device_price if price is None else price
    if checked.model.factory is not None:
        return Plan(checked, linears, default_reasons(source.data, checked), None, on=on)
    best: list[Choice] = []
    tried: list[Choice] = []
    if is_auto(source.data):
        best, tried = search(checked, hardware, fixed_keys(source.data))
    if found_on is not None and best:
        # Chosen before without the memory of the cluster's nodes.
        checked = best[0].spec
    found = estimate(checked, hardware, price)
    other = "none" if checked.training.recompute == "full" else "full"
    training = checked.training.model_copy(update={"recompute": other})
    return Plan(
        checked,
        linears,
        default_reasons(source.data, checked),
        found,
        estimate(checked.model_copy(update={"training": training}), hardware),
        [] if found.fits else remedies(checked, hardware),
        best,
        tried,
        advice(setting_of(checked, found), checked.snapshots.every, checked.checkpoint.every),
        on,
    )


def _cluster(source: Source, asked: Asked) -> tuple[Cluster, ClusterGroup] | None:
    """The cluster and its group that are planned for; raises SpecError for a wrong profile."""
    from orchestrator.planning.cluster import GroupError, group_of
    from orchestrator.planning.devices import DEVICES

    if asked.cluster is None:
        return None
    readers = loaded(CLUSTERS)
    if not readers:
        told = "this installation of Octavo has nothing that reads a cluster profile"
        raise CommandError(told, "install it as a whole: pip install octavo")
    cluster: Cluster = readers[0](asked.cluster)
    try:
        group = group_of(cluster, source.data, asked.group)
    except GroupError as error:
        raise CommandError(f"--group: {error}", "name one of them", USAGE) from None
    if group.device not in DEVICES and not asked.device:
        told = f"no speed is known of the {group.device} of {cluster.name}'s group {group.name}"
        raise CommandError(
            told, f"name what is nearest, with --device: {', '.join(DEVICES)}", USAGE
        )
    return cluster, group


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
    from orchestrator.planning.told import (
        choice_lines,
        cluster_lines,
        estimate_lines,
        interval_lines,
    )

    lines = [f"linears: {made.linears}"]
    if made.on is not None:
        lines += cluster_lines(made.on.cluster, made.on.group, made.on.given, made.on.misfits)
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
        "cluster": _cluster_json(made.on) if made.on else None,
        "auto": {
            "tried": len(made.tried),
            "best": [degrees(choice) for choice in best],
            "reasons": reasons(best[0], made.tried),
        }
        if best
        else None,
    }


def _cluster_json(on: OnCluster) -> dict[str, Any]:
    from orchestrator.spec.errors import dotted

    misfits = [
        {"key": dotted(f.path), "message": f.message, "remedy": f.remedy} for f in on.misfits
    ]
    return {**on.cluster.to_json(on.group), "given": list(on.given), "misfits": misfits}
