"""The critic of a split policy: a second model on the same ranks, with one number for each state. See ``Critic``.

    values, bootstrap = critic.values(batch)
    stats, norms = critic.train(minibatches, totals, lr)

What the reference critic computes, on any layout; its checkpoint files are apart from the policy's here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_hpc.algorithms.stats import Stats
from areal_hpc.config.algorithm import CriticConfig
from areal_hpc.config.schema import TrainerConfig
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.training.critic import CRITIC_FILES, CRITIC_SHARDS, VALUE_HEAD, value_losses
from areal_hpc.training.forward import trained_sequences
from areal_hpc.training.megatron.heads import Numbers
from areal_hpc.training.megatron.parallel import Place
from areal_hpc.training.megatron.schedule import Passes
from areal_hpc.training.megatron.split import SplitModel
from areal_hpc.training.shards import join_shards, write_shards
from areal_hpc.training.updates import each_update
from areal_hpc.types import Batch, Float32Array


class SplitCritic:
    """One rank's part.

    Args:
        source: Hugging Face directory of the model to start from; its words are left out, a new head starts at 0.
    """

    def __init__(
        self,
        source: Path,
        architecture: Architecture,
        trainer: TrainerConfig,
        place: Place,
        *,
        config: CriticConfig,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._rank = config, place.ranks.rank
        self._model = SplitModel(source, architecture, trainer, place, dtype=dtype, number_head=VALUE_HEAD)
        self._passes, self._head = Passes(place, trainer), Numbers(place)

    @torch.no_grad()
    def values(self, batch: Batch) -> tuple[Float32Array, Float32Array]:
        """Values [T] of the states before trainable tokens, 0.0 elsewhere; and [S] of the states after sequences."""
        after = np.zeros(batch.token_ids.size, dtype=np.float32)  # [T], of the state after each token
        split = self._passes.split(batch)

        def keep(number: int, numbers: Tensor) -> Tensor:
            after[split[number][1]] = numbers.cpu().numpy()
            return numbers.sum()

        self._passes.run(self._model.chunks, [part for part, _ in split], self._head, keep)
        after = self._passes.of_last_stage(after)
        values = np.where(batch.loss_mask, np.roll(after, 1), 0.0).astype(np.float32)
        bootstrap = np.zeros(batch.num_sequences, dtype=np.float32)
        trained = trained_sequences(batch)
        bootstrap[trained] = after[batch.boundaries[trained + 1] - 1]
        return values, bootstrap

    def train(self, minibatches: Sequence[Batch], totals: Sequence[int], lr: float) -> tuple[list[Stats], list[float]]:
        """One update for each minibatch that has a trainable token on some rank; see ``Critic.train``."""

        def update(batch: Batch, divisor: int) -> tuple[list[Stats], float]:
            stats: list[Stats] = []
            micro = [part for part, _ in self._passes.split(batch)]

            def loss(number: int, numbers: Tensor) -> Tensor:
                part = micro[number]
                before = torch.from_numpy(np.flatnonzero(part.loss_mask) - 1).to(numbers.device)
                losses, found = value_losses(numbers[before], part, self._config.value_clip)
                stats.append(found)
                return losses.sum() / divisor

            self._model.optimizer.zero_grad()
            self._passes.run(self._model.optimizer.chunks, micro, self._head, loss, train=True)
            return stats, self._model.optimizer.step(lr * self._config.lr_scale)

        return each_update(minibatches, totals, totals, update)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy this rank's share to host memory; what is returned writes it. Collective."""
        shards, num_updates = self._model.state.take(), self._model.optimizer.num_updates

        def write(path: Path) -> None:
            write_shards(shards, path / CRITIC_SHARDS, self._rank)
            if self._rank == 0:
                publish_json(path / "critic.json", {"num_updates": num_updates})

        return write

    def complete(self, path: Path, num_ranks: int) -> None:
        """Make one state of what all ranks have written."""
        join_shards(path / CRITIC_SHARDS, num_ranks)

    def load(self, path: Path) -> None:
        """Continue from what was saved on any layout, or by the reference critic.

        Raises:
            CheckpointError: the directory has no critic, or another one.
        """
        if not (path / "critic.json").is_file():
            raise CheckpointError(f"{path} has no critic; it is of an algorithm without one, so start a new run")
        progress: Mapping[str, int] = read_json(path / "critic.json")
        self._model.state.load(path, CRITIC_SHARDS, CRITIC_FILES, progress["num_updates"])
