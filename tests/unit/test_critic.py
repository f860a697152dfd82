"""The critic against transformers in float64, and that it and the reference model leave the policy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from areal_hpc.config.algorithm import AlgorithmConfig, CriticConfig, KlConfig
from areal_hpc.config.schema import Dtype, OptimizerConfig, TrainerConfig
from areal_hpc.errors import CheckpointError
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch
from tests.tiny_models import VOCAB_SIZE, make_model

OPTIMIZER = OptimizerConfig(lr=1e-3, grad_clip=1e9)
TRAINER = TrainerConfig(total_steps=10, tokens_per_microbatch=32, optimizer=OPTIMIZER)
PPO = AlgorithmConfig(name="ppo", critic=CriticConfig(lr_scale=1.0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_model(path, "qwen3", seed=0, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path


def make(path: Path, algorithm: AlgorithmConfig = PPO, **changes: Any) -> ReferenceBackend:
    settings = {"trainer": TRAINER, "temperature": 1.0, "seed": 1, **changes}
    return ReferenceBackend(model_path=str(path), algorithm=algorithm, **settings)


def random_batch(lengths: tuple[int, ...] = (9, 23, 5, 12, 4)) -> Batch:
    """The last sequence has nothing to train on; the second has a gap."""
    generator = np.random.default_rng(0)
    mask = np.concatenate([np.arange(n) >= 3 for n in lengths])
    mask[16:19] = False
    mask[-4:] = False
    numbers = np.where(mask, generator.normal(size=(3, mask.size)), 0).astype(np.float32)
    return Batch(
        token_ids=generator.integers(0, VOCAB_SIZE, mask.size).astype(np.int32),
        loss_mask=mask,
        behaviour=np.where(mask, -4.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=numbers[0],
        boundaries=np.cumsum([0, *lengths], dtype=np.int32),
        proximal=np.where(mask, -4.0, 0.0).astype(np.float32),
        values=numbers[1],
        returns=numbers[2],
    )


def with_head(backend: ReferenceBackend, directory: Path) -> ReferenceBackend:
    """The same backend with a head that is not 0."""
    directory.mkdir()
    backend.snapshot()(directory)
    masters = load_file(directory / "critic.safetensors")
    masters["value_head.weight"] = torch.randn(masters["value_head.weight"].shape)
    masters["value_head.bias"] = torch.tensor([0.5])
    save_file(masters, directory / "critic.safetensors")
    backend.load(str(directory))
    return backend


def double_values(
    path: Path, masters: Mapping[str, torch.Tensor], batch: Batch
) -> tuple[Any, torch.Tensor, list[float]]:
    """By transformers in float64, one sequence after the other: the model, values [T], values after each sequence."""
    decoder = transformers.AutoModel.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    weight, bias = masters["value_head.weight"][0].double(), masters["value_head.bias"][0].double()
    before, after = [], []
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:end]).long()
        states = decoder(input_ids=ids[None]).last_hidden_state[0] @ weight + bias
        before += [states.new_zeros(1), states[:-1]]
        after.append(float(states[-1].detach()))
    return decoder, torch.cat(before), after


def test_a_new_critic_says_nothing(model: Path) -> None:
    values, bootstrap = make(model).values(random_batch())
    assert not values.any()
    assert not bootstrap.any()


@pytest.mark.parametrize("budget", [1, 32, 10_000])
def test_values_equal_transformers_in_float64(model: Path, tmp_path: Path, budget: int) -> None:
    batch = random_batch()
    backend = with_head(make(model, trainer=replace(TRAINER, tokens_per_microbatch=budget)), tmp_path / "head")
    _, expected, after = double_values(model, load_file(tmp_path / "head" / "critic.safetensors"), batch)
    values, bootstrap = backend.values(batch)
    assert (values.dtype, values.shape, bootstrap.shape) == (np.float32, batch.token_ids.shape, (5,))
    np.testing.assert_allclose(values[batch.loss_mask], expected.detach().numpy()[batch.loss_mask], atol=1e-5)
    assert not values[~batch.loss_mask].any()
    np.testing.assert_allclose(bootstrap, [*after[:4], 0.0], atol=1e-5)  # nothing of the last is trained on
    assert backend.values(batch.select([]))[1].shape == (0,)


@pytest.mark.parametrize(("budget", "order"), [(1, [0, 1, 2, 3, 4]), (10_000, [3, 4, 1, 0, 2])])
def test_the_critics_gradient_equals_the_formula_in_float64(
    model: Path, tmp_path: Path, budget: int, order: list[int]
) -> None:
    """Mean over trainable tokens of max((V - R)^2, (V_before + clip(V - V_before, 0.5) - R)^2) / 2, in any packing."""
    batch = random_batch()
    backend = with_head(make(model, trainer=replace(TRAINER, tokens_per_microbatch=budget)), tmp_path / "head")
    stats = backend.train_step([batch.select(order)])
    masters = load_file(tmp_path / "head" / "critic.safetensors")
    decoder, values, _ = double_values(model, masters, batch)
    mask, before, returns = (torch.from_numpy(x) for x in (batch.loss_mask, batch.values, batch.returns))
    near = before + (values - before).clamp(-0.5, 0.5)
    loss = torch.maximum((values - returns) ** 2, (near - returns) ** 2)[mask].mean() / 2
    loss.backward()
    assert stats["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    (tmp_path / "after").mkdir()
    backend.snapshot()(tmp_path / "after")
    moments = load_file(tmp_path / "after" / "critic_optimizer.safetensors")
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            moments[f"exp_avg.model.{name}"].double() / 0.1, parameter.grad, rtol=1e-4, atol=2e-6
        )


def test_the_critic_learns_and_the_policy_does_not_notice(model: Path) -> None:
    """The same policy, bit for bit, comes out with and without a critic; and the critic comes near its returns."""
    batch = replace(random_batch(), values=np.zeros(53, dtype=np.float32))
    with_critic, without = (
        make(model, replace(PPO, critic=CriticConfig(value_clip=10.0))),
        make(model, AlgorithmConfig()),
    )
    losses = []
    for _ in range(6):
        losses.append(with_critic.train_step([batch])["value_loss"])
        assert "value_loss" not in without.train_step([batch])
    assert losses[-1] < 0.7 * losses[0]
    for (name, ours), (_, theirs) in zip(with_critic.weights(), without.weights(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not any("value_head" in name for name, _ in with_critic.weights())


@pytest.mark.parametrize("dtype", Dtype)
def test_C9_a_loaded_critic_is_the_saved_one_and_goes_on_as_it_would_have(
    model: Path, tmp_path: Path, dtype: Dtype
) -> None:
    backend, batch = make(model, dtype=dtype), random_batch()
    backend.train_step([batch])
    backend.snapshot()(tmp_path)
    restored = make(model, dtype=dtype, seed=7)
    restored.load(str(tmp_path))
    np.testing.assert_array_equal(restored.values(batch)[0], backend.values(batch)[0])
    assert restored.train_step([batch]) == backend.train_step([batch])


def test_a_checkpoint_without_a_critic_is_refused(model: Path, tmp_path: Path) -> None:
    make(model, AlgorithmConfig()).snapshot()(tmp_path)
    with pytest.raises(CheckpointError, match="has no critic"):
        make(model).load(str(tmp_path))


def test_a_policy_is_exported_without_its_critic(model: Path, tmp_path: Path) -> None:
    make(model).export(str(tmp_path / "exported"))
    assert sorted(load_file(tmp_path / "exported" / "model.safetensors")) == sorted(
        load_file(model / "model.safetensors")
    )


@pytest.mark.parametrize("dtype", Dtype)
def test_the_reference_model_stays_where_it_was(model: Path, tmp_path: Path, dtype: Dtype) -> None:
    """And says bit for bit what the policy says as long as their weights are equal."""
    other = tmp_path / "other"
    make_model(other, "qwen3", seed=3, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    batch, kl = random_batch(), KlConfig(coef=0.1)
    backend = make(model, AlgorithmConfig(kl=kl), dtype=dtype)
    before = backend.reference_logprobs(batch)
    np.testing.assert_array_equal(before, backend.logprobs(batch))
    backend.train_step([batch])
    np.testing.assert_array_equal(backend.reference_logprobs(batch), before)
    assert np.abs(backend.logprobs(batch) - before).max() > 1e-3
    named = make(model, AlgorithmConfig(kl=replace(kl, reference=str(other))), dtype=dtype)
    np.testing.assert_array_equal(named.reference_logprobs(batch), make(other, dtype=dtype).logprobs(batch))


def test_a_kl_loss_pulls_towards_the_reference(model: Path, tmp_path: Path) -> None:
    """Without any advantage the only gradient is the KL's, and the measured KL falls."""
    other = tmp_path / "other"
    make_model(other, "qwen3", seed=3, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    batch = replace(random_batch(), advantages=np.zeros(53, dtype=np.float32))
    kl = KlConfig(coef=1.0, reference=str(other), target=1e-4)
    backend = make(model, AlgorithmConfig(kl=kl))
    batch = replace(batch, reference=backend.reference_logprobs(batch))
    measured, coefs = [], [1.0]
    for _ in range(4):
        now = backend.logprobs(batch)
        stats = backend.train_step([replace(batch, behaviour=now, proximal=now)])
        measured.append(stats["reference_kl"])
        coefs.append(stats["kl_coef"])
    assert measured[-1] < measured[0]
    assert coefs == pytest.approx([1.02**n for n in range(5)])  # far above its target: up by a fifth in ten steps
    backend.snapshot()(tmp_path)
    restored = make(model, AlgorithmConfig(kl=kl))
    restored.load(str(tmp_path))
    assert restored.kl_coef == backend.kl_coef == coefs[-1]
    fixed = make(model, AlgorithmConfig(kl=replace(kl, coef=0.3, target=None)))
    fixed.load(str(tmp_path))
    assert fixed.kl_coef == 0.3  # somebody has changed the configuration since


def test_a_kl_may_be_switched_on_when_a_run_goes_on(model: Path, tmp_path: Path) -> None:
    make(model, AlgorithmConfig()).snapshot()(tmp_path)
    for kl in (KlConfig(coef=0.2), KlConfig(coef=0.2, target=0.1)):
        backend = make(model, AlgorithmConfig(kl=kl))
        backend.load(str(tmp_path))
        assert backend.kl_coef == 0.2


def test_a_constant_divisor_is_so_many_tokens_for_each_trajectory(model: Path, tmp_path: Path) -> None:
    batch, found = random_batch(), []
    for length in (0, 50):
        backend = make(model, AlgorithmConfig(length_normaliser=length))
        backend.train_step([batch])
        (tmp_path / str(length)).mkdir()
        backend.snapshot()(tmp_path / str(length))
        found.append(load_file(tmp_path / str(length) / "optimizer.safetensors"))
    factor = batch.num_trainable / (50 * batch.num_sequences)
    for name in found[0]:
        if name.startswith("exp_avg."):
            torch.testing.assert_close(found[1][name], found[0][name] * factor, rtol=1e-4, atol=1e-8)


def test_E17_a_step_without_a_trainable_token_leaves_the_critic_alone(model: Path) -> None:
    backend, batch = make(model), random_batch()
    stats = backend.train_step([batch.select([4]), batch.select([])])
    assert stats["skipped_empty"] == 2.0
    assert math.isnan(stats["value_grad_norm"])
