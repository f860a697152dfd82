"""The steps that every layout must make alike: models, a batch, and both backends at work on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.algorithms.table import find
from areal_hpc.config.algorithm import AlgorithmConfig, KlConfig
from areal_hpc.config.schema import Dtype, OptimizerConfig, ParallelConfig, Schedule, TrainerConfig
from areal_hpc.protocols import Peers
from areal_hpc.training.batching import plan_step
from areal_hpc.training.credit import assess
from areal_hpc.training.megatron.backend import MegatronBackend
from areal_hpc.training.preference import PreferenceBackend, RewardModelBackend
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch

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
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 32}
YARN["beta_fast"] = 3.0
"""Both so that some of the frequencies are divided, some are kept and some lie between."""
ALGORITHM = AlgorithmConfig(kl=KlConfig(coef=0.1))
NUM_STEPS, NUM_SEQUENCES, TEMPERATURE = 3, 9, 0.7


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


def make(
    ranks: Ranks,
    parallel: ParallelConfig,
    path: Path,
    dtype: Dtype = Dtype.FLOAT32,
    algorithm: AlgorithmConfig = ALGORITHM,
    **more: Any,
) -> MegatronBackend:
    settings = {"trainer": trainer(parallel), **more}
    return MegatronBackend(
        model_path=str(path), dtype=dtype, algorithm=algorithm, temperature=TEMPERATURE, ranks=ranks, **settings
    )


def make_reference(
    path: Path, dtype: Dtype = Dtype.FLOAT32, algorithm: AlgorithmConfig = ALGORITHM, **more: Any
) -> ReferenceBackend:
    of_pairs = {"dpo": PreferenceBackend, "reward_model": RewardModelBackend}
    return of_pairs.get(algorithm.name, ReferenceBackend)(
        model_path=str(path),
        dtype=dtype,
        algorithm=algorithm,
        trainer=trainer(ParallelConfig()),
        temperature=TEMPERATURE,
        **more,
    )


def train(
    backend: Any,
    data_ranks: Peers,
    first: int,
    last: int,
    algorithm: AlgorithmConfig = ALGORITHM,
    batch: Batch | None = None,
) -> list[dict[str, float]]:
    """Statistics of steps ``first`` to ``last``: four minibatches each, or three of pairs."""
    batch, told = whole_batch() if batch is None else batch, []
    together = find(algorithm.name).data.together
    rewards = np.linspace(-1, 1, batch.num_sequences)  # of each sequence, where advantages are made of rewards
    for step in range(first, last + 1):
        plan = plan_step(
            batch.lengths, np.ones(batch.num_sequences), 5 - together, data_ranks.size, step, together=together
        )
        shares = [of_ranks[data_ranks.rank] for of_ranks in plan]
        mine, outcomes = [batch.select(share) for share in shares], [rewards[share] for share in shares]
        told.append(dict(backend.train_step(assess(mine, outcomes, backend, algorithm, data_ranks))))
    return told


def weights_of(backend: Any) -> dict[str, Any]:
    return {name: tensor.float().numpy(force=True).copy() for name, tensor in backend.weights()}


def save(ranks: Ranks, backend: Any, directory: Path) -> None:
    """As a run's commit does it: every rank its part, then rank 0 what makes them one."""
    begin_save(ranks, backend, directory)()


def begin_save(ranks: Ranks, backend: Any, directory: Path) -> Callable[[], None]:
    """A copy of the state as it is now, which may be written later."""
    directory.mkdir(parents=True, exist_ok=True)
    write = backend.snapshot()

    def end() -> None:
        write(directory)
        ranks.barrier()
        if ranks.leads:
            backend.complete(str(directory))
        ranks.barrier()

    return end
