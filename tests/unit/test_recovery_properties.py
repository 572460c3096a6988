"""What the recovery policy keeps over any run of incidents, driven as a state machine."""

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from monitoring.records import Incident, IncidentKind, Suspect
from orchestrator.recovery.policy import (
    LADDER,
    Action,
    History,
    Restorable,
    decide,
    exchange_to_fp8,
    return_to_fp8,
)
from orchestrator.recovery.restart_budget import before_ranks
from orchestrator.spec.config import RecoveryConfig
from parallel.config import ExchangeDtype, Precision

LAYERS = tuple(f"layers.{i}.mlp.down" for i in range(3))
KINDS: list[IncidentKind] = [
    "nonfinite",
    "loss_spike",
    "grad_norm_spike",
    "amax_saturation",
    "slow_divergence",
    "amax_surge",
    "projected_overflow",
    "underflow",
    "frozen_scale",
    "exchange_error",
    "replica_disagreement",
    "rank_died",
    "rank_hung",
    "preflight_failed",
]
EARLY = {"projected_overflow", "underflow", "frozen_scale"}
BUDGETS = {
    "whole_bf16": "max_whole_fallbacks",
    "skip_step": "max_skips",
    "rollback": "max_rollbacks",
    "layer_fallback": "max_layer_fallbacks",
    "lower_lr": "max_lr_cuts",
    "accept": "max_accepted_leaps",
    "exchange_bf16": "max_exchange_fallbacks",
}


class Job(RuleBasedStateMachine):
    """A job whose steps, snapshots and precision follow the actions, as the ranks' do."""

    @initialize(
        policy=st.builds(
            RecoveryConfig,
            max_restarts=st.integers(0, 3),
            max_skips=st.integers(0, 3),
            max_consecutive_skips=st.integers(1, 3),
            max_rollbacks=st.integers(0, 3),
            max_consecutive_rollbacks=st.integers(1, 3),
            max_layer_fallbacks=st.integers(0, 3),
            max_lr_cuts=st.integers(0, 2),
            max_accepted_leaps=st.integers(0, 1),
            max_whole_fallbacks=st.integers(0, 2),
            batch_horizon=st.integers(1, 40),
            max_exchange_fallbacks=st.integers(0, 2),
            max_suspects=st.integers(1, 2),
            horizon=st.integers(1, 40),
            calm_steps=st.integers(1, 20),
        ),
        fp8=st.booleans(),
    )
    def begin(self, policy: RecoveryConfig, fp8: bool) -> None:
        self.policy = policy
        self.fp8_layers = LAYERS if fp8 else ()
        self.step = 0
        self.timeline = 0
        self.actions: list[Action] = []
        self.snapshots: list[Restorable] = []
        self.precision: dict[str, Precision] = {}
        self.ledger: list[int] = []
        self.lr_scale = 1.0
        self.exchange: ExchangeDtype = "fp8" if fp8 else "fp32"
        self.last: int | None = None
        self.over = False

    def batch_of(self, step: int) -> int:
        left = [b for b in range(step + len(self.ledger) + 1) if b not in self.ledger]
        return left[step]

    def history(self) -> History:
        return History(
            attempt=1 + restarts_of(self.actions),
            timeline=self.timeline,
            step=self.step,
            time=0.0,
            actions=tuple(self.actions),
            restorable=tuple(self.snapshots),
            precision=dict(self.precision),
            fp8_layers=self.fp8_layers,
            lr_scale=self.lr_scale,
            ledger=tuple(sorted(self.ledger)),
            batches={s: self.batch_of(s) for s in range(self.step + 1)},
            last_incident_step=self.last,
            exchange=self.exchange,
        )

    @rule(steps=st.integers(1, 25), certified=st.booleans())
    def train(self, steps: int, certified: bool) -> None:
        self.step += steps
        self.snapshots = [*self.snapshots, Restorable(self.step, self.timeline, certified)][-3:]

    @rule(
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
        back=st.integers(0, 15),
        layers=st.lists(st.sampled_from(LAYERS), unique=True),
    )
    def suffer(self, kinds: list[IncidentKind], back: int, layers: list[str]) -> None:
        if self.over:
            return
        incidents = [
            Incident(
                kind=kind,
                detector=kind,
                attempt=1,
                timeline=self.timeline,
                step=self.step,
                onset_step=max(0, self.step - (0 if kind == "nonfinite" else back)),
                time=0.0,
                message=kind,
                suspects=tuple(Suspect(name, "input", {}) for name in layers),
            )
            for kind in kinds
        ]
        before = self.history()
        action = decide(incidents, before, self.policy)
        self.check(action, before, min(i.onset_step for i in incidents))
        self.last = self.step
        self.apply(action)

    @rule()
    def calm_down(self) -> None:
        if self.over:
            return
        before = self.history()
        action = return_to_fp8(before, self.policy)
        if action.kind == "none":
            return
        for name in action.precision:
            assert self.precision[name] == "bf16"
            moves = [a.precision[name] for a in self.actions if name in a.precision]
            assert moves.count("fp8") == 0, "a layer returns once"
        self.apply(action)

    @rule()
    def calm_exchange(self) -> None:
        if self.over:
            return
        action = exchange_to_fp8(self.history(), self.policy)
        if action.kind == "none":
            return
        assert self.exchange == "bf16" and action.exchange == "fp8"
        self.apply(action)

    def check(self, action: Action, before: History, onset: int) -> None:
        # The stored form of the history decides the same: nothing is in memory.
        stored = [json.loads(json.dumps(a.to_json())) for a in before.actions]
        again = History(
            **{
                **{f: getattr(before, f) for f in History.__dataclass_fields__},
                "actions": tuple(Action.from_json(a) for a in stored),
            }
        )
        assert decide(action.incidents, again, self.policy) == action
        rungs = [rung.kind for rung in LADDER]
        last = "pause" if action.kind == "fail" else action.kind
        assert [p.rung for p in action.passed_over] == rungs[: rungs.index(last)]
        assert all(p.why for p in action.passed_over) and action.reason
        if action.kind in ("rollback", "layer_fallback", "whole_bf16", "lower_lr"):
            assert action.to_step is not None and action.to_step <= onset
            assert set(action.skip_batches) >= {
                before.batches[s] for s in range(onset, before.step + 1)
            }
            assert not set(action.skip_batches) & set(before.ledger)
            if action.in_place:
                assert action.to_step in {s.step for s in before.restorable}
        if action.exchange is not None:
            assert (before.exchange, action.exchange) == ("fp8", "bf16")
            assert action.to_step is None and not action.precision and not action.skip_batches
        kinds = {i.kind for i in action.incidents}
        if kinds == {"exchange_error"}:
            assert action.kind in ("exchange_bf16", "none"), "training itself is sound"
        elif kinds <= EARLY | {"exchange_error"}:
            assert action.kind in ("early_fallback", "none"), "the state is still good"
            assert action.to_step is None and not action.skip_batches
        if "replica_disagreement" in kinds:
            assert action.kind in ("restart", "pause", "fail") and not action.precision
            assert action.kind != "restart" or action.to_step == onset_of(action)
        running = set(before.fp8_layers) - set(before.precision)
        assert set(action.precision) <= running

    def apply(self, action: Action) -> None:
        self.actions.append(action)
        self.over = action.kind in ("pause", "fail")
        for name, precision in action.precision.items():
            if precision == "bf16":
                self.precision[name] = precision
            else:
                del self.precision[name]
        self.ledger.extend(action.skip_batches)
        self.lr_scale = action.lr_scale or self.lr_scale
        self.exchange = action.exchange or self.exchange
        if not action.in_place:
            self.snapshots = []
        if action.to_step is not None:
            self.step = action.to_step
            self.timeline += 1
            self.snapshots = [s for s in self.snapshots if s.step <= self.step]

    @invariant()
    def budgets_are_kept(self) -> None:
        if not hasattr(self, "policy"):
            return
        for kind, key in BUDGETS.items():
            assert sum(a.kind == kind for a in self.actions) <= getattr(self.policy, key)
        moved = sum(a.kind in ("layer_fallback", "early_fallback") for a in self.actions)
        assert moved <= self.policy.max_layer_fallbacks
        charged = [a for a in self.actions if not before_ranks(a.incidents)]
        assert restarts_of(charged) <= self.policy.max_restarts

    @invariant()
    def no_trouble_is_answered_the_same_way_more_often_in_a_row_than_allowed(self) -> None:
        divergence = {"nonfinite", "loss_spike", "slow_divergence", "grad_norm_spike"}
        row: list[Action] = []
        for action in getattr(self, "actions", []):
            kinds = {i.kind for i in action.incidents}
            if action.kind != "rollback" or not divergence & kinds:
                continue
            near = row and action.step - row[-1].step <= self.policy.horizon
            row = [*row, action] if near else [action]
            assert len(row) <= self.policy.max_consecutive_rollbacks
            if len(row) > 1:
                bad = {i.kind for a in row for i in a.incidents}
                assert not bad & {"nonfinite", "slow_divergence"}


def onset_of(action: Action) -> int:
    """The last step at which the replicas were the same."""
    return min(i.onset_step for i in action.incidents if i.kind == "replica_disagreement")


def restarts_of(actions: list[Action]) -> int:
    return sum(
        a.kind == "restart" or (not a.in_place and a.kind not in ("pause", "fail")) for a in actions
    )


Job.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestJob = Job.TestCase
