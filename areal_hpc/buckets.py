"""Weights packed into flat byte buffers for transfer, and unpacked with proof that nothing changed on the way.

A bucket lays its tensors back to back without padding, which is the layout that SGLang calls ``flattened_bucket``. A
receiver views each piece as its dtype, so every offset must be a multiple of that dtype's size. Sorting a bucket's
tensors by falling element size makes this hold with no gaps: element sizes are powers of two and a tensor's length is a
multiple of its own, hence of every smaller one that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import google_crc32c
import torch

from areal_hpc.errors import WeightUpdateError
from areal_hpc.types import TensorSpec

MANIFEST = "manifest.json"
"""Beside the safetensors files of an update by disk: for each file its ``bytes``, and the ``crc32c`` of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some tensors as one transfer; ``specs`` is all that a receiver needs to take ``buffer`` apart."""

    specs: tuple[TensorSpec, ...]
    buffer: torch.Tensor  # uint8 [B]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch prints as ``torch.<name>``.

    Raises:
        WeightUpdateError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"torch has no dtype {name!r}; sender and receiver run different versions of torch")
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    """How long the tensor is in its bucket."""
    return torch.Size(spec.shape).numel() * dtype_named(spec.dtype).itemsize


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32C (RFC 3720) of a contiguous tensor's bytes."""
    if tensor.numel() == 0:
        return 0
    return int(google_crc32c.value(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()))


def fingerprint(specs: Iterable[TensorSpec]) -> int:
    """One number for all the weights that ``specs`` describe, however they were dealt into buckets.

    CRC-32C over the names and checksums in the order of the names: two sets of weights with the same bits under the
    same names have the same one.
    """
    lines = sorted(f"{spec.name} {spec.checksum}\n" for spec in specs)
    return int(google_crc32c.value("".join(lines).encode()))


def plan_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], limit_bytes: int, *, device: torch.device | str | None = None
) -> Iterator[Bucket]:
    """Pack a stream of tensors, in the order given, into buckets of at most ``limit_bytes``.

    A tensor larger than the limit makes a bucket of its own; one without elements takes no bytes but still travels.
    Each tensor must stay as it is until the bucket that holds it is out; the bucket itself is a copy.

    Args:
        device: where the buffers are made; by default where the tensors are.

    Raises:
        WeightUpdateError: a name comes twice.
    """
    seen: set[str] = set()
    pending: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if name in seen:
            raise WeightUpdateError(f"weight {name!r} comes twice in one update; names must be unique")
        seen.add(name)
        if pending and size + tensor.nbytes > limit_bytes:
            yield _fill(pending, device)
            pending, size = [], 0
        pending.append((name, tensor))
        size += tensor.nbytes
    if pending:
        yield _fill(pending, device)


def _fill(weights: list[tuple[str, torch.Tensor]], device: torch.device | str | None) -> Bucket:
    ordered = sorted(weights, key=lambda item: -item[1].itemsize)  # stable: equal sizes keep their order
    total = sum(tensor.nbytes for _, tensor in ordered)
    buffer = torch.empty(total, dtype=torch.uint8, device=device or ordered[0][1].device)
    layout = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in ordered]
    blank = [TensorSpec(name=name, dtype=dtype, shape=shape, checksum=0) for name, dtype, shape in layout]
    for (_, tensor), piece in zip(ordered, _pieces(buffer, blank), strict=True):
        piece.copy_(tensor.detach())  # takes any strides to the contiguous order of the bucket
    sums = [checksum(piece) for piece in _pieces(buffer.cpu(), blank)]
    specs = (
        TensorSpec(name=name, dtype=dtype, shape=shape, checksum=crc)
        for (name, dtype, shape), crc in zip(layout, sums, strict=True)
    )
    return Bucket(specs=tuple(specs), buffer=buffer)


def _pieces(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
    """Each tensor of a bucket as a view of its buffer."""
    start = 0
    for spec in specs:
        end = start + num_bytes(spec)
        yield buffer[start:end].view(dtype_named(spec.dtype)).view(spec.shape)
        start = end


def unpack(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a bucket that arrived: views of ``buffer``, on its device.

    Args:
        buffer: uint8 [B], contiguous, exactly as long as the specs say.

    Raises:
        WeightUpdateError: the length is wrong, or a tensor's bytes are not the sender's; names the tensor.
    """
    expected = sum(num_bytes(spec) for spec in specs)
    if buffer.numel() != expected:
        raise WeightUpdateError(f"a weight bucket has {buffer.numel()} bytes where its tensors need {expected}")
    for spec, piece in zip(specs, _pieces(buffer.cpu(), specs), strict=True):
        if checksum(piece) != spec.checksum:
            raise WeightUpdateError(f"weight {spec.name!r} arrived with other bytes than were sent (CRC-32C differs)")
    return [(spec.name, piece) for spec, piece in zip(specs, _pieces(buffer, specs), strict=True)]
