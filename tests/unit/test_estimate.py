"""Sizes from config.json, held against models that transformers builds and against published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_hpc.cluster import estimate
from areal_hpc.cluster.estimate import (
    GIB,
    engine_bytes,
    estimate_lines,
    gib,
    gpu_name,
    size_of,
    step_flops,
    trainer_bytes,
)
from areal_hpc.config.cluster import ComponentConfig
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.training import reference
from areal_hpc.training.megatron import heads

QWEN3_0_6B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def config_of(*words: str) -> Config:
    quickstart = Path(__file__).parents[2] / "configs/quickstart.yaml"
    return resolve(load([quickstart], ["cluster.shape=split", *words]))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "tie_word_embeddings": False},
        {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen2", "tie_word_embeddings": False},
        {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
        {"model_type": "qwen3_moe", "head_dim": 16, "tie_word_embeddings": False, **EXPERTS},
    ],
    ids=lambda config: f"{config['model_type']}-{len(config)}",
)
def test_parameters_are_those_of_the_model_that_transformers_builds(config: dict[str, Any]) -> None:
    written = {**SMALL, **config}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    size = size_of(written)
    assert size is not None
    assert size.parameters == model.num_parameters()


def test_a_published_size() -> None:
    size = size_of(QWEN3_0_6B)
    assert size is not None
    assert size.parameters == 596_049_920
    assert size.active == size.parameters
    assert size.kv == 2 * 28 * 8 * 128


def test_of_experts_only_the_chosen_ones_work() -> None:
    size = size_of({**SMALL, **EXPERTS, "model_type": "qwen3_moe"})
    assert size is not None
    assert size.parameters - size.active == 3 * (4 * 3 * 64 * 32 + 64 * 6)


def test_what_cannot_be_counted_is_said(tmp_path: Path) -> None:
    assert size_of({"model_type": "mamba"}) is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "no decoder that can be counted" in next(estimate_lines(config_of(f"model.path={tmp_path}"), ""))


def test_memory_by_hand() -> None:
    """Float32: weight, gradient and two moments; bfloat16: a rounded copy besides."""
    size = size_of(QWEN3_0_6B)
    assert size is not None
    assert trainer_bytes(config_of(), size)[0] == 16 * size.parameters
    assert trainer_bytes(config_of("model.dtype=bfloat16"), size)[0] == 18 * size.parameters
    kl = config_of("model.dtype=bfloat16", "algorithm.kl.coef=0.1")
    assert trainer_bytes(kl, size)[0] == 20 * size.parameters
    spread = ["trainer.backend=megatron", "trainer.ranks=8", "trainer.parallel.tensor=2", "model.dtype=bfloat16"]
    assert trainer_bytes(config_of(*spread), size)[0] == (6 / 2 + 12 / 8) * size.parameters
    lora = config_of("model.dtype=bfloat16", "algorithm.kl.coef=0.1", "model.lora.rank=16")
    adapters = (
        16 * 28 * (2 * (1024 + 2048) + 2 * (1024 + 1024) + 3 * (1024 + 3072))
    )  # and the frozen model is read twice
    assert trainer_bytes(lora, size)[0] == 2 * size.parameters + 18 * adapters
    engine = config_of("model.dtype=bfloat16", "model.max_tokens=1000", "generation.max_running=10")
    assert engine_bytes(engine, size) == (2 * size.parameters, 10 * 1000 * 2 * size.kv)


def test_a_critic_is_a_second_model_and_recomputed_layers_keep_their_inputs_alone() -> None:
    size = size_of({**QWEN3_0_6B})
    assert size is not None
    ppo = config_of("algorithm.name=ppo")
    assert trainer_bytes(ppo, size)[0] == 2 * trainer_bytes(config_of(), size)[0]
    megatron = ("trainer.backend=megatron", "trainer.tokens_per_microbatch=2048")
    logits = 3 * (512 << 20)  # of 2,048 tokens they would be more than twice as much
    kept = trainer_bytes(config_of(*megatron), size)[1] - logits
    assert kept == 2048 * size.activation * 28 * 4
    again = trainer_bytes(config_of(*megatron, "trainer.recompute=layers"), size)[1] - logits
    assert again == 2048 * (1024 * 28 + size.activation) * 4
    split = trainer_bytes(config_of(*megatron, "trainer.ranks=8", "trainer.parallel.tensor=8"), size)[1]
    assert split == kept / 8 + 3 * 4 * 2048 * 151936 / 8


def test_the_logits_that_are_counted_are_those_that_the_trainers_make() -> None:
    assert (estimate.LOGITS_TOKENS, estimate.LOGITS_BYTES) == (reference.CHUNK_TOKENS, heads.CHUNK_BYTES)


def test_the_measured_activations_of_a_forward_are_near_the_estimate() -> None:
    """What autograd keeps for backward, in bytes, as torch itself reports it."""
    written = {**SMALL, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "num_hidden_layers": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written), attn_implementation="sdpa").get_decoder()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=torch.zeros(1, 512, dtype=torch.long))
    size = size_of(written)
    assert output is not None
    assert size is not None
    expected = 512 * size.activation * size.layers * 4
    assert 0.4 < expected / sum(kept.values()) < 1.6


def test_the_work_of_a_step_by_hand() -> None:
    size = size_of(QWEN3_0_6B)
    assert size is not None
    config = config_of("algorithm.groups_per_step=4", "rollout.group_size=8", "model.max_tokens=100")
    assert step_flops(config, size) == (3200, 8 * 596_049_920 * 3200)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        ({"gres": "gpu:a100:4"}, "a100"),
        ({"gres": "lustre:1,gpu:h100:4"}, "h100"),
        ({"gpus_per_node": "a100:4"}, "a100"),
        ({"gpus_per_task": "gh200:1"}, "gh200"),
        ({"gres": "gpu:4"}, ""),
        ({"gpus_per_node": "4"}, ""),
        ({}, ""),
    ],
)
def test_the_gpus_name_is_taken_from_what_is_asked_for(request_: dict[str, str], name: str) -> None:
    assert gpu_name(ComponentConfig(**request_)) == name


def test_the_lines_of_a_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    lines = list(estimate_lines(config_of(f"model.path={tmp_path}", "model.dtype=bfloat16"), "A100"))
    assert lines[0] == "model        596,049,920 parameters"
    assert f"{18 * 596_049_920 / GIB:.2g} weights and optimizer" in lines[1]
    assert lines[3].endswith("of training on 1 A100 at 40% of 312 TFLOP/s")
    assert "TFLOP" not in list(estimate_lines(config_of(f"model.path={tmp_path}"), "mystery"))[3]


@pytest.mark.parametrize(("size", "text"), [(1.234, "1.2"), (99.2, "99"), (99.6, "100"), (1234.5, "1,234")])
def test_gibibytes_are_written_out(size: float, text: str) -> None:
    assert gib(size * GIB) == text
