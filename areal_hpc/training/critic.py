"""The critic: a second model with one number for each state, its own optimizer, its own files in a checkpoint.

    values, bootstrap = critic.values(batch)            at the start of the step; GAE needs them
    stats = critic.train(minibatches, totals, lr)       one update for each minibatch, after the policy's

It shares nothing with the policy, so neither can disturb the other; the price is a second model, its float32 masters
and moments: 16 bytes a parameter, and its dtype's on top. The head starts at 0: until it has learned, advantages are
returns. Its files are apart from the policy's, so an exported policy has no trace of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from areal_hpc.algorithms.losses import value_loss
from areal_hpc.algorithms.stats import Stats, fraction_of, mean_of
from areal_hpc.config.algorithm import CriticConfig
from areal_hpc.config.schema import OptimizerConfig
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.training.forward import forward, parts, trained_sequences
from areal_hpc.training.optimizer import Optimizer
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.shards import read_whole
from areal_hpc.training.snapshot import HostCopy, write_tensors
from areal_hpc.training.updates import each_update, reduced
from areal_hpc.types import Batch, Float32Array

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

VALUE_HEAD = "value_head"
"""Name of the layer that makes values of states."""
CRITIC_FILES = ("critic.safetensors", "critic_optimizer.safetensors")
CRITIC_SHARDS = "critic_shards"
"""Where a checkpoint has masters and moments: of one rank, or of several that hold parts."""


class Critic:
    """One rank's copy.

    Args:
        decoder: a Hugging Face model without its head, in float32, on the device where it is to work.
    """

    def __init__(
        self,
        decoder: Any,
        *,
        config: CriticConfig,
        optimizer: OptimizerConfig,
        dtype: torch.dtype,
        tokens_per_microbatch: int,
        group: ProcessGroup | None,
    ) -> None:
        self._config, self._budget, self._group = config, tokens_per_microbatch, group
        self._decoder, self._device = decoder, next(decoder.parameters()).device
        self._head = nn.Linear(decoder.config.hidden_size, 1, device=self._device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        of_decoder = [(f"model.{name}", parameter) for name, parameter in decoder.named_parameters()]
        of_head = [(f"{VALUE_HEAD}.{name}", parameter) for name, parameter in self._head.named_parameters()]
        self._optimizer = Optimizer([*of_decoder, *of_head], optimizer, dtype)
        self._host_masters, self._host_moments = HostCopy(), HostCopy()

    @torch.no_grad()
    def values(self, batch: Batch) -> tuple[Float32Array, Float32Array]:
        """Values [T] of the states before trainable tokens, 0.0 elsewhere; and [S] of the states after sequences."""
        values = np.zeros(batch.token_ids.size, dtype=np.float32)
        last = np.zeros(batch.token_ids.size, dtype=np.float32)
        for part, where in parts(batch, self._budget):
            run = forward(self._decoder, part, self._device)
            values[where[part.loss_mask]] = self._value(run.before(part.loss_mask)).cpu().numpy()
            last[where[part.boundaries[1:] - 1]] = self._value(run.after()).cpu().numpy()
        bootstrap = np.zeros(batch.num_sequences, dtype=np.float32)
        trained = trained_sequences(batch)
        bootstrap[trained] = last[batch.boundaries[trained + 1] - 1]
        return values, bootstrap

    def _value(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32 [N]; sums over the width in float32 whatever the model computes in."""
        return linear(hidden.float(), self._head.weight.float(), self._head.bias.float()).squeeze(-1)

    def train(self, minibatches: Sequence[Batch], totals: Sequence[int], lr: float) -> tuple[list[Stats], list[float]]:
        """One update for each minibatch that has a trainable token on some rank, at ``lr_scale`` times ``lr``.

        Args:
            totals: trainable tokens of each minibatch on all ranks, what its loss is divided by.

        Returns:
            The statistics of this rank's micro-batches, and the norm of each update's gradient.
        """

        def update(batch: Batch, divisor: int) -> tuple[list[Stats], float]:
            self._optimizer.zero_grad()
            stats = [self._backward(part, divisor) for part, _ in parts(batch, self._budget)]
            self._optimizer.reduce(self._group)
            return stats, self._optimizer.step(lr * self._config.lr_scale)

        return each_update(minibatches, totals, totals, update)

    def _backward(self, batch: Batch, total: int) -> Stats:
        values = self._value(forward(self._decoder, batch, self._device).before(batch.loss_mask))
        losses, stats = value_losses(values, batch, self._config.value_clip)
        (losses.sum() / total).backward()  # type: ignore[no-untyped-call]
        return stats

    def snapshot(self) -> Callable[[Path], None]:
        """Copy masters and moments to host memory; what is returned writes them. See ``ReferenceBackend.snapshot``."""
        masters = self._host_masters.take(self._optimizer.masters.items())
        moments = self._host_moments.take(self._optimizer.state_dict().items())
        progress = {"num_updates": self._optimizer.num_updates}

        def write(path: Path) -> None:
            for tensors, name in zip((masters, moments), CRITIC_FILES, strict=True):
                write_tensors(tensors, path / name)
            publish_json(path / "critic.json", progress)

        return write

    def load(self, path: Path) -> None:
        """Continue from what a snapshot wrote.

        Raises:
            CheckpointError: the directory has no critic, or another one.
        """
        if not (path / "critic.json").is_file():
            raise CheckpointError(f"{path} has no critic; it is of an algorithm without one, so start a new run")
        masters, moments = read_whole(path, CRITIC_SHARDS, CRITIC_FILES)
        progress: Mapping[str, int] = read_json(path / "critic.json")
        self._optimizer.load_state_dict(masters, moments, progress["num_updates"])


def value_losses(values: Tensor, batch: Batch, clip: float) -> tuple[Tensor, Stats]:
    """The critic's losses of a micro-batch, one for each trainable token, and their statistics.

    Args:
        values: float32 [N] with gradient, of the states before the trainable tokens.
    """
    assert batch.values is not None, "the critic's values are missing from the batch"
    assert batch.returns is not None, "returns are missing from the batch"
    mask = batch.loss_mask
    before, returns = (torch.from_numpy(x[mask]).to(values.device) for x in (batch.values, batch.returns))
    losses, clipped = value_loss(values, before, returns, clip)
    every = torch.ones_like(clipped)
    return losses, {
        "value_loss": mean_of(losses, every),
        "value_mean": mean_of(values, every),
        "return_mean": mean_of(returns, every),
        "value_clip_fraction": fraction_of(clipped, every),
    }


def critic_account(stats: Sequence[Stats], norms: Sequence[float], ranks: Ranks) -> dict[str, float]:
    """What a step tells of the critic: over all ranks, and the mean norm of the gradients that were applied."""
    applied = [norm for norm in norms if math.isfinite(norm)]
    return {**reduced(stats, ranks), "value_grad_norm": sum(applied) / len(applied) if applied else math.nan}
