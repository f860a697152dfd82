"""What a checkpoint is on disk: names, the manifest, and the reading of every byte that proves it whole."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import google_crc32c

from areal_hpc import __version__
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import fsync_directory, names_in, publish_json, read_json
from areal_hpc.patience import naming, retried
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion

FORMAT = 2
MANIFEST = "MANIFEST.json"
STATE = "state.json"
PINNED = "PINNED"
CHECKPOINT_NAME = re.compile(r"step-(\d{8})\.e(\d{8})")
PENDING_NAME = re.compile(r"\.step-\d{8}\.e(\d{8})\.[0-9a-f]{8}\.(tmp|trash)")
CHUNK_BYTES = 1 << 18
"""Read at once. Small, since a checksum is made with the interpreter locked while the loop's thread trains."""
LIBRARIES = ("torch", "transformers", "megatron-core", "numpy")

Lineage = Mapping[int, int | None]
"""The surviving history of the run: for each of its epochs the last step that counts, None where all of them do.

Epoch 2 resumed from step 20 of epoch 1: ``{1: 20, 2: None}``. What epoch 1 wrote after step 20 was taken back.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte has been read and found as it was written."""

    path: Path
    version: WeightVersion
    state: Mapping[str, Any]
    layout: Mapping[str, Any]


def path_of(run: RunDir, version: WeightVersion) -> Path:
    return run.checkpoints / f"step-{version.step:08d}.e{version.epoch:08d}"


def version_of(path: Path) -> WeightVersion:
    """The version that the name of a checkpoint's directory tells.

    Raises:
        CheckpointError: the directory is not named exactly like a checkpoint, so it is none.
    """
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint; give a directory named like step-00000042.e00000003")
    return WeightVersion(epoch=int(match[2]), step=int(match[1]))


def pending(path: Path, kind: str) -> Path:
    """A new hidden name for what is not yet (``tmp``) or no longer (``trash``) the checkpoint at ``path``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")


def listed(run: RunDir) -> list[tuple[WeightVersion, Path]]:
    """Everything named exactly like a checkpoint, newest first: a later attempt before an earlier one, then by step."""
    paths = [run.checkpoints / name for name in names_in(run.checkpoints) if CHECKPOINT_NAME.fullmatch(name)]
    return sorted(((version_of(path), path) for path in paths), reverse=True)


def counts(version: WeightVersion, lineage: Lineage) -> bool:
    """Whether ``version`` belongs to the surviving history."""
    if version.epoch not in lineage:
        return False
    last = lineage[version.epoch]
    return last is None or version.step <= last


def write_manifest(directory: Path, version: WeightVersion, layout: Mapping[str, Any]) -> None:
    """Make every file durable, then say in ``MANIFEST.json`` what they hold; the manifest vouches for itself too."""
    files = {str(path.relative_to(directory)): _measure(path, durable=True) for path in _files(directory)}
    for subdirectory in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        fsync_directory(subdirectory)
    body = {
        "format": FORMAT,
        "version": version._asdict(),
        "files": files,
        "layout": dict(layout),
        "code": {"areal-hpc": __version__, **dict(_library_versions())},
    }
    publish_json(directory / MANIFEST, {"body": body, "crc32c": _checksum(body)})  # fsyncs the directory as well


def _files(directory: Path) -> Iterator[Path]:
    """Every file below ``directory`` except the manifest, in a fixed order."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path != directory / MANIFEST:
            yield path


def _library_versions() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _measure(path: Path, *, durable: bool) -> dict[str, int]:
    """Size and CRC-32C of a file, fsynced first where ``durable``."""
    crc = size = 0
    with naming(path), path.open("rb") as file:
        if durable:
            os.fsync(file.fileno())
        while chunk := file.read(CHUNK_BYTES):
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
    return {"size": size, "crc32c": crc}


def _checksum(body: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(body, sort_keys=True).encode()))


def verify(path: Path, *, weights: bool = True) -> Checkpoint:
    """Read the whole of the checkpoint at ``path`` and compare it with its manifest; without ``weights`` only what is
    needed to trust its ``state``, which is small.

    Raises:
        CheckpointError: it is not a checkpoint, or a file is missing, short or damaged; says which.
    """
    version = version_of(path)
    try:
        body = _read_manifest(path, version)
        for name, expected in body["files"].items():
            if not weights and name != STATE:
                continue
            if (found := retried(partial(_measure, path / name, durable=False))) != expected:
                raise CheckpointError(
                    f"{path / name} is damaged: {found}, written was {expected}; use another checkpoint"
                )
        state = read_json(path / STATE)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use another checkpoint") from error
    return Checkpoint(path=path, version=version, state=state, layout=body["layout"])


def size_of(path: Path) -> int:
    """Bytes of all files of the checkpoint at ``path``, as its manifest has them.

    Raises:
        CheckpointError: that is damaged.
    """
    return sum(int(file["size"]) for file in _read_manifest(path, version_of(path))["files"].values())


def _read_manifest(path: Path, version: WeightVersion) -> dict[str, Any]:
    try:
        manifest = read_json(path / MANIFEST)
        body: dict[str, Any] = manifest["body"]
        intact = manifest["crc32c"] == _checksum(body)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}; use another checkpoint") from error
    if not intact:
        raise CheckpointError(f"{path / MANIFEST} is damaged: its checksum differs; use another checkpoint")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {body['format']}, this version reads {FORMAT}; use the one that wrote it"
        )
    if body["version"] != version._asdict():
        raise CheckpointError(f"{path} holds {body['version']}, which its name denies; rename it back")
    return body
