"""Reading safetensors from a checkpoint directory, checked against what the model needs before a weight is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from areal_hpc.errors import DataError
from areal_hpc.fs import read_json


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, else all in the directory.

    Raises:
        DataError: there are none, or one that the index names is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    absent = [path.name for path in files if not path.is_file()]
    if absent or not files:
        lacking = ", ".join(absent) or "*.safetensors"
        raise DataError(f"{directory} lacks {lacking}; give a directory with a complete safetensors checkpoint")
    return files


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, from the files' headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


def read_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, one in memory at a time."""
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                yield name, file.get_tensor(name)


def check_shapes(directory: Path, needed: Mapping[str, tuple[int, ...]]) -> None:
    """Hold the checkpoint against the names and shapes the model needs.

    Raises:
        DataError: a tensor is missing or has another shape; names the first few.
    """
    found = read_shapes(directory)
    missing = [name for name in needed if name not in found]
    wrong = [
        f"{name} {found[name]} for {shape}" for name, shape in needed.items() if name in found and found[name] != shape
    ]
    if missing or wrong:
        raise DataError(
            f"{directory} does not fit its config.json: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(wrong)} of another shape {wrong[:3]}; write the checkpoint again"
        )
