"""Trainers of given answers against transformers in float64, and what packing must not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from areal_hpc.algorithms.advantages import AdvantageInputs
from areal_hpc.algorithms.table import find
from areal_hpc.config.algorithm import AlgorithmConfig, DpoConfig, KlConfig, PreferenceLoss, ProximalMethod
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config, ModelConfig, OptimizerConfig, PromptsConfig, RolloutConfig, TrainerConfig
from areal_hpc.errors import DataError
from areal_hpc.scorer import load_scorer
from areal_hpc.training.batching import plan_step
from areal_hpc.training.credit import assess
from areal_hpc.training.forward import parts
from areal_hpc.training.preference import PreferenceBackend, RewardModelBackend
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch
from tests.tiny_models import VOCAB_SIZE, make_model

LENGTHS = (9, 23, 5, 12, 31, 6)
BACKENDS: dict[str, type[ReferenceBackend]] = {
    "sft": ReferenceBackend,
    "dpo": PreferenceBackend,
    "reward_model": RewardModelBackend,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_model(path, "qwen3", 0, hidden_size=32, intermediate_size=48, head_dim=8, initializer_range=0.06)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference that is not the policy."""
    path = tmp_path_factory.mktemp("models") / "other"
    make_model(path, "qwen3", 7, hidden_size=32, intermediate_size=48, head_dim=8, initializer_range=0.06)
    return path


def algorithm(name: str, **dpo: Any) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, decoupled=False, proximal=ProximalMethod.BEHAVIOUR, dpo=DpoConfig(**dpo))


def make(name: str, path: Path, budget: int = 64, lr: float = 1e-2, **dpo: Any) -> ReferenceBackend:
    optimizer = OptimizerConfig(lr=lr, grad_clip=1e9)
    return BACKENDS[name](
        model_path=str(path),
        algorithm=algorithm(name, **dpo),
        trainer=TrainerConfig(total_steps=10, tokens_per_microbatch=budget, optimizer=optimizer),
        temperature=1.0,
    )


def given() -> Batch:
    generator = np.random.default_rng(0)
    mask = np.concatenate([np.arange(n) >= 2 + n % 3 for n in LENGTHS])
    return Batch(
        token_ids=generator.integers(0, VOCAB_SIZE, mask.size).astype(np.int32),
        loss_mask=mask,
        behaviour=np.zeros(mask.size, dtype=np.float32),
        versions=np.full(mask.size, -1, dtype=np.int32),
        advantages=mask.astype(np.float32),
        boundaries=np.cumsum([0, *LENGTHS], dtype=np.int32),
    )


def assessed(backend: ReferenceBackend, batch: Batch, config: AlgorithmConfig) -> Batch:
    (whole,) = assess([batch], [np.zeros(batch.num_sequences)], backend, config, Ranks())
    assert whole.proximal is None  # no forward for nothing
    return whole


def gradients(backend: ReferenceBackend) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in backend._model.named_parameters()}


def answers_logprobs(path: Path, batch: Batch) -> tuple[torch.nn.Module, torch.Tensor]:
    """Sum of each answer's log-probs [S] by transformers in float64, one sequence after the other."""
    language = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    sums = []
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:end]).long()
        logs = language(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        of_tokens = logs[torch.arange(len(ids) - 1), ids[1:]]
        sums.append(of_tokens[torch.from_numpy(batch.loss_mask[start + 1 : end])].sum())
    return language, torch.stack(sums)


def assert_same_gradient(backend: ReferenceBackend, expected: torch.nn.Module) -> None:
    found = gradients(backend)
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=2e-3, atol=2e-6, msg=name)


def test_sft_is_transformers_language_modelling_loss(model: Path) -> None:
    """One sequence, so that its mean over labelled tokens is the batch's."""
    backend, batch = make("sft", model), given().select([1])
    stats = backend.train_step([assessed(backend, batch, algorithm("sft"))])
    language = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    ids = torch.from_numpy(batch.token_ids).long()[None]
    labels = torch.where(torch.from_numpy(batch.loss_mask), ids, -100)
    loss = language(input_ids=ids, labels=labels).loss
    loss.backward()
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradient(backend, language)


def test_sft_is_a_mean_over_tokens_not_over_answers(model: Path) -> None:
    backend, batch = make("sft", model), given()
    stats = backend.train_step([assessed(backend, batch, algorithm("sft"))])
    language, sums = answers_logprobs(model, batch)
    loss = -sums.sum() / batch.num_trainable
    loss.backward()
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradient(backend, language)


@pytest.mark.parametrize("kind", list(PreferenceLoss))
def test_dpo_is_the_papers_loss_in_float64(model: Path, other: Path, kind: PreferenceLoss) -> None:
    options = {"beta": 0.2, "loss": kind, "reference": str(other)}
    backend, batch = make("dpo", model, **options), given()
    stats = backend.train_step([assessed(backend, batch, algorithm("dpo", **options))])
    language, current = answers_logprobs(model, batch)
    with torch.no_grad():
        _, frozen = answers_logprobs(other, batch)
    better, worse = (current - frozen).view(-1, 2).unbind(1)
    margins = better - worse
    losses = -logsigmoid(0.2 * margins) if kind is PreferenceLoss.SIGMOID else (margins - 2.5).square()
    losses.mean().backward()
    assert stats["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert stats["margin"] == pytest.approx(margins.mean().item(), rel=1e-4, abs=1e-4)
    assert stats["accuracy"] == pytest.approx(float((margins > 0).double().mean()))
    assert_same_gradient(backend, language)


def test_a_reference_that_is_not_named_is_where_the_policy_began(model: Path) -> None:
    backend, batch = make("dpo", model), given()
    whole = assessed(backend, batch, algorithm("dpo"))
    assert backend.evaluate(whole)["loss"] == pytest.approx(np.log(2))
    first = backend.train_step([whole])
    assert first["loss"] == pytest.approx(np.log(2))
    after = assessed(backend, batch, algorithm("dpo"))
    np.testing.assert_array_equal(after.reference, whole.reference)  # frozen
    assert backend.evaluate(after)["loss"] < first["loss"] - 0.01
    assert "kl_coef" not in first


def head(backend: ReferenceBackend, seed: int) -> None:
    """Give the head weights, so that gradients reach the decoder."""
    generator = torch.Generator().manual_seed(seed)
    backend._model.score.weight.data.normal_(generator=generator)


def test_a_reward_model_is_transformers_sequence_classifier(model: Path, tmp_path: Path) -> None:
    backend, batch = make("reward_model", model), given()
    head(backend, 3)
    backend.export(str(tmp_path / "out"))
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float64)
    scores = torch.stack([classifier(input_ids=ids[None]).logits[0, 0] for ids in sequences(batch)])
    better, worse = scores.view(-1, 2).unbind(1)
    loss = -logsigmoid(better - worse).mean()
    loss.backward()
    stats = backend.train_step([assessed(backend, batch, algorithm("reward_model"))])
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradient(backend, classifier)


def sequences(batch: Batch) -> list[torch.Tensor]:
    return [torch.from_numpy(ids).long() for ids in batch.per_sequence(batch.token_ids)]


def test_a_new_head_scores_everything_0_and_a_language_model_is_no_reward(model: Path) -> None:
    backend = make("reward_model", model)
    assert backend.evaluate(given())["loss"] == pytest.approx(np.log(2))
    assert backend.evaluate(given())["accuracy"] == 0.0
    with pytest.raises(DataError, match=r"is no reward model: it lacks 1 weights, first score.weight"):
        load_scorer(model, new_head=False)
    with pytest.raises(DataError, match=r"holds no config.json"):
        load_scorer(model.parent, new_head=False)


@pytest.mark.parametrize("name", BACKENDS)
def test_E8_packing_and_order_of_pairs_change_nothing(name: str, model: Path) -> None:
    def updated(batch: Batch, budget: int) -> tuple[float, dict[str, torch.Tensor]]:
        backend = make(name, model, budget)
        if name == "reward_model":
            head(backend, 3)
        stats = backend.train_step([assessed(backend, batch, algorithm(name))])
        return stats["loss"], gradients(backend)

    loss, expected = updated(given(), 10_000)
    for order, budget in (([0, 1, 2, 3, 4, 5], 1), ([4, 5, 0, 1, 2, 3], 64), ([2, 3, 4, 5, 0, 1], 100)):
        other_loss, found = updated(given().select(order), budget)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for tensor, other_tensor in zip(expected.values(), found.values(), strict=True):
            torch.testing.assert_close(other_tensor, tensor, rtol=1e-3, atol=3e-6)


@pytest.mark.parametrize("budget", [1, 24, 64, 10_000])
def test_pairs_stay_together_and_within_the_budget(budget: int) -> None:
    batch = replace(given(), behaviour=np.repeat(np.arange(6), LENGTHS).astype(np.float32))
    found = []
    for part, where in parts(batch, budget, together=2):
        numbers = [int(values[0]) for values in part.per_sequence(part.behaviour)]
        assert numbers[1::2] == [number + 1 for number in numbers[::2]]
        assert all(number % 2 == 0 for number in numbers[::2])
        assert part.num_sequences == 2 or part.num_sequences * int(part.lengths.max()) <= budget
        np.testing.assert_array_equal(batch.token_ids[where], part.token_ids)
        found += numbers
    assert sorted(found) == list(range(6))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_plan_keeps_pairs_together(num_ranks: int) -> None:
    lengths, generated = np.arange(1, 25), np.ones(24)
    plan = plan_step(lengths, generated, num_minibatches=3, num_ranks=num_ranks, seed=1, together=2)
    shares = [share for minibatch in plan for share in minibatch]
    assert all(share[1::2] == [index + 1 for index in share[::2]] for share in shares)
    assert sorted(index for share in shares for index in share) == list(range(24))
    assert [sum(map(len, minibatch)) for minibatch in plan] == [8, 8, 8]


def test_a_distilled_token_is_worth_what_the_teacher_finds_it_likelier(model: Path, other: Path) -> None:
    """By transformers in float64; no reward, no discount, no baseline."""
    written = AlgorithmConfig(name="distillation", kl=KlConfig(reference=str(other)))
    config = resolve(
        Config(
            name="small",
            model=ModelConfig(path=str(model)),
            prompts=PromptsConfig(train="train.jsonl"),
            rollout=RolloutConfig(reward="tasks:reward"),
            trainer=TrainerConfig(total_steps=10),
            algorithm=written,
        )
    ).algorithm
    backend = ReferenceBackend(
        model_path=str(model), algorithm=config, trainer=TrainerConfig(total_steps=10), temperature=1.0
    )
    behaviour = np.random.default_rng(1).uniform(-6, -4, int(given().boundaries[-1])).astype(np.float32)
    batch = replace(given(), behaviour=np.where(given().loss_mask, behaviour, 0.0).astype(np.float32))
    outcomes = find("distillation").outcomes(
        AdvantageInputs(
            rewards=np.arange(6.0),
            groups=np.zeros(6, dtype=np.int64),
            generated=np.ones(6, dtype=np.int64),
            truncated=np.zeros(6, dtype=np.bool_),
            episodes=np.arange(6),
            max_new_tokens=40,
        ),
        config,
    )
    (found,) = assess([batch], [outcomes], backend, config, Ranks())
    with torch.no_grad():
        teacher = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float64)
        logs = [teacher(input_ids=ids[None]).logits[0, :-1].log_softmax(-1) for ids in sequences(batch)]
    likelier = np.concatenate(
        [[0.0, *one[np.arange(len(ids) - 1), ids[1:]]] for one, ids in zip(logs, sequences(batch), strict=True)]
    )
    expected = np.where(batch.loss_mask, likelier - batch.behaviour, 0.0)
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-3, atol=1e-4)
    assert np.ptp(found.advantages[batch.loss_mask]) > 1.0


def save_and_load(name: str, model: Path, path: Path) -> tuple[ReferenceBackend, ReferenceBackend]:
    backend = make(name, model)
    path.mkdir()
    batch = assessed(backend, given(), algorithm(name))
    backend.train_step([batch])
    backend.snapshot()(path)
    again = make(name, model)
    again.load(str(path))
    return backend, again


@pytest.mark.parametrize("name", BACKENDS)
def test_a_loaded_trainer_goes_on_with_the_same_bits(name: str, model: Path, tmp_path: Path) -> None:
    backend, again = save_and_load(name, model, tmp_path / "saved")
    for one in (backend, again):
        one.train_step([assessed(one, given(), algorithm(name))])
    for (first, tensor), (second, other_tensor) in zip(backend.weights(), again.weights(), strict=True):
        assert first == second
        assert torch.equal(tensor, other_tensor)


@pytest.mark.parametrize("name", BACKENDS)
def test_evaluation_trains_nothing(name: str, model: Path) -> None:
    backend = make(name, model)
    batch = assessed(backend, given(), algorithm(name))
    before = {key: tensor.clone() for key, tensor in backend.weights()}
    assert backend.evaluate(batch) == backend.evaluate(batch)
    assert all(torch.equal(before[key], tensor) for key, tensor in backend.weights())


@pytest.mark.parametrize("name", BACKENDS)
def test_E17_a_rank_without_a_share_is_no_crash(name: str, model: Path) -> None:
    backend = make(name, model)
    stats = backend.train_step([given().select([])])
    assert np.isnan(stats["loss"])
    assert stats["skipped_empty"] == 1.0
    assert dict(backend.evaluate(given().select([]))) == {}
