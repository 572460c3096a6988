"""The loop of four real ranks (PP2×DP2, FP8): rollback, restart and stop, compared bit for bit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from launch.attempt_folder import open_attempt
from launch.checkpoints import commit_checkpoint, newest_checkpoint
from launch.commands import (
    Assignment,
    Command,
    CopyFailed,
    DrillReport,
    ExchangeReport,
    Order,
    RankReport,
    RankResult,
    Report,
    RestorePoint,
    Rollback,
    RollbackReport,
    SetExchange,
    SetPrecision,
    SnapshotReport,
    Stop,
)
from launch.config import RunConfig
from launch.keeper import Keeper
from launch.mailbox import Mailbox
from monitoring.amax import decode
from monitoring.records import ReplicaComparison
from monitoring.tensor_sums import merge
from orchestrator.supervision.record_merger import merge_reports
from tests.ranks.launch_ranks import run_ranks

WORLD = 4
STEPS = 12
SURGE = {"kind": "weight_surge", "step": 6, "layer": 2, "factor": 30.0}
NAN = {"kind": "nonfinite_gradient", "step": 7, "rank": 3}

LAYOUTS: dict[str, dict[str, Any]] = {
    # With all that the gradient exchange can be asked for, and DeepSpeed's other optimizer.
    "TP2xDP2": {
        "parallelism": {"tensor": 2, "data": 2},
        "deepspeed": {"data_types": {"grad_accum_dtype": "bf16"}},
        "gradient_exchange": {
            "min_size": 1024,
            "error_feedback": True,
            "high_precision_parameters": ["embedding.weight", "layers.1.mlp.*"],
        },
    },
    "TP2xPP2": {
        "parallelism": {"tensor": 2, "pipeline": 2, "data": 1},
        "training": {
            "steps": STEPS,
            "seq_len": 32,
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "lr": 3e-3,
            "warmup_steps": 3,
        },
    },
}
"""Sections other than those of PP2xDP2."""


@dataclass(frozen=True)
class Post:
    """Post ``order`` on a rank once that rank has reported step ``after[rank]``."""

    number: int
    order: Order
    after: tuple[int, int, int, int]


@dataclass
class Seen:
    """What one rank told, in order."""

    rank: int
    result: RankResult | None = None
    reports: list[RankReport] = field(default_factory=list)
    copies: list[SnapshotReport] = field(default_factory=list)
    others: list[Report] = field(default_factory=list)
    held: dict[Any, Any] = field(default_factory=dict)

    def losses(self, timeline: int = 0) -> dict[int, bytes]:
        """Bits of the loss by step."""
        return {r.step: _bits(r.loss) for r in self.reports if r.timeline == timeline}

    def copied(self, tier: str) -> list[int]:
        return [c.step for c in self.copies if c.tier == tier]


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _number(bits: bytes) -> float:
    return float(struct.unpack("<d", bits)[0])


def _config(corpus: str, zero_stage: int, recipe: str, **more: Any) -> RunConfig:
    values = {
        "num_nodes": 1,
        "slots_per_node": WORLD,
        "parallelism": {"pipeline": 2, "data": 2, "zero_stage": zero_stage},
        "model": {"hidden_size": 64, "num_layers": 4, "num_heads": 2, "ffn_size": 96},
        "data": {"source": corpus, "shuffle_seed": 1},
        "training": {
            "steps": STEPS,
            "seq_len": 32,
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "lr": 3e-3,
            "warmup_steps": 3,
        },
        "fp8": {"recipe": recipe, **({"amax_history_len": 8} if recipe == "delayed" else {})},
        "gradient_exchange": {"min_size": 1024},
        "snapshots": {"every": 4, "keep": 3},
        "checkpoint": {"every": 0},
    }
    return RunConfig.model_validate({**values, **more})


def _body(
    rank: int,
    world_size: int,
    config: RunConfig,
    job_dir: str,
    posts: Sequence[Post],
    start: dict[str, Any],
    held: Sequence[dict[Any, Any]],
) -> Seen:
    import os

    from launch.stores import only
    from launch.training import TrainingLoop

    fields: dict[str, Any] = {
        "attempt": 1,
        "timeline": 0,
        "restore": None,
        "ledger": (),
        "precision": {},
        "lr_scale": 1.0,
        "fired_drills": (),
        **start,
    }
    assignment = Assignment(
        job="job",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_size=world_size,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        job_dir=job_dir,
        run=config,
        **fields,
    )
    mailbox = Mailbox(assignment.attempt)
    seen = Seen(rank)
    waiting = list(posts)

    def outbox(batch: Sequence[Report]) -> None:
        for report in batch:
            if isinstance(report, RankReport):
                seen.reports.append(report)
            elif isinstance(report, SnapshotReport):
                seen.copies.append(report)
            else:
                seen.others.append(report)
        while waiting and seen.reports and seen.reports[-1].step >= waiting[0].after[rank]:
            post = waiting.pop(0)
            mailbox.post(Command(assignment.attempt, post.number, post.order))

    keeper = Keeper(config.snapshots.keep)
    if held:
        for key, (payload, digest) in held[rank].items():
            keeper.put(key, payload, digest)
    seen.result = TrainingLoop(assignment, mailbox, outbox, only(keeper)).run()
    for key in keeper.keys("job"):
        stored = keeper.get(key)
        assert stored is not None
        seen.held[key] = (bytes(stored.payload), stored.digest)
    return seen


Train = Callable[..., list[Seen]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = np.random.default_rng(0).integers(97, 123, (400, 5), dtype=np.uint8)
    text = b" ".join(words[n].tobytes() for n in np.random.default_rng(1).integers(0, 400, 8000))
    path.write_bytes(text)
    return str(path)


@pytest.fixture(scope="module")
def train(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    def run(
        *posts: Post,
        zero: int = 1,
        recipe: str = "delayed",
        job_dir: Path | None = None,
        held: Sequence[dict[Any, Any]] = (),
        config: dict[str, Any] | None = None,
        **start: Any,
    ) -> list[Seen]:
        folder = str(job_dir or tmp_path_factory.mktemp("job"))
        if not Path(folder, "checkpoints").is_file():
            open_attempt(folder, start.get("attempt", 1))
        settings = _config(corpus, zero, recipe, **(config or {}))
        return run_ranks(
            _body, WORLD, settings, folder, posts, start, held, init_group=False, timeout_s=200
        )

    return run


@pytest.fixture(scope="module")
def undisturbed(train: Train) -> Callable[..., list[Seen]]:
    @cache
    def run(zero: int, recipe: str, layout: str = "") -> list[Seen]:
        return train(zero=zero, recipe=recipe, config=LAYOUTS.get(layout))

    return run


def _weight_growth(before: RankReport, after: RankReport) -> set[str]:
    """Layers with a linear whose largest weight grew more than twenty-fold."""
    amax = [
        dict(zip(r.stats_names, decode(r.stats, r.stats_names)[:, 0], strict=True))
        for r in (before, after)
    ]
    return {
        ".".join(name.split(".")[:2])
        for name in amax[0]
        if name.endswith("/weight") and amax[1][name] > 20 * amax[0][name]
    }


def _everywhere(*, step: int) -> tuple[int, int, int, int]:
    return (step, step, step, step)


def test_a_run_reports_every_step_on_every_rank_alike(undisturbed: Any) -> None:
    ranks = undisturbed(1, "delayed")
    losses = ranks[0].losses()
    assert list(losses) == list(range(STEPS))
    assert all(rank.losses() == losses for rank in ranks)
    reports = ranks[0].reports
    assert reports[-1].loss < reports[0].loss - 0.5
    assert [r.batch for r in reports] == list(range(STEPS))
    assert {r.tokens for r in reports} == {8 * 32}
    assert all(r.grad_norm > 0 and not r.skipped and not r.nonfinite_loss for r in reports)
    assert [round(r.lr, 6) for r in reports[:4]] == [0.001, 0.002, 0.003, 0.003]
    for rank in ranks:
        assert rank.result == RankResult(rank.rank, STEPS, "finished")
        assert rank.copied("ring") == rank.copied("memory") == [0, 4, 8, 12]
        for report in rank.reports:
            assert (decode(report.stats, report.stats_names)[:, 0] > 0).all()
            assert report.stats_names
            assert 0 < report.compute_s < report.step_time_s
    layers = {name.split("/")[0] for rank in ranks for name in rank.reports[0].stats_names}
    assert len(layers) == 16


def test_replicas_are_compared_every_ten_steps_and_are_the_same(undisturbed: Any) -> None:
    ranks = undisturbed(1, "delayed")
    assert [rank.reports[0].replicas for rank in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    steps = zip(*(rank.reports for rank in ranks), strict=True)
    records = [merge_reports(reports) for reports in steps]
    compared = {record.step: record.replicas for record in records if record.replicas}
    assert compared == {0: ReplicaComparison(), 10: ReplicaComparison()}


def test_statistics_are_taken_of_every_third_step_and_amax_is_of_the_steps_between_too(
    train: Train, undisturbed: Any
) -> None:
    sampled = {"recipe": "mxfp8", "statistics_every": 3, "sqnr": True}
    often, seldom = undisturbed(1, "mxfp8"), train(config={"fp8": sampled})
    assert seldom[0].losses() == often[0].losses()
    for every, third in zip(often, seldom, strict=True):
        taken = [report.step for report in third.reports if report.stats_names]
        assert taken == list(range(2, STEPS, 3))
        names = third.reports[2].stats_names
        assert names == every.reports[2].stats_names
        each = [decode(report.stats, names) for report in every.reports[:3]]
        table = decode(third.reports[2].stats, names)
        assert np.array_equal(table[:, 0], np.max(each, axis=0)[:, 0])
        assert np.array_equal(table[:, 2:6], each[-1][:, 2:6])
        quality = [t.sqnr_db or 0.0 for t in merge([(names, third.reports[2].stats)]).values()]
        assert min(quality) > 20 and max(quality) < 45


@pytest.mark.parametrize(
    ("zero", "recipe"), [(1, "delayed"), (0, "delayed"), (1, "current"), (1, "mxfp8")]
)
def test_a_rollback_replays_the_same_losses_to_the_bit(
    train: Train, undisturbed: Any, zero: int, recipe: str
) -> None:
    # Rank 0 sees it last; the others have had it for five steps and must not have acted.
    back = Post(1, Rollback(to_step=4, timeline=1), after=(7, 2, 2, 3))
    ranks = train(back, zero=zero, recipe=recipe)
    expected = undisturbed(zero, recipe)[0].losses()
    for rank in ranks:
        before, after = rank.losses(0), rank.losses(1)
        applied = max(before)
        assert applied >= 7
        assert before == {s: expected[s] for s in range(applied + 1)}
        assert after == {s: expected[s] for s in range(4, STEPS)}
        (report,) = [r for r in rank.others if isinstance(r, RollbackReport)]
        assert (report.step, report.timeline, report.attempt) == (4, 1, 1)
    assert len({max(rank.losses(0)) for rank in ranks}) == 1


@pytest.mark.parametrize("layout", list(LAYOUTS))
class TestTensorRanks:
    def test_report_the_losses_of_stages_and_replicas(self, undisturbed: Any, layout: str) -> None:
        ranks = undisturbed(1, "delayed", layout)
        losses = [r.loss for r in ranks[0].reports]
        expected = [r.loss for r in undisturbed(1, "delayed")[0].reports]
        assert losses == pytest.approx(expected, rel=0.01)
        assert all(rank.losses() == ranks[0].losses() for rank in ranks)
        assert {r.tokens for r in ranks[0].reports} == {8 * 32}
        for first, second in (ranks[:2], ranks[2:]):
            assert first.reports[0].stats_names == second.reports[0].stats_names

    def test_replay_a_rollback_and_a_restart_to_the_bit(
        self, train: Train, undisturbed: Any, layout: str
    ) -> None:
        calm = undisturbed(1, "delayed", layout)
        expected = calm[0].losses()
        back = Post(1, Rollback(to_step=4, timeline=1), after=(7, 2, 2, 3))
        drill = {**LAYOUTS[layout], "drills": [SURGE]}
        for rank in train(back, config=drill):
            before, after = rank.losses(0), rank.losses(1)
            assert before[6] != expected[6], "the drill did nothing"
            assert after == {s: expected[s] for s in range(4, STEPS)}
        point = RestorePoint(step=8, tier="memory", attempt=1, timeline=0)
        held = [rank.held for rank in calm]
        for rank in train(held=held, attempt=2, restore=point, config=LAYOUTS[layout]):
            assert rank.losses() == {s: expected[s] for s in range(8, STEPS)}


def test_a_rollback_with_skipped_batches_trains_on_what_the_ledger_leaves(train: Train) -> None:
    order = Rollback(to_step=4, timeline=1, skip_batches=(4, 6), lr_scale=0.5)
    ranks = train(Post(1, order, after=_everywhere(step=5)))
    for rank in ranks:
        batches = [r.batch for r in rank.reports if r.timeline == 1]
        assert batches == [5, 7, 8, 9, 10, 11, 12, 13]
    old = {r.step: r for r in ranks[0].reports if r.timeline == 0}
    new = {r.step: r for r in ranks[0].reports if r.timeline == 1}
    assert new[4].lr == pytest.approx(old[4].lr / 2)
    assert new[4].loss != old[4].loss


def test_layers_move_to_bf16_and_back_at_one_step_on_all_ranks(train: Train) -> None:
    layer = "layers.1.mlp.down"
    ranks = train(
        Post(1, SetPrecision({layer: "bf16"}), after=(4, 1, 3, 2)),
        Post(2, SetPrecision({layer: "fp8"}), after=(7, 5, 5, 6)),
    )
    applied = {tuple((r.step, r.command) for r in rank.reports) for rank in ranks}
    assert len(applied) == 1
    stage = [rank for rank in ranks if any(layer in n for n in rank.reports[0].stats_names)]
    assert len(stage) == 2
    for rank in stage:
        for report, following in zip(rank.reports, rank.reports[1:], strict=False):
            in_bf16 = layer in following.high_precision_layers
            assert in_bf16 == (report.command == 1)
    assert max(command for _, command in next(iter(applied))) == 2


def test_a_rollback_keeps_the_precision_in_force_and_adds_its_own(train: Train) -> None:
    first, second = "layers.0.attn.qkv", "layers.0.mlp.down"
    ranks = train(
        Post(1, SetPrecision({first: "bf16"}), after=_everywhere(step=4)),
        Post(2, Rollback(to_step=4, timeline=1, precision={second: "bf16"}), _everywhere(step=7)),
    )
    stage = [rank for rank in ranks if any(first in n for n in rank.reports[0].stats_names)]
    for rank in stage:
        replayed = [r for r in rank.reports if r.timeline == 1]
        assert replayed[0].step == 4
        assert all(set(r.high_precision_layers) == {first, second} for r in replayed)


def test_a_restart_from_the_keeper_goes_on_to_the_bit(train: Train, undisturbed: Any) -> None:
    before = undisturbed(1, "delayed")
    held = [rank.held for rank in before]
    point = RestorePoint(step=8, tier="memory", attempt=1, timeline=0)
    ranks = train(held=held, attempt=2, restore=point)
    for rank, earlier in zip(ranks, before, strict=True):
        assert rank.losses() == {s: earlier.losses()[s] for s in range(8, STEPS)}


def test_an_attempt_that_starts_at_the_last_step_writes_the_checkpoint_that_is_missing(
    train: Train, undisturbed: Any, tmp_path: Path
) -> None:
    held = [rank.held for rank in undisturbed(1, "delayed")]
    point = RestorePoint(step=STEPS, tier="memory", attempt=1, timeline=0)
    ranks = train(held=held, attempt=2, restore=point, job_dir=tmp_path)
    for rank in ranks:
        assert rank.result == RankResult(rank.rank, STEPS, "finished")
        assert rank.copied("disk") == [STEPS]
    made = commit_checkpoint(tmp_path, STEPS, 2, range(WORLD), timeline=0)
    # From there nothing is left to be written.
    open_attempt(tmp_path, 3)
    point = RestorePoint(STEPS, "disk", 2, 0, str(made.path))
    assert not any(r.copied("disk") for r in train(attempt=3, restore=point, job_dir=tmp_path))


def test_a_damaged_copy_is_refused_by_rank_step_and_tier(train: Train, undisturbed: Any) -> None:
    held = [dict(rank.held) for rank in undisturbed(1, "delayed")]
    wrong = {key: value for key, value in held[2].items() if key.step != 8}
    point = RestorePoint(step=8, tier="memory", attempt=1, timeline=0)
    with pytest.raises(AssertionError, match="rank 2: copy of step 8 in tier memory"):
        train(held=[held[0], held[1], wrong, held[3]], attempt=2, restore=point)


def test_a_stopped_run_resumes_from_its_checkpoint_to_the_bit(
    train: Train, undisturbed: Any, tmp_path: Path
) -> None:
    config = {"checkpoint": {"every": 3}}
    stop = Post(1, Stop("pause"), after=_everywhere(step=6))
    stopped = train(stop, job_dir=tmp_path, config=config)
    step = stopped[0].result.step  # type: ignore[union-attr]
    assert 7 <= step < STEPS
    for rank in stopped:
        assert rank.result == RankResult(rank.rank, step, "stopped", "pause", command=1)
        assert rank.copied("disk") == stopped[0].copied("disk")
        # A slow disk may have had no time for step 6.
        assert rank.copied("disk")[0] == 3
        assert rank.copied("disk")[-1] == step
    for at in stopped[0].copied("disk"):
        commit_checkpoint(tmp_path, at, 1, range(WORLD))
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.step == step
    point = RestorePoint(step, "disk", attempt=1, timeline=0, path=str(found.path))
    resumed = train(job_dir=tmp_path, attempt=2, restore=point, config=config)
    expected = undisturbed(1, "delayed")[0].losses()
    for rank in resumed:
        assert rank.losses() == {s: expected[s] for s in range(step, STEPS)}

    # As many ranks of other degrees: the same batches, the same state, sums in another order.
    turned = train(
        job_dir=tmp_path, attempt=3, restore=point, config={**config, **LAYOUTS["TP2xPP2"]}
    )
    for rank in turned:
        assert [r.batch for r in rank.reports] == list(range(step, STEPS))
        for report in rank.reports:
            assert report.loss == pytest.approx(_number(expected[report.step]), rel=2e-3)


def test_an_unwritable_job_folder_is_reported_and_training_goes_on(
    train: Train, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    ranks = train(job_dir=tmp_path, config={"checkpoint": {"every": 4}})
    for rank in ranks:
        assert rank.result is not None and rank.result.reason == "finished"
        assert "no checkpoint of step 12" in rank.result.detail
        failed = [r for r in rank.others if isinstance(r, CopyFailed)]
        assert [(r.tier, r.step) for r in failed] == [("disk", 4), ("disk", 8), ("disk", 12)]
        assert rank.copied("memory") == [0, 4, 8, 12]


def test_drills_fire_once_whatever_is_rolled_back(train: Train) -> None:
    back = Post(1, Rollback(to_step=4, timeline=1), after=_everywhere(step=9))
    ranks = train(back, config={"drills": [SURGE, NAN]})
    grown = [
        _weight_growth(*(r for r in rank.reports if r.timeline == 0 and r.step in (5, 6)))
        for rank in ranks
    ]
    assert grown == [set(), set(), {"layers.2"}, {"layers.2"}]
    for rank in ranks:
        fired = [(r.timeline, r.step, d) for r in rank.reports for d in r.drills]
        expected = [(0, 6, 0)] + ([(0, 7, 1)] if rank.rank == 3 else [])
        assert fired == expected
        told = [(r.step, r.drill) for r in rank.others if isinstance(r, DrillReport)]
        assert told == [(step, drill) for _, step, drill in expected]
        by_step = {r.step: r for r in rank.reports if r.timeline == 0}
        assert [s for s, r in by_step.items() if r.skipped] == [7]
        assert bool(by_step[7].nonfinite_parameters) == (rank.rank == 3)
        assert not any(r.skipped for r in rank.reports if r.timeline == 1)


def test_a_drill_that_fired_in_an_earlier_attempt_does_not_fire(train: Train) -> None:
    ranks = train(config={"drills": [SURGE, NAN]}, fired_drills=(0, 1))
    assert not any(r.drills or r.skipped for rank in ranks for r in rank.reports)


class TestExchange:
    FEEDBACK: ClassVar[dict[str, Any]] = {
        "gradient_exchange": {"min_size": 1024, "error_feedback": True}
    }

    def test_goes_to_bf16_and_back_at_one_step_on_all_ranks(self, train: Train) -> None:
        posts = [
            Post(1, SetExchange("bf16"), after=(4, 1, 3, 2)),
            Post(2, SetExchange("fp8"), after=(7, 5, 5, 6)),
        ]
        ranks = train(*posts, config=self.FEEDBACK)
        plain = train(config=self.FEEDBACK)[0].losses()
        bits = [[r.comm["wire_bits"] for r in rank.reports] for rank in ranks]
        assert all(of_rank == bits[0] for of_rank in bits)
        away = [step for step, n in enumerate(bits[0]) if n == 16]
        assert away and away == list(range(away[0], away[-1] + 1))
        assert away[0] >= 5 and 8 <= away[-1] + 1 < STEPS
        for report in ranks[0].reports:
            assert (report.comm["relative_error"] > 0) == (report.step not in away)
        losses = ranks[0].losses()
        assert all(rank.losses() == losses for rank in ranks)
        before = range(away[0] + 1)
        assert [losses[s] for s in before] == [plain[s] for s in before]
        assert losses[STEPS - 1] != plain[STEPS - 1]

    def test_stays_in_bf16_through_a_rollback_and_a_restart_to_the_bit(self, train: Train) -> None:
        """Snapshots of both kinds of step: what is in force counts, not what they say."""
        posts = [
            Post(1, SetExchange("bf16"), after=_everywhere(step=1)),
            Post(2, Rollback(to_step=0, timeline=1), after=_everywhere(step=5)),
        ]
        back = train(*posts, config=self.FEEDBACK)
        start = train(exchange="bf16", config=self.FEEDBACK)
        expected = start[0].losses()
        for rank in back:
            assert rank.losses(1) == expected
            assert {r.comm["wire_bits"] for r in rank.reports if r.timeline == 1} == {16}
        point = RestorePoint(step=4, tier="memory", attempt=1, timeline=0)
        calm = train(config=self.FEEDBACK)
        resumed = train(
            held=[rank.held for rank in calm],
            attempt=2,
            restore=point,
            exchange="bf16",
            config=self.FEEDBACK,
        )
        for rank in resumed:
            assert rank.reports[0].comm["wire_bits"] == 16
            assert rank.losses()[4] == calm[0].losses()[4], "the forward pass of its first step"
            assert rank.losses() != {s: calm[0].losses()[s] for s in range(4, STEPS)}

    def test_auto_is_measured_once_and_is_the_same_on_all_ranks(self, train: Train) -> None:
        auto = {"communication_data_type": "auto", **self.FEEDBACK}
        ranks = train(config=auto)
        (told,) = [r for rank in ranks for r in rank.others if isinstance(r, ExchangeReport)]
        assert told.rank == 0 and " ms in FP8 (casts: c) and " in told.reason
        bits = {r.comm["wire_bits"] for rank in ranks for r in rank.reports}
        assert bits == {8 if told.dtype == "fp8" else 16}
        chosen = train(config={**auto, "communication_data_type": told.dtype})
        assert ranks[0].losses() == chosen[0].losses(), "measuring left no trace"

    def test_auto_without_a_stored_decision_goes_on_as_the_state_was_trained(
        self, train: Train
    ) -> None:
        auto = {"communication_data_type": "auto", **self.FEEDBACK}
        calm = train(exchange="bf16", config=auto)
        point = RestorePoint(step=8, tier="memory", attempt=1, timeline=0)
        held = [rank.held for rank in calm]
        ranks = train(held=held, attempt=2, restore=point, config=auto)
        (told,) = [r for rank in ranks for r in rank.others if isinstance(r, ExchangeReport)]
        assert (told.dtype, told.reason) == ("bf16", "so it was in the state of step 8")
        assert ranks[0].losses() == {s: calm[0].losses()[s] for s in range(8, STEPS)}
