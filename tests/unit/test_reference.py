from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_steps import (
    OPTIMIZER,
    TRAINER,
    digest,
    double_gradients,
    double_logprobs,
    gradients,
    make,
    random_batch,
    small_model,
)
from safetensors.torch import load_file

from areal_hpc.algorithms.objective import LossInputs, LossOutput
from areal_hpc.algorithms.stats import mean_of
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import Dtype, Schedule
from areal_hpc.errors import CheckpointError, ConfigError, DataError
from areal_hpc.training.optimizer import Optimizer
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "qwen3")


# Log-probs


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("budget", [1, 32, 10_000])
def test_logprobs_equal_transformers_in_float64(tmp_path: Path, family: str, budget: int) -> None:
    path, batch = small_model(tmp_path / family, family), random_batch()
    found = make(path, trainer=replace(TRAINER, tokens_per_microbatch=budget)).logprobs(batch)
    expected = double_logprobs(path, batch)[1].detach().numpy()
    assert (found.dtype, found.shape) == (np.float32, batch.token_ids.shape)
    np.testing.assert_allclose(found[batch.loss_mask], expected[batch.loss_mask], atol=1e-5)
    assert not found[~batch.loss_mask].any()


def test_temperature_divides_the_logits(qwen3: Path) -> None:
    batch = random_batch()
    for temperature in (0.5, 1.0, 1.7):
        expected = double_logprobs(qwen3, batch, temperature)[1].detach().numpy()
        found = make(qwen3, temperature=temperature).logprobs(batch)
        np.testing.assert_allclose(found[batch.loss_mask], expected[batch.loss_mask], atol=1e-5)


@pytest.mark.parametrize("token", [0, 1, 2])
def test_G11_a_token_that_looks_like_padding_is_a_token(qwen3: Path, token: int) -> None:
    """Also as the last one of a sequence that shares its rows with longer ones; padding is never found by its id."""
    batch = random_batch()
    batch = replace(batch, token_ids=np.full_like(batch.token_ids, token))
    found = make(qwen3, trainer=replace(TRAINER, tokens_per_microbatch=10_000)).logprobs(batch)
    expected = double_logprobs(qwen3, batch)[1].detach().numpy()
    np.testing.assert_allclose(found[batch.loss_mask], expected[batch.loss_mask], atol=1e-5)
    ends = np.cumsum(batch.lengths) - 1
    assert batch.loss_mask[ends].any() and (found[ends][batch.loss_mask[ends]] < 0).all()


def test_logprobs_of_nothing(qwen3: Path) -> None:
    assert make(qwen3).logprobs(random_batch().select([])).shape == (0,)


# Gradients and updates


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_gradients_equal_the_formula_in_float64(tmp_path: Path, family: str) -> None:
    path, batch = small_model(tmp_path / family, family), random_batch()
    backend = make(path)
    stats = backend.train_step([batch.with_proximal(backend.logprobs(batch))])
    expected = double_gradients(path, batch)
    found = gradients(backend, tmp_path / "saved")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].double(), gradient, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(("budget", "order"), [(1, [0, 1, 2, 3, 4]), (40, [4, 2, 0, 3, 1]), (10_000, [3, 4, 1, 0, 2])])
def test_E8_gradients_do_not_depend_on_packing(qwen3: Path, tmp_path: Path, budget: int, order: list[int]) -> None:
    batch, found = random_batch(), []
    for part, tokens in ((batch, 64), (batch.select(order), budget)):
        backend = make(qwen3, trainer=replace(TRAINER, tokens_per_microbatch=tokens))
        backend.train_step([part.with_proximal(backend.logprobs(part))])
        found.append(gradients(backend, tmp_path / "saved"))
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-6)


def test_one_update_for_each_minibatch_and_one_learning_rate_for_each_step(qwen3: Path) -> None:
    optimizer = replace(OPTIMIZER, lr=1.0, warmup_steps=2, schedule=Schedule.LINEAR, min_lr=0.2, grad_clip=1e-4)
    backend, batch = make(qwen3, trainer=replace(TRAINER, total_steps=4, optimizer=optimizer)), random_batch()
    batch = batch.with_proximal(backend.logprobs(batch))
    steps = [backend.train_step([batch.select([0, 1]), batch.select([2, 3, 4])]) for _ in range(5)]
    assert [s["lr"] for s in steps] == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])
    assert [s["updates"] for s in steps] == [2.0] * 5


def test_training_makes_what_was_good_likelier(qwen3: Path) -> None:
    backend, batch = make(qwen3), random_batch()
    before = backend.logprobs(batch)
    batch = replace(batch, behaviour=before)
    backend.train_step([batch.with_proximal(before)])
    change = (backend.logprobs(batch) - before)[batch.loss_mask]
    assert float((change * batch.advantages[batch.loss_mask]).sum()) > 0


def test_a_loss_of_ones_own_is_what_is_minimised(qwen3: Path, tmp_path: Path) -> None:
    """Cross-entropy, which needs no other policy: its gradients are those of transformers in float64."""

    def cross_entropy(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
        assert config.clip_high == 0.3
        per_token = torch.where(inputs.mask, -inputs.current, 0.0)
        return LossOutput(per_token=per_token, stats={"mine": mean_of(per_token, inputs.mask)})

    batch = random_batch()
    backend = make(qwen3, algorithm=AlgorithmConfig(clip_high=0.3), loss=cross_entropy)
    stats = backend.train_step([batch])
    model, logprobs = double_logprobs(qwen3, batch)
    expected = -logprobs[torch.from_numpy(batch.loss_mask)].mean()
    expected.backward()
    assert stats["mine"] == stats["loss"] == pytest.approx(float(expected), rel=1e-5)
    found = gradients(backend, tmp_path)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad.float(), rtol=1e-3, atol=1e-5)


def test_statistics_are_those_of_the_batch(qwen3: Path) -> None:
    backend, batch = make(qwen3), random_batch()
    proximal = backend.logprobs(batch)
    stats = backend.train_step([batch.with_proximal(proximal)])
    mask = batch.loss_mask
    gap = np.abs(proximal - batch.behaviour)[mask]
    assert stats["trainable_tokens"] == mask.sum()
    assert stats["logprob_gap"] == pytest.approx(gap.mean(), rel=1e-5)
    assert stats["logprob_gap_max"] == pytest.approx(gap.max(), rel=1e-5)
    assert 0 < stats["entropy"] <= math.log(VOCAB_SIZE) + 1e-5
    assert stats["staleness_mean"] == 0.0


def test_E17_a_batch_without_a_trainable_token_is_skipped_and_counted(qwen3: Path) -> None:
    backend, batch = make(qwen3), random_batch()
    before = digest(backend)
    nothing = replace(batch, loss_mask=np.zeros_like(batch.loss_mask), proximal=np.zeros_like(batch.behaviour))
    stats = backend.train_step([nothing, nothing.select([])])
    assert (stats["updates"], stats["skipped_empty"], stats["trainable_tokens"]) == (0.0, 2.0, 0.0)
    assert math.isnan(stats["loss"])
    assert math.isnan(stats["grad_norm"])
    assert digest(backend) == before


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_the_next_one_applied(qwen3: Path, advantage: float) -> None:
    backend, batch = make(qwen3), random_batch()
    batch = replace(batch, behaviour=backend.logprobs(batch))
    batch = batch.with_proximal(batch.behaviour)
    broken = replace(batch, advantages=np.where(batch.loss_mask, advantage, 0).astype(np.float32))
    before = digest(backend)
    stats = backend.train_step([broken])
    assert (stats["updates"], stats["skipped_nonfinite"]) == (0.0, 1.0)
    assert digest(backend) == before
    stats = backend.train_step([broken, batch])
    assert (stats["updates"], stats["skipped_nonfinite"]) == (1.0, 1.0)
    assert digest(backend) != before
    assert all(bool(torch.isfinite(tensor).all()) for _, tensor in backend.weights())


@pytest.mark.parametrize("ratio", [-1000.0, 1000.0, -math.inf, math.inf, math.nan])
def test_E6_a_broken_ratio_with_zero_advantage_keeps_the_update_finite(qwen3: Path, ratio: float) -> None:
    backend, batch = make(qwen3), random_batch()
    proximal = backend.logprobs(batch)
    place = int(np.flatnonzero(batch.loss_mask)[3])
    batch = replace(batch, behaviour=proximal.copy())
    proximal[place] -= ratio
    batch.advantages[place] = 0.0
    stats = backend.train_step([batch.with_proximal(proximal)])
    assert stats["updates"] == 1.0
    assert math.isfinite(stats["loss"])


def test_training_twice_from_the_same_start_gives_the_same_bits(qwen3: Path) -> None:
    digests = set()
    for _ in range(2):
        backend, batch = make(qwen3), random_batch()
        backend.train_step([batch.with_proximal(backend.logprobs(batch))])
        digests.add(digest(backend))
    assert len(digests) == 1


# Weights


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_D6_weights_have_the_names_shapes_and_values_of_the_checkpoint(
    tmp_path: Path, family: str, dtype: Dtype
) -> None:
    path = small_model(tmp_path / family, family)
    on_disk = load_file(path / "model.safetensors")
    weights = list(make(path, dtype=dtype).weights())
    assert [name for name, _ in weights] == sorted(on_disk)
    for name, tensor in weights:
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, on_disk[name].to(tensor.dtype)), name
    assert ("lm_head.weight" in on_disk) == (family != "qwen3")


def test_bfloat16_log_probs_are_close_and_training_moves_the_masters(qwen3: Path) -> None:
    backend, batch = make(qwen3, dtype=Dtype.BFLOAT16), random_batch()
    found, exact = backend.logprobs(batch), make(qwen3).logprobs(batch)
    assert 0 < np.abs(found - exact).max() < 0.15
    batch = batch.with_proximal(found)
    stats = backend.train_step([batch])
    assert stats["updates"] == 1.0
    assert not np.array_equal(backend.logprobs(batch), found)


# Checkpoints


def states(directory: Path) -> Mapping[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir())}


@pytest.mark.parametrize("dtype", list(Dtype))
def test_C9_C32_a_loaded_backend_is_the_saved_one_and_goes_on_as_it_would_have(
    qwen3: Path, tmp_path: Path, dtype: Dtype
) -> None:
    trainer = replace(TRAINER, optimizer=replace(OPTIMIZER, schedule=Schedule.COSINE, warmup_steps=2))
    backend, batch = make(qwen3, trainer=trainer, dtype=dtype), random_batch()
    batch = batch.with_proximal(backend.logprobs(batch))
    for _ in range(3):
        backend.train_step([batch.select([0, 1]), batch.select([2, 3, 4])])
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    backend.snapshot()(tmp_path / "first")
    restored = make(small_model(tmp_path / "other", seed=5), trainer=trainer, dtype=dtype, seed=9)
    restored.load(str(tmp_path / "first"))
    assert digest(restored) == digest(backend)  # before any step: what the engines are sent
    restored.snapshot()(tmp_path / "second")
    assert states(tmp_path / "second") == states(tmp_path / "first")
    again = [b.train_step([batch.select([0, 1]), batch.select([2, 3, 4])]) for b in (backend, restored)]
    assert again[0] == again[1]
    assert digest(restored) == digest(backend)


def test_C33_random_streams_are_restored_last(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    backend = make(qwen3)
    backend.snapshot()(tmp_path)
    expected = draw()
    real = Optimizer.load_state_dict

    def load_with_warm_up(self: Optimizer, *args: Any) -> None:
        draw()
        real(self, *args)

    monkeypatch.setattr(Optimizer, "load_state_dict", load_with_warm_up)
    other = make(qwen3, seed=77)
    other.load(str(tmp_path))
    assert draw() == expected


def test_a_directory_of_something_else_is_refused(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        make(qwen3).load(str(tmp_path))
    make(small_model(tmp_path / "llama", "llama")).snapshot()(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        make(qwen3).load(str(tmp_path))


def test_an_export_is_a_complete_hugging_face_directory(qwen3: Path, tmp_path: Path) -> None:
    backend, batch = make(qwen3), random_batch()
    backend.train_step([batch.with_proximal(backend.logprobs(batch))])
    target = tmp_path / "exported"
    backend.export(str(target))
    expected = double_logprobs(target, batch)[1].detach().numpy()
    np.testing.assert_allclose(backend.logprobs(batch)[batch.loss_mask], expected[batch.loss_mask], atol=1e-5)
    config = json.loads((target / "config.json").read_text())
    assert config["rope_theta"] == 5000.0
    assert config["torch_dtype"] == config["dtype"] == "float32"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (qwen3 / name).read_bytes()
    assert "lm_head.weight" not in load_file(target / "model.safetensors")
    mode = target.stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {mode}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_an_export_has_the_names_and_shapes_of_its_family(family: str, tmp_path: Path) -> None:
    """transformers fuses experts when it loads them, for one; other readers know only the names of the family."""
    source = small_model(tmp_path / family, family)
    backend = make(source)
    backend.train_step([random_batch().with_proximal(backend.logprobs(random_batch()))])
    backend.export(str(tmp_path / "exported"))
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "exported"))
    assert {name: tensor.shape for name, tensor in after.items()} == {n: tensor.shape for n, tensor in before.items()}
    trained = dict(backend.weights())
    assert trained.keys() == after.keys()
    assert all(torch.equal(trained[name], tensor) for name, tensor in after.items())
    assert not all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_B12_nothing_is_ever_written_into_the_model_directory(tmp_path: Path) -> None:
    path = small_model(tmp_path / "qwen3")
    before = {p.name: p.stat().st_mtime_ns for p in (path, *path.iterdir())}
    backend = make(path)
    backend.train_step([random_batch().with_proximal(backend.logprobs(random_batch()))])
    backend.export(str(tmp_path / "exported"))
    assert {p.name: p.stat().st_mtime_ns for p in (path, *path.iterdir())} == before


# Refusals


def test_a_model_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        make(tmp_path)


def test_a_model_with_missing_weights_is_refused(tmp_path: Path) -> None:
    path = small_model(tmp_path / "qwen3")
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"model\.layers\.2"):
        make(path)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Gemma2"):
        make(small_model(tmp_path / "gemma2", "gemma2", final_logit_softcapping=0.5))


def test_greedy_sampling_cannot_be_trained_on(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        make(qwen3, temperature=0.0)
