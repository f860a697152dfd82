"""The trainer on Megatron-core: ``TrainerBackend`` for models that are split over ranks.

    backend.logprobs(batch)                 forward only, through the pipeline
    backend.train_step(minibatches)
        for each minibatch                  one optimizer update
            packed micro-batches -> Megatron's schedule -> log-probs on the last stage -> loss / trainable tokens of
            all ranks -> backward -> gradients summed -> clip over all parts -> distributed AdamW
    backend.weights()                       what the engines load, gathered weight by weight

Loss, gradient norm and weights are those of ``reference.py`` on any layout; only rounding differs: logits of up to 3 by
less than 1e-4 from those of transformers in float32, by less than 0.1 in bfloat16, at late positions as at early ones.
Ranks that hold parts of one copy of the model are given the same sequences: ``data_ranks`` are those among which
sequences are dealt.
Of a checkpoint every rank writes a part, and any other layout loads it; each backend goes on from the other's where
both hold the same tensors (all but mixtures of experts).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_hpc.algorithms import table
from areal_hpc.algorithms.preferences import pair_margins
from areal_hpc.algorithms.stats import Stats
from areal_hpc.buckets import fingerprint_of
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.lora import NO_LORA, LoraConfig
from areal_hpc.config.recipes import reference_of
from areal_hpc.config.schema import Dtype, TrainerConfig
from areal_hpc.errors import ConfigError
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.pretrained.lora import terms_of
from areal_hpc.training.critic import critic_account
from areal_hpc.training.export import write_adapters, write_checkpoint
from areal_hpc.training.lora import outgoing
from areal_hpc.training.megatron.critic import SplitCritic
from areal_hpc.training.megatron.heads import Head, Numbers, Words
from areal_hpc.training.megatron.parallel import Place, enter_groups
from areal_hpc.training.megatron.replay import replay
from areal_hpc.training.megatron.requirements import check_model
from areal_hpc.training.megatron.schedule import Passes
from areal_hpc.training.megatron.split import AdaptedModel, SplitModel, frozen
from areal_hpc.training.progress import Progress
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.shards import FILES, SHARDS, join_shards, write_shards
from areal_hpc.training.updates import answer_margins, pair_losses, reduced, token_losses
from areal_hpc.types import Batch, Float32Array

SCORE = "score"
"""Name of the layer that makes a reward model's scores, as transformers' classifiers call it."""


class MegatronBackend:
    """``TrainerBackend`` of one rank. One in a process: Megatron's groups are the process's.

    Args:
        ranks: all of the trainer.
        seed: of the adapters that training begins with.
        loss: a loss of your own, in place of the one that ``algorithm.name`` has in the table.
        Others: as of ``ReferenceBackend``.

    Raises:
        DataError: a model that is not computed here, or no complete checkpoint directory.
        ConfigError: no or another megatron-core, a model that cannot be split so, greedy sampling.
    """

    def __init__(
        self,
        *,
        model_path: str,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        temperature: float,
        ranks: Ranks,
        dtype: Dtype = Dtype.FLOAT32,
        seed: int = 1,
        loss: table.LossFunction | None = None,
        lora: LoraConfig = NO_LORA,
        whole: bool = False,
    ) -> None:
        if temperature <= 0:
            raise ConfigError("greedy answers cannot be trained on; set rollout.sampling.temperature above 0")
        self._algorithm, self._config, self._ranks = algorithm, trainer, ranks
        self._loss = loss or table.find(algorithm.name).loss
        self._source, self._dtype = Path(model_path), getattr(torch, dtype)
        self._of_pairs = table.find(algorithm.name).pair_loss is not None
        self._is_scorer = self._of_pairs and reference_of(algorithm) is None
        architecture = check_model(self._source, trainer.parallel, lora, fp8=trainer.fp8)
        enter_groups(ranks, trainer.parallel)
        self._place = Place(ranks)
        self.data_ranks = self._place.data
        self._temperature, self._passes = temperature, Passes(self._place, trainer)
        self._lora, self._whole = lora, whole
        self._model = self._adapted(architecture, seed) if lora.rank else self._split(architecture)
        if architecture.experts is not None:
            replay(self._model.chunks)
        self._terms = terms_of(lora, fingerprint_of(self._base_weights())) if lora.rank else {}
        self._head = Numbers(self._place) if self._is_scorer else self._words(architecture)
        self._progress = Progress(algorithm, trainer, self._terms)
        self._reference = self._make_reference(architecture)
        self._critic = self._make_critic(architecture) if table.find(algorithm.name).critic else None

    def _split(self, architecture: Architecture) -> SplitModel:
        head = SCORE if self._is_scorer else ""
        return SplitModel(self._source, architecture, self._config, self._place, dtype=self._dtype, number_head=head)

    def _adapted(self, architecture: Architecture, seed: int) -> AdaptedModel:
        return AdaptedModel(
            self._source, architecture, self._config, self._place, dtype=self._dtype, lora=self._lora, seed=seed
        )

    def _base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The frozen weights under the adapters; collective, as ``weights``."""
        assert isinstance(self._model, AdaptedModel)
        return self._model.base.whole(lambda parameter: parameter.detach(), self._dtype)

    def _words(self, architecture: Architecture) -> Words:
        return Words(self._place, vocab_size=architecture.vocab_size, temperature=self._temperature)

    def _make_reference(self, architecture: Architecture) -> tuple[list[Any], Words] | None:
        """Chunks and head of the frozen model, where the algorithm has one that is not the policy without adapters."""
        path = reference_of(self._algorithm)
        if path is None or (path == "" and self._lora.rank):
            return None
        if path:
            architecture = check_model(Path(path), self._config.parallel, fp8=self._config.fp8)
        source = Path(path) if path else self._source
        chunks, _ = frozen(source, architecture, self._config, self._place, self._dtype)
        return chunks, self._words(architecture)

    def _make_critic(self, architecture: Architecture) -> SplitCritic:
        config = self._algorithm.critic
        if config.path:
            architecture = check_model(Path(config.path), self._config.parallel, fp8=self._config.fp8)
        source = Path(config.path) if config.path else self._source
        return SplitCritic(source, architecture, self._config, self._place, config=config, dtype=self._dtype)

    @property
    def kl_coef(self) -> float:
        """The KL coefficient of the next step."""
        return self._progress.kl_coef

    # Forward

    def logprobs(self, batch: Batch) -> Float32Array:
        """Log-probs [T] of the trainable tokens by the weights as they are; 0.0 elsewhere."""
        return self._logprobs_of(self._model.chunks, self._head, batch)

    def reference_logprobs(self, batch: Batch) -> Float32Array:
        """Log-probs [T] of the trainable tokens by the frozen reference model; 0.0 elsewhere."""
        if self._reference is not None:
            return self._logprobs_of(*self._reference, batch)
        assert isinstance(self._model, AdaptedModel) and reference_of(self._algorithm) == "", "there is no reference"
        with self._model.adapters.off():  # another model, as a frozen one of its own: it routes by itself
            return self._logprobs_of(self._model.chunks, self._head, replace(batch, experts=None))

    def values(self, batch: Batch) -> tuple[Float32Array, Float32Array]:
        """The critic's values [T] before trainable tokens, and [S] after each sequence; see ``Critic.values``."""
        assert self._critic is not None, "the algorithm has no critic"
        return self._critic.values(batch)

    @torch.no_grad()
    def _logprobs_of(self, chunks: Sequence[Any], head: Head, batch: Batch) -> Float32Array:
        found = np.zeros(batch.token_ids.size, dtype=np.float32)
        split = self._passes.split(batch)

        def keep(number: int, logprobs: Tensor, _: Tensor) -> Tensor:
            part, where = split[number]
            found[where[part.loss_mask]] = logprobs.cpu().numpy()
            return logprobs.sum()

        self._passes.run(chunks, [part for part, _ in split], head, keep)
        return self._passes.of_last_stage(found)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Mapping[str, float]:
        """Loss and its statistics on this rank's share of held-out data, over all ranks; nothing is trained."""
        return self._told(self._pass(self._model.chunks, batch, 1, train=False))

    # Training

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        """One optimizer update for each minibatch at the learning rate of this step; statistics of all ranks.

        A minibatch without a trainable token on any rank, or whose gradient is not finite, is skipped and counted.
        """
        return self._progress.take(
            minibatches, self.data_ranks, update=self._update, tell=self._told, critic=self._train_critic
        )

    def _update(self, batch: Batch, divisor: int, lr: float) -> tuple[list[Stats], float]:
        optimizer = self._model.optimizer
        optimizer.zero_grad()
        return self._pass(optimizer.chunks, batch, divisor, train=True), optimizer.step(lr)

    def _train_critic(self, minibatches: Sequence[Batch], totals: Sequence[int], lr: float) -> dict[str, float]:
        if self._critic is None:
            return {}
        stats, norms = self._critic.train(minibatches, totals, lr)
        return critic_account(stats if self._place.reports else [], norms, self._ranks)

    def _told(self, stats: Sequence[Stats]) -> dict[str, float]:
        return reduced(stats if self._place.reports else [], self._ranks)

    def _pass(self, chunks: Sequence[Any], batch: Batch, divisor: int, *, train: bool) -> list[Stats]:
        """The minibatch through the model, with the gradient of (sum of its losses / divisor) if it is to ``train``;
        this rank's statistics.
        """
        stats: list[Stats] = []
        micro = [part for part, _ in self._passes.split(batch, together=2 if self._of_pairs else 1)]

        def loss(number: int, *outputs: Tensor) -> Tensor:
            losses, found = self._losses(micro[number], *outputs)
            stats.append(found)
            return losses.sum() / divisor

        self._passes.run(chunks, micro, self._head, loss, train=train)
        return stats

    def _losses(self, part: Batch, *outputs: Tensor) -> tuple[Tensor, Stats]:
        """The losses of a micro-batch by what the head made of it, and their statistics."""
        if self._is_scorer:
            (numbers,) = outputs
            ends = torch.from_numpy(part.boundaries[1:] - 1).to(numbers.device)
            return pair_losses(pair_margins(numbers[ends]), self._algorithm)
        logprobs, entropy = outputs
        if self._of_pairs:
            return pair_losses(answer_margins(part, logprobs), self._algorithm)
        return token_losses(
            part,
            logprobs,
            entropy,
            self._loss,
            self._algorithm,
            version_now=self._progress.version_now,
            kl_coef=self.kl_coef,
        )

    # Weights and checkpoints

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights as a checkpoint directory names them, or adapters alone (``pretrained.lora``), sorted by name;
        collective, and all ranks get all of them."""
        found = self._model.weights.whole(lambda parameter: parameter.detach(), self._dtype)
        if not self._terms:
            return found
        return outgoing(self._lora, self._base_weights, found, self._terms["base"], whole=self._whole)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy this rank's share of masters and moments to host memory; see ``ReferenceBackend``. Collective.

        Every rank writes its own share.
        """
        shards, rank = self._model.state.take(), self._ranks.rank
        write_progress = self._progress.writer(self._model.optimizer.num_updates)
        write_critic = None if self._critic is None else self._critic.snapshot()

        def write(path: Path) -> None:
            write_shards(shards, path / SHARDS, rank)
            if write_critic is not None:
                write_critic(path)
            if rank == 0:
                write_progress(path)

        return write

    def complete(self, directory: str) -> None:
        """Make one state of what all ranks have written."""
        join_shards(Path(directory) / SHARDS, self._ranks.size)
        if self._critic is not None:
            self._critic.complete(Path(directory), self._ranks.size)

    def load(self, directory: str) -> None:
        """Continue from a checkpoint of any layout, or of the reference backend; every rank reads what it holds of.

        Raises:
            CheckpointError: the directory is not a trainer's, or holds another model.
        """
        path = Path(directory)
        self._model.state.load(path, SHARDS, FILES, self._progress.read(path))
        if self._critic is not None:
            self._critic.load(path)

    def export(self, directory: str) -> None:
        """Write a Hugging Face checkpoint directory, or adapters as ``peft`` does; collective, rank 0 writes."""
        if not self._ranks.leads:
            deque(self.weights(), maxlen=0)
        elif self._lora.rank and not self._whole:
            write_adapters(self.weights(), self._source, Path(directory), self._lora)
        else:
            write_checkpoint(self.weights(), self._source, Path(directory), scorer=self._is_scorer)
