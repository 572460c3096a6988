"""Configuration of the control plane: a job's resources, recovery, preflight and notifications,
and when a controller quarantines nodes.

Promises: frozen values, unknown keys refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from orchestrator.planning.devices import device_named, network_named


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _a_device(name: str) -> str:
    return device_named(name).name


def _a_network(name: str) -> str:
    return network_named(name).name


class ResourcesConfig(_Section):
    """What the job asks of the cluster."""

    priority: int = Field(0, ge=-100, le=100)
    """Jobs of higher priority are admitted first, and in place of preemptible ones of lower."""
    preemptible: bool = True
    """May be put back into the queue, after a checkpoint, for a job of higher priority: it loses
    no step, and nothing has a higher priority unless somebody says so."""
    spares: int = Field(0, ge=0, le=64)
    """Nodes beyond ``num_nodes`` whose workers stand ready: ranks of a lost node move there."""
    min_nodes: int | None = Field(None, ge=1)
    """With fewer nodes than ``num_nodes``, down to these, the job goes on with fewer replicas from
    its newest checkpoint, and with all of them again when nodes are there; unset: it waits."""
    standby: bool = True
    """Keep one imported, idle worker a rank for restarts."""
    device: Annotated[str, AfterValidator(_a_device)] | None = None
    """What a rank computes on, for `octavo plan` and ``parallelism: auto`` to reckon with: h100, …
    (orchestrator.planning.devices); unset: h100 on GPUs, cpu without."""
    network: Annotated[str, AfterValidator(_a_network)] | None = None
    """What joins the nodes, for the same: ib400, …; unset: ib400 on GPUs, eth10 without."""


LEAST_INIT_TIMEOUT_S = 5.0
LEAST_STEP_TIMEOUT_S = 1.0
LONGEST_TIMEOUT_S = 7 * 86400.0


def _a_start(seconds: float) -> float:
    return _within(seconds, LEAST_INIT_TIMEOUT_S, "the imports of a rank alone take as long")


def _a_step(seconds: float) -> float:
    why = "a step's report takes up to a quarter of one, and every late one costs a restart"
    return _within(seconds, LEAST_STEP_TIMEOUT_S, why)


def _within(seconds: float, least: float, why: str) -> float:
    if not seconds >= least:
        raise ValueError(f"must be {least:g} or more, in seconds: {why}")
    if seconds > LONGEST_TIMEOUT_S:
        raise ValueError(
            f"must be {LONGEST_TIMEOUT_S:.0f} or less, in seconds: a week of silence is a hang"
        )
    return seconds


class RecoveryConfig(_Section):
    """Budgets of the recovery ladder, and restarts."""

    max_restarts: int = Field(10, ge=0)
    """Restarts after a lost rank, within ``restart_window_steps``."""
    restart_window_steps: int = Field(1000, ge=1)
    """Steps over which ``max_restarts`` counts: on a large cluster machines fail every day, and
    a long job would have spent any budget for life."""
    max_attempts_without_progress: int = Field(3, ge=1)
    """Attempts in a row without a new step after which the job ends instead of looping; those that
    preflight ended count too, and charge no restart."""
    budget_window_steps: int = Field(2000, ge=1)
    """Newest steps in which the budgets count what was done, but for ``max_lr_cuts`` and
    ``max_exchange_fallbacks``, which are for the job's life: of a long job's bad batches each is a
    trouble of its own."""
    max_skips: int = Field(20, ge=0)
    """Non-finite steps whose update may be left out."""
    max_consecutive_skips: int = Field(3, ge=1)
    """Left-out updates in a row after which the state is suspected, not the batch."""
    max_rollbacks: int = Field(10, ge=0)
    """Rollbacks that only skip batches."""
    max_consecutive_rollbacks: int = Field(3, ge=1)
    """Such rollbacks in a row, each within ``horizon`` of the one before, after which the state is
    suspected, not the batches. With 2 and 4 batches more than were bad, three reach over 9."""
    max_whole_fallbacks: int = Field(2, ge=0)
    """Times that all layers may be moved to BF16."""
    max_accepted_leaps: int = Field(2, ge=0)
    """Leaps of the loss that may be taken for a change of the data, after other batches and BF16
    led to the same; beyond it a person is called. 0: never, the learning rate is lowered."""
    max_layer_fallbacks: int = Field(10, ge=0)
    """Times that suspect layers are moved to BF16, with a rollback or before one is needed."""
    max_exchange_fallbacks: int = Field(2, ge=0)
    """Times that the gradient exchange may fall back to BF16; after the last it stays there."""
    max_suspects: int = Field(4, ge=1)
    """Layers moved at most by one action."""
    lr_factor: float = Field(0.5, gt=0, lt=1)
    """Factor of the rung that lowers the learning rate."""
    max_lr_cuts: int = Field(3, ge=0)
    """Times that the learning rate may be lowered."""
    batch_horizon: int = Field(25, ge=1)
    """The same for leaps of loss or gradients, which a bad batch explains: once training has come
    so far beyond a skipped one, the next is another."""
    horizon: int = Field(200, ge=1)
    """Steps within which an incident counts as the same trouble recurring."""
    calm_steps: int = Field(100, ge=1)
    """Healthy steps after which layers, and the gradient exchange, return to FP8."""
    init_timeout_s: Annotated[float, AfterValidator(_a_start)] = 300.0
    """Seconds an attempt may take from its start to its first step."""
    step_timeout_s: Annotated[float, AfterValidator(_a_step)] | None = None
    """Seconds a step may take; unset: 20 times the job's own median, at least 60."""
    replace_slow_nodes: bool = False
    """Whether a node whose ranks are slow (``detection.slow_rank``) is replaced by a restart from
    the newest snapshot; it is always told."""
    on_exhausted: Literal["pause", "fail"] = "pause"
    """What to do when the budgets are spent."""
    no_other_node: Literal["continue", "wait"] = "continue"
    """Where a node is quarantined and no other is free: go on there, still watched, or wait. A
    corrupted replica is mended by the restart anyway, and most bit flips don't come back; the
    second one within ``horizon`` is for a person."""


class PreflightConfig(_Section):
    """Checks of a node before a job's ranks run on it for the first time."""

    enabled: bool = True
    timeout_s: float = Field(20.0, gt=0)
    """Seconds that nodes may take to answer; healthy ones take tenths of one."""
    max_clock_skew_s: float = Field(5.0, gt=0)
    """Seconds that a node's clock may be off the controller's."""
    min_bandwidth_mbit_s: float | None = Field(None, gt=0)
    """Of the collective of any two nodes; unset: what is measured is told, and any will do."""


class QuarantineConfig(_Section):
    """When a controller leaves a node out, and for how long; of its home, not of a job."""

    ranks_lost: int = Field(3, ge=1)
    """Attempts that ended because ranks on a node died or hung, within ``window_s``, after which
    it is left out. One or two happen to good nodes; schedulers drain at three."""
    window_s: float = Field(3600.0, gt=0)
    ranks_lost_s: float = Field(3600.0, gt=0)
    """Seconds for lost ranks, doubled each time the node comes back to it."""
    preflight_s: float = Field(900.0, gt=0)
    """Seconds for a machine that failed preflight: its next try is checked anyway."""
    unfit_s: float = Field(120.0, gt=0)
    """Seconds for one that can't run this job now, as for want of disk."""
    unfit_longest_s: float = Field(600.0, gt=0)
    """The most of them: what it lacks may be back any time, and another look takes a second."""
    corruption_s: float = Field(86400.0, gt=0)
    """Seconds for parameters that were outvoted: a day, for a person to test the machine."""
    slow_s: float = Field(3600.0, gt=0)
    """Seconds for a node whose ranks were slow, where the job asked for another one."""
    rehearsed_s: float = Field(60.0, gt=0)
    """Seconds for what a drill did: the node is sound."""
    longest_s: float = Field(7 * 86400.0, gt=0)


NotifiedState = Literal["paused", "failed", "succeeded", "cancelled"]

_SECRET_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com", ".webhook.office.com")
"""Services whose webhook URLs are secrets in themselves."""
_SECRET_PARAMETER = re.compile(r"token|key|secret|sig|password|auth", re.I)
_ELSEWHERE = "put the URL into the controller's environment and name the variable: webhook_env"


def _webhook(url: str) -> str:
    """The URL, if it is one that may be stored and shown in clear."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 — raises for one that is no number
    except ValueError:
        raise ValueError("is no URL, which is as https://example.com/octavo") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL that begins with https:// or http://")
    if re.search(r"[\s\x00-\x1f]", url):
        raise ValueError("has a space or control character in it")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"holds a password, and specs are stored and shown in clear: {_ELSEWHERE}")
    hidden = any(_SECRET_PARAMETER.search(name) for name, _ in parse_qsl(parts.query))
    if hidden or parts.hostname.endswith(_SECRET_HOSTS):
        raise ValueError(f"is a secret, and specs are stored and shown in clear: {_ELSEWHERE}")
    return url


class NotificationsConfig(_Section):
    """Whom to tell when a job stops: a webhook, besides W&B's alerts."""

    webhook: Annotated[str, AfterValidator(_webhook)] | None = None
    """URL that JSON is posted to; no secret, it is stored and shown in clear."""
    webhook_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Variable of the controller's environment that holds the URL instead."""
    states: tuple[NotifiedState, ...] = ("paused", "failed")
    """States that are told."""

    @model_validator(mode="after")
    def _one_place(self) -> NotificationsConfig:
        if self.webhook is not None and self.webhook_env is not None:
            raise ValueError("has both webhook and webhook_env: keep one of the two")
        return self

    def wanted(self, state: str) -> bool:
        """Whether somebody is to be told of ``state``."""
        told = self.webhook is not None or self.webhook_env is not None
        return told and state in self.states
