"""The elements of a tensor that differ from what its receiver holds, bit for bit.

    delta = difference(held, now)        both of one dtype and shape
    apply(held, delta)                   held is now, to the last bit, or an error says that it is not

Bits are compared and moved, never numbers: a NaN equals itself if it has the same payload, and -0.0 is not 0.0.

An element travels as its value and one byte: how many elements that stay lie between it and the one before.

    held    5 5 5 5 5 5        values  7 8
    now     5 7 5 5 8 5        gaps    1 2

Of more than 255 that stay in a row, one is sent as it is. Any bytes are gaps of some ascending positions, so all that
can be wrong with them is their sum. The rest is told by the checksum of the whole tensor as it must be afterwards: also
that the receiver held something else than the sender believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray

from areal_hpc.errors import WeightUpdateError

FARTHEST = 256
"""Longest distance from one position to the next that a gap can say."""
CHUNK = 1 << 20
"""Elements compared at once: what is in between stays in the processor's cache."""
STRETCH = 1 << 20
"""Bytes summed in one go, for which no other thread of the process runs: an engine's is to sample meanwhile."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element of so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The elements of one tensor that have to be replaced."""

    values: torch.Tensor  # [N], of the tensor's dtype
    gaps: torch.Tensor  # uint8 [N]
    shape: torch.Size  # of the tensor
    checksum: int  # of the tensor once it is replaced

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.gaps.nbytes


Weight = torch.Tensor | Delta
"""A tensor on its way: whole, or as what has changed of it."""


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32C (RFC 3720) of a contiguous tensor's bytes."""
    if tensor.numel() == 0:
        return 0
    data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    so_far = 0
    for start in range(0, data.size, STRETCH):
        so_far = google_crc32c.extend(so_far, data[start : start + STRETCH])
    return int(so_far)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as integers [numel], in its own memory."""
    return tensor.detach().view(-1).view(BITS[tensor.itemsize])


def difference(held: torch.Tensor, now: torch.Tensor) -> Delta:
    """What makes ``now`` of ``held``; both contiguous in host memory."""
    assert (held.dtype, held.shape) == (now.dtype, now.shape), (held.dtype, held.shape, now.dtype, now.shape)
    positions = bridged(np.concatenate([np.zeros(0, np.int64), *_differing(bits(held).numpy(), bits(now).numpy())]))
    return Delta(
        values=now.detach().view(-1)[torch.from_numpy(positions)],
        gaps=torch.from_numpy((np.diff(positions, prepend=-1) - 1).astype(np.uint8)),
        shape=now.shape,
        checksum=checksum(now),
    )


def _differing(held: NDArray[np.integer], now: NDArray[np.integer]) -> Iterator[NDArray[np.int64]]:
    """Ascending positions at which two arrays [N] differ, a chunk at a time."""
    for start in range(0, now.size, CHUNK):
        yield np.flatnonzero(held[start : start + CHUNK] != now[start : start + CHUNK]) + start


def bridged(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending ``positions``, with others put between those that are farther apart than a gap can say."""
    counts = (np.diff(positions, prepend=-1) - 1) // FARTHEST + 1  # of each position: itself and those before it
    to_go = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
    filled: NDArray[np.int64] = np.repeat(positions, counts) - FARTHEST * to_go
    return filled


def apply(tensor: torch.Tensor, delta: Delta) -> None:
    """Replace elements of ``tensor``, which is contiguous, and prove that it is what the sender has.

    Raises:
        WeightUpdateError: it is not. With a dtype, shape or position that does not fit, nothing has been replaced.
    """
    if (tensor.dtype, tensor.shape) != (delta.dtype, delta.shape):
        raise WeightUpdateError(
            f"a delta of {delta.dtype} {tuple(delta.shape)} came for {tensor.dtype} {tuple(tensor.shape)}; "
            "send it whole"
        )
    positions = torch.cumsum(delta.gaps.to(tensor.device, torch.int64) + 1, 0) - 1
    if len(positions) and int(positions[-1]) >= tensor.numel():
        raise WeightUpdateError(f"a delta reaches to element {int(positions[-1])} of {tensor.numel()}; send it whole")
    bits(tensor)[positions] = bits(delta.values).to(tensor.device)
    if checksum(tensor) != delta.checksum:
        raise WeightUpdateError(
            "a delta did not make of it what the sender has (CRC-32C differs): it was made against other weights than "
            "these, or changed on its way; send it whole"
        )
