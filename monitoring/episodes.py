"""What happened to a job, as a story: each trouble with its answer, each stretch in BF16.

Promises: pure; made of stored rows, for the report and the terminal alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monitoring.job_view import JobView, Row, landing
from monitoring.records import StepRecord

HEADLINES = {
    "none": "Watched",
    "skip_step": "Skipped the step",
    "rollback": "Rolled back{where}",
    "layer_fallback": "Rolled back{where}, layers to BF16",
    "exchange_chosen": "Gradient exchange chosen",
    "early_fallback": "Layers to BF16",
    "exchange_bf16": "Gradient exchange to BF16",
    "exchange_fp8": "Gradient exchange back to FP8",
    "return_to_fp8": "Layers back to FP8",
    "whole_bf16": "Rolled back{where}, whole model to BF16",
    "accept": "Went on at the new level",
    "lower_lr": "Rolled back{where}, learning rate lowered",
    "restart": "Restarted the ranks{where}",
    "pause": "Paused for a person",
    "fail": "Gave up",
    "precision": "Layers moved",
    "exchange_auto": "Gradient exchange to be measured",
    "resumed": "Began with another job's state",
}

"""What an action did; ``{where}`` is `` to step N`` or nothing."""

TROUBLES = {
    "nonfinite": "non-finite gradient",
    "loss_spike": "loss spike",
    "slow_divergence": "slow divergence",
    "grad_norm_spike": "gradient norm spike",
    "amax_saturation": "FP8 saturation",
    "amax_surge": "amax surge",
    "projected_overflow": "projected FP8 overflow",
    "underflow": "FP8 underflow",
    "frozen_scale": "frozen FP8 scale",
    "exchange_error": "coarse gradient exchange",
    "replica_disagreement": "replicas disagree",
    "rank_died": "rank died",
    "rank_hung": "rank hung",
    "slow_rank": "slow rank",
    "supervisor_lost": "supervisor lost",
    "preflight_failed": "preflight failed",
}


@dataclass(frozen=True, slots=True)
class Episode:
    """One trouble with what was done about it, or one decision without a trouble."""

    number: int
    """From 1."""
    step: int
    time: float
    incidents: tuple[Row, ...]
    action: Row | None
    to_step: int | None = None
    """Step that was gone back to, once that is known."""

    @property
    def trouble(self) -> str:
        """What was seen, as ``FP8 saturation and loss spike``."""
        words = [TROUBLES.get(i["kind"], str(i["kind"])) for i in self.incidents]
        return " and ".join(dict.fromkeys(words))

    @property
    def answer(self) -> str:
        """What was done, in a few words."""
        if self.action is None:
            return "Seen"
        kind = str(self.action["kind"])
        where = "" if self.to_step is None else f" to step {self.to_step}"
        done = HEADLINES[kind].format(where=where) if kind in HEADLINES else kind
        asked = self.action.get("asked")
        return f"{done}, as {asked['by']} asked" if asked else done


def _to_step(view: JobView, action: Row | None) -> int | None:
    if action is None:
        return None
    found = landing(view, action)
    return found.step if found else action.get("to_step")


def _key(incident: Row) -> tuple[object, ...]:
    return tuple(incident.get(k) for k in ("kind", "attempt", "timeline", "step"))


def episodes(view: JobView) -> list[Episode]:
    """All of them, oldest first; an incident that no action names stands by its step."""
    answered: set[tuple[object, ...]] = set()
    found: list[tuple[float, int, tuple[Row, ...], Row | None]] = []
    for action in view.actions:
        incidents = tuple(action.get("incidents", ()))
        answered.update(_key(i) for i in incidents)
        found.append((float(action["time"]), int(action["step"]), incidents, action))
    alone: dict[tuple[object, ...], list[Row]] = {}
    for incident in view.incidents:
        if _key(incident) not in answered:
            place = (incident.get("attempt"), incident.get("timeline"), incident["step"])
            alone.setdefault(place, []).append(incident)
    for group in alone.values():
        found.append((float(group[0]["time"]), int(group[0]["step"]), tuple(group), None))
    found.sort(key=lambda entry: entry[0])
    return [
        Episode(
            i, min([s, *(int(r["step"]) for r in rows)]), time, rows, action, _to_step(view, action)
        )
        for i, (time, s, rows, action) in enumerate(found, 1)
    ]


def bf16_stretches(kept: Sequence[StepRecord]) -> dict[str, list[tuple[int, int]]]:
    """Layer → [first step, step after the last) in BF16, over the kept records."""
    stretches: dict[str, list[tuple[int, int]]] = {}
    for record in kept:
        for layer in record.high_precision_layers:
            own = stretches.setdefault(layer, [])
            if own and own[-1][1] == record.step:
                own[-1] = (own[-1][0], record.step + 1)
            else:
                own.append((record.step, record.step + 1))
    return stretches
