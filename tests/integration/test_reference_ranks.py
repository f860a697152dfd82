"""The reference trainer on several ranks, each a real process: how many there are must not be visible in the result."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import ProcessGroup

from areal_hpc.config.algorithm import (
    AlgorithmConfig,
    GaeConfig,
    KlConfig,
    KlEstimator,
    KlPlace,
    Level,
    NormConfig,
)
from areal_hpc.config.schema import Dtype, OptimizerConfig, TrainerConfig
from areal_hpc.training.batching import plan_step
from areal_hpc.training.credit import assess
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB_SIZE, make_model

NUM_SEQUENCES = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_model(path, "qwen3", seed=0, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path


def whole_batch() -> Batch:
    """Sequences of very different lengths: means of means would be far off. The last one has nothing to train on."""
    generator = np.random.default_rng(5)
    lengths = np.array([40, 6, 11, 25, 5, 18, 9])
    mask = np.concatenate([np.arange(n) >= 3 for n in lengths])
    mask[-9:] = False
    advantages = np.repeat(generator.normal(size=NUM_SEQUENCES), lengths)
    return Batch(
        token_ids=generator.integers(0, VOCAB_SIZE, mask.size).astype(np.int32),
        loss_mask=mask,
        behaviour=np.where(mask, generator.uniform(-5, -4, mask.size), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, advantages, 0).astype(np.float32),
        boundaries=np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
    )


def make(
    group: ProcessGroup | None, path: Path, budget: int = 48, algorithm: AlgorithmConfig | None = None
) -> ReferenceBackend:
    optimizer = OptimizerConfig(lr=1e-3, grad_clip=1e9)
    return ReferenceBackend(
        model_path=str(path),
        dtype=Dtype.FLOAT32,
        algorithm=algorithm or AlgorithmConfig(),
        trainer=TrainerConfig(total_steps=10, tokens_per_microbatch=budget, optimizer=optimizer),
        temperature=1.0,
        seed=1,
        group=group,
    )


def shares(batch: Batch, num_minibatches: int, num_ranks: int, rank: int, seed: int = 1) -> list[Batch]:
    plan = plan_step(batch.lengths, np.ones(NUM_SEQUENCES), num_minibatches, num_ranks, seed)
    return [batch.select(shares[rank]) for shares in plan]


def layout(group: ProcessGroup | None) -> tuple[int, int]:
    return (group.size(), group.rank()) if group is not None else (1, 0)


def digest(backend: ReferenceBackend) -> str:
    total = hashlib.sha256()
    for _, tensor in backend.weights():
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()


def one_update(group: ProcessGroup | None, path: Path, budget: int, saved: Path) -> tuple[dict[str, float], str]:
    backend = make(group, path, budget)
    minibatches = shares(whole_batch(), 1, *layout(group))
    stats = backend.train_step([m.with_proximal(backend.logprobs(m)) for m in minibatches])
    saved.mkdir(exist_ok=True)
    backend.snapshot()(saved)
    return dict(stats), digest(backend)


@pytest.mark.parametrize(("num_ranks", "budget"), [(2, 1), (3, 48), (3, 10_000)])
def test_E8_any_number_of_ranks_makes_the_same_gradient(
    model: Path, tmp_path: Path, num_ranks: int, budget: int
) -> None:
    expected, _ = one_update(None, model, 10_000, tmp_path / "one")
    results = run_ranks(num_ranks, one_update, model, budget, tmp_path / "many")
    assert len({weights for _, weights in results}) == 1  # all ranks hold the same bits afterwards
    for stats, _ in results:
        assert stats == results[0][0]
        assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6)
    one = load_file(tmp_path / "one" / "optimizer.safetensors")
    many = load_file(tmp_path / "many" / "optimizer.safetensors")
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


PPO = AlgorithmConfig(
    name="ppo",
    adv_norm=NormConfig(mean=Level.BATCH, std=Level.BATCH),
    gae=GaeConfig(lam=0.9),
    kl=KlConfig(coef=0.05, place=KlPlace.REWARD, estimator=KlEstimator.K1, target=1e-6),
)
M2PO = AlgorithmConfig(name="m2po", m2_threshold=0.2)


def menu(group: ProcessGroup | None, path: Path) -> list[Any]:
    return [menu_steps(group, path, algorithm) for algorithm in (PPO, M2PO)]


def menu_steps(group: ProcessGroup | None, path: Path, algorithm: AlgorithmConfig) -> Any:
    """Two steps of two minibatches, as the loop makes them; what each said, the weights, the coefficient."""
    backend, batch = make(group, path, algorithm=algorithm), whole_batch()
    size, rank = layout(group)
    batch = replace(batch, truncated=np.arange(NUM_SEQUENCES) % 2 == 0)
    outcomes = np.arange(NUM_SEQUENCES) % 3 - 0.5
    told = []
    for step in range(2):
        plan = [of_ranks[rank] for of_ranks in plan_step(batch.lengths, np.ones(NUM_SEQUENCES), 2, size, step)]
        ranks = Ranks(group)
        parts = assess([batch.select(p) for p in plan], [outcomes[p] for p in plan], backend, algorithm, ranks)
        told.append(dict(backend.train_step(parts)))
    values = backend.values(batch)[0].tolist() if algorithm.name == "ppo" else []
    return told, digest(backend), values, backend.logprobs(batch), backend.kl_coef


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_E24_critic_kl_and_bounds_do_not_see_how_many_ranks_there_are(model: Path, num_ranks: int) -> None:
    of_ranks = run_ranks(num_ranks, menu, model)
    for alone, results in zip(menu(None, model), zip(*of_ranks, strict=True), strict=True):
        assert len({weights for _, weights, *_ in results}) == 1
        for told, _, values, logprobs, coef in results:
            for found, expected in zip(told, alone[0], strict=True):
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
            assert values == pytest.approx(alone[2], rel=1e-3, abs=1e-5)
            np.testing.assert_allclose(logprobs, alone[3], rtol=1e-3, atol=1e-4)
            assert coef == alone[4]
    assert 0 < alone[0][0]["kept_fraction"] < 1, "the bound must leave out some tokens"


def odd_shares(group: ProcessGroup, path: Path) -> dict[str, float]:
    """Four minibatches: rank 1 has nothing in the first, nobody in the second, rank 0 a broken one in the third."""
    backend, batch, (_, rank) = make(group, path), whole_batch(), layout(group)
    batch = replace(batch, behaviour=backend.logprobs(batch))
    batch = batch.with_proximal(batch.behaviour)
    broken = replace(batch, advantages=np.where(batch.loss_mask, np.nan, 0).astype(np.float32))
    first = batch.select([0, 1] if rank == 0 else [])
    third = (broken if rank == 0 else batch).select([2])
    return dict(backend.train_step([first, batch.select([6]), third, batch.select([3 + rank])]))


def test_E17_an_empty_share_and_a_broken_one_are_the_same_decision_on_all_ranks(model: Path) -> None:
    one, other = run_ranks(2, odd_shares, model)
    assert one == pytest.approx(other, nan_ok=True)
    assert (one["updates"], one["skipped_empty"], one["skipped_nonfinite"]) == (2.0, 1.0, 1.0)
    assert math.isfinite(one["grad_norm"])


def train_on(
    group: ProcessGroup | None, path: Path, first: int, last: int, load: Path | None, saved: Path
) -> list[Any]:
    """Losses and gradient norms of steps ``first`` to ``last``, going on from ``load``; each step has its own plan."""
    backend = make(group, path)
    if load is not None:
        backend.load(str(load))
    told = []
    for step in range(first, last + 1):
        minibatches = shares(whole_batch(), 2, *layout(group), seed=step)
        stats = backend.train_step([m.with_proximal(backend.logprobs(m)) for m in minibatches])
        told.append([stats[name] for name in ("loss", "grad_norm", "entropy", "lr")])
    saved.mkdir(exist_ok=True)
    backend.snapshot()(saved)
    return told


@pytest.mark.long
def test_C35_ranks_may_change_between_attempts_without_a_trace_in_the_losses(model: Path, tmp_path: Path) -> None:
    """Steps 1 to 8 by one rank, against 1 and 2 by one, 3 and 4 by two, 5 and 6 by three, 7 and 8 by one again."""
    undisturbed = train_on(None, model, 1, 8, None, tmp_path / "whole")
    told = train_on(None, model, 1, 2, None, tmp_path / "a")
    told += run_ranks(2, train_on, model, 3, 4, tmp_path / "a", tmp_path / "b")[1]
    told += run_ranks(3, train_on, model, 5, 6, tmp_path / "b", tmp_path / "c")[2]
    told += train_on(None, model, 7, 8, tmp_path / "c", tmp_path / "d")
    np.testing.assert_allclose(told, undisturbed, rtol=2e-3, atol=1e-5)
    whole, parts = load_file(tmp_path / "whole" / "model.safetensors"), load_file(tmp_path / "d" / "model.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def train_and_save(group: ProcessGroup | None, path: Path, steps: int, saved: Path | None, load: Path | None) -> Any:
    backend = make(group, path)
    if load is not None:
        backend.load(str(load))
    loaded = digest(backend)
    batch, stats = whole_batch(), {}
    for step in range(steps):
        minibatches = shares(batch, 2, *layout(group), seed=step)
        stats = backend.train_step([m.with_proximal(backend.logprobs(m)) for m in minibatches])
    if saved is not None:
        saved.mkdir(exist_ok=True)
        backend.snapshot()(saved)
    return loaded, digest(backend), dict(stats), float(torch.rand(()))


@pytest.mark.long
def test_C30_a_checkpoint_of_two_ranks_keeps_both_streams_and_loads_on_one_and_on_three(
    model: Path, tmp_path: Path
) -> None:
    saved = run_ranks(2, train_and_save, model, 2, tmp_path / "two", None)
    again = run_ranks(2, train_and_save, model, 0, None, tmp_path / "two")
    one = train_and_save(None, model, 2, None, tmp_path / "two")
    three = run_ranks(3, train_and_save, model, 2, None, tmp_path / "two")
    assert [draw for *_, draw in again] == [draw for *_, draw in saved]  # each rank goes on with its own stream
    assert len({draw for *_, draw in three}) == 3
    assert {loaded for loaded, *_ in (*again, one, *three)} == {saved[0][1]}
    assert three[0][2]["lr"] == one[2]["lr"]
    assert three[0][2]["loss"] == pytest.approx(one[2]["loss"], rel=1e-3)
