"""Safetensors: reading a checkpoint directory, checked against what the model needs before a weight is touched; and
writing a file, with the disk's refusal as what it is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from areal_hpc.errors import DataError
from areal_hpc.fs import read_json

HEAD = "lm_head.weight"
DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; it follows from config.json, and no trainer has it."""


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, which is not durable yet.

    Raises:
        OSError: the disk refused, as where it is full; safetensors has an error of its own for that, with the number in
            its text.
    """
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        refused = re.search(r"\(os error (\d+)\)", str(error))
        if refused is None:
            raise
        raise OSError(int(refused[1]), os.strerror(int(refused[1])), str(path)) from error


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


def trainable(names: Iterable[str], directory: Path) -> list[str]:
    """The ``names`` in the checkpoint ``directory`` whose tensors a trainer has, and sends to engines: no buffers
    that follow from ``config.json``, and no head where that ties it to the embedding."""
    tied = bool(read_json(directory / "config.json").get("tie_word_embeddings", False))
    return [name for name in names if not (name.endswith(DERIVED_SUFFIX) or (tied and name == HEAD))]


class TensorFiles:
    """Tensors of safetensors files by name, each read when it is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        # Read, not mapped: of a mapped file a bad disk would be a SIGBUS.
        files: list[Any] = [safe_open(path, framework="pt", backend="pread") for path in paths]
        self._file_of: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self._where = paths[0].parent

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor.

        Raises:
            DataError: there is none of that name.
        """
        if name not in self._file_of:
            raise DataError(f"{self._where} lacks {name}, which its config.json asks for; complete the checkpoint")
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


def check_shapes(
    directory: Path, needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Hold the checkpoint against the names and shapes the model needs.

    Args:
        found: what is in ``directory``; by default what its safetensors files say.

    Raises:
        DataError: a tensor is missing or has another shape; names the first few.
    """
    found = read_shapes(directory) if found is None else found
    missing = [name for name in needed if name not in found]
    wrong = [
        f"{name} {found[name]} for {shape}" for name, shape in needed.items() if name in found and found[name] != shape
    ]
    if missing or wrong:
        raise DataError(
            f"{directory} does not fit its config.json: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(wrong)} of another shape {wrong[:3]}; write the checkpoint again"
        )
