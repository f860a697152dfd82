"""The trainer on Megatron-core: ``TrainerBackend`` for models that are split over ranks.

    backend.logprobs(batch)                 forward only, through the pipeline
    backend.train_step(minibatches)
        for each minibatch                  one optimizer update
            packed micro-batches -> Megatron's schedule -> log-probs on the last stage -> loss / trainable tokens of
            all ranks -> backward -> gradients summed -> clip over all parts -> distributed AdamW
    backend.weights()                       what the engines load, gathered weight by weight

Loss, gradient norm and weights are those of ``reference.py`` on any layout; only rounding differs. Ranks that hold
parts of one copy of the model are given the same sequences: ``data_ranks`` are those among which sequences are dealt.
Of a checkpoint every rank writes a part, and any other layout loads it; each backend goes on from the other's where
both hold the same tensors (all but mixtures of experts). Left out: LoRA.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_hpc.algorithms import table
from areal_hpc.algorithms.kl import adapted
from areal_hpc.algorithms.stats import Stats
from areal_hpc.collective import meeting
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.recipes import reference_of
from areal_hpc.config.schema import Dtype, TrainerConfig
from areal_hpc.errors import CheckpointError, ConfigError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.pretrained.files import TensorFiles, weight_files
from areal_hpc.training.export import write_checkpoint
from areal_hpc.training.forward import parts
from areal_hpc.training.megatron.model import build
from areal_hpc.training.megatron.optimizer import SplitOptimizer
from areal_hpc.training.megatron.parallel import Place, enter_groups
from areal_hpc.training.megatron.requirements import check_model
from areal_hpc.training.megatron.schedule import Passes
from areal_hpc.training.megatron.state import SplitState
from areal_hpc.training.megatron.weights import Weights
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.schedule import learning_rate
from areal_hpc.training.shards import SHARDS, join_shards, write_shards
from areal_hpc.training.updates import account, loss_divisors, loss_inputs, microbatch_stats, reduced, sums
from areal_hpc.types import Batch, Float32Array


class MegatronBackend:
    """``TrainerBackend`` of one rank. One in a process: Megatron's groups are the process's.

    Args:
        ranks: all of the trainer.
        loss: a loss of your own, in place of the one that ``algorithm.name`` has in the table.
        Others: as of ``ReferenceBackend``.

    Raises:
        DataError: a model that is not computed here, or no complete checkpoint directory.
        ConfigError: no or another megatron-core, a model that cannot be split so, an algorithm with a critic, greedy
            sampling.
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
        loss: table.LossFunction | None = None,
    ) -> None:
        if temperature <= 0:
            raise ConfigError("greedy answers cannot be trained on; set rollout.sampling.temperature above 0")
        self._algorithm, self._config, self._ranks = algorithm, trainer, ranks
        self._loss = loss or table.find(algorithm.name).loss
        self._source, self._step, self._dtype = Path(model_path), 0, getattr(torch, dtype)
        architecture = check_model(self._source, trainer.parallel)
        enter_groups(ranks, trainer.parallel)
        self._place = Place(ranks)
        self.data_ranks = self._place.data
        self._passes = Passes(
            self._place, trainer.parallel, vocab_size=architecture.vocab_size, temperature=temperature
        )
        self._chunks = build(architecture, trainer.parallel, self._dtype)
        self._weights = Weights(self._chunks, architecture, self._place)
        self._optimizer = SplitOptimizer(self._chunks, trainer.optimizer, self._dtype)
        for parameter, part in self._weights.cut(TensorFiles(weight_files(self._source)).read):
            self._optimizer.set_master(parameter, part)
        self._state = SplitState(self._weights, self._optimizer)
        self.kl_coef = algorithm.kl.coef
        reference = reference_of(algorithm)
        self._reference = None if reference is None else self._frozen(architecture, reference)

    def _frozen(self, architecture: Architecture, path: str) -> list[torch.nn.Module]:
        """The reference model, split and rounded as the policy is: equal weights must give equal log-probs."""
        source = Path(path) if path else self._source
        if path:
            architecture = check_model(source, self._config.parallel)
        chunks = build(architecture, self._config.parallel, self._dtype)
        with torch.no_grad():
            for parameter, part in Weights(chunks, architecture, self._place).cut(
                TensorFiles(weight_files(source)).read
            ):
                parameter.copy_(part)
        return [chunk.requires_grad_(False) for chunk in chunks]

    # Forward

    def logprobs(self, batch: Batch) -> Float32Array:
        """Log-probs [T] of the trainable tokens by the weights as they are; 0.0 elsewhere."""
        return self._logprobs_of(self._chunks, batch)

    def reference_logprobs(self, batch: Batch) -> Float32Array:
        """Log-probs [T] of the trainable tokens by the frozen reference model; 0.0 elsewhere."""
        assert self._reference is not None, "the algorithm has no reference model"
        return self._logprobs_of(self._reference, batch)

    def values(self, batch: Batch) -> tuple[Float32Array, Float32Array]:
        raise AssertionError("the configuration's checks let no algorithm with a critic pass")

    def evaluate(self, batch: Batch) -> Mapping[str, float]:
        raise AssertionError("the configuration's checks let no algorithm that learns from a data set pass")

    @torch.no_grad()
    def _logprobs_of(self, chunks: Sequence[torch.nn.Module], batch: Batch) -> Float32Array:
        found = np.zeros(batch.token_ids.size, dtype=np.float32)
        split = self._split(batch)

        def keep(number: int, logprobs: Tensor, _: Tensor) -> Tensor:
            part, where = split[number]
            found[where[part.loss_mask]] = logprobs.cpu().numpy()
            return logprobs.sum()

        self._passes.run(chunks, [part for part, _ in split], keep)
        return self._of_last_stage(found)

    def _split(self, batch: Batch) -> list[tuple[Batch, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
        budget = self._config.tokens_per_microbatch * self._config.parallel.context
        return list(parts(batch, budget, padded=False))

    def _of_last_stage(self, found: Float32Array) -> Float32Array:
        group = self._place.pipeline
        if group.size() == 1:
            return found
        tensor = torch.from_numpy(found).to(self._ranks.device)
        with meeting("the last stage's log-probs", group):
            dist.broadcast(tensor, group=group, group_src=group.size() - 1)
        return tensor.cpu().numpy()

    # Training

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        """One optimizer update for each minibatch at the learning rate of this step; statistics of all ranks.

        A minibatch without a trainable token on any rank, or whose gradient is not finite, is skipped and counted.
        """
        lr = learning_rate(self._step + 1, self._config.optimizer, self._config.total_steps)
        totals = sums([batch.num_trainable for batch in minibatches], self.data_ranks)
        divisors = loss_divisors(minibatches, totals, self._algorithm, self.data_ranks)
        stats: list[Stats] = []
        norms: list[float] = []
        for batch, total, divisor in zip(minibatches, totals, divisors, strict=True):
            if total == 0:
                continue
            self._optimizer.zero_grad()
            stats += self._backward(batch, divisor)
            norms.append(self._optimizer.step(lr))
        told = reduced(stats if self._place.reports else [], self._ranks)
        self.kl_coef = adapted(self.kl_coef, told.get("reference_kl", math.nan), self._algorithm.kl)
        self._step += 1
        return {
            **account(told, norms, totals, lr),
            **({"kl_coef": self.kl_coef} if self._algorithm.kl.coef > 0 else {}),
        }

    def _backward(self, batch: Batch, divisor: int) -> list[Stats]:
        """The gradient of (sum of the minibatch's token losses / divisor), on all ranks; this one's statistics."""
        stats: list[Stats] = []
        micro = [part for part, _ in self._split(batch)]

        def loss(number: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            inputs = loss_inputs(micro[number], logprobs, version_now=self._step + 1, kl_coef=self.kl_coef)
            output = self._loss(inputs, self._algorithm)
            stats.append(microbatch_stats(output, inputs.mask, entropy))
            return output.per_token.sum() / divisor

        self._passes.run(self._optimizer.chunks, micro, loss, train=True)
        return stats

    # Weights and checkpoints

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights as a checkpoint directory names them, sorted by name; collective, and all ranks get all of them."""
        return self._weights.whole(lambda parameter: parameter.detach(), self._dtype)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy this rank's share of masters and moments to host memory; see ``ReferenceBackend``. Collective.

        Every rank writes its own share.
        """
        shards, rank = self._state.take(), self._ranks.rank
        progress = {"step": self._step, "num_updates": self._optimizer.num_updates, "kl_coef": self.kl_coef}

        def write(path: Path) -> None:
            write_shards(shards, path / SHARDS, rank)
            if rank == 0:
                publish_json(path / "trainer.json", progress)

        return write

    def complete(self, directory: str) -> None:
        """Make one state of what all ranks have written."""
        join_shards(Path(directory) / SHARDS, self._ranks.size)

    def load(self, directory: str) -> None:
        """Continue from a checkpoint of any layout, or of the reference backend; every rank reads what it holds of.

        Raises:
            CheckpointError: the directory is not a trainer's, or holds another model.
        """
        path = Path(directory)
        if not (path / "trainer.json").is_file():
            raise CheckpointError(f"{path} has no trainer.json; give a checkpoint of a run")
        progress = read_json(path / "trainer.json")
        if (path / SHARDS).is_dir():
            self._state.load(path / SHARDS, progress["num_updates"])
        else:
            files = (TensorFiles([path / f"{name}.safetensors"]) for name in ("model", "optimizer"))
            self._state.load_whole(*files, num_updates=progress["num_updates"], path=path)
        self._step = progress["step"]
        if self._algorithm.kl.target is not None:  # one that does not adapt is the configuration's, also a changed one
            self.kl_coef = progress.get("kl_coef") or self.kl_coef  # 0 was off: nothing to go on from

    def export(self, directory: str) -> None:
        """Write a Hugging Face checkpoint directory, tokenizer included; collective, rank 0 writes."""
        if self._ranks.leads:
            write_checkpoint(self.weights(), self._source, Path(directory))
        else:
            deque(self.weights(), maxlen=0)
