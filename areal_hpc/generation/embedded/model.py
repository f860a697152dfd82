"""The forward pass of a dense Llama, Qwen2 or Qwen3 in plain torch, with weights that can be replaced in place.

    hidden = model.prefill(token_ids, rows, cache)      whole prompts into their rows of the cache
    hidden = model.decode(token_ids, positions, cache)  one token for each of the first rows
    logits = model.logits(hidden)

Query, key and value projections are one matrix, gate and up projections another. ``parameters`` maps each Hugging Face
name to its view in that fused storage: loading, reading back and checksums all go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from areal_hpc.delta import Weight, apply
from areal_hpc.errors import DataError, WeightUpdateError
from areal_hpc.generation.embedded.cache import KVCache
from areal_hpc.pretrained.architecture import Architecture, inverse_frequencies, read_architecture
from areal_hpc.pretrained.files import check_shapes, read_weights

DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; it follows from config.json."""
HEAD = "lm_head.weight"

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [N, heads, D], keys and values [N, kv_heads, D]) -> [N, heads * D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one decoder layer; fused matrices are [sum of outputs, inputs]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """Weights and forward pass. Weights are uninitialised until ``load_weights`` has run over all of them."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, max_tokens: int) -> None:
        self.architecture, self.dtype = architecture, dtype
        self.parameters: dict[str, torch.Tensor] = {}
        hidden, vocabulary = architecture.hidden_size, architecture.vocab_size
        self._embedding = self._parameter("model.embed_tokens.weight", vocabulary, hidden)
        self._layers = [self._layer(f"model.layers.{i}") for i in range(architecture.num_layers)]
        self._norm = self._parameter("model.norm.weight", hidden)
        self._head = self._embedding if architecture.tied else self._parameter(HEAD, vocabulary, hidden)
        self._cos, self._sin = _rotary_tables(architecture, dtype, max_tokens)

    # -- storage

    def _parameter(self, name: str, *shape: int) -> torch.Tensor:
        self.parameters[name] = torch.empty(shape, dtype=self.dtype)
        return self.parameters[name]

    def _fused(self, names: Mapping[str, int], *inputs: int) -> torch.Tensor:
        """One tensor [sum of outputs, *inputs] whose consecutive rows are the named parameters."""
        fused = torch.empty((sum(names.values()), *inputs), dtype=self.dtype)
        self.parameters.update(zip(names, fused.split_with_sizes(list(names.values())), strict=True))
        return fused

    def _layer(self, prefix: str) -> Layer:
        a, attention, mlp = self.architecture, f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = dict(zip((f"{attention}.{part}_proj" for part in "qkv"), a.qkv_sizes, strict=True))
        gate_up = {f"{mlp}.{part}_proj.weight": a.intermediate_size for part in ("gate", "up")}
        return Layer(
            input_norm=self._parameter(f"{prefix}.input_layernorm.weight", a.hidden_size),
            qkv=self._fused({f"{name}.weight": size for name, size in qkv.items()}, a.hidden_size),
            qkv_bias=self._fused({f"{name}.bias": size for name, size in qkv.items()}) if a.qkv_bias else None,
            query_norm=self._parameter(f"{attention}.q_norm.weight", a.head_dim) if a.qk_norm else None,
            key_norm=self._parameter(f"{attention}.k_norm.weight", a.head_dim) if a.qk_norm else None,
            output=self._parameter(f"{attention}.o_proj.weight", a.hidden_size, a.qkv_sizes[0]),
            output_bias=self._parameter(f"{attention}.o_proj.bias", a.hidden_size) if a.output_bias else None,
            mlp_norm=self._parameter(f"{prefix}.post_attention_layernorm.weight", a.hidden_size),
            gate_up=self._fused(gate_up, a.hidden_size),
            down=self._parameter(f"{mlp}.down_proj.weight", a.hidden_size, a.intermediate_size),
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name and shape of every parameter."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> frozenset[str]:
        """Copy tensors over the parameters of the same Hugging Face names, cast to the model's dtype; apply deltas.

        A tied model takes a whole ``lm_head.weight`` that equals its embedding. Returns the names of the loaded
        parameters; ``missing`` says what a whole update still lacks.

        Raises:
            WeightUpdateError: unknown name, wrong shape, a name twice, a delta against something else. Parameters
                before it have been replaced.
        """
        loaded: set[str] = set()
        head: torch.Tensor | None = None
        for name, tensor in weights:
            if name.endswith(DERIVED_SUFFIX):
                continue
            if name == HEAD and self.architecture.tied and isinstance(tensor, torch.Tensor):
                head = tensor
                continue
            self._check(name, tensor, loaded)
            self._replace(name, tensor)
            loaded.add(name)
        if head is not None and not torch.equal(head.to(self.dtype), self._embedding):
            raise WeightUpdateError(f"{HEAD} differs from the embedding that this model ties it to; send one of them")
        return frozenset(loaded)

    def _replace(self, name: str, weight: Weight) -> None:
        if isinstance(weight, torch.Tensor):
            self.parameters[name].copy_(weight)
            return
        try:
            apply(self.parameters[name], weight)
        except WeightUpdateError as error:
            raise WeightUpdateError(f"parameter {name!r}: {error}") from error

    def _check(self, name: str, tensor: Weight, loaded: set[str]) -> None:
        if name not in self.parameters:
            raise WeightUpdateError(
                f"the model has no parameter {name!r}; send Hugging Face names of this architecture"
            )
        if name in loaded:
            raise WeightUpdateError(f"parameter {name!r} came twice in one update; send each once")
        if tensor.shape != self.parameters[name].shape:
            raise WeightUpdateError(
                f"parameter {name!r} came with shape {tuple(tensor.shape)}, the model has "
                f"{tuple(self.parameters[name].shape)}; send unsharded tensors of this model"
            )

    def missing(self, names: Iterable[str]) -> list[str]:
        """The parameters that ``names`` leaves out."""
        return sorted(self.parameters.keys() - set(names))

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
        return F.linear(hidden, self._head).float()

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Hidden states after the last norm [N, hidden] of N tokens; ``attend`` knows which of them see each other."""
        a = self.architecture
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)  # [N, 1, D]
        x = self._embedding[token_ids]
        for index, layer in enumerate(self._layers):
            fused = F.linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            heads = fused.view(-1, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
            turned, values = heads[:, : -a.num_kv_heads], heads[:, -a.num_kv_heads :]
            if layer.query_norm is not None and layer.key_norm is not None:
                queries, keys = turned[:, : a.num_heads], turned[:, a.num_heads :]
                turned = torch.cat((self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)), 1)
            turned = _rotate(turned, cos, sin)
            queries, keys = turned[:, : a.num_heads], turned[:, a.num_heads :]
            x = x + F.linear(attend(index, queries, keys, values), layer.output, layer.output_bias)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down)
        return self._normed(x, self._norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)


def _rotary_tables(
    architecture: Architecture, dtype: torch.dtype, max_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [max_tokens, head_dim]: x turned is x * cos + (halves of x swapped) * sin."""
    angles = torch.outer(torch.arange(max_tokens, dtype=torch.float32), inverse_frequencies(architecture))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((high, low), -1), sin)


def load_model(directory: Path, dtype: torch.dtype, max_tokens: int) -> Model:
    """The model of a Hugging Face checkpoint directory.

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
    model = Model(architecture, dtype, max_tokens)
    check_shapes(directory, model.shapes)
    model.load_weights(read_weights(directory))
    return model
