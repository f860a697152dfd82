"""Forward and backward through the Megatron trainer against plain transformers, in one process, in one run.

    python tests/benchmarks/megatron_speed.py [--shape smollm2-135m] [--dtype float32] [--threads 1] [--profile]
    python tests/benchmarks/megatron_speed.py --shape qwen2.5-1.5b --dtype bfloat16 --sequences 8 --length 2048 \
        --attention flash --peak-tflops 990          on a CUDA device, here an H100 or H200

Both compute the log-prob of every token but the first of each sequence and the gradient of their mean, with the same
random weights. All sequences are of one length, so transformers pads nothing. The two take turns; on a CPU a turn is
timed by the CPU time of the process, which other work on the machine changes little, on a device by the clock. What
counts is the middle of the ratios of neighbouring turns. MFU counts 6 operations for each token and weight of a matrix,
and those of causal attention, and nothing that is computed again.

bfloat16: how far the log-probs of both are from transformers' in float32, at the first eighth of positions and at the
last. The profile is of one turn of each, by operation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from machine import describe
from tiny_models import make_model
from torch import Tensor
from torch.profiler import profile, supported_activities

from areal_hpc import accelerator
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import Attention, Dtype, TrainerConfig
from areal_hpc.training.megatron.backend import MegatronBackend
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
}
DEVICE = accelerator.detect()


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One that computes them: forward and backward, to the mean log-prob; and forward, to all log-probs [S, L - 1]."""

    train: Callable[[], float]
    logprobs: Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=list(Dtype), default=Dtype.FLOAT32)
    parser.add_argument("--attention", choices=list(Attention), default=Attention.EXACT)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device, for its share that is used")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    family, shape = SHAPES[options.shape]
    result: dict[str, Any] = {"machine": describe(), "device": DEVICE.name, "settings": vars(options)}
    with tempfile.TemporaryDirectory() as directory:
        made = {"tie_word_embeddings": True, "initializer_range": 0.02, "max_position_embeddings": options.length}
        make_model(Path(directory), family, 0, **shape, **made)
        batch = sequences(options.sequences, options.length, shape["vocab_size"])
        path, dtype = Path(directory), Dtype(options.dtype)
        if dtype is Dtype.BFLOAT16:
            exact = of_transformers(path, batch, Dtype.FLOAT32).logprobs()
        ways = {"transformers": of_transformers(path, batch, dtype), "megatron": of_megatron(path, batch, options)}
    result["losses"] = {name: -way.train() for name, way in ways.items()}  # and whatever a first time takes
    turns = [{name: timed(way.train) for name, way in ways.items()} for _ in range(options.repeats)]
    tokens, best = batch.token_ids.size, {name: min(turn[name] for turn in turns) for name in ways}
    result["seconds"] = turns
    result["tokens_per_second"] = {name: tokens / seconds for name, seconds in best.items()}
    result["megatron_over_transformers"] = statistics.median(one["transformers"] / one["megatron"] for one in turns)
    if options.peak_tflops:
        done = operations(shape, batch) / (options.peak_tflops * 1e12)
        result["mfu"] = {name: done / seconds for name, seconds in best.items()}
    if dtype is Dtype.BFLOAT16:
        result["mean_error"] = {name: by_position(way.logprobs() - exact) for name, way in ways.items()}
    if options.profile:
        result["profile"] = {name: by_operation(way.train) for name, way in ways.items()}
    told = {name: result.get(name) for name in ("losses", "tokens_per_second", "mfu", "mean_error")}
    print(json.dumps({name: value for name, value in told.items() if value}, indent=1))
    print(f"megatron / transformers: {result['megatron_over_transformers']:.3f}")
    name = "megatron_speed.json" if DEVICE is accelerator.CPU else f"megatron_speed_{DEVICE.name}.json"
    Path(__file__).with_name(name).write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def sequences(count: int, length: int, vocab_size: int) -> Batch:
    mask = np.tile(np.arange(length) > 0, count)
    zeros = np.zeros(mask.size, dtype=np.float32)
    return Batch(
        token_ids=np.random.default_rng(0).integers(0, vocab_size, mask.size).astype(np.int32),
        loss_mask=mask,
        behaviour=zeros,
        versions=np.zeros(mask.size, dtype=np.int32),
        advantages=zeros,
        boundaries=np.arange(0, mask.size + 1, length, dtype=np.int32),
    )


def of_transformers(path: Path, batch: Batch, dtype: Dtype) -> Way:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(DEVICE.device)
    ids = torch.from_numpy(batch.token_ids.reshape(batch.num_sequences, -1)).long().to(DEVICE.device)

    def losses() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")

    def train() -> float:
        model.zero_grad(set_to_none=False)
        loss = losses().mean()
        loss.backward()
        return -loss.item()

    @torch.no_grad()
    def logprobs() -> Tensor:
        return -losses().view(batch.num_sequences, -1).cpu()

    return Way(train=train, logprobs=logprobs)


def of_megatron(path: Path, batch: Batch, options: argparse.Namespace) -> Way:
    trainer = TrainerConfig(
        total_steps=1, tokens_per_microbatch=batch.token_ids.size, attention=options.attention, fp8=options.fp8
    )
    backend = MegatronBackend(
        model_path=str(path),
        algorithm=AlgorithmConfig(),
        trainer=trainer,
        temperature=1.0,
        ranks=Ranks(device=accelerator.take_device(0)),
        dtype=Dtype(options.dtype),
    )
    found: list[float] = []

    def loss(_: int, logprobs: Tensor, __: Tensor) -> Tensor:
        found.append(logprobs.mean().item())
        return -logprobs.mean()

    def train() -> float:
        backend._model.optimizer.zero_grad()
        backend._passes.run(backend._model.optimizer.chunks, [batch], backend._head, loss, train=True)
        return found[-1]

    def logprobs() -> Tensor:
        return torch.from_numpy(backend.logprobs(batch)[batch.loss_mask].reshape(batch.num_sequences, -1))

    return Way(train=train, logprobs=logprobs)


def timed(work: Callable[[], Any]) -> float:
    """Seconds: of the processor on a CPU, of the clock on a device."""
    on_device = DEVICE is not accelerator.CPU
    clock = time.perf_counter if on_device else time.process_time
    began = clock()
    work()
    if on_device:
        torch.accelerator.synchronize()
    return clock() - began


def operations(shape: dict[str, Any], batch: Batch) -> float:
    """Of forward and backward: two for each product's element, three products for one forward."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    width = hidden // heads
    attention = hidden * width * 2 * (heads + shape["num_key_value_heads"])
    weights = layers * (attention + 3 * hidden * shape["intermediate_size"]) + shape["vocab_size"] * hidden
    seen = float((batch.lengths.astype(np.float64) ** 2 / 2).sum())
    return 6.0 * weights * batch.token_ids.size + 3.0 * layers * 4.0 * heads * width * seen


def by_position(error: Tensor) -> dict[str, float]:
    eighth = max(1, error.shape[1] // 8)
    return {"first": error[:, :eighth].abs().mean().item(), "last": error[:, -eighth:].abs().mean().item()}


def by_operation(work: Callable[[], Any], most: int = 25) -> dict[str, list[float]]:
    """Milliseconds of the operation itself and how often it ran, the costliest first."""
    on_device = DEVICE is not accelerator.CPU
    with profile(activities=supported_activities()) as profiled:
        work()
    times = {
        one.key: [(one.self_device_time_total if on_device else one.self_cpu_time_total) / 1e3, one.count]
        for one in profiled.key_averages()
    }
    found = dict(sorted(times.items(), key=lambda item: -item[1][0])[:most])
    print("\n".join(f"{milliseconds:10.1f} ms {count:6} {name}" for name, (milliseconds, count) in found.items()), "\n")
    return found


if __name__ == "__main__":
    main()
