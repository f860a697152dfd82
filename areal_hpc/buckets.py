"""Weights packed into flat byte buffers for transfer, and unpacked with proof that nothing changed on the way.

A bucket lays its tensors back to back without padding, which is the layout that SGLang calls ``flattened_bucket``. A
receiver views each piece as its dtype, so every offset must be a multiple of that dtype's size. Sorting a bucket's
tensors by falling element size makes this hold with no gaps: element sizes are powers of two and a tensor's length is a
multiple of its own, hence of every smaller one that follows.

A tensor may travel as a delta (``delta.py``): its values lie where the tensor would, and the gaps of all of a bucket's
deltas, which are bytes, at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import google_crc32c
import torch

from areal_hpc.delta import Delta, Weight, checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.transfer import TensorSpec


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


def whole_bytes(spec: TensorSpec) -> int:
    """How long the tensor is."""
    return torch.Size(spec.shape).numel() * dtype_named(spec.dtype).itemsize


def num_bytes(spec: TensorSpec) -> int:
    """How long the tensor, or its delta, is in its bucket."""
    if spec.num_changed is None:
        return whole_bytes(spec)
    return spec.num_changed * (dtype_named(spec.dtype).itemsize + 1)


def fingerprint(specs: Iterable[TensorSpec]) -> int:
    """One number for all the weights that ``specs`` describe, however they were dealt into buckets.

    CRC-32C over the names and checksums in the order of the names: two sets of weights with the same bits under the
    same names have the same one.
    """
    lines = sorted(f"{spec.name} {spec.checksum}\n" for spec in specs)
    return int(google_crc32c.value("".join(lines).encode()))


def fingerprint_of(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """The ``fingerprint`` that ``weights`` have once they are packed; one in host memory at a time."""
    return fingerprint(
        replace(_spec(name, tensor), checksum=checksum(tensor.detach().cpu().contiguous())) for name, tensor in weights
    )


def plan_buckets(
    weights: Iterable[tuple[str, Weight]],
    limit_bytes: int,
    memory: BucketMemory | None = None,
    *,
    summed: bool = True,
) -> Iterator[Bucket]:
    """Pack a stream of tensors, in the order given, into buckets of at most ``limit_bytes``.

    A tensor larger than the limit makes a bucket of its own; one without elements takes no bytes but still travels.
    Each tensor must stay as it is until the bucket that holds it is out; the bucket itself is a copy.

    Args:
        memory: where the buckets are made; by default each in memory of its own, where the tensors are.
        summed: whether somebody will ask for checksums: of what lies on a device they cost a copy to the host.

    Raises:
        WeightUpdateError: a name comes twice.
    """
    seen: set[str] = set()
    pending: list[tuple[str, Weight]] = []
    size = 0
    memory = memory or BucketMemory()
    for name, tensor in weights:
        if name in seen:
            raise WeightUpdateError(f"weight {name!r} comes twice in one update; names must be unique")
        seen.add(name)
        if pending and size + tensor.nbytes > limit_bytes:
            yield _fill(pending, memory, summed)
            pending, size = [], 0
        pending.append((name, tensor))
        size += tensor.nbytes
    if pending:
        yield _fill(pending, memory, summed)


class BucketMemory:
    """Where buckets are put.

    Args:
        device: by default that of the tensors.
        reuse: so many buckets after it, a bucket's memory is taken for another one: fresh memory costs more than the
            copy into it. 0 is never.
    """

    def __init__(self, device: torch.device | str | None = None, reuse: int = 0) -> None:
        self._device, self._reuse = device, reuse
        self._used: deque[torch.Tensor] = deque(maxlen=reuse)
        self._largest = 0

    def take(self, num: int, at_home: torch.device | str = "cpu") -> torch.Tensor:
        """uint8 [num]."""
        device = torch.empty(0, device=self._device or at_home).device  # torch takes "cuda" and "cuda:0" for two
        self._largest = max(self._largest, num)
        oldest = self._used.popleft() if self._reuse and len(self._used) == self._reuse else None
        if oldest is None or oldest.numel() < num or oldest.device != device:
            oldest = torch.empty(self._largest if self._reuse else num, dtype=torch.uint8, device=device)
        self._used.append(oldest)
        return oldest[:num]

    def forget(self) -> None:
        """Let go of what was taken: somebody else may write into it, or need the room."""
        self._used.clear()


def _fill(weights: list[tuple[str, Weight]], memory: BucketMemory, summed: bool) -> Bucket:
    ordered = sorted(weights, key=lambda item: -item[1].dtype.itemsize)  # stable: equal sizes keep their order
    blank = [_spec(name, tensor) for name, tensor in ordered]
    first = ordered[0][1]
    at_home = first.values.device if isinstance(first, Delta) else first.device
    buffer = memory.take(sum(map(num_bytes, blank)), at_home)
    for (_, tensor), piece in zip(ordered, _pieces(buffer, blank), strict=True):
        if isinstance(tensor, Delta):
            assert isinstance(piece, Delta)
            piece.values.copy_(tensor.values)
            piece.gaps.copy_(tensor.gaps)
        else:
            assert isinstance(piece, torch.Tensor)
            piece.copy_(tensor.detach())  # takes any strides to the contiguous order of the bucket
    if not summed:
        return Bucket(specs=tuple(blank), buffer=buffer)
    in_host_memory = _pieces(buffer.cpu(), blank)
    return Bucket(specs=tuple(map(_with_checksum, blank, in_host_memory)), buffer=buffer)


def _spec(name: str, tensor: Weight) -> TensorSpec:
    """Whole tensors get their checksum once they are packed."""
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        checksum=tensor.checksum if isinstance(tensor, Delta) else 0,
        num_changed=len(tensor.values) if isinstance(tensor, Delta) else None,
    )


def _with_checksum(spec: TensorSpec, piece: Weight) -> TensorSpec:
    return spec if isinstance(piece, Delta) else replace(spec, checksum=checksum(piece))


def _pieces(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> list[Weight]:
    """Each tensor or delta of a bucket as a view of its buffer."""
    start = 0

    def cut(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        nonlocal start
        end = start + torch.Size(shape).numel() * dtype.itemsize
        piece, start = buffer[start:end].view(dtype).view(torch.Size(shape)), end
        return piece

    heads = [cut(dtype_named(s.dtype), s.shape if s.num_changed is None else (s.num_changed,)) for s in specs]
    return [
        head
        if spec.num_changed is None
        else Delta(
            values=head,
            gaps=cut(torch.uint8, (spec.num_changed,)),
            shape=torch.Size(spec.shape),
            checksum=spec.checksum,
        )
        for spec, head in zip(specs, heads, strict=True)
    ]


def unpack(buffer: torch.Tensor, specs: Sequence[TensorSpec], *, checked: bool = True) -> list[tuple[str, Weight]]:
    """The named tensors and deltas of a bucket that arrived: views of ``buffer``, on its device.

    A delta has its proof with it, for whoever applies it.

    Args:
        buffer: uint8 [B], contiguous, exactly as long as the specs say.
        checked: whether the checksums of the specs mean anything.

    Raises:
        WeightUpdateError: the length is wrong, or a tensor's bytes are not the sender's; names the tensor.
    """
    expected = sum(map(num_bytes, specs))
    if buffer.numel() != expected:
        raise WeightUpdateError(f"a weight bucket has {buffer.numel()} bytes where its tensors need {expected}")
    for spec, piece in zip(specs, _pieces(buffer.cpu(), specs), strict=True) if checked else ():
        if isinstance(piece, torch.Tensor):
            verify(spec.name, piece, spec.checksum)
    return [(spec.name, piece) for spec, piece in zip(specs, _pieces(buffer, specs), strict=True)]


def verify(name: str, tensor: torch.Tensor, sent: int) -> None:
    """Raises WeightUpdateError if the checksum of ``tensor`` is not the one that was ``sent``."""
    if checksum(tensor) != sent:
        raise WeightUpdateError(f"weight {name!r} arrived with other bytes than were sent (CRC-32C differs)")
