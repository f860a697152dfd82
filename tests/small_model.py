"""Models of a few thousand parameters in real Hugging Face directories, one for each layout of weights that matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


def small_model(directory: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model and return its path: qwen3 has tied embeddings, llama has not, qwen3_moe has experts."""
    config = {
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True, **changes),
        "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, **changes),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, tie_word_embeddings=False, **MIXTURE, **changes),
        "gemma2": lambda: transformers.Gemma2Config(**SIZES, **changes),
    }[family]()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms of exactly 1 would hide mistakes
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "note": "ď 今日 🙂"}), encoding="utf-8")
    (directory / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return directory
