"""Tensors that many ranks hold pieces of, as one state on disk: each rank writes its own pieces, any reader cuts anew.

    write_shards(shards, directory, rank)       every rank, in any thread: one file of its pieces, and what is in it
    join_shards(directory, num_ranks)           rank 0, once all have written: one index over all files
    ShardFiles(directory).read("master.NAME")   the whole tensor, put together from whoever had pieces of it

What ``join_shards`` leaves is a checkpoint of ``torch.distributed.checkpoint`` under the names that
``megatron.core.dist_checkpointing`` looks for, so that either can load it, in other pieces than it was saved in. They
are not used to write one: they plan in collectives, and write from forks of the process, both of which would have to
happen while its own thread is in the middle of the next step.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from areal_hpc.errors import CorruptRecord
from areal_hpc.fs import publish, publish_json, read_json
from areal_hpc.training.snapshot import same_bits

PROGRESS = "trainer.json"
"""What a checkpoint says of the trainer in one object."""
SHARDS = "shards"
FILES = ("model.safetensors", "optimizer.safetensors")
"""Where a checkpoint has masters and moments: of a model that ranks hold parts of, or of one rank that holds it all."""
MASTER = "master."
"""Begins the names of the float32 weights; those of Adam's moments begin with what torch calls these."""
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What ``megatron.core.dist_checkpointing`` reads first."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rectangular piece of a named tensor."""

    name: str
    data: Tensor
    offset: Shape  # of its first element in the whole
    whole: Shape


def write_shards(shards: Iterable[Shard], directory: Path, rank: int) -> None:
    """Write one rank's pieces into ``directory``, durably, and read them back.

    Raises:
        CorruptRecord: the file does not hold what was written.
        OSError: the disk refused.
    """
    directory.mkdir(exist_ok=True)
    path = directory / f"__{rank}_0.distcp"
    entries: list[dict[str, Any]] = []
    with path.open("w+b") as file:
        for shard in shards:
            start = file.tell()
            torch.save(shard.data, file)
            length = file.tell() - start
            entries.append({**_described(shard), "file": path.name, "start": start, "length": length})
            file.flush()
            file.seek(start)
            if not same_bits(_loaded(file.read(length)), shard.data):
                raise CorruptRecord(f"{path}: {shard.name} does not hold what was written; check the disk")
        os.fsync(file.fileno())
    publish_json(directory / _index_of(rank), entries)


def _described(shard: Shard) -> dict[str, Any]:
    assert shard.data.is_contiguous() and shard.data.untyped_storage().nbytes() == shard.data.nbytes, shard.name
    return {
        "name": shard.name,
        "dtype": str(shard.data.dtype).removeprefix("torch."),
        "offset": shard.offset,
        "shape": tuple(shard.data.shape),
        "whole": shard.whole,
    }


def _loaded(data: bytes) -> Tensor:
    tensor: Tensor = torch.load(io.BytesIO(data), weights_only=True)
    return tensor


def _index_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def join_shards(directory: Path, num_ranks: int) -> None:
    """Make one state of what ``num_ranks`` ranks have written into ``directory``.

    Raises:
        CorruptRecord: some element of a tensor was written by no rank or by several; names the tensor.
    """
    entries = [entry for rank in range(num_ranks) for entry in read_json(directory / _index_of(rank))]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_name.setdefault(entry["name"], []).append(entry)
    metadata = Metadata({name: _tensor_of(name, pieces, directory) for name, pieces in by_name.items()})
    results = [
        WriteResult(
            index=MetadataIndex(piece["name"], piece["offset"]),
            size_in_bytes=piece["length"],
            storage_data=_StorageInfo(piece["file"], piece["start"], piece["length"]),
        )
        for piece in entries
    ]
    FileSystemWriter(directory).finish(metadata, [results])
    nothing = io.BytesIO()
    torch.save({}, nothing)
    publish(directory / "common.pt", nothing.getvalue())  # where Megatron keeps what is no tensor; it must be there
    publish_json(directory / "metadata.json", FORMAT)


def _tensor_of(name: str, pieces: Sequence[Mapping[str, Any]], directory: Path) -> TensorStorageMetadata:
    whole, dtype = pieces[0]["whole"], pieces[0]["dtype"]
    found = sum(math.prod(piece["shape"]) for piece in pieces)
    distinct = {tuple(piece["offset"]) for piece in pieces}
    if found != math.prod(whole) or len(distinct) != len(pieces):
        raise CorruptRecord(f"{directory}: {found} of the {math.prod(whole)} elements of {name} were written")
    chunks = [ChunkStorageMetadata(torch.Size(piece["offset"]), torch.Size(piece["shape"])) for piece in pieces]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(whole), chunks)


class ShardFiles:
    """What ``join_shards`` has made: whole tensors by name, each put together when it is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        metadata = FileSystemReader(directory).read_metadata()
        stored = metadata.state_dict_metadata
        self._tensors = {name: one for name, one in stored.items() if isinstance(one, TensorStorageMetadata)}
        self._places: Mapping[MetadataIndex, Any] = metadata.storage_data

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor, by name."""
        return {name: tuple(one.size) for name, one in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The whole tensor, in host memory."""
        one = self._tensors[name]
        tensor = torch.empty(one.size, dtype=one.properties.dtype)
        for chunk in one.chunks:
            place = self._places[MetadataIndex(name, chunk.offsets)]
            with (self._directory / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                piece = _loaded(file.read(place.length))
            spans = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[tuple(spans)] = piece
        return tensor


def policy_weights(directory: Path, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the policy's weights, rounded as the engines had them; one in memory at a time."""
    files = ShardFiles(directory)
    for name in sorted(files.shapes):
        if name.startswith(MASTER):
            yield name.removeprefix(MASTER), files.read(name).to(getattr(torch, dtype))


def read_whole(path: Path, shards: str, files: tuple[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and moments of a checkpoint, all in memory: from its directory ``shards`` where it has one, else from the
    two ``files``, which are read and not mapped: of a mapped file a bad disk would be a SIGBUS.
    """
    if not (path / shards).is_dir():
        masters, moments = (load_file(path / name, backend="pread") for name in files)
        return masters, moments
    stored = ShardFiles(path / shards)
    named = {name: stored.read(name) for name in stored.shapes}
    masters = {name.removeprefix(MASTER): named.pop(name) for name in list(named) if name.startswith(MASTER)}
    return masters, named
