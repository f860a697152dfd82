"""A weight update as a directory: safetensors files, and a manifest that says what they must hold.

    model-00001.safetensors    whole tensors under their Hugging Face names; a delta as NAME!values and NAME!gaps
    ...
    manifest.json              for each file its bytes, the CRC-32C of each tensor, whole or as its delta must leave it,
                               and the shape of each tensor that has a delta

A directory without a manifest is a checkpoint as Hugging Face has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from areal_hpc.buckets import Bucket, unpack
from areal_hpc.delta import Delta, Weight, checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.fs import read_json
from areal_hpc.pretrained.files import TensorFiles, read_shapes, read_weights, save_tensors

MANIFEST = "manifest.json"
VALUES, GAPS = "!values", "!gaps"


def write_file(path: Path, bucket: Bucket) -> dict[str, Any]:
    """One safetensors file, durable, and its entry in the manifest."""
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, weight in unpack(bucket.buffer, bucket.specs):
        if isinstance(weight, Delta):
            tensors |= {name + VALUES: weight.values, name + GAPS: weight.gaps}
            shapes[name] = list(weight.shape)
        else:
            tensors[name] = weight
    save_tensors(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sums = {spec.name: spec.checksum for spec in bucket.specs}
    return {"bytes": path.stat().st_size, "crc32c": sums, "deltas": shapes}


def _manifest(directory: Path) -> Mapping[str, Any] | None:
    path = directory / MANIFEST
    return read_json(path)["files"] if path.is_file() else None


def shapes_in(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is there, whole or as a delta."""
    shapes = read_shapes(directory)
    for entry in (_manifest(directory) or {}).values():
        for name, shape in entry["deltas"].items():
            del shapes[name + VALUES], shapes[name + GAPS]
            shapes[name] = tuple(shape)
    return shapes


def read_update(directory: Path) -> Iterator[tuple[str, Weight]]:
    """Every tensor or delta in ``directory``; where a trainer wrote it for its engines, each tensor is what it wrote.

    Raises:
        WeightUpdateError: it is not, so a disk or a network between has changed it; names the tensor.
    """
    files = _manifest(directory)
    if files is None:
        yield from read_weights(directory)
        return
    for file, entry in files.items():
        stored = TensorFiles([directory / file])
        for name, crc in entry["crc32c"].items():
            if name in entry["deltas"]:
                values, gaps = stored.read(name + VALUES), stored.read(name + GAPS)
                yield name, Delta(values=values, gaps=gaps, shape=torch.Size(entry["deltas"][name]), checksum=crc)
                continue
            tensor = stored.read(name)
            if checksum(tensor) != crc:
                raise WeightUpdateError(
                    f"weight {name!r} in {directory} has other bytes than the trainer wrote (CRC-32C differs)"
                )
            yield name, tensor
