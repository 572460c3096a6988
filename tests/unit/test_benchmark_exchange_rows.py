"""Which exchanges the benchmarks call equal, and that what failed stays in their rows."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from parallel.layer_costs import ffn_size
from tests.benchmarks import bench_exchange, gradient_turns
from tests.benchmarks.bench_curves import EXCHANGES
from tests.benchmarks.bench_curves import rows_of as curve_rows
from tests.benchmarks.bench_exchange_casts import HOPS, Timed
from tests.benchmarks.bench_hooks import at_equal_loss, least_rank, loss_rows, wire_rows
from tests.benchmarks.gradient_sides import (
    CONTROLS,
    FP8,
    REFERENCES,
    SHAPES,
    Side,
    run_of,
    sides,
    starts_of,
)
from tests.benchmarks.gradient_turns import Measured, Turn
from tests.benchmarks.peers.turns import Failed
from tests.hosts.exchanges import bounded

ALL = sides([1, 2, 4])
POWER = {side.rank: side for side in ALL if side.exchange == "powersgd"}
BF16_HOOK = Side("ddp", "bf16")


def finals(**of: float):
    """Final losses of one seed, 2.0 where nothing is said, and 2.02 of DDP's control."""
    losses = {side: {0: 2.0} for side in (*ALL, *CONTROLS)}
    losses[CONTROLS[1]] = {0: 2.02}
    for rank, loss in of.items():
        losses[POWER[int(rank.removeprefix("rank"))]] = {0: loss}
    return losses


def test_every_side_has_a_name_of_its_own():
    names = [side.name for side in (*ALL, *CONTROLS)]
    assert len(set(names)) == len(names)
    assert {"octavo FP8", "DDP BF16 hook", "DDP PowerSGD hook, rank 4"} <= set(names)


def test_a_loss_within_what_chance_does_is_equal_and_one_beyond_it_is_not():
    equal = at_equal_loss(finals(rank2=2.019, rank1=2.03))
    assert equal[FP8] and equal[BF16_HOOK] and equal[POWER[2]]
    assert not equal[POWER[1]]
    assert least_rank(equal) == 2


def test_a_rank_is_not_equal_by_luck_where_a_higher_one_is_not():
    equal = at_equal_loss(finals(rank1=2.0, rank2=2.1))
    assert not equal[POWER[1]] and least_rank(equal) == 4


def test_a_side_without_a_loss_is_counted_and_not_equal():
    told = finals()
    told[BF16_HOOK] = {0: Failed("silent for 9 s", hung=True)}
    equal = at_equal_loss(told)
    assert not equal[BF16_HOOK]
    (row,) = (
        row
        for row in loss_rows(told, equal, 240)
        if row.name == "final loss" and row.side == BF16_HOOK.name
    )
    assert (row.n, row.failures, row.hangs) == (0, 0, 1)


def test_no_rank_is_told_where_none_reaches_equal_loss():
    equal = at_equal_loss(finals(rank4=3.0))
    row = loss_rows(finals(rank4=3.0), equal, 240)[-1]
    assert least_rank(equal) is None and row.n == 0 and row.note == "none of 1, 2, 4"


def test_the_fastest_peer_is_one_at_equal_loss():
    turns = {side: [Turn(3.0, 1e6), Turn(5.0, 1e6)] for side in ALL}
    turns[FP8] = [Turn(2.0, 1e6), Turn(2.0, 1e6)]
    turns[POWER[1]] = [Turn(1.0, 1e6)] * 2
    turns[POWER[4]] = [Turn(2.5, 1e6)] * 2
    del turns[BF16_HOOK]
    found = Measured(turns, {BF16_HOOK: Failed("it died", hung=False)})
    rows = wire_rows("demo", "1gbit", ALL, found, at_equal_loss(finals(rank1=2.5)))
    assert (rows[-1].side, rows[-1].median) == (POWER[4].name, 1.25)
    steps = {row.side: row for row in rows if row.name == "a step"}
    assert steps[BF16_HOOK.name].failures == 1
    assert steps[POWER[1].name].note == "loss not equal"
    ratios = {row.side: row for row in rows if row.name.startswith("… its time")}
    assert ratios[REFERENCES[0].name].median == 2.0 and FP8.name not in ratios


@pytest.mark.parametrize(("steps", "begins"), [(1000, 100), (240, 24), (100, 20), (8, 4)])
def test_power_sgd_begins_after_the_warm_up_and_always_runs(steps: int, begins: int):
    assert starts_of(steps, warm_up=20) == begins < steps


@pytest.mark.parametrize(("shape", "millions"), [("demo", 1.2), ("wide", 11.0)])
def test_a_shape_has_as_many_parameters_as_it_says(shape: str, millions: float):
    model = run_of(SHAPES[shape], FP8, 0, 50).model
    heads = model.num_kv_heads or model.num_heads
    attention = model.hidden_size * (2 + 2 * heads / model.num_heads)
    layer = model.hidden_size * (attention + 3 * ffn_size(model))
    numel = model.num_layers * layer + 2 * model.vocab_size * model.hidden_size
    assert f"{millions:g} M parameters" in SHAPES[shape].told
    assert numel / 1e6 == pytest.approx(millions, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_sides_train_the_same_batch_whole_on_each_rank(shape: str):
    for side in (*ALL, *CONTROLS):
        run = run_of(SHAPES[shape], side, 3, 50)
        training = run.training
        assert training.train_micro_batch_size_per_gpu and training.gradient_accumulation_steps
        micro = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
        assert 2 * micro == SHAPES[shape].batch and run.parallelism.zero_stage == 0
        assert (run.precision, training.seed, training.steps) == ("bf16", 3, 50)


def test_casts_that_give_other_bits_are_a_failure():
    seconds = {way: {hop: [value] for hop in HOPS} for way, value in (("C", 1.0), ("plain", 4.0))}
    rows = Timed("cpu", 2**20, seconds, {"C": False, "plain": True}).rows()
    assert [(row.side, row.failures) for row in rows] == [
        ("octavo (C)", 1),
        ("octavo (plain)", 0),
        ("octavo (plain)", 0),
    ]
    assert rows[-1].median == 4.0 and rows[-1].met


def test_a_curve_that_failed_leaves_the_others_comparable():
    rows = curve_rows("here", EXCHANGES[1], {0: 2.2}, {0: 2.0, 1: 3.0}, {"failures": 1, "hangs": 0})
    assert [(round(row.median, 6), row.n, row.failures) for row in rows] == [
        (2.2, 1, 1),
        (10.0, 1, 1),
    ]


def test_a_side_whose_ranks_die_is_counted_and_the_others_begin_anew(monkeypatch):
    attempts = []

    def take_turns(network, case, left, told, is_on):
        attempts.append(list(left))
        for side in left:
            is_on(side)
            if side == BF16_HOOK:
                raise RuntimeError("a rank ended with -6 before it had answered")
            told[side].append(Turn(1.0, 2.0))

    hosts = SimpleNamespace(hosts=(), shape=lambda rate: None)
    monkeypatch.setattr(gradient_turns, "Network", lambda count: nullcontext(hosts))
    monkeypatch.setattr(gradient_turns, "_take_turns", take_turns)
    asked = [FP8, BF16_HOOK, POWER[4]]
    found = gradient_turns.measure("demo", "none", asked, turns=1, steps=1, limit_s=60.0)
    assert attempts == [asked, [FP8, POWER[4]]]
    assert found.turns == {FP8: [Turn(1.0, 2.0)], POWER[4]: [Turn(1.0, 2.0)]}
    assert (
        found.failed[BF16_HOOK].why.startswith("a rank ended") and not found.failed[BF16_HOOK].hung
    )


def test_hosts_that_dont_come_up_are_every_sides_failure(monkeypatch):
    def none(count: int):
        raise RuntimeError("no network namespace can be made")

    monkeypatch.setattr(gradient_turns, "Network", none)
    found = gradient_turns.measure("demo", "none", [FP8, BF16_HOOK], turns=1, steps=1, limit_s=9.0)
    assert not found.turns and set(found.failed) == {FP8, BF16_HOOK}
    assert "no network namespace" in found.failed[FP8].why


def test_a_way_that_dies_leaves_what_the_others_sent(monkeypatch):
    def exchange(network, dtypes, numel, repeats, *, scattered):
        if dtypes == ["bf16"]:
            raise TimeoutError("not done within 9 s")
        return SimpleNamespace(sent_bytes={"fp32": 4e6, "fp8": 1e6}[dtypes[0]])

    monkeypatch.setattr(bench_exchange, "Network", lambda count: nullcontext())
    monkeypatch.setattr(bench_exchange, "bounded", lambda network, limit_s: nullcontext())
    monkeypatch.setattr(bench_exchange, "exchange", exchange)
    rows = bench_exchange.bytes_rows(2, 1.0)
    assert [(row.side, row.n, row.hangs) for row in rows[:4]] == [
        ("torch FP32 all-reduce", 1, 0),
        ("torch BF16 all-reduce", 0, 1),
        ("octavo FP8", 1, 0),
        ("octavo FP8, scattered", 1, 0),
    ]
    over_bf16, over_fp32, _ = rows[4:]
    assert (over_bf16.n, over_bf16.met) == (0, False)
    assert (over_fp32.median, over_fp32.met) == (0.25, True)


def test_what_does_not_end_is_killed_and_told_as_a_hang():
    killed = threading.Event()
    hosts = SimpleNamespace(hosts=[SimpleNamespace(kill=killed.set)])
    with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"), bounded(hosts, 0.01):
        assert killed.wait(30)
        raise RuntimeError("a rank ended with -9 before it had answered")
    with pytest.raises(RuntimeError, match="ended with 1"), bounded(hosts, 60):
        raise RuntimeError("a rank ended with 1")
