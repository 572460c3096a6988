"""A layer recomputed on Transformer Engine: the same to the bit, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.transformer_engine_layer import (
    LINEARS,
    RECIPES,
    Layer,
    assert_equal_states,
    inputs,
    scope_of,
    state_of,
    train_step,
)


@pytest.mark.parametrize("recipe", ["delayed", "most_recent", "current", "block", "mxfp8"])
def test_the_same_gradients_and_scaling_state_as_without(te, recipe):
    scopes = [scope_of(RECIPES[recipe]) for _ in range(2)]
    layers = [Layer(scope) for scope in scopes]
    for step in range(4):
        plain = train_step(scopes[0], layers[0], step, micro_batches=2)
        te.log.clear()
        again = train_step(scopes[1], layers[1], step, micro_batches=2, recompute=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert_equal_states(state_of(scopes[1]), state_of(scopes[0]))
    forwards = [e for e in te.said("forward") if e[1] == LINEARS[0]]
    assert [(how, second) for _, _, how, second, _ in forwards] == [
        ("fp8", False),
        ("fp8", True),
    ] * 2
    assert [e[4] for e in forwards[0::2]] == [e[4] for e in forwards[1::2]]


def test_a_linear_in_bf16_is_seen_once(te):
    scopes = [scope_of(RECIPES["delayed"]) for _ in range(2)]
    layers = [Layer(scope) for scope in scopes]
    for scope in scopes:
        scope.set_precision({LINEARS[1]: "bf16"})
        scope.collect(True)
    for step in range(2):
        train_step(scopes[0], layers[0], step)
        train_step(scopes[1], layers[1], step, recompute=True)
    assert_equal_states(state_of(scopes[1]), state_of(scopes[0]))
    assert torch.equal(scopes[1].statistics()[1], scopes[0].statistics()[1])


def test_it_is_transformer_engines_checkpoint_and_not_torchs(te, monkeypatch):
    def torchs(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch's checkpoint would run the second pass in BF16")

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", torchs)
    scope = scope_of(RECIPES["current"])
    train_step(scope, Layer(scope), 0, recompute=True)
    assert te.said("checkpoint") == [("checkpoint",)]


def test_without_a_gradient_to_come_it_is_refused(te):
    scope = scope_of(RECIPES["current"])
    layer = Layer(scope)
    with scope.micro_batch(), pytest.raises(ValueError, match="needs a gradient"):
        scope.checkpoint(layer, inputs(0, 0)[0].detach())


def test_outside_a_micro_batch_it_is_refused(te):
    scope = scope_of(RECIPES["current"])
    layer = Layer(scope)
    with pytest.raises(RuntimeError, match="outside micro_batch"):
        scope.checkpoint(layer, inputs(0, 0)[0])


def test_with_ema_it_is_refused(te):
    scope = scope_of(RECIPES["ema"])
    layer = Layer(scope)
    with scope.micro_batch(), pytest.raises(ValueError, match="ema"):
        scope.checkpoint(layer, inputs(0, 0)[0])
