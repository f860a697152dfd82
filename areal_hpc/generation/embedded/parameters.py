"""The weights of a dense Llama, Qwen2 or Qwen3, each under its Hugging Face name and in the form that computing wants.

Query, key and value projections are one matrix, gate and up projections another. ``by_name`` maps each Hugging Face
name to its view in that fused storage: loading, reading back and checksums all go through it.

What new weights replace is a ``WeightSet``: all of these, or the adapters that stand on them (``adapters.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from areal_hpc.buckets import fingerprint_of
from areal_hpc.delta import Weight, apply
from areal_hpc.errors import WeightUpdateError
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.pretrained.files import DERIVED_SUFFIX, HEAD


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The low-rank adapters of one fused matrix: x -> scale * up(down(x)) for each of its adapted parts."""

    down: torch.Tensor  # [parts * rank, inputs]
    ups: tuple[tuple[slice, torch.Tensor], ...]  # of each part its rows of the fused output, and [its outputs, rank]
    scale: float

    def add(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``output`` [N, fused outputs], which is overwritten, with what the adapters make of ``x`` [N, inputs]."""
        narrow = torch.nn.functional.linear(x, self.down).chunk(len(self.ups), -1)
        for (rows, up), part in zip(self.ups, narrow, strict=True):
            output[:, rows].addmm_(part, up.t(), alpha=self.scale)
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapters:
    """The adapters of one decoder layer, under the names that its matrices have in ``Layer``."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


NO_ADAPTERS = LayerAdapters()


class WeightSet(ABC):
    """Tensors that are replaced together, each under its Hugging Face name."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}

    @property
    @abstractmethod
    def matrices(self) -> Parameters:
        """The model's own weights, which a forward pass computes with."""

    @abstractmethod
    def adapters(self, layer: int) -> LayerAdapters:
        """The adapters that a forward pass adds to the matrices of decoder layer ``layer``."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name and shape of every parameter."""
        return {name: tuple(parameter.shape) for name, parameter in self.by_name.items()}

    @torch.inference_mode()
    def load(self, weights: Iterable[tuple[str, Weight]], held: WeightSet | None = None) -> frozenset[str]:
        """Copy tensors over those of the same Hugging Face names, cast to the model's dtype.

        Returns the names of the loaded ones; ``missing`` says what a whole update still lacks.

        Args:
            held: the weights that deltas were made against; needed where there are any.

        Raises:
            WeightUpdateError: unknown name, wrong shape, a name twice, a delta against something else. Parameters
                before it have been replaced.
        """
        loaded: set[str] = set()
        for name, tensor in weights:
            self._check(name, tensor, loaded)
            self._replace(name, tensor, held)
            loaded.add(name)
        return frozenset(loaded)

    def _replace(self, name: str, weight: Weight, held: WeightSet | None) -> None:
        if isinstance(weight, torch.Tensor):
            self.by_name[name].copy_(weight)
            return
        assert held is not None, "a delta against nothing"
        self.by_name[name].copy_(held.by_name[name])
        try:
            apply(self.by_name[name], weight)
        except WeightUpdateError as error:
            raise WeightUpdateError(f"parameter {name!r}: {error}") from error

    def _check(self, name: str, tensor: Weight, loaded: set[str]) -> None:
        if name not in self.by_name:
            raise WeightUpdateError(
                f"the model has no parameter {name!r}; send Hugging Face names of this architecture"
            )
        if name in loaded:
            raise WeightUpdateError(f"parameter {name!r} came twice in one update; send each once")
        if tensor.shape != self.by_name[name].shape:
            raise WeightUpdateError(
                f"parameter {name!r} came with shape {tuple(tensor.shape)}, the model has "
                f"{tuple(self.by_name[name].shape)}; send unsharded tensors of this model"
            )

    def missing(self, names: Iterable[str]) -> list[str]:
        """The parameters that ``names`` leaves out."""
        return sorted(self.by_name.keys() - set(names))


class Parameters(WeightSet):
    """One whole set of weights; uninitialised until ``load`` has run over all of them."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        self.architecture, self.dtype = architecture, dtype
        hidden, vocabulary = architecture.hidden_size, architecture.vocab_size
        self.embedding = self._parameter("model.embed_tokens.weight", vocabulary, hidden)
        self.layers = [self._layer(f"model.layers.{i}") for i in range(architecture.num_layers)]
        self.norm = self._parameter("model.norm.weight", hidden)
        self.head = self.embedding if architecture.tied else self._parameter(HEAD, vocabulary, hidden)

    @property
    def matrices(self) -> Parameters:
        return self

    def adapters(self, layer: int) -> LayerAdapters:
        """None: weights that are updated themselves have no adapters."""
        return NO_ADAPTERS

    @cached_property
    def fingerprint(self) -> int:
        """``buckets.fingerprint`` of the weights, which must not change any more."""
        return fingerprint_of(self.by_name.items())

    # -- storage

    def _parameter(self, name: str, *shape: int) -> torch.Tensor:
        self.by_name[name] = torch.empty(shape, dtype=self.dtype)
        return self.by_name[name]

    def _fused(self, names: Mapping[str, int], *inputs: int) -> torch.Tensor:
        """One tensor [sum of outputs, *inputs] whose consecutive rows are the named parameters."""
        fused = torch.empty((sum(names.values()), *inputs), dtype=self.dtype)
        self.by_name.update(zip(names, fused.split_with_sizes(list(names.values())), strict=True))
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

    @torch.inference_mode()
    def load(self, weights: Iterable[tuple[str, Weight]], held: WeightSet | None = None) -> frozenset[str]:
        """As ``WeightSet.load``, for the whole model. One with tied embeddings also takes an ``lm_head.weight``, if it
        equals the embedding; buffers that old checkpoints carry are ignored.

        Raises:
            WeightUpdateError: as there, or such a head is another.
        """
        head: list[torch.Tensor] = []

        def own() -> Iterator[tuple[str, Weight]]:
            for name, tensor in weights:
                if name == HEAD and self.architecture.tied and isinstance(tensor, torch.Tensor):
                    head.append(tensor)
                elif not name.endswith(DERIVED_SUFFIX):
                    yield name, tensor

        loaded = super().load(own(), held)
        if head and not torch.equal(head[-1].to(self.dtype), self.embedding):
            raise WeightUpdateError(f"{HEAD} differs from the embedding that this model ties it to; send one of them")
        return loaded
