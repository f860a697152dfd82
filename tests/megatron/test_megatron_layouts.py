"""The Megatron trainer against the reference on every kind of layout: log-probs, loss, gradient norm, weights.

The reference is held against transformers in float64 by its own tests, on one rank; how many ranks there are, and what
each of them holds, must not be visible in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import Run, pool
from safetensors.torch import load_file
from tiny_models import make_model

from areal_hpc.config.algorithm import AlgorithmConfig, KlConfig
from areal_hpc.config.schema import OptimizerConfig, ParallelConfig, Schedule, TrainerConfig
from areal_hpc.training.batching import plan_step
from areal_hpc.training.credit import assess
from areal_hpc.training.megatron.backend import MegatronBackend
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch

pytestmark = pytest.mark.megatron

VOCAB_SIZE = 273  # no multiple of 2: shares of the vocabulary are padded
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "initializer_range": 0.06,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False}
MIXTURE["norm_topk_prob"] = True
ALGORITHM = AlgorithmConfig(kl=KlConfig(coef=0.1))
NUM_STEPS, NUM_SEQUENCES, TEMPERATURE = 3, 9, 0.7
LAYOUTS = [
    ("qwen3", "tp2"),
    ("llama", "pp2"),
    ("qwen2", "pp2"),
    ("qwen2", "dp2"),
    ("qwen3", "tp2 pp2"),
    ("qwen2", "tp2 dp2"),
    ("qwen3", "cp2"),
    ("qwen3", "tp2 cp2"),
    ("llama", "pp2 vpp2"),
    ("qwen3_moe", "dp2 ep2"),
    ("qwen3_moe", "tp2 ep2 pp2"),
]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with pool() as run:
        yield run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """qwen2 and qwen3 have tied embeddings, the others not; qwen2 has biases, qwen3 and the mixture norms of heads."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        make_model(root / family, family, 0, **SIZES, **(MIXTURE if family == "qwen3_moe" else {}))
    return {path.name: path for path in root.iterdir()}


def whole_batch() -> Batch:
    """Sequences of very different lengths, the last one with nothing to train on."""
    generator = np.random.default_rng(5)
    lengths = np.array([40, 6, 11, 25, 5, 18, 2, 33, 9])
    mask = np.concatenate([np.arange(n) >= min(3, n - 1) for n in lengths])
    mask[-9:] = False
    return Batch(
        token_ids=generator.integers(0, VOCAB_SIZE, mask.size).astype(np.int32),
        loss_mask=mask,
        behaviour=np.where(mask, generator.uniform(-6, -5, mask.size), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, np.repeat(generator.normal(size=NUM_SEQUENCES), lengths), 0).astype(np.float32),
        boundaries=np.cumsum([0, *lengths], dtype=np.int32),
    )


def trainer(parallel: ParallelConfig) -> TrainerConfig:
    optimizer = OptimizerConfig(lr=1e-3, grad_clip=0.5, weight_decay=0.1, warmup_steps=2, schedule=Schedule.COSINE)
    return TrainerConfig(total_steps=8, tokens_per_microbatch=48, parallel=parallel, optimizer=optimizer)


def make(ranks: Ranks, parallel: ParallelConfig, path: Path) -> MegatronBackend:
    return MegatronBackend(
        model_path=str(path),
        algorithm=ALGORITHM,
        trainer=trainer(parallel),
        temperature=TEMPERATURE,
        ranks=ranks,
    )


def make_reference(path: Path) -> ReferenceBackend:
    return ReferenceBackend(
        model_path=str(path), algorithm=ALGORITHM, trainer=trainer(ParallelConfig()), temperature=TEMPERATURE
    )


def train(backend: Any, data_ranks: Ranks, first: int, last: int) -> list[dict[str, float]]:
    """Statistics of steps ``first`` to ``last``: three minibatches each, one of them of two sequences."""
    batch, told = whole_batch(), []
    for step in range(first, last + 1):
        plan = plan_step(batch.lengths, np.ones(NUM_SEQUENCES), 4, data_ranks.size, step)
        mine = [batch.select(of_ranks[data_ranks.rank]) for of_ranks in plan]
        zeros = [np.zeros(part.num_sequences) for part in mine]
        told.append(dict(backend.train_step(assess(mine, zeros, backend, ALGORITHM, data_ranks))))
    return told


def weights_of(backend: Any) -> dict[str, Any]:
    return {name: tensor.clone().numpy() for name, tensor in backend.weights()}


def whole_story(ranks: Ranks, parallel: ParallelConfig, path: Path, saved: Path) -> dict[str, Any]:
    backend = make(ranks, parallel, path)
    story = {"loaded": weights_of(backend), "logprobs": backend.logprobs(whole_batch())}
    story["reference"] = backend.reference_logprobs(whole_batch())
    story["told"] = train(backend, backend.data_ranks, 1, NUM_STEPS)
    backend.snapshot()(saved)
    return story | {"trained": weights_of(backend)}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What the reference makes of the same steps."""
    stories = {}
    for family, path in models.items():
        backend = make_reference(path)
        story = {"loaded": weights_of(backend), "logprobs": backend.logprobs(whole_batch())}
        story["told"] = train(backend, Ranks(), 1, NUM_STEPS)
        stories[family] = story | {"trained": weights_of(backend)}
    return stories


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_C35_every_layout_trains_as_the_reference_does(
    run: Run,
    models: dict[str, Path],
    expected: dict[str, dict[str, Any]],
    tmp_path: Path,
    family: str,
    layout: str,
) -> None:
    stories, right = run(layout, whole_story, models[family], tmp_path), expected[family]
    stored = load_file(models[family] / "model.safetensors")
    for story in stories:
        assert list(story["loaded"]) == sorted(stored)
        for name, tensor in story["loaded"].items():
            np.testing.assert_array_equal(tensor, stored[name].numpy(), err_msg=name)  # there and back, bit for bit
        np.testing.assert_allclose(story["logprobs"], right["logprobs"], atol=1e-5)
        np.testing.assert_array_equal(story["reference"], story["logprobs"])  # the same weights
        for found, told in zip(story["told"], right["told"], strict=True):
            assert found == pytest.approx(told, rel=2e-4, abs=2e-6)
        for name, tensor in story["trained"].items():
            np.testing.assert_array_equal(tensor, stories[0]["trained"][name], err_msg=name)
            np.testing.assert_allclose(tensor, right["trained"][name], atol=2e-5, err_msg=name)
