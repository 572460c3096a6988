"""What to change of a job that doesn't fit: the fewest changes first, the fastest of those.

Where up to three changes don't do, all degrees are chosen anew, and what differs is told.

Promises: pure; what is offered fits by the same estimate and passes ``spec_checks``; nothing is
offered that changes what is learned: model, batch, precision and steps stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product

from orchestrator.planning.estimate import Estimate, Hardware, estimate
from orchestrator.planning.search import accepted, degrees_of, divisors, search, varied
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.job import JobSpec

MOST_CHANGES = 3
_OFFERED = 3

Step = Callable[[JobSpec], JobSpec | None]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes after which a job fits."""

    changes: tuple[str, ...]
    """Each as it is written in a job file, with dots."""
    estimate: Estimate

    def __str__(self) -> str:
        *others, last = self.changes
        return f"{', '.join(others)} and {last}" if others else last


def remedies(spec: JobSpec, hardware: Hardware) -> list[Remedy]:
    """Up to three, best first; empty where nothing that is tried helps."""
    kinds = [list(kind) for kind in _kinds(spec)]
    for count in range(1, MOST_CHANGES + 1):
        found: list[Remedy] = []
        for chosen in combinations(kinds, count):
            for steps in product(*chosen):
                changed: JobSpec | None = spec
                for _, step in steps:
                    changed = step(changed) if changed is not None else None
                if changed is None:
                    continue
                foretold = estimate(changed, hardware)
                if foretold.fits and accepted(changed):
                    found.append(Remedy(tuple(words for words, _ in steps), foretold))
        if found:
            return sorted(found, key=lambda r: (r.estimate.step.total, r.changes))[:_OFFERED]
    return list(_anew(spec, hardware))


def _anew(spec: JobSpec, hardware: Hardware) -> Iterator[Remedy]:
    """Where a few changes don't do: all degrees as ``parallelism: auto`` would choose them."""
    alone: tuple[str, Step] = ("", lambda same: same)
    for words, change in (alone, *snapshot_changes(spec), *node_changes(spec)):
        changed = change(spec)
        best = search(changed, hardware, limit=1)[0] if changed is not None else []
        if best and best[0].estimate.fits:
            before, after = asdict(degrees_of(spec)), asdict(best[0].degrees)
            told = [f"{_KEYS[k]}: {v}" for k, v in after.items() if v != before[k]]
            yield Remedy((*told, *[words] * bool(words)), best[0].estimate)
            return


_KEYS = {
    "tensor": "parallelism.tensor",
    "pipeline": "parallelism.pipeline",
    "zero_stage": "parallelism.zero_stage",
    "micro": "training.train_micro_batch_size_per_gpu",
    "recompute": "training.recompute",
}


def _kinds(spec: JobSpec) -> Iterator[Iterator[tuple[str, Step]]]:
    """Kinds of changes, the least first; of one kind a remedy has one."""
    yield snapshot_changes(spec)
    yield _recompute(spec)
    yield _micro_batch(spec)
    yield _zero_stage(spec)
    yield _feedback(spec)
    yield _degree(spec, "tensor", slots_per_node(spec))
    yield _degree(spec, "pipeline", spec.model.num_layers)
    yield node_changes(spec)


def snapshot_changes(spec: JobSpec) -> Iterator[tuple[str, Step]]:
    """Fewer copies, as long as a certified one is still kept."""
    kept = spec.snapshots
    fewest = max(2, -(-kept.certify_after // kept.every) + 1)
    updates: list[dict[str, int]] = [{"keep": n} for n in range(kept.keep - 1, fewest - 1, -1)]
    if kept.replicas:
        updates.append({"replicas": 0})
        if fewest < kept.keep:
            updates.append({"keep": fewest, "replicas": 0})
    for update in updates:
        words = " and ".join(f"snapshots.{key}: {value}" for key, value in update.items())
        yield words, _section("snapshots", update)


def _recompute(spec: JobSpec) -> Iterator[tuple[str, Step]]:
    if spec.training.recompute == "none":
        yield "training.recompute: full", _section("training", {"recompute": "full"})


def _micro_batch(spec: JobSpec) -> Iterator[tuple[str, Step]]:
    mine = degrees_of(spec).micro
    for micro in divisors(mine)[:-1][::-1]:

        def step(before: JobSpec, micro: int = micro) -> JobSpec | None:
            return varied(before, replace(degrees_of(before), micro=micro))

        yield f"training.train_micro_batch_size_per_gpu: {micro}", step


def _zero_stage(spec: JobSpec) -> Iterator[tuple[str, Step]]:
    for stage in (1, 2):
        if stage > spec.parallelism.zero_stage and (spec.parallelism.data or 1) > 1:
            yield f"parallelism.zero_stage: {stage}", _section("parallelism", {"zero_stage": stage})


def _feedback(spec: JobSpec) -> Iterator[tuple[str, Step]]:
    if spec.gradient_exchange.error_feedback:
        off = {"error_feedback": False}
        yield "gradient_exchange.error_feedback: false", _section("gradient_exchange", off)


def _degree(spec: JobSpec, name: str, most: int) -> Iterator[tuple[str, Step]]:
    value = 2 * getattr(spec.parallelism, name)
    while value <= most:

        def step(before: JobSpec, value: int = value) -> JobSpec | None:
            return _shared(before, name, value)

        yield f"parallelism.{name}: {value}", step
        value *= 2


def node_changes(spec: JobSpec) -> Iterator[tuple[str, Step]]:
    """More nodes."""
    for times in (2, 4, 8):

        def step(before: JobSpec, times: int = times) -> JobSpec | None:
            return _shared(before.model_copy(update={"num_nodes": times * before.num_nodes}))

        yield f"num_nodes: {times * spec.num_nodes}", step


def _shared(spec: JobSpec, name: str = "", value: int = 0) -> JobSpec | None:
    """With another degree, in the largest micro-batch so far that shares the batch."""
    wanted = degrees_of(spec)
    if name == "tensor":
        wanted = replace(wanted, tensor=value)
    elif name == "pipeline":
        wanted = replace(wanted, pipeline=value)
    for micro in divisors(wanted.micro)[::-1]:
        found = varied(spec, replace(wanted, micro=micro))
        if found is not None:
            return found
    return None


def _section(name: str, update: Mapping[str, object]) -> Step:
    def step(spec: JobSpec) -> JobSpec:
        return spec.model_copy(update={name: getattr(spec, name).model_copy(update=update)})

    return step
