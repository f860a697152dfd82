"""The reference trainer at work on models small enough for a test, and what it must compute, in float64."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import VOCAB_SIZE, make_model

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import Dtype, OptimizerConfig, TrainerConfig
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch

OPTIMIZER = OptimizerConfig(lr=1e-2, grad_clip=1e9)
TRAINER = TrainerConfig(total_steps=10, tokens_per_microbatch=32, optimizer=OPTIMIZER)
TEMPERATURE = 0.7
SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "initializer_range": 0.06, "rope_theta": 5000.0}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False}


def small_model(path: Path, family: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """qwen3 has tied embeddings, llama has not, qwen3_moe has experts that transformers fuses in memory."""
    make_model(path, family, seed, **SIZES, **(MIXTURE if family == "qwen3_moe" else {}), **changes)
    return path


def make(
    path: Path, *, trainer: TrainerConfig = TRAINER, dtype: Dtype = Dtype.FLOAT32, **changes: Any
) -> ReferenceBackend:
    settings = {"algorithm": AlgorithmConfig(), "temperature": TEMPERATURE, "seed": 1, "group": None, **changes}
    return ReferenceBackend(model_path=str(path), dtype=dtype, trainer=trainer, **settings)


def random_batch(seed: int = 0, lengths: tuple[int, ...] = (9, 23, 5, 12, 31)) -> Batch:
    """Prompts of two to four tokens, then sampled ones with a gap that was not sampled (a tool's output)."""
    generator = np.random.default_rng(seed)
    mask = np.concatenate([np.arange(n) >= 2 + n % 3 for n in lengths])
    mask[14:17] = False
    total = mask.size
    return Batch(
        token_ids=generator.integers(0, VOCAB_SIZE, total).astype(np.int32),
        loss_mask=mask,
        behaviour=np.where(mask, generator.uniform(-6, -3, total), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, np.repeat(generator.normal(size=len(lengths)), lengths), 0).astype(np.float32),
        boundaries=np.cumsum([0, *lengths], dtype=np.int32),
    )


def double_logprobs(path: Path, batch: Batch, temperature: float = TEMPERATURE) -> tuple[torch.nn.Module, torch.Tensor]:
    """Log-probs [T] by transformers in float64, one sequence after the other; the model for its gradients."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    parts = []
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:end]).long()
        logs = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        parts += [logs.new_zeros(1), logs[torch.arange(len(ids) - 1), ids[1:]]]
    return model, torch.cat(parts)


def double_gradients(path: Path, batch: Batch) -> dict[str, torch.Tensor]:
    """Of the decoupled clipped objective written out by hand, as a mean over trainable tokens, in float64."""
    model, current = double_logprobs(path, batch)
    mask, behaviour = torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.behaviour).double()
    advantages = torch.from_numpy(batch.advantages).double()
    proximal = current.detach()
    weight = (proximal - behaviour).exp()
    weight = torch.where(weight <= 5.0, weight, 0.0)
    ratio = (current - proximal).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * weight
    (loss[mask].sum() / mask.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(backend: ReferenceBackend, directory: Path) -> dict[str, torch.Tensor]:
    """Gradients of the one update that a backend has made, from its first moments: exp_avg = (1 - beta1) * gradient."""
    directory.mkdir(exist_ok=True)
    backend.snapshot()(directory)
    moments = load_file(directory / "optimizer.safetensors")
    prefix = "exp_avg."
    return {k.removeprefix(prefix): t / 0.1 for k, t in moments.items() if k.startswith(prefix)}


def digest(backend: ReferenceBackend) -> str:
    total = hashlib.sha256()
    for name, tensor in backend.weights():
        total.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
