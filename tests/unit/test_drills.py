"""Drills as one rank fires them: when, how often, what they make of the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from launch.config import DataConfig
from launch.data import TokenStream
from launch.drills import Drills
from launch.drills.batches import disturbed, noisy, poisoned
from launch.drills.config import Drill, PoisonedBatch

ADAPTER: TypeAdapter[Any] = TypeAdapter(Drill)

SURGE = {"kind": "weight_surge", "step": 5, "layer": 1, "factor": 8.0}
NAN = {"kind": "nonfinite_gradient", "step": 5, "rank": 1}
KILL = {"kind": "kill_rank", "step": 7, "rank": 1}


class Rank:
    """What drills did to one rank, in order."""

    def __init__(
        self,
        rank: int,
        *drills: dict[str, Any],
        fired: Sequence[int] = (),
        received: bool = True,
    ) -> None:
        self.log: list[Any] = []
        self.received = received
        self.timeline = 0
        self.drills = Drills(
            [ADAPTER.validate_python(drill) for drill in drills or (SURGE, NAN, KILL)],
            rank=rank,
            fired=fired,
            target=self,
            announce=self.announce,
            kill=lambda: self.log.append("kill"),
        )

    def fire(self, step: int) -> tuple[int, ...]:
        return self.drills.fire(step, timeline=self.timeline, batch=step)

    def roll_back(self) -> None:
        self.timeline += 1

    def announce(self, drill: int, step: int) -> bool:
        self.log.append(("told", drill, step))
        return self.received

    def done(self) -> list[Any]:
        """What was done, without what was told."""
        return [entry for entry in self.log if entry[0] != "told"]

    # The target.

    def surge_mlp(self, layer: int, factor: float) -> None:
        self.log.append(("surge", layer, factor))

    def grow_channel(self, layer: int, factor: float) -> None:
        self.log.append(("grow", layer, factor))

    def add_outlier(self, tensor: str, factor: float) -> None:
        self.log.append(("outlier", tensor, factor))

    def flip_bit(self, parameter: str, replica: int, bit: int) -> None:
        self.log.append(("flip", parameter, replica, bit))

    def freeze_scale(self, tensor: str, factor: float) -> None:
        self.log.append(("freeze", tensor, factor))

    def thaw_scale(self, tensor: str) -> None:
        self.log.append(("thaw", tensor))

    def poison_gradient(self, value: float) -> None:
        self.log.append(("poison", str(value)))

    def check_linear(self, tensor: str) -> None: ...

    def check_layer(self, layer: int) -> None: ...

    def check_parameter(self, name: str) -> None: ...


class TestFiring:
    def test_each_is_told_before_it_fires_on_its_rank(self) -> None:
        rank = Rank(1)
        assert [rank.fire(step) for step in range(4, 8)] == [(), (0, 1), (), (2,)]
        assert rank.log == [
            ("told", 0, 5),
            ("surge", 1, 8.0),
            ("told", 1, 5),
            ("poison", "nan"),
            ("told", 2, 7),
            "kill",
        ]

    def test_another_rank_only_surges(self) -> None:
        rank = Rank(0)
        assert [rank.fire(step) for step in range(4, 8)] == [(), (0,), (), ()]
        assert rank.log == [("told", 0, 5), ("surge", 1, 8.0)]

    def test_none_fires_again_after_a_rollback(self) -> None:
        rank = Rank(1)
        for step in (5, 6, 7):
            rank.fire(step)
        rank.roll_back()
        assert [rank.fire(step) for step in (5, 6, 7)] == [(), (), ()]
        assert len(rank.done()) == 3

    def test_none_fires_that_an_earlier_attempt_fired(self) -> None:
        rank = Rank(1, fired=(0, 2))
        assert [rank.fire(step) for step in (5, 7)] == [(1,), ()]

    def test_a_rank_is_not_killed_unless_that_was_received(self) -> None:
        """Or the next attempt would meet the same drill, and the one after."""
        rank = Rank(1, received=False)
        rank.fire(7)
        assert rank.log == [("told", 2, 7)]

    def test_replicas_surge_alike_though_one_could_not_tell(self) -> None:
        rank = Rank(0, received=False)
        rank.fire(5)
        assert rank.done() == [("surge", 1, 8.0)]

    @pytest.mark.parametrize(
        ("drill", "does"),
        [
            (
                {"kind": "amax_outlier", "tensor": "layers.0.mlp.down/input", "factor": 50},
                ("outlier", "layers.0.mlp.down/input", 50.0),
            ),
            (
                {"kind": "bit_flip", "parameter": "head.weight", "replica": 1, "bit": 3},
                ("flip", "head.weight", 1, 3),
            ),
            ({"kind": "nonfinite_gradient", "value": "inf"}, ("poison", "inf")),
        ],
    )
    def test_what_happens_at_once_happens_in_its_step_alone(
        self, drill: dict[str, Any], does: Any
    ) -> None:
        rank = Rank(0, {"step": 3, **drill})
        assert [rank.fire(step) for step in range(2, 6)] == [(), (0,), (), ()]
        assert rank.done() == [does]


class TestWhatLasts:
    def test_growth_comes_in_each_of_its_steps(self) -> None:
        rank = Rank(0, {"kind": "swiglu_growth", "step": 3, "steps": 3, "layer": 1, "factor": 2})
        seen = []
        for step in range(1, 9):
            rank.fire(step)
            seen.append(len(rank.done()))
        assert seen == [0, 0, 1, 2, 3, 3, 3, 3]
        assert rank.log.count(("told", 0, 3)) == 1

    def test_a_scale_stands_still_and_is_let_go(self) -> None:
        rank = Rank(0, {"kind": "frozen_scale", "step": 3, "steps": 2, "tensor": "a/input"})
        for step in range(2, 8):
            rank.fire(step)
        assert rank.done() == [("freeze", "a/input", 1.0), ("thaw", "a/input")]

    def test_a_rollback_ends_it_and_its_steps_are_replayed_undisturbed(self) -> None:
        frozen = {"kind": "frozen_scale", "step": 3, "steps": 9, "tensor": "a/input"}
        growth = {"kind": "swiglu_growth", "step": 3, "steps": 9, "layer": 0, "factor": 2}
        shock = {"kind": "lr_shock", "step": 3, "steps": 9, "factor": 10}
        rank = Rank(0, frozen, growth, shock)
        for step in (3, 4):
            rank.fire(step)
        assert rank.drills.lr_factor == 10
        rank.roll_back()
        before = len(rank.done())
        for step in (2, 3, 4, 5):
            rank.fire(step)
            assert rank.drills.lr_factor == 1
        assert rank.done()[before:] == [("thaw", "a/input")]

    def test_the_next_attempt_goes_on_without_it(self) -> None:
        shock = {"kind": "lr_shock", "step": 3, "steps": 9, "factor": 10}
        rank = Rank(0, shock, fired=(0,))
        for step in (2, 3, 4):
            rank.fire(step)
            assert rank.drills.lr_factor == 1

    def test_shocks_of_the_learning_rate_multiply(self) -> None:
        rank = Rank(
            0,
            {"kind": "lr_shock", "step": 2, "steps": 3, "factor": 10},
            {"kind": "lr_shock", "step": 3, "steps": 1, "factor": 0.5},
        )
        factors = []
        for step in range(1, 7):
            rank.fire(step)
            factors.append(rank.drills.lr_factor)
        assert factors == [1, 10, 5, 10, 1, 1]


POISON = {"kind": "poisoned_batch", "step": 3, "batches": 2}


class TestBatches:
    text = np.arange(60, 93, dtype=np.uint8)

    def test_a_batch_stays_poisoned_whenever_it_is_seen(self) -> None:
        rank = Rank(0, POISON)
        healthy = [rank.drills.change_of(batch) is None for batch in range(7)]
        assert healthy == [True, True, True, False, False, True, True]
        assert [rank.fire(step) for step in (3, 4)] == [(0,), ()]
        rank.roll_back()
        assert rank.fire(3) == ()
        first = rank.drills.change_of(3)
        again = Rank(1, POISON, fired=(0,)).drills.change_of(3)
        assert first is not None and again is not None
        for one, other in zip(first(40, self.text), again(40, self.text), strict=True):
            assert np.array_equal(one, other)

    def test_a_batch_that_the_ledger_skips_is_not_met(self) -> None:
        rank = Rank(0, POISON)
        steps = [rank.drills.fire(step, timeline=1, batch=step + 2) for step in (3, 4, 5)]
        assert steps == [(), (), ()]

    @given(st.integers(0, 2**40), st.integers(2, 300))
    def test_random_tokens_follow_from_the_position_alone(self, position: int, length: int) -> None:
        drill = PoisonedBatch(kind="poisoned_batch", step=1)
        tokens = poisoned(position, length, drill)
        assert tokens.shape == (length,) and tokens.dtype == np.uint8
        assert np.array_equal(tokens, poisoned(position, length, drill))
        assert not np.array_equal(poisoned(0, 300, drill), poisoned(position + 1, 300, drill))

    def test_replicas_and_micro_batches_cut_a_disturbed_batch_as_any_other(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 20)
        stream = TokenStream(DataConfig(source=str(tmp_path / "text")), seq_len=16)
        rank = Rank(0, POISON, {"kind": "label_noise", "step": 3, "share": 0.5})
        rank.fire(3)

        def batch(data: int, micro: int, accumulation: int) -> list[list[int]]:
            rows = {}
            for replica in range(data):
                cut = stream.micro_batches(
                    3, replica, data, micro, accumulation, rank.drills.change_of(3)
                )
                for turn, (inputs, targets) in enumerate(cut):
                    for row in range(micro):
                        at = (turn * data + replica) * micro + row
                        rows[at] = [*inputs[row].tolist(), *targets[row].tolist()]
            return [rows[at] for at in range(8)]

        assert batch(1, 8, 1) == batch(2, 2, 2) == batch(4, 1, 2)
        inputs, targets = next(stream.micro_batches(3, 0, 1, 8, 1))
        assert batch(1, 8, 1) != torch.cat((inputs, targets), 1).tolist()

    def test_one_token_over_and_over_is_its_own_target(self) -> None:
        drill = PoisonedBatch(kind="poisoned_batch", step=1, tokens="repeated", token=65)
        inputs, targets = disturbed(7, self.text, drill, [])
        assert set(inputs) == set(targets) == {65} and len(inputs) == len(targets) == 32

    @given(st.integers(0, 2**40), st.integers(1, 300), st.floats(0.001, 1.0))
    def test_noise_replaces_its_share_of_the_targets_by_others(
        self, position: int, length: int, share: float
    ) -> None:
        targets = (np.arange(length) % 256).astype(np.uint8)
        before = targets.copy()
        changed = noisy(position, targets, share)
        assert np.count_nonzero(changed != targets) == round(share * length)
        assert np.array_equal(targets, before), "the corpus itself was written to"
        assert np.array_equal(changed, noisy(position, targets, share))

    def test_noise_leaves_the_inputs_alone_and_lasts_its_steps(self) -> None:
        rank = Rank(0, {"kind": "label_noise", "step": 2, "steps": 2, "share": 1.0})
        changes = []
        for step in range(1, 6):
            rank.fire(step)
            changes.append(rank.drills.change_of(step))
        assert [change is not None for change in changes] == [False, True, True, False, False]
        assert changes[1] is not None
        inputs, targets = changes[1](9, self.text)
        assert np.array_equal(inputs, self.text[:-1])
        assert not np.any(targets == self.text[1:])


def test_the_undisturbed_learning_rate_is_the_same_number() -> None:
    rank = Rank(0)
    rank.fire(1)
    assert math.pi * 1e-4 * rank.drills.lr_factor == math.pi * 1e-4
