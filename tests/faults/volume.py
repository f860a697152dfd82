"""A file system in memory that knows what a process kill and what a power cut leave of it.

    volume = Volume(Path("/volume"))
    with mounted(volume):                       (mounted.py) the os module now answers for paths under /volume
        publish(Path("/volume/x"), b"data")
    volume.image                                what a killed process leaves: everything it did
    power_cut(volume.image, rng)                what a machine without power leaves: one of the legal possibilities

Every call is offered to ``intercept`` first, which may look, fail, change what is written, or stop the process. What
POSIX promises and no more is durable: the content of a file after fsync of that file, a name after fsync of its
directory. Of anything younger a power cut keeps any part, sector by sector and call by call, in any combination.
Images are immutable and share what did not change, so one of each instant of a run costs little.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from faults.images import ROOT, Change, Directory, File, Image, Write, patched

FIRST_FD = 1 << 20
"""Descriptors from here on are ours."""
MUTATING = {
    *("create", "write", "pwrite", "truncate", "fsync", "fdatasync"),
    *("rename", "replace", "link", "unlink", "mkdir", "rmdir"),
}
"""Calls after which a crash may leave something else than before them."""


class Call(NamedTuple):
    """One call of a process, before it is carried out."""

    name: str
    path: str
    data: bytes = b""  # of a write
    target: str = ""  # of a rename or link


Intercept = Callable[[Call, Callable[..., Any]], Any]
"""Gets a call and what carries it out: ``do()``, or ``do(other_data)`` for a write."""


@dataclass(slots=True)
class Descriptor:
    inode: int
    path: str
    flags: int
    position: int = 0


def failure(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class Volume:
    """What is mounted, and the descriptors of those who use it. One lock: calls of threads come one at a time."""

    def __init__(self, root: Path, image: Image | None = None) -> None:
        self.root = str(root)
        self.inodes: dict[int, File | Directory] = dict(image or {ROOT: Directory()})
        self.descriptors: dict[int, Descriptor] = {}
        self.free_bytes = 1 << 40
        self.hard_links = True
        self.intercept: Intercept = lambda _, do: do()
        self._lock = threading.RLock()
        self._links = Counter(
            target for node in self.inodes.values() if isinstance(node, Directory) for target in node.names.values()
        )
        self._next_inode = max(self.inodes) + 1
        self._next_fd = FIRST_FD
        self._serial = 0

    @property
    def image(self) -> Image:
        return dict(self.inodes)

    def call(self, call: Call, do: Callable[..., Any]) -> Any:
        with self._lock:
            return self.intercept(call, do)

    # Paths

    def _parts(self, path: str) -> list[str]:
        assert path == self.root or path.startswith(self.root + "/"), path
        return [part for part in path[len(self.root) :].split("/") if part not in ("", ".")]

    def look_up(self, path: str) -> int:
        """The inode of ``path``.

        Raises:
            FileNotFoundError, NotADirectoryError: as the kernel would.
        """
        inode = ROOT
        for part in self._parts(path):
            inode = self.look_up_in(inode, part, path)
        return inode

    def look_up_in(self, directory: int, name: str, path: str) -> int:
        names = self.directory(directory, path).names
        if name not in names:
            raise failure(errno.ENOENT, path)
        return names[name]

    def directory(self, inode: int, path: str) -> Directory:
        node = self.inodes[inode]
        if not isinstance(node, Directory):
            raise failure(errno.ENOTDIR, path)
        return node

    def _file(self, inode: int, path: str) -> File:
        node = self.inodes[inode]
        if isinstance(node, Directory):
            raise failure(errno.EISDIR, path)
        return node

    def _place(self, path: str) -> tuple[int, str, int | None]:
        """The parent's inode, the last name, and the inode behind it if there is one."""
        if path == self.root:
            return ROOT, "", ROOT
        *_, name = self._parts(path)
        parent = self.look_up(path.rsplit("/", 1)[0])
        return parent, name, self.directory(parent, path).names.get(name)

    def _change(self, *changes: tuple[int, str, int | None]) -> None:
        self._serial += 1
        for parent, name, inode in changes:
            directory = self.directory(parent, name)
            names = dict(directory.names)
            if name in names:
                self._links[names.pop(name)] -= 1
            if inode is not None:
                names[name] = inode
                self._links[inode] += 1
            unsynced = (*directory.unsynced, Change(self._serial, name, inode))
            self.inodes[parent] = replace(directory, names=names, unsynced=unsynced)

    def _new(self, node: File | Directory) -> int:
        inode, self._next_inode = self._next_inode, self._next_inode + 1
        self.inodes[inode] = node
        return inode

    # Calls on names

    def open(self, path: str, flags: int, mode: int) -> int:
        exists = True
        try:
            self.look_up(path)
        except FileNotFoundError:
            exists = False
        name = "create" if flags & os.O_CREAT and not exists else "open"
        result: int = self.call(Call(name, path), lambda: self._open(path, flags, mode))
        return result

    def _open(self, path: str, flags: int, mode: int) -> int:
        parent, name, inode = self._place(path)
        if inode is not None and flags & os.O_CREAT and flags & os.O_EXCL:
            raise failure(errno.EEXIST, path)
        if inode is None:
            if not flags & os.O_CREAT:
                raise failure(errno.ENOENT, path)
            inode = self._new(File(mode=mode & 0o777))
            self._change((parent, name, inode))
        if flags & os.O_DIRECTORY:
            self.directory(inode, path)
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._file(inode, path)
        fd, self._next_fd = self._next_fd, self._next_fd + 1
        self.descriptors[fd] = Descriptor(inode, path, flags)
        if flags & os.O_TRUNC:
            self.truncate(fd, 0)
        return fd

    def names(self, path: str) -> list[str]:
        def do() -> list[str]:
            return list(self.directory(self.look_up(path), path).names)

        result: list[str] = self.call(Call("listdir", path), do)
        return result

    def stat(self, path: str) -> os.stat_result:
        result: os.stat_result = self.call(Call("stat", path), lambda: self._stat(self.look_up(path)))
        return result

    def _stat(self, inode: int, size: int | None = None) -> os.stat_result:
        node = self.inodes[inode]
        kind = stat.S_IFDIR if isinstance(node, Directory) else stat.S_IFREG
        content = 0 if isinstance(node, Directory) else len(node.data)
        length = content if size is None else size
        fields = (kind | node.mode, inode, 1, self._links[inode], os.getuid(), os.getgid(), length, 0, 0, 0)
        return os.stat_result(fields, {"st_blksize": 4096})

    def chmod(self, path: str, mode: int) -> None:
        """Modes are no part of what a crash may leave: whoever needs one sets it again."""

        def do() -> None:
            inode = self.look_up(path)
            self.inodes[inode] = replace(self.inodes[inode], mode=mode & 0o777)

        self.call(Call("chmod", path), do)

    def mkdir(self, path: str, mode: int) -> None:
        def do() -> None:
            parent, name, inode = self._place(path)
            if inode is not None:
                raise failure(errno.EEXIST, path)
            self._change((parent, name, self._new(Directory(mode=mode & 0o777))))

        self.call(Call("mkdir", path), do)

    def rmdir(self, path: str) -> None:
        def do() -> None:
            parent, name, inode = self._place(path)
            if inode is None:
                raise failure(errno.ENOENT, path)
            if self.directory(inode, path).names:
                raise failure(errno.ENOTEMPTY, path)
            self._change((parent, name, None))

        self.call(Call("rmdir", path), do)

    def unlink(self, path: str) -> None:
        def do() -> None:
            parent, name, inode = self._place(path)
            if inode is None:
                raise failure(errno.ENOENT, path)
            self._file(inode, path)
            self._change((parent, name, None))

        self.call(Call("unlink", path), do)

    def rename(self, name: str, source: str, target: str) -> None:
        def do() -> None:
            parent, before, inode = self._place(source)
            into, after, replaced = self._place(target)
            if inode is None:
                raise failure(errno.ENOENT, source)
            if target.startswith(source + "/"):
                raise failure(errno.EINVAL, target)
            self._check_replaced(inode, replaced, target)
            if replaced != inode:
                self._change((parent, before, None), (into, after, inode))

        self.call(Call(name, source, target=target), do)

    def _check_replaced(self, inode: int, replaced: int | None, target: str) -> None:
        if replaced is None or replaced == inode:
            return
        if isinstance(self.inodes[inode], Directory):
            if self.directory(replaced, target).names:
                raise failure(errno.ENOTEMPTY, target)
        else:
            self._file(replaced, target)

    def link(self, source: str, target: str) -> None:
        def do() -> None:
            inode = self.look_up(source)
            parent, name, existing = self._place(target)
            if existing is not None:
                raise failure(errno.EEXIST, target)
            if isinstance(self.inodes[inode], Directory) or not self.hard_links:
                raise failure(errno.EPERM, source)
            self._change((parent, name, inode))

        self.call(Call("link", source, target=target), do)

    # Calls on descriptors

    def descriptor(self, fd: int) -> Descriptor:
        if fd not in self.descriptors:
            raise failure(errno.EBADF, str(fd))
        return self.descriptors[fd]

    def content(self, descriptor: Descriptor) -> bytes:
        """What the holder of ``descriptor`` sees of its file."""
        return self._file(descriptor.inode, descriptor.path).data

    def fstat(self, fd: int) -> os.stat_result:
        descriptor = self.descriptor(fd)
        is_file = isinstance(self.inodes[descriptor.inode], File)
        size = len(self.content(descriptor)) if is_file else None
        result: os.stat_result = self.call(Call("fstat", descriptor.path), lambda: self._stat(descriptor.inode, size))
        return result

    def close(self, fd: int) -> None:
        descriptor = self.descriptor(fd)
        del self.descriptors[fd]  # it is closed whatever close(2) answers
        self.call(Call("close", descriptor.path), lambda: None)

    def read(self, fd: int, size: int) -> bytes:
        descriptor = self.descriptor(fd)
        data = self.pread(fd, size, descriptor.position)
        descriptor.position += len(data)
        return data

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        descriptor = self.descriptor(fd)

        def do() -> bytes:
            if descriptor.flags & os.O_ACCMODE == os.O_WRONLY:
                raise failure(errno.EBADF, descriptor.path)
            return self.content(descriptor)[offset : offset + size]

        data: bytes = self.call(Call("pread", descriptor.path), do)
        return data

    def write(self, fd: int, data: bytes) -> int:
        descriptor = self.descriptor(fd)
        offset = len(self.content(descriptor)) if descriptor.flags & os.O_APPEND else descriptor.position
        written = self._write("write", descriptor, data, offset)
        descriptor.position = offset + written
        return written

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        descriptor = self.descriptor(fd)
        appends = descriptor.flags & os.O_APPEND  # Linux then passes over the offset, see pwrite(2)
        return self._write("pwrite", descriptor, data, len(self.content(descriptor)) if appends else offset)

    def _write(self, name: str, descriptor: Descriptor, data: bytes, offset: int) -> int:
        def do(instead: bytes | None = None) -> int:
            if descriptor.flags & os.O_ACCMODE == os.O_RDONLY:
                raise failure(errno.EBADF, descriptor.path)
            chosen = data if instead is None else instead
            self._apply(descriptor, Write(offset, chosen))
            return len(chosen)

        written: int = self.call(Call(name, descriptor.path, data), do)
        return written

    def truncate(self, fd: int, size: int) -> None:
        descriptor = self.descriptor(fd)

        def do() -> None:
            if descriptor.flags & os.O_ACCMODE == os.O_RDONLY:
                raise failure(errno.EINVAL, descriptor.path)
            self._apply(descriptor, Write(size, None))

        self.call(Call("truncate", descriptor.path), do)

    def _apply(self, descriptor: Descriptor, write: Write) -> None:
        file = self._file(descriptor.inode, descriptor.path)
        self.inodes[descriptor.inode] = replace(file, data=patched(file.data, write), unsynced=(*file.unsynced, write))

    def sync(self, name: str, fd: int) -> None:
        descriptor = self.descriptor(fd)

        def do() -> None:
            node = self.inodes[descriptor.inode]
            if isinstance(node, File):
                self.inodes[descriptor.inode] = replace(node, durable=node.data, unsynced=())
            else:
                self.inodes[descriptor.inode] = replace(node, durable=node.names, unsynced=())

        self.call(Call(name, descriptor.path), do)
