"""What is on a disk: immutable images of a file system, and what a kill and a power cut leave of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

SECTOR = 512
"""Bytes that a disk writes whole or not at all."""
ROOT = 1


class Write(NamedTuple):
    offset: int
    data: bytes | None  # None: the file was cut to ``offset`` bytes


class Change(NamedTuple):
    """One name that came, went or moved; the changes of one call have one serial and reach the disk together."""

    serial: int
    name: str
    inode: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    data: bytes = b""
    durable: bytes = b""
    unsynced: tuple[Write, ...] = ()
    mode: int = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    names: Mapping[str, int] = field(default_factory=dict)
    durable: Mapping[str, int] = field(default_factory=dict)
    unsynced: tuple[Change, ...] = ()
    mode: int = 0o700


Image = Mapping[int, File | Directory]
"""Inodes by number; ROOT is the directory that the volume is mounted on."""


def patched(content: bytes, write: Write) -> bytes:
    """``content`` after ``write``; a gap becomes zeros."""
    if write.data is None:
        return content[: write.offset] + bytes(max(0, write.offset - len(content)))
    if not write.data:
        return content
    start, end = write.offset, write.offset + len(write.data)
    return content[:start] + bytes(max(0, start - len(content))) + write.data + content[end:]


def killed(image: Image) -> Image:
    """After the death of every process: nothing is lost, and nobody has a file open any more."""
    return _reachable(image)


def power_cut(image: Image, rng: Random) -> Image:
    """One of the states that the disk may be in after a power cut."""
    survival = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    kept: dict[int, bool] = {}
    after: dict[int, File | Directory] = {}
    for inode, node in image.items():
        if isinstance(node, File):
            content = _surviving_content(node, rng, survival)
            after[inode] = File(data=content, durable=content, mode=node.mode)
        else:
            names = _surviving_names(node, lambda serial: kept.setdefault(serial, rng.random() < survival))
            after[inode] = Directory(names=names, durable=names, mode=node.mode)
    return _reachable(after)


def _surviving_content(file: File, rng: Random, survival: float) -> bytes:
    content = file.durable
    for write in file.unsynced:
        for piece in sectors(write):
            if rng.random() < survival:
                content = patched(content, piece)
    if file.unsynced and rng.random() < survival / 2:  # the new size got there before the data
        content += bytes(max(0, len(file.data) - len(content)))
    return content


def sectors(write: Write) -> Iterator[Write]:
    if write.data is None:
        yield write
        return
    start = 0
    while start < len(write.data):
        end = min(len(write.data), start + SECTOR - (write.offset + start) % SECTOR)
        yield Write(write.offset + start, write.data[start:end])
        start = end


def _surviving_names(directory: Directory, is_kept: Callable[[int], bool]) -> dict[str, int]:
    names = dict(directory.durable)
    for change in directory.unsynced:
        if not is_kept(change.serial):
            continue
        if change.inode is None:
            names.pop(change.name, None)
        else:
            names[change.name] = change.inode
    return names


def _reachable(image: Image) -> Image:
    found: dict[int, File | Directory] = {}
    left = [ROOT]
    while left:
        inode = left.pop()
        node = found[inode] = image[inode]
        if isinstance(node, Directory):
            left += [target for target in node.names.values() if target not in found]
    return found


def tree(image: Image, inode: int = ROOT, path: str = "") -> dict[str, bytes | None]:
    """Every path with its content, None for a directory: what two images have in common or not."""
    node = image[inode]
    if isinstance(node, File):
        return {path: node.data}
    found: dict[str, bytes | None] = {path: None}
    for name, target in sorted(node.names.items()):
        found |= tree(image, target, f"{path}/{name}")
    return found
