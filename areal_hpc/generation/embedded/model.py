"""The forward pass of a dense Llama, Qwen2 or Qwen3 in plain torch, with two sets of weights: one serves, one is spare.

hidden = model.prefill(token_ids, rows, cache)      whole prompts into their rows of the cache
hidden = model.decode(token_ids, positions, cache)  one token for each of the first rows
logits = model.logits(hidden)

model.spare.load(weights, held=model.serving)       new weights beside those that are computed with
model.swap()                                        between two forward passes, at once

With adapters the sets are of these, both on the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from areal_hpc.config.lora import NO_LORA, LoraConfig
from areal_hpc.errors import DataError
from areal_hpc.generation.embedded.adapters import Adapters
from areal_hpc.generation.embedded.cache import KVCache
from areal_hpc.generation.embedded.parameters import LowRank, Parameters, WeightSet
from areal_hpc.pretrained.architecture import Architecture, read_architecture
from areal_hpc.pretrained.files import check_shapes, read_weights
from areal_hpc.pretrained.rope import amplitude, inverse_frequencies

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [N, heads, D], keys and values [N, kv_heads, D]) -> [N, heads * D]."""


class Model:
    """Forward pass by the weights that are ``serving``; another set of them can be made ready meanwhile."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, max_tokens: int, lora: LoraConfig = NO_LORA
    ) -> None:
        self.architecture, self.dtype = architecture, dtype
        weights = Parameters(architecture, dtype)
        self.serving: WeightSet = Adapters(weights, lora) if lora.rank else weights
        # Takes memory once something is written into it.
        self.spare: WeightSet = Adapters(weights, lora) if lora.rank else Parameters(architecture, dtype)
        self._cos, self._sin = _rotary_tables(architecture, dtype, max_tokens)

    def swap(self) -> None:
        """Compute with what was ``spare``. Not within a forward pass."""
        self.serving, self.spare = self.spare, self.serving

    # -- forward

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, rows: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Hidden states [n, Q, hidden] of whole prompts, padded on the right, written into ``rows`` [n] of the cache.

        ``token_ids`` is int64 [n, Q]. What padding leaves in the cache is overwritten before anything attends to it.
        """
        num, length = token_ids.shape
        positions = torch.arange(length).expand(num, length)
        places = cache.places(rows[:, None], positions).flatten()

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.write(layer, places, k, v)
            q, k, v = (x.reshape(num, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(num * length, -1)

        return self._forward(token_ids.flatten(), positions.flatten(), attend).view(num, length, -1)

    @torch.inference_mode()
    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Hidden states [B, hidden] after one more token in each of the cache's first B rows.

        ``token_ids`` and ``positions`` are int64 [B]; row r attends to its positions 0 to ``positions[r]``.
        """
        num, length = token_ids.numel(), int(positions.max()) + 1
        places = cache.places(torch.arange(num), positions)
        unseen = torch.arange(length) > positions[:, None]
        group = self.architecture.num_heads // self.architecture.num_kv_heads
        mask = torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, -torch.inf)
        mask = mask[:, None, None].expand(num, 1, group, length)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.write(layer, places, k, v)
            keys, values = cache.read(layer, num, length)
            # Heads that share a key stand where query positions do, so that no key is copied (bfloat16: 6 x faster).
            q = q.reshape(num, -1, group, self.architecture.head_dim)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).flatten(1)

        return self._forward(token_ids, positions, attend)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [..., vocab_size] of hidden states [..., hidden]."""
        return F.linear(hidden, self.serving.matrices.head).float()

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Hidden states after the last norm [N, hidden] of N tokens; ``attend`` knows which of them see each other."""
        a = self.architecture
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)  # [N, 1, D]
        weights = self.serving.matrices
        x = weights.embedding[token_ids]
        for index, layer in enumerate(weights.layers):
            adapters = self.serving.adapters(index)
            fused = _linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias, adapters.qkv)
            heads = fused.view(-1, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
            turned, values = heads[:, : -a.num_kv_heads], heads[:, -a.num_kv_heads :]
            if layer.query_norm is not None and layer.key_norm is not None:
                queries, keys = turned[:, : a.num_heads], turned[:, a.num_heads :]
                turned = torch.cat((self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)), 1)
            turned = _rotate(turned, cos, sin)
            queries, keys = turned[:, : a.num_heads], turned[:, a.num_heads :]
            mixed = attend(index, queries, keys, values)
            x = x + _linear(mixed, layer.output, layer.output_bias, adapters.output)
            gate, up = _linear(self._normed(x, layer.mlp_norm), layer.gate_up, None, adapters.gate_up).chunk(2, -1)
            x = x + _linear(F.silu(gate).mul_(up), layer.down, None, adapters.down)
        return self._normed(x, weights.norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low_rank: LowRank | None) -> torch.Tensor:
    """[N, inputs] -> [N, outputs]."""
    output = F.linear(x, weight, bias)
    return output if low_rank is None else low_rank.add(output, x)


def _rotary_tables(
    architecture: Architecture, dtype: torch.dtype, max_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [max_tokens, head_dim]: x turned is x * cos + (halves of x swapped) * sin."""
    frequencies = inverse_frequencies(architecture.rope, architecture.head_dim)
    angles = torch.outer(torch.arange(max_tokens, dtype=torch.float32), frequencies)
    cos, sin = (amplitude(architecture.rope) * waves for waves in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((high, low), -1), sin)


def load_model(directory: Path, dtype: torch.dtype, max_tokens: int, lora: LoraConfig = NO_LORA) -> Model:
    """The model of a Hugging Face checkpoint directory, with adapters that change nothing yet if ``lora`` has a rank.

    Raises:
        DataError: an architecture that is not computed here, or weights that do not fit config.json.
        WeightUpdateError: the checkpoint holds a tensor that the architecture does not have.
    """
    architecture = read_architecture(directory)
    if architecture.experts is not None:
        raise DataError(
            f"{directory}: the embedded engine does not compute model_type {architecture.family!r}, which has experts; "
            "set generation.backend to sglang for this one"
        )
    model = Model(architecture, dtype, max_tokens, lora)
    weights = model.serving.matrices
    check_shapes(directory, weights.shapes)
    weights.load(read_weights(directory))
    return model
