"""How large a run is, from the model's ``config.json`` alone: parameters, memory for each device, work for each step.

Estimates for planning, within a quarter of the truth for dense decoders; nothing is loaded and no device is looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.config.cluster import ComponentConfig
from areal_hpc.config.derived import model_ranks
from areal_hpc.config.lora import FEED_FORWARD
from areal_hpc.config.recipes import recipe_of
from areal_hpc.config.schema import Config, Dtype, Recompute, TrainerBackendName

GIB = 1 << 30
LOGITS_TOKENS, LOGITS_BYTES = 1024, 512 << 20
"""Logits that exist at a time: of so many tokens in the reference trainer, so many bytes on a rank of Megatron's."""
LOGITS_COPIES = 3
"""Logits, their softmax and its gradient, in float32."""
PEAK_TFLOPS: Mapping[str, float] = {"v100": 125, "a100": 312, "h100": 989, "h200": 989, "gh200": 989, "b200": 2250}
"""Dense bfloat16 (V100: float16) operations a second in the makers' data sheets, in 10^12, by the name in Slurm."""
USUAL_SHARE = 0.4
"""Share of the peak that training reaches when it is set up well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A decoder, counted."""

    parameters: int
    rounded: int
    """The parameters, were the number of each tensor's elements rounded up to a power of two."""
    active: int
    """Parameters that one token passes: of a mixture of experts some of them, else all."""
    layers: int
    hidden: int
    activation: int
    """Elements that backward needs of one token in one layer, without recomputation."""
    kv: int
    """Elements of one token in the KV cache."""
    vocabulary: int
    adapted: Mapping[str, int]
    """Elements of adapters of rank 1 on all matrices of one name; of experts there are none."""


def gib(num_bytes: float) -> str:
    """In GiB, with as many digits as an estimate is worth."""
    value = num_bytes / GIB
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def gpu_name(request: ComponentConfig) -> str:
    """What Slurm calls the GPUs that a component asks for, such as a100; empty where it does not say."""
    named = re.match(r"([a-z]\w*):", request.gpus_per_node or request.gpus_per_task)
    found = named or re.search(r"\bgpu:([a-z]\w*)", request.gres)
    return found[1] if found else ""


def size_of(config: Mapping[str, Any]) -> Size | None:
    """The size of the model with this ``config.json``; None where it is no decoder that we know how to count."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    if any(not isinstance(config.get(name), int) for name in needed):
        return None
    hidden, layers, heads, vocabulary, inner = (config[name] for name in needed)
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, kv_heads * head
    of_layer = [hidden * queries] * 2 + [hidden * keys] * 2 + _small_parts(config, hidden, queries, keys, head)
    attention = sum(of_layer)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    if experts:
        inner = config.get("moe_intermediate_size") or inner
        chosen = config.get("num_experts_per_tok") or 1
        of_layer += [hidden * inner] * 3 * experts + [hidden * experts]
        active_of = chosen * 3 * hidden * inner
        inner *= chosen
    else:
        of_layer += [hidden * inner] * 3
        active_of = 3 * hidden * inner
    ends = [vocabulary * hidden] * (1 if config.get("tie_word_embeddings") else 2) + [hidden]
    return Size(
        parameters=sum(ends) + layers * sum(of_layer),
        rounded=sum(map(_rounded, ends)) + layers * sum(map(_rounded, of_layer)),
        active=sum(ends) + layers * (attention + active_of),
        layers=layers,
        hidden=hidden,
        activation=4 * hidden + 2 * queries + 2 * keys + 4 * inner,
        kv=2 * layers * keys,
        vocabulary=vocabulary,
        adapted={
            **dict.fromkeys(("q_proj", "o_proj"), layers * (hidden + queries)),
            **dict.fromkeys(("k_proj", "v_proj"), layers * (hidden + keys)),
            **dict.fromkeys(() if experts else FEED_FORWARD, layers * (hidden + inner)),
        },
    )


def _rounded(number: int) -> int:
    """Up to a power of two."""
    return 1 << (number - 1).bit_length()


def _small_parts(config: Mapping[str, Any], hidden: int, queries: int, keys: int, head: int) -> list[int]:
    """Elements of each norm and bias of one layer."""
    family = str(config.get("model_type", ""))
    biased = family == "qwen2" or bool(config.get("attention_bias"))
    output = [hidden] if config.get("attention_bias") and family != "qwen2" else []
    norms = [hidden] * 2 + ([head] * 2 if family.startswith("qwen3") else [])
    return norms + ([queries, keys, keys] if biased else []) + output


def model_size(config: Config) -> Size | None:
    """The size of the run's model; None where it is not there yet, or cannot be counted."""
    path = Path(config.model.path) / "config.json"
    return size_of(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def trained_parameters(config: Config, size: Size) -> int:
    """How many parameters the optimizer has: the adapters', where there are any; a critic's are left out."""
    lora = config.model.lora
    return lora.rank * sum(size.adapted.get(name, 0) for name in lora.target_modules) or size.parameters


def trainer_bytes(config: Config, size: Size) -> tuple[float, float]:
    """Bytes of one trainer rank: weights, gradients and optimizer, also a critic's; activations of one micro-batch."""
    width = 2 if config.model.dtype is Dtype.BFLOAT16 else 4
    rounded = width if width < 4 else 0  # the masters are float32, and in float32 they are the weights themselves
    state, lora = float(4 + 4 + 8 + rounded), config.model.lora
    if config.trainer.backend is TrainerBackendName.MEGATRON:  # masters and moments are spread over data parallel ranks
        ranks = model_ranks(config)
        state = (4 + rounded) / ranks + 12 / config.trainer.ranks
    trained = trained_parameters(config, size)
    frozen = size.parameters * width / model_ranks(config) if lora.rank or config.algorithm.kl.coef else 0.0
    critic = size.parameters * state if recipe_of(config.algorithm.name).critic else 0.0
    return trained * state + frozen + critic, _activation_bytes(config, size, width) + _logits_bytes(config, size)


def _activation_bytes(config: Config, size: Size, width: int) -> float:
    """Kept of one micro-batch for its backward pass; where layers are computed again, their inputs and one layer's."""
    kept = size.activation * size.layers
    if config.trainer.recompute is Recompute.LAYERS:
        kept = size.hidden * size.layers + size.activation
    return config.trainer.tokens_per_microbatch * kept * width / model_ranks(config)


def _logits_bytes(config: Config, size: Size) -> float:
    if config.trainer.backend is TrainerBackendName.MEGATRON:
        words = size.vocabulary / config.trainer.parallel.tensor
        return LOGITS_COPIES * min(LOGITS_BYTES, 4 * config.trainer.tokens_per_microbatch * words)
    return LOGITS_COPIES * 4.0 * LOGITS_TOKENS * size.vocabulary


def engine_bytes(config: Config, size: Size) -> tuple[float, float]:
    """Bytes of one device of an engine: weights; and the KV cache of as many of the longest sequences as it may run."""
    width = 2 if config.model.dtype is Dtype.BFLOAT16 else 4
    ranks = config.generation.tensor_parallel * config.generation.pipeline_parallel
    tokens = config.generation.max_running * config.model.max_tokens
    return size.parameters * width / ranks, tokens * size.kv * width / ranks


def step_flops(config: Config, size: Size) -> tuple[int, float]:
    """One optimizer step at most: its tokens, and the operations of proximal log-probs and training together."""
    tokens = config.algorithm.groups_per_step * config.rollout.group_size * config.model.max_tokens
    return tokens, (2 + 6) * float(size.active) * tokens


def estimate_lines(config: Config, gpu: str) -> Iterator[str]:
    """The estimates, a line each.

    Args:
        gpu: what the trainer's devices are called in Slurm, such as a100; empty where nobody said.
    """
    path = Path(config.model.path) / "config.json"
    if not path.is_file():
        yield f"memory       not known: there is no {path} yet"
        return
    size = model_size(config)
    if size is None:
        yield f"memory       not known: {path} describes no decoder that can be counted"
        return
    active = f", {size.active:,} for each token" if size.active != size.parameters else ""
    yield f"model        {size.parameters:,} parameters{active}"
    state, activations = trainer_bytes(config, size)
    yield (
        f"memory       about {gib(state + activations)} GiB for each trainer rank: {gib(state)} weights "
        f"and optimizer, {gib(activations)} a micro-batch of {config.trainer.tokens_per_microbatch:,} tokens"
    )
    weights, cache = engine_bytes(config, size)
    yield (
        f"             about {gib(weights + cache)} GiB for each device of an engine: {gib(weights)} "
        f"weights, {gib(cache)} KV cache of {config.generation.max_running} sequences"
    )
    tokens, flops = step_flops(config, size)
    yield f"step         at most {tokens:,} tokens, {flops:.1e} operations{_duration(flops, config.trainer.ranks, gpu)}"


def _duration(flops: float, ranks: int, gpu: str) -> str:
    peak = PEAK_TFLOPS.get(gpu.lower())
    if peak is None:
        return ""
    seconds = flops / (ranks * peak * 1e12 * USUAL_SHARE)
    return f": {seconds:.2g} s of training on {ranks} {gpu} at {USUAL_SHARE:.0%} of {peak:g} TFLOP/s"
