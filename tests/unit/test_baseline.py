"""When an update may be a delta, and what travels then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from areal_hpc.delta import Delta, apply
from areal_hpc.weights.baseline import DeltaBaseline

Weights = dict[str, torch.Tensor]


class Engine:
    """Takes what a baseline sends; ``told`` says for each update whether anything came as a delta."""

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.told: list[bool] = []

    def take(self, arriving: Iterator[tuple[str, torch.Tensor | Delta]]) -> None:
        deltas = False
        for name, weight in arriving:
            if isinstance(weight, Delta):
                apply(self.weights[name], weight)
                deltas = True
            else:
                self.weights[name] = weight.clone()
        self.told.append(deltas)


def step(weights: Weights) -> None:
    for weight in weights.values():
        weight.view(-1)[:2] += 1


@pytest.fixture
def weights() -> Weights:
    return {"w": torch.zeros(10, 30, dtype=torch.bfloat16), "norm": torch.ones(40)}


def publish(baseline: DeltaBaseline, engine: Engine, weights: Weights, holders: int = 1) -> None:
    step(weights)
    engine.take(baseline.against(weights.items(), holders))
    baseline.settle(holders)
    assert all(torch.equal(engine.weights[name], weight) for name, weight in weights.items())


def test_the_first_is_whole_and_so_is_every_nth(weights: Weights) -> None:
    baseline, engine = DeltaBaseline(whole_every=3), Engine()
    for _ in range(7):
        publish(baseline, engine, weights)
    assert engine.told == [False, True, True, False, True, True, False]


def test_each_time_that_the_membership_has_changed_it_is_whole(weights: Weights) -> None:
    baseline, engine = DeltaBaseline(whole_every=100), Engine()
    for holders in (1, 1, 2, 2, 4):
        publish(baseline, engine, weights, holders)
    assert engine.told == [False, True, False, True, False]


@pytest.mark.parametrize("read", [0, 1, 2])
def test_after_an_update_that_did_not_arrive_it_is_whole(weights: Weights, read: int) -> None:
    """Wherever it broke off: some engine may hold any mixture now, and the copy here does, too."""
    baseline, engine = DeltaBaseline(whole_every=100), Engine()
    publish(baseline, engine, weights)
    publish(baseline, engine, weights)
    step(weights)
    broken = baseline.against(weights.items(), 1)
    for _ in range(read):
        next(broken)
    publish(baseline, engine, weights)
    publish(baseline, engine, weights)
    assert engine.told == [False, True, False, True]


def test_a_tensor_travels_whole_where_its_delta_would_not_be_shorter() -> None:
    baseline = DeltaBaseline(whole_every=100)
    weights = {"dense": torch.zeros(300), "sparse": torch.zeros(300), "strided": torch.zeros(10, 20).t()}
    list(baseline.against(weights.items(), 1))
    baseline.settle(1)
    weights["dense"][:240] += 1  # 240 * 5 bytes of 300 * 4
    weights["sparse"][:239] += 1
    weights["strided"][3, 4] += 1
    arriving = dict(baseline.against(weights.items(), 1))
    assert {name: isinstance(weight, Delta) for name, weight in arriving.items()} == {
        "dense": False,
        "sparse": True,
        "strided": True,
    }
    assert arriving["dense"] is weights["dense"]
    assert arriving["strided"].shape == (20, 10)
