"""Checkpoints: one directory for a step, one atomic commit for everything that a resumed run needs.

    sweep(run, epoch)                                   # at the start of an attempt
    found = newest(run, lineage)                        # None only where no checkpoint was ever made
    ...
    write(run, version, backend.save, state, still_leader=fence.check)          # every k steps
    prune(run, keep)

    checkpoints/step-00000042.e00000003/                optimizer step 42, made by attempt (epoch) 3
        whatever ``save`` wrote
        state.json                                      plain data: consumed set, telemetry step, configuration hash ...
        MANIFEST.json                                   written last: size and CRC-32C of every file, layout, versions

A checkpoint is made under a temporary name, everything in it is fsynced, and one rename makes it exist. A crash at any
instant leaves either the whole or a temporary that the next attempt sweeps. No torch: the trainer writes its own files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import google_crc32c

from areal_hpc import __version__
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import PRIVATE_DIR, RunDir, fsync_directory, publish, publish_json, read_json
from areal_hpc.types import WeightVersion

FORMAT = 1
MANIFEST = "MANIFEST.json"
STATE = "state.json"
CHECKPOINT_NAME = re.compile(r"step-(\d{8})\.e(\d{8})")
PENDING_NAME = re.compile(r"\.step-\d{8}\.e(\d{8})\.[0-9a-f]{8}\.(tmp|trash)")
CHUNK_BYTES = 1 << 22
LIBRARIES = ("torch", "transformers", "megatron-core", "numpy")

Lineage = Mapping[int, int | None]
"""The surviving history of the run: for each of its epochs the last step that counts, None where all of them do.

Epoch 2 resumed from step 20 of epoch 1: ``{1: 20, 2: None}``. What epoch 1 wrote after step 20 was taken back.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte has been read and found as it was written."""

    path: Path
    version: WeightVersion
    state: Mapping[str, Any]
    layout: Mapping[str, Any]


def _no_successor() -> None:
    """The fence of a run that cannot have a second trainer."""


def write(
    run: RunDir,
    version: WeightVersion,
    save: Callable[[Path], None],
    state: Mapping[str, Any],
    *,
    layout: Mapping[str, Any] | None = None,
    still_leader: Callable[[], None] = _no_successor,
) -> Path:
    """Make the checkpoint of ``version``, replacing one that exists; when this returns it survives a power cut.

    Args:
        save: fills the directory it is given; when it returns, all files of all ranks are there.
        state: plain JSON data.
        layout: how the files are split over ranks, for people and for a check at load.
        still_leader: called once all data is durable, just before the checkpoint becomes visible: a process that slept
            through its own replacement must find out after the slow part, not before it.

    Raises:
        Fenced: by ``still_leader``. As with every other failure, nothing is left behind and older checkpoints stand.
        OSError: the disk refused.
    """
    document = json.dumps(state, indent=1, sort_keys=True).encode()
    path = run.checkpoints / f"step-{version.step:08d}.e{version.epoch:08d}"
    temporary = _pending(path, "tmp")
    temporary.mkdir(mode=PRIVATE_DIR)
    try:
        save(temporary)
        publish(temporary / STATE, document)
        _write_manifest(temporary, version, layout or {})
        still_leader()
        if path.exists():
            os.rename(path, _pending(path, "trash"))  # noqa: PTH104
        os.rename(temporary, path)  # noqa: PTH104
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # what cannot be removed now, `sweep` removes
        raise
    fsync_directory(run.checkpoints)
    return path


def _pending(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")


def _files(directory: Path) -> Iterator[Path]:
    """Every file below ``directory`` except the manifest, in a fixed order."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path != directory / MANIFEST:
            yield path


def _write_manifest(directory: Path, version: WeightVersion, layout: Mapping[str, Any]) -> None:
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


def _library_versions() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _measure(path: Path, *, durable: bool) -> dict[str, int]:
    """Size and CRC-32C of a file, fsynced first where ``durable``."""
    crc = size = 0
    with path.open("rb") as file:
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
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint; give a directory named like step-00000042.e00000003")
    version = WeightVersion(epoch=int(match[2]), step=int(match[1]))
    try:
        body = _read_manifest(path, version)
        for name, expected in body["files"].items():
            if (weights or name == STATE) and (found := _measure(path / name, durable=False)) != expected:
                raise CheckpointError(
                    f"{path / name} is damaged: {found}, written was {expected}; use another checkpoint"
                )
        state = read_json(path / STATE)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use another checkpoint") from error
    return Checkpoint(path=path, version=version, state=state, layout=body["layout"])


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


def _verified(path: Path) -> Checkpoint | None:
    try:
        return verify(path)
    except CheckpointError as error:
        logger.warning("checkpoint not usable: %s", error)
        return None


def _listed(run: RunDir) -> list[tuple[WeightVersion, Path]]:
    """Everything named exactly like a checkpoint, newest first: a later attempt before an earlier one, then by step."""
    matches = [match for name in os.listdir(run.checkpoints) if (match := CHECKPOINT_NAME.fullmatch(name))]
    versions = [(WeightVersion(epoch=int(m[2]), step=int(m[1])), run.checkpoints / m[0]) for m in matches]
    return sorted(versions, reverse=True)


def newest(run: RunDir, lineage: Lineage) -> Checkpoint | None:
    """The newest checkpoint of the surviving history that verifies; each damaged one on the way is logged.

    Returns:
        None where the directory holds nothing but unfinished work of earlier attempts: a fresh start is right.

    Raises:
        CheckpointError: there is something in the directory, and nothing that can be loaded.
    """
    for version, path in _listed(run):
        if version.epoch not in lineage or _beyond(version.step, lineage[version.epoch]):
            logger.warning("%s does not belong to the surviving history of this run; passed over", path)
        elif checkpoint := _verified(path):
            return checkpoint
    if present := sorted(name for name in os.listdir(run.checkpoints) if not PENDING_NAME.fullmatch(name)):
        raise CheckpointError(
            f"{run.checkpoints} holds {', '.join(present)}, but no checkpoint that can be loaded; restore one, "
            "or move them away to start this run from the beginning"
        )
    return None


def at_step(run: RunDir, lineage: Lineage, step: int) -> Checkpoint:
    """The checkpoint of exactly ``step`` in the surviving history; never another one in its place.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    counted = [(v, p) for v, p in _listed(run) if v.epoch in lineage and not _beyond(v.step, lineage[v.epoch])]
    for version, path in counted:
        if version.step == step:
            return verify(path)
    steps = ", ".join(str(step) for step in sorted({version.step for version, _ in counted})) or "none"
    raise CheckpointError(f"{run.checkpoints} has no checkpoint of step {step}; there are: {steps}")


def _beyond(step: int, last: int | None) -> bool:
    return last is not None and step > last


def prune(run: RunDir, keep: int) -> None:
    """Delete what is older than the ``keep`` newest checkpoints that verify (each of those is read once more).

    While fewer verify, nothing is deleted, so the last good one never goes. A deletion that the file system refuses
    (on NFS, a file that somebody still holds open) is logged and tried again by the next call; it never ends a run.
    """
    assert keep >= 1, keep
    num_verified = 0
    for _, path in _listed(run):
        if num_verified >= keep:
            _delete(path)
        else:
            num_verified += _verified(path) is not None
    _empty_trash(run)


def sweep(run: RunDir, epoch: int) -> None:
    """Remove what attempts before ``epoch`` left unfinished; called once by the attempt that owns ``epoch``."""
    for path, made_by, kind in _pending_entries(run):
        if kind == "tmp" and made_by < epoch:
            _delete(path)
    _empty_trash(run)


def _pending_entries(run: RunDir) -> list[tuple[Path, int, str]]:
    matches = [match for name in os.listdir(run.checkpoints) if (match := PENDING_NAME.fullmatch(name))]
    return [(run.checkpoints / match[0], int(match[1]), match[2]) for match in matches]


def _empty_trash(run: RunDir) -> None:
    for path, _, kind in _pending_entries(run):
        if kind == "trash":
            _delete(path)


def _delete(path: Path) -> None:
    """Rename ``path`` so that nobody takes it for whole, then remove what can be removed."""
    try:
        if not PENDING_NAME.fullmatch(path.name):
            path = path.rename(_pending(path, "trash"))
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("cannot delete %s yet, the next clean-up tries again: %s", path, error)
