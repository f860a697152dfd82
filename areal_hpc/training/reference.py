"""The trainer in plain torch: data-parallel over a Hugging Face model. The specification that other backends meet.

    backend.logprobs(batch)                 forward only
    backend.train_step(minibatches)
        for each minibatch                  one optimizer update
            for each micro-batch            rows padded on the right -> hidden states -> log-probs of trainable
                                            tokens -> loss / trainable tokens of all ranks -> backward
            sum of gradients over ranks -> clip -> AdamW
    backend.weights()                       what the engines load

Every rank holds the whole model, its float32 master weights and the optimizer. Left out on purpose, since Megatron has
them: sharded weights and optimizer, activation recomputation, packed attention. Dropout stays off: current, proximal
and behaviour policy must be the same function of the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from areal_hpc import accelerator
from areal_hpc.algorithms import table
from areal_hpc.algorithms.logprobs import token_logprobs
from areal_hpc.algorithms.stats import Stats
from areal_hpc.buckets import fingerprint_of
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.lora import NO_LORA, LoraConfig
from areal_hpc.config.recipes import reference_of
from areal_hpc.config.schema import Dtype, TrainerConfig
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.pretrained.lora import is_adapter, terms_of
from areal_hpc.privacy import follow_directory
from areal_hpc.training.critic import Critic, critic_account
from areal_hpc.training.export import (
    add_what_older_readers_need,
    copy_tokenizer,
    write_adapters,
    write_checkpoint,
)
from areal_hpc.training.forward import forward, parts
from areal_hpc.training.lora import Adapters, freeze, outgoing
from areal_hpc.training.optimizer import Optimizer
from areal_hpc.training.progress import Progress
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.rng import restore_rng, rng_state
from areal_hpc.training.shards import FILES, SHARDS, read_whole
from areal_hpc.training.snapshot import HostCopy, write_tensors
from areal_hpc.training.updates import reduced, token_losses
from areal_hpc.types import Batch, Float32Array

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time."""

logger = logging.getLogger(__name__)


class ReferenceBackend:
    """``TrainerBackend`` of one rank.

    Args:
        temperature: the one that generation uses, above 0.
        dtype: of the model's weights; the masters stay in float32.
        seed: of this process's random streams, and of the adapters that training begins with.
        group: the trainer's ranks; None where there is one.
        device: this rank's, as torch spells it; the current accelerator's if not given.
        loss: a loss of your own, in place of the one that ``algorithm.name`` has in the table.
        lora: adapters that are trained while the model is frozen; their reference model is the frozen one.
        whole: engines and exports get the model with its adapters merged, not these alone.

    Raises:
        DataError: ``model_path`` is no complete checkpoint directory.
        ConfigError: the model computes its logits in a way that this backend does not, or the temperature is 0.
    """

    def __init__(
        self,
        *,
        model_path: str,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        temperature: float,
        dtype: Dtype = Dtype.FLOAT32,
        seed: int = 1,
        group: ProcessGroup | None = None,
        device: str = "",
        loss: table.LossFunction | None = None,
        lora: LoraConfig = NO_LORA,
        whole: bool = False,
    ) -> None:
        if temperature <= 0:
            raise ConfigError("greedy answers cannot be trained on; set rollout.sampling.temperature above 0")
        self._algorithm, self._config, self._temperature = algorithm, trainer, temperature
        self._loss = loss or table.find(algorithm.name).loss
        self._source, self._seed = Path(model_path), seed
        self._device = torch.device(device or accelerator.detect().device)
        self._ranks = self.data_ranks = Ranks(group, str(self._device))
        self._together = table.find(algorithm.name).data.together
        self._model = self._load_model(self._source).to(self._device)
        self._lora, self._whole = lora, whole
        self._adapters = Adapters(self._model, lora, dtype=getattr(torch, dtype), seed=seed) if lora.rank else None
        self._terms = terms_of(lora, fingerprint_of(self._model_weights())) if lora.rank else {}
        trained = self._model.named_parameters() if self._adapters is None else self._adapters.parameters().items()
        self._optimizer = Optimizer(trained, trainer.optimizer, getattr(torch, dtype))
        self._host_masters, self._host_moments = HostCopy(), HostCopy()
        self._progress = Progress(algorithm, trainer, self._terms)
        reference = reference_of(algorithm)
        own = self._adapters is not None and reference == ""
        self._reference = None if reference is None or own else self._frozen(reference, dtype)
        self._critic = self._make_critic(dtype) if table.find(algorithm.name).critic else None
        self._seed_rank()

    def _load_model(self, path: Path) -> Any:
        """The model that is trained."""
        return load_model(path)

    def _frozen(self, path: str, dtype: Dtype) -> Any:
        """The reference model, rounded to ``dtype`` as the policy is."""
        model = load_model(Path(path) if path else self._source).to(self._device)
        freeze(model, getattr(torch, dtype))
        return model

    def _make_critic(self, dtype: Dtype) -> Critic:
        config = self._algorithm.critic
        return Critic(
            load_model(Path(config.path) if config.path else self._source).get_decoder().to(self._device),
            config=config,
            optimizer=self._config.optimizer,
            dtype=getattr(torch, dtype),
            tokens_per_microbatch=self._config.tokens_per_microbatch,
            group=self._ranks.group,
        )

    def _seed_rank(self) -> None:
        torch.manual_seed(self._seed + self._ranks.rank + 1_000_003 * self._progress.step)

    @property
    def kl_coef(self) -> float:
        """The KL coefficient of the next step."""
        return self._progress.kl_coef

    # Forward

    def logprobs(self, batch: Batch) -> Float32Array:
        """Log-probs [T] of the trainable tokens by the weights as they are; 0.0 elsewhere."""
        return self._logprobs_of(self._model, batch)

    def reference_logprobs(self, batch: Batch) -> Float32Array:
        """Log-probs [T] of the trainable tokens by the frozen reference model; 0.0 elsewhere."""
        if self._reference is not None:
            return self._logprobs_of(self._reference, batch)
        assert self._adapters is not None and reference_of(self._algorithm) is not None, "there is no reference model"
        with self._adapters.off():
            return self._logprobs_of(self._model, batch)

    def values(self, batch: Batch) -> tuple[Float32Array, Float32Array]:
        """The critic's values [T] before trainable tokens, and [S] after each sequence; see ``Critic.values``."""
        assert self._critic is not None, "the algorithm has no critic"
        return self._critic.values(batch)

    @torch.no_grad()
    def _logprobs_of(self, model: Any, batch: Batch) -> Float32Array:
        result = np.zeros(batch.token_ids.size, dtype=np.float32)
        for part, where in parts(batch, self._config.tokens_per_microbatch):
            result[where[part.loss_mask]] = self._forward(model, part)[0].cpu().numpy()
        return result

    def _forward(self, model: Any, batch: Batch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-prob and entropy [N] of the trainable tokens in the order they stand in."""
        run = forward(model.get_decoder(), batch, self._device)
        predicting, targets = run.before(batch.loss_mask), run.targets(batch.loss_mask)
        head = model.get_output_embeddings().weight  # [V, H]
        return token_logprobs(predicting, head, targets, self._temperature, CHUNK_TOKENS, with_entropy=with_entropy)

    # Training

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        """One optimizer update for each minibatch at the learning rate of this step; statistics of all ranks.

        A minibatch without a trainable token on any rank, or whose gradient is not finite, is skipped and counted.
        """
        return self._progress.take(
            minibatches, self._ranks, update=self._update, tell=self._told, critic=self._train_critic
        )

    def _update(self, batch: Batch, divisor: int, lr: float) -> tuple[list[Stats], float]:
        self._optimizer.zero_grad()
        stats = [self._backward(part, divisor) for part in self._parts(batch)]
        self._optimizer.reduce(self._ranks.group)
        return stats, self._optimizer.step(lr)

    def _told(self, stats: Sequence[Stats]) -> dict[str, float]:
        return reduced(stats, self._ranks)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Mapping[str, float]:
        """Loss and its statistics on this rank's share of held-out data, over all ranks; nothing is trained."""
        return self._told([self._losses(part)[1] for part in self._parts(batch)])

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        found = parts(batch, self._config.tokens_per_microbatch, together=self._together)
        return (part for part, _ in found)

    def _train_critic(self, minibatches: Sequence[Batch], totals: Sequence[int], lr: float) -> dict[str, float]:
        if self._critic is None:
            return {}
        return critic_account(*self._critic.train(minibatches, totals, lr), self._ranks)

    def _backward(self, batch: Batch, divisor: int) -> Stats:
        """Add one micro-batch's gradient of (sum of its losses / divisor)."""
        losses, stats = self._losses(batch)
        (losses.sum() / divisor).backward()  # type: ignore[no-untyped-call]
        return stats

    def _losses(self, batch: Batch) -> tuple[Tensor, Stats]:
        """The losses of a micro-batch with gradient, one for each token, and their statistics."""
        logprobs, entropy = self._forward(self._model, batch, with_entropy=True)
        assert entropy is not None
        return token_losses(
            batch,
            logprobs,
            entropy,
            self._loss,
            self._algorithm,
            version_now=self._progress.version_now,
            kl_coef=self.kl_coef,
        )

    # Weights and checkpoints

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What engines load, sorted by name: the model's weights, or the adapters alone (``pretrained.lora``)."""
        if self._adapters is None:
            yield from self._model_weights()
            return
        adapters = ((name, one.detach()) for name, one in self._adapters.parameters().items())
        yield from outgoing(self._lora, self._model_weights, adapters, self._terms["base"], whole=self._whole)

    def _model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights as a checkpoint directory names them, sorted by name; a tied output embedding is not among them."""
        from transformers.core_model_loading import revert_weight_conversion

        persistent = {name for name in self._model.state_dict() if not is_adapter(name)}
        named = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        tensors = {name: tensor.detach() for name, tensor in named.items() if name in persistent}
        yield from sorted(revert_weight_conversion(self._model, tensors).items())

    def snapshot(self) -> Callable[[Path], None]:
        """Copy this rank's part of the state to host memory. What is returned writes it into a directory, durably and
        read back, in any thread; call it before the next ``snapshot``, which takes the same memory.

        Every rank holds the same model, optimizer and step, so rank 0 writes them; each writes its random streams.
        """
        rank, streams = self._ranks.rank, rng_state(self._device)
        if not self._ranks.leads:
            return lambda path: publish_json(path / _streams_name(rank), streams)
        masters = self._host_masters.take(self._optimizer.masters.items())
        moments = self._host_moments.take(self._optimizer.state_dict().items())
        write_progress = self._progress.writer(self._optimizer.num_updates)
        write_critic = None if self._critic is None else self._critic.snapshot()

        def write(path: Path) -> None:
            for tensors, name in zip((masters, moments), FILES, strict=True):
                write_tensors(tensors, path / name)
            if write_critic is not None:
                write_critic(path)
            write_progress(path)
            publish_json(path / _streams_name(rank), streams)

        return write

    def load(self, directory: str) -> None:
        """Continue from what the snapshots of all ranks wrote, on the same or any other number of ranks.

        Raises:
            CheckpointError: the directory is not one of this backend, or holds another model.
        """
        path = Path(directory)
        num_updates = self._progress.read(path)
        masters, moments = read_whole(path, SHARDS, FILES)
        self._optimizer.load_state_dict(masters, moments, num_updates)
        if self._critic is not None:
            self._critic.load(path)
        streams = path / _streams_name(self._ranks.rank)
        if streams.is_file():
            restore_rng(read_json(streams), self._device)  # last: whatever comes before may draw numbers
        else:
            self._seed_rank()  # a rank that was not there when this was saved

    def complete(self, directory: str) -> None:
        """Nothing: each rank's files are whole."""

    def export(self, directory: str) -> None:
        """Write a Hugging Face checkpoint directory, tokenizer included, or adapters as ``peft`` does; rank 0 does."""
        if not self._ranks.leads:
            return
        if self._terms:
            if self._whole:
                write_checkpoint(self.weights(), self._source, Path(directory))
            else:
                write_adapters(self.weights(), self._source, Path(directory), self._lora)
            return
        self._model.save_pretrained(directory)
        add_what_older_readers_need(Path(directory) / "config.json")
        copy_tokenizer(self._source, Path(directory))
        follow_directory(Path(directory))


def _streams_name(rank: int) -> str:
    return f"streams-{rank:05d}.json"


def load_model(path: Path) -> Any:
    """The causal language model at ``path`` in float32, checked for what this backend assumes.

    Raises:
        DataError, ConfigError: see ``ReferenceBackend``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a log file is no terminal
    if not (path / "config.json").is_file():
        raise DataError(
            f"{path} holds no config.json; model.path, algorithm.kl.reference and algorithm.critic.path name "
            "Hugging Face checkpoint directories"
        )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise DataError(
            f"{path} lacks {len(missing)} weights of its model, first {missing[0]}; complete the checkpoint"
        )
    _require_plain_logits(model)
    return model


@torch.no_grad()
def _require_plain_logits(model: Any) -> None:
    """Some models scale, cap or shift their logits after the output embedding: log-probs from here would be wrong."""
    token_ids = torch.arange(4).unsqueeze(0) % model.config.vocab_size
    expected = model(input_ids=token_ids, use_cache=False).logits
    hidden = model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
    found = linear(hidden, model.get_output_embeddings().weight)
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
        kind = type(model).__name__
        raise ConfigError(f"{kind} does more to its logits than one projection; use trainer.backend=megatron")
