"""A volume as several clients of a network file system see it: each from its own caches, by close-to-open consistency.

What nfs(5) allows, and no more is promised to anybody:
  - opening a file shows what its writer had flushed by fsync or close, and of what he has not, any sectors;
  - a directory listing, and the answer that a name does not exist, may be as old as LIFE calls;
  - what a client does itself it sees at once; creations, links and renames are decided by the server, atomically.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from random import Random

from faults.images import File, patched, sectors
from faults.volume import Descriptor, Volume, failure

LIFE = 400
"""Calls, of all clients together, for which a cache is believed."""


class NfsVolume(Volume):
    """``client`` is who calls from now on."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        super().__init__(root)
        self.client = ""
        self.stale = Counter[str]()
        """How often a client was told something that was no longer, or not yet, true."""
        self._rng = Random(seed)
        self._writer: dict[int, str] = {}  # inode -> the client that wrote it last
        self._seen: dict[int, bytes] = {}  # descriptor -> content as of its opening
        self._listings: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self._absent: dict[tuple[str, str], int] = {}
        self._calls = 0

    def act_as(self, client: str) -> None:
        self.client = client

    def names(self, path: str) -> list[str]:
        self._calls += 1
        key = (self.client, path)
        now = super().names(path)
        since, cached = self._listings.get(key, (self._calls, now))
        if self._calls - since > LIFE:
            since, cached = self._calls, now
        if since == self._calls:  # asked the server: so the names that it denied are asked for anew as well
            for other in [other for other in self._absent if other[0] == self.client and _parent(other[1]) == path]:
                del self._absent[other]
        self._listings[key] = (since, cached)
        self.stale["listing"] += sorted(cached) != sorted(now)
        return list(cached)

    def open(self, path: str, flags: int, mode: int) -> int:
        self._calls += 1
        if not flags & os.O_CREAT:
            self._check_absent(path)
        fd = super().open(path, flags, mode)
        if flags & os.O_CREAT:
            self._changed(path)
        node = self.inodes[self.descriptors[fd].inode]
        if isinstance(node, File):
            self._seen[fd] = self._as_of_now(self.descriptors[fd].inode, node)
        return fd

    def _check_absent(self, path: str) -> None:
        key = (self.client, path)
        since = self._absent.get(key)
        there = True
        try:
            self.look_up(path)
        except FileNotFoundError:
            there = False
        if since is not None and self._calls - since <= LIFE:
            self.stale["absent"] += there
            raise failure(errno.ENOENT, path)
        if not there:
            self._absent[key] = self._calls

    def stat(self, path: str) -> os.stat_result:
        self._calls += 1
        self._check_absent(path)
        return super().stat(path)

    def _as_of_now(self, inode: int, file: File) -> bytes:
        """What the server has, for a client that is not the writer: all that was flushed, and any of the rest."""
        if self._writer.get(inode, self.client) == self.client:
            return file.data
        content = file.durable
        for write in file.unsynced:
            for piece in sectors(write):
                if self._rng.random() < 0.5:
                    content = patched(content, piece)
        self.stale["content"] += content != file.data
        return content

    def content(self, descriptor: Descriptor) -> bytes:
        if self._writer.get(descriptor.inode, self.client) == self.client:
            return super().content(descriptor)
        fd = next(fd for fd, known in self.descriptors.items() if known is descriptor)
        return self._seen[fd]

    def close(self, fd: int) -> None:
        descriptor = self.descriptor(fd)
        if isinstance(self.inodes[descriptor.inode], File) and descriptor.flags & (os.O_WRONLY | os.O_RDWR):
            self.sync("flush", fd)
        super().close(fd)

    def _write(self, name: str, descriptor: Descriptor, data: bytes, offset: int) -> int:
        self._writer[descriptor.inode] = self.client
        return super()._write(name, descriptor, data, offset)

    def _changed(self, *paths: str) -> None:
        """The client has changed these names itself, so it knows of them."""
        for path in paths:
            self._absent.pop((self.client, path), None)
            self._listings.pop((self.client, _parent(path)), None)

    def mkdir(self, path: str, mode: int) -> None:
        super().mkdir(path, mode)
        self._changed(path)

    def rmdir(self, path: str) -> None:
        super().rmdir(path)
        self._changed(path)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._changed(path)

    def rename(self, name: str, source: str, target: str) -> None:
        super().rename(name, source, target)
        self._changed(source, target)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._changed(target)


def _parent(path: str) -> str:
    return path.rsplit("/", 1)[0]
