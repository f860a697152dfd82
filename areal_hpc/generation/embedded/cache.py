"""The KV cache: one row for each running sequence, rows dense from 0, room for ``max_tokens`` in each.

Untouched rows cost address space only: the zeros come from the operating system page by page.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from areal_hpc.pretrained.architecture import Architecture


class KVCache:
    """Keys and values, each [layers, rows * tokens, kv_heads * head_dim]; row r starts at r * tokens."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, num_rows: int, max_tokens: int) -> None:
        self.num_rows, self.max_tokens = num_rows, max_tokens
        self._heads, self._head_dim = architecture.num_kv_heads, architecture.head_dim
        shape = (architecture.num_layers, num_rows * max_tokens, self._heads * self._head_dim)
        self._keys, self._values = _lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype)

    def places(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the tokens at ``positions`` of ``rows`` lie; int64, the common shape of both."""
        return rows * self.max_tokens + positions

    def write(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``keys`` and ``values`` [N, kv_heads, head_dim] at ``places`` [N]."""
        self._keys[layer].index_copy_(0, places, keys.flatten(1))
        self._values[layer].index_copy_(0, places, values.flatten(1))

    def read(self, layer: int, num_rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values [num_rows, kv_heads, length, head_dim] of the first rows and positions."""
        shape = (self.num_rows, self.max_tokens, self._heads, self._head_dim)
        keys, values = self._keys[layer].view(shape), self._values[layer].view(shape)
        return keys[:num_rows, :length].transpose(1, 2), values[:num_rows, :length].transpose(1, 2)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of row ``source`` into row ``target``."""
        start, end = source * self.max_tokens, target * self.max_tokens
        for tensor in (self._keys, self._values):
            tensor[:, end : end + length] = tensor[:, start : start + length]

    def clear(self, row: int) -> None:
        """Zero a row: masked attention still multiplies what lies there by 0, which a NaN would survive."""
        for tensor in (self._keys, self._values):
            tensor[:, row * self.max_tokens : (row + 1) * self.max_tokens] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only once written: numpy asks calloc for them, torch.zeros writes them all."""
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
