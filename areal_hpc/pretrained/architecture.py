"""What a checkpoint's ``config.json`` says of a decoder, checked: Llama, Qwen2, Qwen3, and Qwen3 with experts.

Everything that our own forward passes (the embedded engine's, the Megatron trainer's) do not compute is refused here,
by name, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.errors import DataError
from areal_hpc.fs import read_json
from areal_hpc.pretrained.rope import Rope, read_rope
from areal_hpc.routing import Routing

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture that stands in place of each layer's feed-forward block."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    renormalised: bool
    """Whether the weights of a token's chosen experts add up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shapes and switches of one decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool
    rope: Rope
    eos_token_ids: frozenset[int]
    experts: Experts | None

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def routing(self) -> Routing | None:
        """What records of the experts of a mixture look like."""
        experts = self.experts
        return None if experts is None else Routing(self.num_layers, experts.num_per_token, experts.num_experts)


def read_architecture(directory: Path) -> Architecture:
    """The architecture of the checkpoint in ``directory``.

    Raises:
        DataError: no config.json, or a model that we do not compute.
    """
    config = _read_config(directory)
    _refuse_what_is_not_computed(config, directory)
    family, heads = config["model_type"], config["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=read_rope(config, directory),
        eos_token_ids=_eos_token_ids(config, directory),
        experts=_experts(config) if family == "qwen3_moe" else None,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist; model.path must be a Hugging Face checkpoint directory")
    config: dict[str, Any] = read_json(path)
    return config


def _refuse_what_is_not_computed(config: Mapping[str, Any], directory: Path) -> None:
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    of_rotation = {**config, **(config.get("rope_parameters") or {})}  # transformers 5 keeps it there
    refused = {
        f"model_type {config.get('model_type')!r}": config.get("model_type") not in FAMILIES,
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act") != "silu",
        "a quantized checkpoint": bool(config.get("quantization_config")),
        "sliding-window attention": bool(config.get("use_sliding_window")) or bool(layer_types),
        "mlp_bias": bool(config.get("mlp_bias")),
        "partial rotary embeddings": of_rotation.get("partial_rotary_factor", 1.0) != 1.0,
        "dense layers between mixtures": bool(config.get("mlp_only_layers"))
        or config.get("decoder_sparse_step", 1) != 1,
    }
    for what, found in refused.items():
        if found:
            raise DataError(
                f"{directory}: the embedded engine and the Megatron trainer do not compute {what}; they run "
                f"{', '.join(FAMILIES)} checkpoints, so set generation.backend to sglang and trainer.backend to "
                "reference for this one"
            )


def _experts(config: Mapping[str, Any]) -> Experts:
    return Experts(
        num_experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],  # transformers 5
        num_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        renormalised=bool(config.get("norm_topk_prob", False)),
    )


def _eos_token_ids(config: Mapping[str, Any], directory: Path) -> frozenset[int]:
    """End tokens of config.json and generation_config.json together; each may be absent, a number or a list."""
    path = directory / "generation_config.json"
    sources = [config, read_json(path) if path.is_file() else {}]
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)
