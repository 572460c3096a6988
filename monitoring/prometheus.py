"""Numbers of all jobs in Prometheus' text format.

Promises: pure; what is given is a value read at one moment, so that a scrape is consistent. One
series a job and number: nothing a layer, a rank or a tensor, whose histories are W&B's. Names are
stable, in base units, and each has its help text; ``deploy/grafana.json`` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from monitoring.amax import are_of_layers, headrooms
from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorColumns
from monitoring.utilization import mfu_pct

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class JobNumbers:
    """One job at one moment."""

    job: str
    name: str
    steps_planned: int
    attempt: int
    nodes: int
    fp8_format: str = "HYBRID"
    newest: StepRecord | None = None
    """Its newest step; None before the first."""
    incidents: Mapping[str, int] = field(default_factory=dict)
    """By kind, in the job's life."""
    actions: Mapping[str, int] = field(default_factory=dict)
    """By kind, in the job's life."""
    checkpoint_at: float | None = None
    """When its newest checkpoint was written, Unix time; None before the first."""
    steps_lost: int = 0
    """Steps given up, to be done again or not, in the job's life."""
    recovering_s: float = 0.0
    """Seconds from troubles to the first steps after them, in the job's life."""
    peak_tokens_per_s: float | None = None
    """Of its ranks at an MFU of 100 %; None: unknown."""
    submitted_at: float | None = None
    """When it was submitted, Unix time."""
    started_at: float | None = None
    """When it was first given nodes; None while it waits."""
    steps_done: int | None = None
    """Those that count: fewer than ``newest`` says where it was given up; None: as it says."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """All that a scrape tells."""

    jobs: Sequence[JobNumbers]
    """Those that are under way, and those that ended a short while ago."""
    states: Mapping[str, int]
    """Jobs in each state, all there ever were."""
    quarantined_nodes: int = 0
    passed_at: float | None = None
    """When the controller's newest pass over its jobs ended, Unix time; None before the first."""


def exposition(numbers: Numbers) -> bytes:
    """The text that is scraped."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(numbers))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        numbers = self._numbers
        states = GaugeMetricFamily("octavo_jobs", "Jobs in each state.", labels=["state"])
        for state, count in sorted(numbers.states.items()):
            states.add_metric([state], count)
        yield states
        yield GaugeMetricFamily(
            "octavo_quarantined_nodes",
            "Nodes that no job is placed on for the time being.",
            value=numbers.quarantined_nodes,
        )
        if numbers.passed_at is not None:
            yield GaugeMetricFamily(
                "octavo_controller_pass_timestamp_seconds",
                "When the controller last looked after its jobs, Unix time: alert when it stands "
                "still, for then nothing is started or mended.",
                value=numbers.passed_at,
            )
        gauges = {name: _gauge(name, told) for name, told in GAUGES.items()}
        counters = {name: _counter(name, told) for name, told in COUNTERS.items()}
        totals = {name: _total(name, told) for name, told in TOTALS.items()}
        for job in numbers.jobs:
            for name, value in _values(job):
                gauges[name].add_metric([job.job, job.name], value)
            for name, counts in (("incidents", job.incidents), ("actions", job.actions)):
                for kind, count in sorted(counts.items()):
                    counters[name].add_metric([job.job, job.name, kind], count)
            totals["steps_lost"].add_metric([job.job, job.name], job.steps_lost)
            totals["recovering_seconds"].add_metric([job.job, job.name], job.recovering_s)
        yield from gauges.values()
        yield from counters.values()
        yield from totals.values()


GAUGES = {
    "step": "Steps done on the present timeline; a rollback lowers it.",
    "steps_planned": "Steps of the whole job.",
    "attempt": "Number of the present attempt.",
    "nodes": "Nodes that the job holds.",
    "submitted_timestamp_seconds": "When it was submitted, Unix time.",
    "started_timestamp_seconds": "When it was first given nodes, Unix time; absent while it waits: "
    "alert when one has waited for too long.",
    "loss": "Mean cross-entropy of the newest step, nats a token; absent once it is given up.",
    "grad_norm": "Global gradient norm of that step before clipping.",
    "learning_rate": "Learning rate of the newest step.",
    "step_seconds": "Wall seconds of the newest step on the slowest rank.",
    "tokens_per_second": "Tokens of the newest step over its seconds.",
    "mfu_ratio": "MFU of the newest step; only with resources.device and the built-in model.",
    "step_timestamp_seconds": "When the newest step ended, Unix time: alert when it stands still.",
    "checkpoint_timestamp_seconds": "When its newest checkpoint was written, Unix time: alert when "
    "it is too long ago.",
    "exchange_bytes": "Bytes of gradients that the mean rank sent in the newest step.",
    "high_precision_layers": "Linears that computed in BF16 in the newest step.",
    "headroom_octaves": "Least headroom of a tensor in FP8 in the newest step, in octaves.",
    "saturated_ratio": "Largest share of a tensor's values clamped in the newest step.",
    "underflow_ratio": "Largest share of a tensor's values flushed to zero in the newest step.",
}
"""Of each job, as ``octavo_job_<name>``."""
COUNTERS = {
    "incidents": "Troubles seen in the job's life, by kind.",
    "actions": "Decisions of the recovery policy and of people in the job's life, by kind.",
}
"""Of each job and kind, as ``octavo_job_<name>_total``."""
TOTALS = {
    "steps_lost": "Steps given up by rollbacks, restarts, pauses and failures in the job's life.",
    "recovering_seconds": "Seconds from troubles to the first steps after them, in its life.",
}
"""Of each job, as ``octavo_job_<name>_total``."""


def _gauge(name: str, told: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"octavo_job_{name}", told, labels=["job", "name"])


def _counter(name: str, told: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"octavo_job_{name}", told, labels=["job", "name", "kind"])


def _total(name: str, told: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"octavo_job_{name}", told, labels=["job", "name"])


def _values(job: JobNumbers) -> Iterator[tuple[str, float]]:
    yield "steps_planned", job.steps_planned
    yield "attempt", job.attempt
    yield "nodes", job.nodes
    if job.submitted_at is not None:
        yield "submitted_timestamp_seconds", job.submitted_at
    if job.started_at is not None:
        yield "started_timestamp_seconds", job.started_at
    if job.checkpoint_at is not None:
        yield "checkpoint_timestamp_seconds", job.checkpoint_at
    record = job.newest
    recorded = 0 if record is None else record.step + 1
    done = recorded if job.steps_done is None else job.steps_done
    yield "step", done
    if record is None:
        return
    if done >= recorded:
        # Of a step that was given up they say nothing.
        yield "loss", record.loss
        yield "grad_norm", record.grad_norm
    yield "learning_rate", record.lr
    yield "step_seconds", record.step_time_s
    if record.step_time_s > 0:
        yield "tokens_per_second", record.tokens / record.step_time_s
    if (mfu := mfu_pct(record, job.peak_tokens_per_s)) is not None:
        yield "mfu_ratio", mfu / 100
    yield "step_timestamp_seconds", record.time
    if record.comm.get("bytes"):
        yield "exchange_bytes", record.comm["bytes"]
    yield "high_precision_layers", len(record.high_precision_layers)
    columns = TensorColumns.of(record.tensors)
    in_fp8 = ~are_of_layers(columns.names, record.high_precision_layers)
    if not in_fp8.any():
        return
    # An amax of zero has all the room there is, which is no number to draw.
    if (least := float(headrooms(columns, job.fp8_format)[in_fp8].min())) < math.inf:
        yield "headroom_octaves", least
    yield "saturated_ratio", float(np.fmax.reduce(columns.saturated_pct[in_fp8])) / 100
    yield "underflow_ratio", float(np.fmax.reduce(columns.underflow_pct[in_fp8])) / 100
