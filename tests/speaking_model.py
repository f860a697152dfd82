"""A model with random weights that, greedy, says one known text over and over once its turn has ended."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_model, make_tokenizer

SAYS = "é漢😀"
"""Two, three and four bytes, no two of them alike, and each is a token of its own."""
TURN: tuple[int, ...] = tuple(make_tokenizer()(SAYS + "<|im_end|>").input_ids)
END = TURN[-1]
FAR = 100.0
"""So far beyond all else in the residual stream that normalisation leaves little else."""
LOUD = 0.75
"""At this logit of 6 the next token is the likeliest by far, and yet half the samples at temperature 1 are another."""


@torch.no_grad()
def make_speaking_model(directory: Path, seed: int) -> Any:
    """Write it, a Llama of ``tiny_models``, and return it.

    Each token of the turn has a dimension of the residual stream to itself, which nothing else writes to and only the
    head's row of its successor reads. After all other tokens it is an ordinary random model. Its heads have the 32
    dimensions that vLLM's kernels need.
    """
    model: Any = make_model(directory, "llama", seed, num_attention_heads=2, num_key_value_heads=1)
    inner = model.model
    for dimension, (token, successor) in enumerate(pairwise([END, *TURN])):
        inner.embed_tokens.weight[:, dimension] = 0
        inner.embed_tokens.weight[token, dimension] = FAR
        for layer in inner.layers:
            layer.self_attn.o_proj.weight[dimension] = 0
            layer.mlp.down_proj.weight[dimension] = 0
        model.lm_head.weight[:, dimension] = 0
        model.lm_head.weight[successor, dimension] = LOUD / inner.norm.weight[dimension]
    model.save_pretrained(directory)
    return model
