"""The faults, as data: what is done to a job in mid-run, and what must hold besides.

Every row trains the same job to its end; its losses are compared with an undisturbed run's to
the bit, or within a tolerance where it goes on on other degrees. A new fault is a new ``Row``,
its verb in ``acts``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hosts.faults.acts import (
    Act,
    Check,
    back_to_before,
    budget_spent,
    cancel_in_recovery,
    cut,
    damaged,
    fewer_replicas,
    fill_disk,
    fill_queue,
    flip_byte,
    flip_replica,
    freeze_node,
    keepers_then_rank,
    kill_all,
    kill_controller,
    kill_gcs,
    kill_head,
    kill_in_checkpoint,
    kill_in_recovery,
    kill_node,
    kill_supervisor,
    leave_be,
    lock_store,
    nothing,
    one_attempt,
    out_of_memory,
    pause_when_short,
    rank_and_node,
    shaped,
    signalled,
    take_manifest,
    truncate,
    two_at_once,
    within_an_interval,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One fault."""

    name: str
    told: str
    """What is done, for the table."""
    act: Act
    prepare: Act = leave_be
    """What comes before, as soon as the job is submitted."""
    at: int = 25
    """Step after which it is done."""
    deadline_s: float = 240.0
    """Seconds from the fault to the job's end, a hang beyond."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the job, by section."""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """What ``Cluster`` is to be made of, where it isn't three plain hosts."""
    tolerance: float = 0.0
    """Of a loss against the undisturbed run's; 0: equal to the bit."""
    check: Check = nothing
    """What is wrong besides, a sentence each."""
    repeat: int = 3
    aim_s: float | None = None
    """Longest outage that is aimed at, on a machine that has nothing else to do."""


ALONE: dict[str, Any] = {"resources": {"spares": 0, "standby": False}}
"""Nobody stands ready: where nothing should restart, and where what it restarts from is shown
rather than how soon."""

NO_RANKS_ON_THE_HEAD: dict[str, Any] = {"slots": (0, 2, 2)}
"""Two hosts that train, so that there is none to take a lost one's place."""
HEAD_IN_REDIS = NO_RANKS_ON_THE_HEAD | {"redis": True}
CONTROLLER_ELSEWHERE = HEAD_IN_REDIS | {"controller": 1}

LONG = ALONE | {"training": {"steps": 240}}
"""Still at work when a head is back."""

STANDING_READY: dict[str, Any] = {"training": {"steps": 300}}
"""Long enough for the idle workers, whose imports give way to training on the same cores."""

IN_MEMORY: dict[str, Any] = ALONE | {"checkpoint": {"every": 1000}}
"""No checkpoint but the one that a job's end makes: what outlives ranks is in keepers alone."""

ONE_SLOT: dict[str, Any] = {
    "slots_per_node": 1,
    "parallelism": {"data": 1},
    "training": {"train_batch_size": 4, "steps": 200},
    "resources": {"spares": 0, "standby": False},
}
"""A job of which two run on three hosts of two slots."""

ROWS = (
    Row(
        "rank_killed",
        "rank SIGKILL",
        signalled(1, signal.SIGKILL),
        changes=STANDING_READY,
        repeat=10,
        aim_s=1.5,
    ),
    Row(
        "node_killed",
        "node killed",
        kill_node,
        changes=STANDING_READY,
        repeat=10,
        aim_s=4.0,
    ),
    Row(
        "rank_stopped",
        "rank SIGSTOP (step_timeout_s: 5)",
        signalled(2, signal.SIGSTOP),
        changes={"recovery": {"step_timeout_s": 5.0}},
    ),
    Row("rank_segfault", "rank segfault", signalled(1, signal.SIGSEGV), repeat=10),
    Row("rank_memory", "rank out of memory", out_of_memory, repeat=10),
    Row("node_frozen", "node frozen", freeze_node),
    Row("link_5s", "link cut 5 s", cut(5.0), check=one_attempt, changes=ALONE),
    Row("link_60s", "link cut 60 s", cut(60.0), deadline_s=300),
    Row("link_for_good", "link cut for good", cut(None)),
    Row(
        "loss",
        "5 % packet loss for 20 s",
        shaped(20.0, loss=0.05),
        check=one_attempt,
        changes=ALONE,
    ),
    Row(
        "delay",
        "200 ms delay for 20 s",
        shaped(20.0, delay_s=0.2),
        check=one_attempt,
        changes=ALONE,
    ),
    Row(
        "disk_full",
        "disk full while checkpointing",
        fill_disk,
        check=one_attempt,
        changes=ALONE,
    ),
    Row(
        "truncated",
        "newest checkpoint truncated",
        damaged(truncate),
        check=back_to_before,
        changes=ALONE,
    ),
    Row(
        "flipped",
        "newest checkpoint: one bit",
        damaged(flip_byte),
        check=back_to_before,
        changes=ALONE,
    ),
    Row(
        "no_manifest",
        "newest checkpoint: no manifest",
        damaged(take_manifest),
        check=back_to_before,
    ),
    Row(
        "replica",
        "replica flipped, then the node lost",
        flip_replica,
        check=back_to_before,
        changes=ALONE,
    ),
    Row(
        "controller",
        "controller SIGKILL, 100 queued, 2 running",
        kill_controller,
        prepare=fill_queue,
        changes=ONE_SLOT,
        deadline_s=300,
        check=one_attempt,
        repeat=10,
    ),
    Row("supervisor", "supervisor SIGKILL", kill_supervisor, repeat=10),
    Row("rank_and_supervisor", "two at once: rank, supervisor", two_at_once),
    Row("rank_and_node", "two at once: rank, node", rank_and_node),
    Row("in_recovery", "a rank, another in the recovery", kill_in_recovery),
    Row("in_checkpoint", "a rank during a checkpoint", kill_in_checkpoint),
    Row(
        "budget_spent",
        "a rank, no restart left: paused, resumed (no checkpoint before)",
        budget_spent,
        changes=IN_MEMORY | {"recovery": {"max_restarts": 0}},
        check=within_an_interval,
    ),
    Row(
        "cancelled_in_recovery",
        "a rank, cancelled while it recovers, resumed (no checkpoint before)",
        cancel_in_recovery,
        changes=IN_MEMORY,
        check=within_an_interval,
    ),
    Row(
        "paused_when_short",
        "node killed, no other there, paused, resumed (no checkpoint before)",
        pause_when_short,
        cluster=NO_RANKS_ON_THE_HEAD,
        changes=IN_MEMORY,
        check=within_an_interval,
        deadline_s=300,
    ),
    Row(
        "keepers_then_rank",
        "the keepers of snapshots, and a rank later (no checkpoint before)",
        keepers_then_rank,
        changes=IN_MEMORY | {"training": {"steps": 240}},
        check=within_an_interval,
    ),
    Row(
        "wandb",
        "W&B unreachable",
        leave_be,
        changes=ALONE | {"wandb": {"mode": "online"}},
        check=one_attempt,
    ),
    Row(
        "fewer_nodes",
        "node killed, no other there (min_nodes: 1)",
        kill_node,
        cluster=NO_RANKS_ON_THE_HEAD,
        changes={"resources": {"spares": 0, "min_nodes": 1}},
        # One replica exchanges nothing, where two round each other's gradients to FP8.
        tolerance=0.005,
        check=fewer_replicas,
    ),
    Row(
        "gcs",
        "Ray's GCS SIGKILL, its tables in Redis",
        kill_gcs,
        cluster=HEAD_IN_REDIS,
        changes=ALONE,
        check=one_attempt,
    ),
    Row(
        "head",
        "Ray's head killed and started again, its tables in Redis",
        kill_head,
        cluster=CONTROLLER_ELSEWHERE,
        changes=LONG,
        check=one_attempt,
        deadline_s=300,
    ),
    Row(
        "head_and_controller",
        "Ray's head and the controller killed and started again, tables in Redis",
        kill_head,
        cluster=HEAD_IN_REDIS,
        changes={"resources": {"spares": 0}},
        deadline_s=300,
    ),
    Row("cluster", "head and all nodes killed, started again", kill_all),
    Row(
        "cluster_in_redis",
        "head and all nodes killed, started again on the same tables in Redis",
        kill_all,
        cluster=HEAD_IN_REDIS,
        deadline_s=300,
    ),
    Row(
        "store_locked",
        "store locked for 10 s",
        lock_store,
        check=one_attempt,
        changes=ALONE,
    ),
)
