"""Forward and backward through the Megatron trainer against plain transformers, on one CPU process, in one run.

    python tests/benchmarks/megatron_speed.py [--threads 1] [--sequences 8] [--length 256] [--dtype float32]

Both compute the log-prob of every token but the first of each sequence and the gradient of their mean, with the same
weights: SmolLM2-135M's shape, random. All sequences are of one length, so transformers pads nothing. The two take
turns; what counts is the best of each, by the CPU time of the process, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from machine import describe
from tiny_models import make_model
from torch import Tensor

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import Dtype, TrainerConfig
from areal_hpc.training.megatron.backend import MegatronBackend
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=list(Dtype), default=Dtype.FLOAT32)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {"machine": describe(), "settings": {**vars(options), "shape": SHAPE}}
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), "llama", 0, **SHAPE)
        batch = sequences(options.sequences, options.length)
        ways = {
            "transformers": of_transformers(Path(directory), batch, Dtype(options.dtype)),
            "megatron": of_megatron(Path(directory), batch, Dtype(options.dtype)),
        }
        losses = {name: way() for name, way in ways.items()}  # and whatever a first time takes
        seconds = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, way in ways.items():
                began = time.process_time()
                way()
                seconds[name].append(time.process_time() - began)
    tokens = options.sequences * options.length
    result["losses"] = losses
    result["cpu_seconds"] = seconds
    result["tokens_per_cpu_second"] = {name: tokens / min(times) for name, times in seconds.items()}
    speed = result["tokens_per_cpu_second"]
    result["megatron_over_transformers"] = speed["megatron"] / speed["transformers"]
    for name, rate in speed.items():
        print(f"{name:14} {rate:8.1f} tokens per CPU second   loss {losses[name]:.6f}")
    print(f"megatron / transformers: {result['megatron_over_transformers']:.3f}")
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def sequences(count: int, length: int) -> Batch:
    mask = np.tile(np.arange(length) > 0, count)
    zeros = np.zeros(mask.size, dtype=np.float32)
    return Batch(
        token_ids=np.random.default_rng(0).integers(0, SHAPE["vocab_size"], mask.size).astype(np.int32),
        loss_mask=mask,
        behaviour=zeros,
        versions=np.zeros(mask.size, dtype=np.int32),
        advantages=zeros,
        boundaries=np.arange(0, mask.size + 1, length, dtype=np.int32),
    )


def of_transformers(path: Path, batch: Batch, dtype: Dtype) -> Callable[[], float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    ids = torch.from_numpy(batch.token_ids.reshape(batch.num_sequences, -1)).long()

    def run() -> float:
        model.zero_grad(set_to_none=False)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.item()

    return run


def of_megatron(path: Path, batch: Batch, dtype: Dtype) -> Callable[[], float]:
    trainer = TrainerConfig(total_steps=1, tokens_per_microbatch=batch.token_ids.size)
    backend = MegatronBackend(
        model_path=str(path), algorithm=AlgorithmConfig(), trainer=trainer, temperature=1.0, ranks=Ranks(), dtype=dtype
    )
    found: list[float] = []

    def loss(_: int, logprobs: Tensor, __: Tensor) -> Tensor:
        found.append(-logprobs.mean().item())
        return -logprobs.mean()

    def run() -> float:
        backend._model.optimizer.zero_grad()
        backend._passes.run(backend._model.optimizer.chunks, [batch], backend._head, loss, train=True)
        return found[-1]

    return run


if __name__ == "__main__":
    main()
