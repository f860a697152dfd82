"""A Hugging Face directory from a stream of weights, as transformers reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_hpc.training.export import write_checkpoint


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_transformers_reads_back_every_bit_from_one_file_and_from_many(tmp_path: Path, shard_bytes: int) -> None:
    model = make_model(tmp_path / "source", "qwen2", 0)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.named_parameters()}
    weights["model.norm.weight"] = weights["model.norm.weight"] * -2
    target = tmp_path / "target"
    write_checkpoint(iter(sorted(weights.items())), tmp_path / "source", target, shard_bytes=shard_bytes)
    files = sorted(name for name in os.listdir(target) if name.endswith(".safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes > 20_000)
    found = AutoModelForCausalLM.from_pretrained(target)
    assert found.dtype == torch.bfloat16
    for name, tensor in found.named_parameters():
        assert torch.equal(tensor, weights[name]), name
    source = AutoTokenizer.from_pretrained(tmp_path / "source")
    assert AutoTokenizer.from_pretrained(target).encode("four 4") == source.encode("four 4")
    settings = json.loads((target / "config.json").read_text())
    assert settings["torch_dtype"] == settings["dtype"] == "bfloat16"
    assert "rope_theta" in settings  # for readers of older layouts
    assert not [name for name in os.listdir(target) if name.endswith(".part")]
