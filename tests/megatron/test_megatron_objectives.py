"""Every kind of objective on split models as on the reference: a critic, given answers, pairs, scores.

The reference's own tests hold each of these against transformers in float64.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from layouts import Run
from safetensors.torch import load_file, save_file
from steps import VOCAB_SIZE, make, make_reference, save, train, weights_of, whole_batch

from areal_hpc.config.algorithm import AlgorithmConfig, CriticConfig, DpoConfig, Level, NormConfig, ProximalMethod
from areal_hpc.config.schema import Dtype, ParallelConfig
from areal_hpc.errors import CheckpointError
from areal_hpc.scorer import load_scorer, scores
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch

pytestmark = pytest.mark.megatron

NAMES = ("ppo", "sft", "dpo", "reward_model")


def algorithm_of(name: str, path: Path) -> AlgorithmConfig:
    """DPO's reference is another model: near itself, accuracies of a policy are rounding."""
    given = {} if name == "ppo" else {"decoupled": False, "proximal": ProximalMethod.BEHAVIOUR}
    dpo, critic = DpoConfig(reference=str(path.parent / "llama")), CriticConfig(lr_scale=2.0)
    over = Level.BATCH if name == "ppo" else Level.NONE  # the advantages of all ranks are one population
    return AlgorithmConfig(name=name, dpo=dpo, critic=critic, adv_norm=NormConfig(mean=over, std=over), **given)


def data(name: str) -> Batch:
    batch = whole_batch()
    if name == "ppo":
        return replace(batch, truncated=np.arange(batch.num_sequences) % 2 == 0)
    return batch.select([0, 1, 2, 3, 4, 5, 7, 6])  # each with something to train on


def story(ranks: Ranks, parallel: ParallelConfig, path: Path, name: str, saved: Path) -> dict[str, Any]:
    algorithm, batch = algorithm_of(name, path), data(name)
    backend = make(ranks, parallel, path, Dtype.FLOAT32, algorithm)
    told = train(backend, backend.data_ranks, 1, 2, algorithm, batch)
    save(ranks, backend, saved / "second")
    told += train(backend, backend.data_ranks, 3, 3, algorithm, batch)
    found = {"told": told, "trained": weights_of(backend)}
    again = make(ranks, parallel, path, Dtype.FLOAT32, algorithm)
    again.load(str(saved / "second"))
    found["again"] = train(again, again.data_ranks, 3, 3, algorithm, batch)
    if name == "ppo":
        return found | {"values": backend.values(batch)}
    backend.export(str(saved / "exported"))
    if name == "dpo":
        batch = replace(batch, reference=backend.reference_logprobs(batch))
    share = [0, 1] if backend.data_ranks.rank == 0 else [2, 3, 4, 5, 6, 7]
    if backend.data_ranks.size == 1:
        share = list(range(batch.num_sequences))
    return found | {"evaluated": dict(backend.evaluate(batch.select(share)))}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    stories = {}
    for name in NAMES:
        algorithm = algorithm_of(name, models["qwen3"])
        backend, batch = make_reference(models["qwen3"], Dtype.FLOAT32, algorithm), data(name)
        found = {"told": train(backend, Ranks(), 1, 3, algorithm, batch), "trained": weights_of(backend)}
        if name == "ppo":
            found["values"] = backend.values(batch)
        else:
            if name == "dpo":
                batch = replace(batch, reference=backend.reference_logprobs(batch))
            found["evaluated"] = dict(backend.evaluate(batch))
        stories[name] = found
    return stories


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ppo", "tp2 pp2"),
        pytest.param("ppo", "cp2 dp2", marks=pytest.mark.long),
        ("sft", "tp2 dp2"),
        pytest.param("dpo", "pp2 dp2", marks=pytest.mark.long),
        ("dpo", "cp2"),
        pytest.param("reward_model", "tp2 pp2", marks=pytest.mark.long),
        ("reward_model", "cp2 dp2"),
    ],
)
def test_E8_E24_every_objective_is_the_reference_s_on_split_models(
    run: Run, models: dict[str, Path], expected: dict[str, dict[str, Any]], tmp_path: Path, name: str, layout: str
) -> None:
    """Statistics, weights, values and held-out losses; and a checkpoint goes on with the same bits."""
    right = expected[name]
    for found in run(layout, story, models["qwen3"], name, tmp_path):
        for step, told in zip(found["told"], right["told"], strict=True):
            assert step == pytest.approx(told, rel=5e-4, abs=5e-6)
        assert found["again"] == found["told"][2:]
        for weight, tensor in right["trained"].items():
            np.testing.assert_allclose(found["trained"][weight], tensor, atol=2e-5, err_msg=weight)
        if name == "ppo":
            for values, known in zip(found["values"], right["values"], strict=True):
                np.testing.assert_allclose(values, known, atol=2e-5)
            assert np.abs(found["values"][0]).max() > 1e-3  # the head has learned something
        else:
            assert found["evaluated"] == pytest.approx(right["evaluated"], rel=5e-4, abs=5e-6)


def test_an_exported_reward_model_is_what_rewards_are_asked_of(
    run: Run, models: dict[str, Path], expected: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    (found,) = run("tp1", story, models["qwen3"], "reward_model", tmp_path)
    model = load_scorer(tmp_path / "exported", new_head=False)
    assert torch.equal(model.score.weight, torch.from_numpy(found["trained"]["score.weight"]))
    any_tool = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    ids = torch.randint(VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(3))
    after = model.get_decoder()(input_ids=ids).last_hidden_state[:, -1]
    torch.testing.assert_close(any_tool(input_ids=ids).logits[0], scores(model, after))


def loaded_values(ranks: Ranks, parallel: ParallelConfig, path: Path, saved: Path) -> Any:
    backend = make(ranks, parallel, path, Dtype.FLOAT32, algorithm_of("ppo", path))
    backend.load(str(saved))
    save(ranks, backend, saved / "split")
    return backend.values(data("ppo"))


def test_each_critic_goes_on_from_the_others_checkpoint(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    """A critic whose head is not 0, there and back."""
    path = models["qwen3"]
    reference = make_reference(path, Dtype.FLOAT32, algorithm_of("ppo", path))
    reference.snapshot()(tmp_path)
    masters = load_file(tmp_path / "critic.safetensors")
    masters["value_head.weight"] = torch.linspace(-1, 1, 32).view(1, 32)
    masters["value_head.bias"] = torch.tensor([0.5])
    save_file(masters, tmp_path / "critic.safetensors")
    reference.load(str(tmp_path))
    known = reference.values(data("ppo"))
    for found in run("tp2", loaded_values, path, tmp_path):
        for values, right in zip(found, known, strict=True):
            np.testing.assert_allclose(values, right, atol=1e-5)
    again = make_reference(path, Dtype.FLOAT32, algorithm_of("ppo", path))
    again.load(str(tmp_path / "split"))
    for values, right in zip(again.values(data("ppo")), known, strict=True):
        np.testing.assert_array_equal(values, right)


def without_critic(ranks: Ranks, parallel: ParallelConfig, path: Path, saved: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        make(ranks, parallel, path, Dtype.FLOAT32, algorithm_of("ppo", path)).load(str(saved))
    return str(error.value)


def test_a_checkpoint_without_a_critic_is_refused(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    make_reference(models["qwen3"]).snapshot()(tmp_path)
    (said,) = run("tp1", without_critic, models["qwen3"], tmp_path)
    assert "has no critic" in said
