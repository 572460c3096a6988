"""Reports of a step merged on any way to the supervisor give the record of all at one place."""

from __future__ import annotations

import json
import math
import pickle
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.commands import RankReport
from launch.step_part import MOST_PARAMETERS, StepPart, merged, part_of
from monitoring.amax import COLUMNS, encode
from monitoring.exact_sums import ExactSum, fixed_point, total
from orchestrator.supervision.record_merger import RecordMerger, merge_reports, record_of

counts = st.integers(0, 2**31).map(float)
scales = st.floats(2.0**-40, 2.0**40, width=32)
amaxes = st.one_of(st.floats(0, 2.0**100, width=32), st.sampled_from([math.nan, math.inf, 0.0]))
energies = st.one_of(
    st.just(0.0),
    st.floats(0, float(np.finfo(np.float32).max), width=32),
    st.sampled_from([math.inf, math.nan, 2.0**-149]),
)
calibrated = st.sampled_from([0.0, 1.0])
seconds = st.floats(1e-6, 1e6)
named = st.sampled_from(
    [("a/input", "a/weight"), ("b/input",), (), ("a/weight", "c/input"), ("b/input", "a/input")]
)


@st.composite
def reports(draw: st.DrawFn) -> list[RankReport]:
    """One step of up to nine ranks; what they name and measure is anything."""
    world = draw(st.integers(1, 9))
    found = []
    for rank in range(world):
        names = draw(named)
        rows = [
            draw(st.tuples(amaxes, scales, *[counts] * 4, energies, energies, calibrated))
            for _ in names
        ]
        stats = np.array(rows, np.float32).reshape(len(names), len(COLUMNS))
        odd = draw(st.sampled_from([(), (), ("w1",), tuple(f"w{i}" for i in range(40, 80))]))
        keys = draw(st.sampled_from([("bytes", "seconds", "relative_error"), ("seconds",), ()]))
        sums = draw(st.sampled_from([b"", b"\0" * 16, b"\1" + b"\0" * 15]))
        found.append(
            RankReport(
                attempt=1,
                timeline=0,
                rank=rank,
                step=7,
                time=draw(seconds),
                batch=draw(st.sampled_from([7, 7, 7, 8])),
                loss=draw(seconds),
                grad_norm=draw(seconds),
                lr=draw(seconds),
                tokens=64,
                step_time_s=draw(seconds),
                skipped=draw(st.booleans()),
                nonfinite_parameters=odd,
                nonfinite_loss=draw(st.booleans()),
                comm={key: draw(st.one_of(seconds, st.just(math.nan))) for key in keys},
                stats=encode(stats),
                stats_names=names,
                high_precision_layers=draw(st.sampled_from([(), ("l.1",), ("l.0", "l.1")])),
                drills=draw(st.sampled_from([(), (0,), (2, 1)])),
                command=draw(st.integers(0, 3)),
                checksums=sums,
                checksum_names=("w",) if sums else (),
                replicas=tuple(r for r in range(world) if r % 2 == rank % 2),
                compute_s=draw(seconds),
            )
        )
    return found


def by_some_tree(parts: list[StepPart], chance: random.Random) -> StepPart:
    """Merged in any order, any number at a time, and carried from one place to the next."""
    left = chance.sample(parts, len(parts))
    while len(left) > 1:
        count = chance.randint(2, len(left))
        some, left = left[:count], left[count:]
        whole = pickle.loads(pickle.dumps(merged(some)))
        left.insert(chance.randint(0, len(left)), whole)
    return left[0]


def told(part: StepPart) -> str:
    """The record to the last bit: JSON has the shortest digits that name a float."""
    return json.dumps(record_of(part).to_json())


@given(reports(), st.randoms(use_true_random=False))
def test_any_tree_gives_the_record_of_the_flat_merge(
    ranks: list[RankReport], chance: random.Random
) -> None:
    flat = merged([part_of(report) for report in ranks])
    tree = by_some_tree([part_of(report) for report in ranks], chance)
    assert told(tree) == told(flat) == json.dumps(merge_reports(ranks).to_json())
    several = part_of(*chance.sample(ranks, len(ranks)))
    assert told(several) == told(flat) and several.ranks.tolist() == flat.ranks.tolist()
    assert tree.ranks.tolist() == list(range(len(ranks)))
    assert tree.compute_s.tobytes() == flat.compute_s.tobytes()
    assert tree.command == min(report.command for report in ranks)


@given(st.lists(st.floats(-1e300, 1e300), max_size=20), st.randoms(use_true_random=False))
def test_an_exact_sum_is_rounded_once_whatever_the_order(
    values: list[float], chance: random.Random
) -> None:
    exact = float(sum(map(Fraction, values), Fraction(0))) if values else 0.0
    some = chance.sample(values, len(values))
    half = len(some) // 2
    found = ExactSum.of(some[:half]).add(ExactSum.of(some[half:]))
    assert found.value == exact


def test_what_is_not_finite_makes_a_sum_so() -> None:
    assert math.isnan(ExactSum.of([1.0, math.inf]).add(ExactSum.of([-math.inf])).value)
    assert ExactSum.of([math.inf, 1.0]).value == math.inf


@given(st.lists(st.floats(0, float(np.finfo(np.float32).max), width=32), min_size=1, max_size=40))
def test_sums_in_fixed_point_lose_nothing(values: list[float]) -> None:
    array = np.array(values, np.float32)
    digits = fixed_point(array)
    exact = float(sum(map(Fraction, array.tolist())))
    assert float(total(digits.sum(axis=0))) == pytest.approx(exact, rel=1e-15, abs=0)
    again = fixed_point(array[::-1])[: len(values) // 2].sum(axis=0)
    again = again + fixed_point(array[::-1])[len(values) // 2 :].sum(axis=0)
    assert float(total(again)) == float(total(digits.sum(axis=0)))


def plain(rank: int, step: int = 7, **changed: object) -> RankReport:
    values: dict[str, object] = {"time": 0.0, "batch": step, "loss": 1.0, "grad_norm": 1.0}
    values |= {"lr": 1.0, "tokens": 1, "step_time_s": 0.1, "skipped": False, "comm": {}}
    values |= {"nonfinite_parameters": (), "nonfinite_loss": False, "stats": b"", "drills": ()}
    values |= {"stats_names": (), "high_precision_layers": (), "command": 0, "compute_s": 0.05}
    values |= {"attempt": 1, "timeline": 0, "rank": rank, "step": step}
    return RankReport(**{**values, **changed})  # type: ignore[arg-type]


def node(*ranks: int, step: int = 7) -> StepPart:
    return merged([part_of(plain(rank, step)) for rank in ranks])


class TestMerger:
    def test_a_step_is_whole_when_every_rank_came_alone_or_with_its_node(self) -> None:
        merger = RecordMerger(1, 0, 6)
        assert merger.add(node(2, 3)) is None
        assert merger.add(plain(0)) is None and merger.add(plain(1)) is None
        assert merger.waiting_for() == (4, 5)
        whole = merger.add(node(4, 5))
        assert whole is not None and whole.ranks.tolist() == [0, 1, 2, 3, 4, 5]
        assert merger.waiting_for() == ()

    def test_what_comes_twice_counts_once_and_opens_nothing_again(self) -> None:
        merger = RecordMerger(1, 0, 4)
        assert merger.add(node(0, 1)) is None and merger.add(node(0, 1)) is None
        assert merger.add(plain(1)) is None
        assert merger.waiting_for() == (2, 3)
        assert merger.add(node(2, 3)) is not None
        assert merger.add(node(2, 3)) is None and merger.add(plain(0)) is None
        assert merger.waiting_for() == (), "a late copy is no step that ranks are missing of"

    def test_a_node_takes_in_those_of_its_ranks_that_came_by_themselves(self) -> None:
        merger = RecordMerger(1, 0, 4)
        assert merger.add(plain(1)) is None
        assert merger.add(node(0, 1)) is None
        whole = merger.add(node(2, 3))
        assert whole is not None and whole.compute_s.tolist() == [0.05] * 4

    def test_parts_that_overlap_otherwise_are_refused(self) -> None:
        merger = RecordMerger(1, 0, 4)
        assert merger.add(node(0, 1)) is None and merger.add(node(1, 2)) is None
        assert merger.waiting_for() == (2, 3)

    def test_parts_of_another_attempt_or_timeline_are_refused(self) -> None:
        merger = RecordMerger(2, 1, 2)
        assert merger.add(node(0, 1)) is None and merger.waiting_for() == ()
        merger.begin(2)
        again = [part_of(plain(rank, attempt=2, timeline=2)) for rank in range(2)]
        assert merger.add(merged(again)) is not None

    def test_after_a_way_back_the_same_steps_come_again(self) -> None:
        merger = RecordMerger(1, 0, 2)
        assert merger.add(node(0, 1)) is not None
        merger.begin(1)
        again = [part_of(plain(rank, timeline=1)) for rank in range(2)]
        assert merger.add(merged(again)) is not None


def test_of_ranks_that_all_went_wrong_a_part_keeps_no_more_names_than_a_record() -> None:
    names = [tuple(f"{rank}.{i}" for i in range(40)) for rank in range(50)]
    found = merged([part_of(plain(r, nonfinite_parameters=own)) for r, own in enumerate(names)])
    assert len(found.nonfinite_parameters) == 2 and len(found.nonfinite_ranks) == 50
    assert len(record_of(found).nonfinite_parameters) == MOST_PARAMETERS


def test_a_part_of_many_ranks_is_as_large_as_one_but_for_their_own_seconds() -> None:
    stats = np.ones((60, len(COLUMNS)), np.float32)
    names = tuple(f"layers.{i}/weight" for i in range(60))
    own = {"stats": encode(stats), "stats_names": names, "comm": {"bytes": 1.0}}
    sizes = []
    for world in (8, 1024):
        part = merged([part_of(plain(rank, **own)) for rank in range(world)])
        sizes.append(len(pickle.dumps(part)))
    assert sizes[1] - sizes[0] <= 12 * 1016 + 100
