"""One attempt's plan: who is which rank, where state comes from, how long things may take.

Pure: values in, values out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launch.commands import Assignment, RestorePoint
from launch.config import RunConfig
from launch.rank_group import Seat
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import ResumeState, keeper_actor
from orchestrator.recovery.job_facts import JobFacts
from orchestrator.spec.config import RecoveryConfig

LEAST_STEP_TIMEOUT_S = 60.0
STEP_TIMEOUT_MEDIANS = 20.0


def assignments(
    resume: ResumeState,
    facts: JobFacts,
    restore: Sequence[RestorePoint],
    master: tuple[str, int],
) -> list[Assignment]:
    """One assignment a rank, in order of ranks; ranks fill the nodes in their order.

    ``restore``: where they may start from, best first; () for the seed.

    With rank = (pipe * data + d) * tensor + t, neighbours in tensor share a node, and
    pipeline stages are cut across nodes.
    """
    spec = resume.spec
    run = RunConfig.model_construct(**{k: getattr(spec, k) for k in RunConfig.model_fields})
    world = world_size(resume)
    # Every layer that an action ever moved: the state restored may know it otherwise.
    moved = dict.fromkeys(name for action in facts.actions for name in action.precision)
    precision = {name: facts.precision.get(name, spec.precision) for name in moved}
    plan: list[Assignment] = []
    for node in resume.nodes:
        for local_rank in range(node.slots):
            plan.append(
                Assignment(
                    job=resume.job,
                    attempt=facts.attempt,
                    timeline=facts.timeline,
                    rank=len(plan),
                    world_size=world,
                    local_rank=local_rank,
                    local_size=node.slots,
                    master_addr=master[0],
                    master_port=master[1],
                    job_dir=resume.job_dir,
                    run=run,
                    restore=restore[0] if restore else None,
                    fallbacks=tuple(restore[1:]),
                    ledger=facts.ledger,
                    precision=precision,
                    lr_scale=facts.lr_scale,
                    fired_drills=tuple(sorted(facts.fired_drills)),
                    exchange=facts.exchange,
                    envs=dict(spec.envs),
                )
            )
    return plan


def seats(resume: ResumeState) -> list[Seat]:
    """The nodes that have ranks, as the group of ranks sees them."""
    return seats_of(resume.job, resume.nodes)


def seats_of(job: str, nodes: Sequence[NodeSlot]) -> list[Seat]:
    """Some nodes of a job, as the group of ranks sees them."""
    return [
        Seat(node.node_id, node.node_ip, node.slots, keeper_actor(job, node.bundle))
        for node in nodes
    ]


def world_size(resume: ResumeState) -> int:
    """Ranks of the job."""
    return sum(node.slots for node in resume.nodes)


def step_timeout_s(policy: RecoveryConfig, step_times: Sequence[float]) -> float:
    """Seconds without a new step after which the ranks count as hung."""
    if policy.step_timeout_s is not None:
        return policy.step_timeout_s
    if not step_times:
        return LEAST_STEP_TIMEOUT_S
    return max(LEAST_STEP_TIMEOUT_S, STEP_TIMEOUT_MEDIANS * statistics.median(step_times))


def ranks_told(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
