"""Masters and moments of a split model on disk: every rank writes what it keeps, any layout loads it.

    state = SplitState(weights, optimizer)
    shards = state.take()                       at a step's edge: a copy in host memory; collective
    write_shards(shards, directory, rank)       later, in any thread
    state.load(path, ...)                       on the same or any other layout; collective

What data-parallel ranks have in common is divided among them, so that each copies and writes an equal share, and all of
them together every number once. Pieces bear Hugging Face names and lie where they are in the whole tensor (without the
rows that make shares of a vocabulary equal), so nothing of the layout is in the files: not how many ranks there were,
not which stage had a layer, not which rank an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from areal_hpc.errors import CheckpointError
from areal_hpc.pretrained.files import TensorFiles
from areal_hpc.training.megatron.names import Slice
from areal_hpc.training.megatron.optimizer import MASTER, MOMENTS, SplitOptimizer
from areal_hpc.training.megatron.weights import Weights
from areal_hpc.training.shards import Shard, ShardFiles
from areal_hpc.training.snapshot import HostCopy


class SplitState:
    """One rank's view of the state of one model."""

    def __init__(self, weights: Weights, optimizer: SplitOptimizer) -> None:
        self._weights, self._optimizer = weights, optimizer
        self._host = HostCopy()

    def take(self) -> list[Shard]:
        """This rank's pieces in host memory, which the next call takes again."""
        places: dict[str, tuple[str, Slice]] = {}

        def pieces() -> Iterator[tuple[str, Tensor]]:
            for name, one, tensor in self._pieces():
                key = f"{name} from {one.start}"
                places[key] = name, one
                yield key, tensor

        copied = self._host.take(pieces())
        return [
            Shard(name=name, data=copied[key], offset=one.offset, whole=one.whole)
            for key, (name, one) in places.items()
        ]

    def _pieces(self) -> Iterator[tuple[str, Slice, Tensor]]:
        keepers = self._optimizer.keepers([parameter for parameter, _ in self._weights.kept()])
        for parameter, slices in self._weights.kept():
            for what in (MASTER, *MOMENTS):
                part = self._optimizer.gathered(what, parameter, keepers[parameter])
                if part is not None:
                    for one in slices:
                        yield f"{what}.{one.name}", one, part.index_select(one.dim, one.places.to(part.device))

    def load(self, path: Path, shards: str, files: tuple[str, str], num_updates: int) -> None:
        """Continue from the checkpoint ``path``: from its directory ``shards`` of what ranks wrote, each rank reading
        what it holds, one kind of tensor in memory at a time; or from two ``files`` of whole tensors.

        Raises:
            CheckpointError: it is of another model.
        """
        if (path / shards).is_dir():
            self._load_shards(path / shards)
        else:
            self._load_files(*(TensorFiles([path / name]) for name in files), path=path)
        self._optimizer.go_on(num_updates)

    def _load_shards(self, directory: Path) -> None:
        shapes = self._weights.shapes
        expected = {f"{what}.{name}": shape for what in (MASTER, *MOMENTS) for name, shape in shapes.items()}
        require_same(ShardFiles(directory).shapes, expected, directory)
        for parameter, part in self._parts(directory, MASTER):
            self._optimizer.set_master(parameter, part)
        for moment in MOMENTS:
            for parameter, part in self._parts(directory, moment):
                self._optimizer.set_moment(moment, parameter, part)

    def _load_files(self, masters: TensorFiles, moments: TensorFiles, *, path: Path) -> None:
        require_same(dict.fromkeys(masters.names, ()), dict.fromkeys(self._weights.shapes, ()), path)
        for parameter, part in self._weights.cut(masters.read):
            self._optimizer.set_master(parameter, part)
        for moment in MOMENTS:
            for parameter, part in self._weights.cut(partial(_read_moment, moments, moment)):
                self._optimizer.set_moment(moment, parameter, part)

    def _parts(self, directory: Path, what: str) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """This rank's part of each of its weights, in host memory."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import ShardedTensor

        held = list(self._weights.held())
        wanted = {
            f"{number}.{position}": ShardedTensor(
                key=f"{what}.{one.name}",
                data=None,
                dtype=torch.float32,
                local_shape=one.shape,
                global_shape=one.whole,
                global_offset=one.offset,
                axis_fragmentations=None,  # pieces of a vocabulary are of unequal size
            )
            for number, (_, slices) in enumerate(held)
            for position, one in enumerate(slices)
        }
        # Who holds copies of the same piece loads it as well: nothing is to be owned by one rank only.
        loaded = dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)
        for number, (parameter, slices) in enumerate(held):
            part = torch.zeros(parameter.shape, dtype=torch.float32)
            for position, one in enumerate(slices):
                part.index_copy_(one.dim, one.places, loaded.pop(f"{number}.{position}"))
            yield parameter, part


def _read_moment(files: TensorFiles, moment: str, name: str) -> Tensor:
    return files.read(f"{moment}.{name}")


def require_same(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Check that the checkpoint ``path`` has the model's tensors, by name and shape.

    Raises:
        CheckpointError: names or shapes differ.
    """
    if found != expected:
        names = sorted({name for name, _ in found.items() ^ expected.items()})
        raise CheckpointError(
            f"{path} is of another model: {len(names)} tensors differ, first {names[0]}; check model.path"
        )
