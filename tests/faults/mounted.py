"""The ``os`` module with a ``Volume`` mounted: paths below its root go there, all others to the real file system.

Files that Python opens itself (``Path.read_bytes``, ``os.fdopen``) go through C; ``_pyio`` is the standard library's
own implementation of the same in terms of ``os``, so it is what opens files of the volume here.
"""

from __future__ import annotations

import _pyio
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from faults.volume import FIRST_FD, Volume

STATVFS_BLOCK = 4096


class Entry:
    """os.DirEntry, as far as shutil and pathlib ask."""

    def __init__(self, volume: Volume, directory: str, name: str) -> None:
        self.name, self.path, self._volume, self._full = name, f"{directory}/{name}", volume, f"{directory}/{name}"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._volume.stat(self._full)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self.stat().st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self.stat().st_mode)

    def is_symlink(self) -> bool:
        return False


class Entries(list[Entry]):
    """What os.scandir returns: an iterator that is a context manager."""

    def __enter__(self) -> Iterator[Entry]:
        return iter(self)

    def __exit__(self, *_: object) -> None:
        pass


class Mount:
    """The functions of ``os`` for one volume. ``ours`` tells whether a path or descriptor lies on it."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume

    def path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path if it is on the volume."""
        if isinstance(path, int):
            return self.volume.descriptor(path).path if path >= FIRST_FD else None
        text = os.fsdecode(path)
        if dir_fd is not None and dir_fd >= FIRST_FD:
            text = f"{self.volume.descriptor(dir_fd).path}/{text}"
        root = self.volume.root
        return text if text == root or text.startswith(root + "/") else None

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        return self.volume.open(path, flags, mode)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.volume.stat(path)

    def listdir(self, path: str) -> list[str]:
        return self.volume.names(path)

    def scandir(self, path: str) -> Entries:
        return Entries(Entry(self.volume, path, name) for name in self.volume.names(path))

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.volume.mkdir(path, mode)

    def chmod(self, path: str, mode: int, *, follow_symlinks: bool = True) -> None:
        self.volume.chmod(path, mode)

    def statvfs(self, _: str) -> os.statvfs_result:
        free = self.volume.free_bytes // STATVFS_BLOCK
        return os.statvfs_result((STATVFS_BLOCK, STATVFS_BLOCK, 1 << 30, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255))


@contextmanager
def mounted(volume: Volume) -> Iterator[None]:
    """Mount ``volume`` in this process for the length of the block."""
    mount = Mount(volume)

    def by_path(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any = ".", *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            where = mount.path(path, dir_fd)
            if where is not None:
                return ours(where, *args, **options)
            return real(path, *args, **options, **({} if dir_fd is None else {"dir_fd": dir_fd}))

        return call

    def by_fd(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(os, name)
        return lambda fd, *args: (ours if fd >= FIRST_FD else real)(fd, *args)

    def by_two_paths(name: str, ours: Callable[[str, str], Any]) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(source: Any, target: Any, **options: Any) -> Any:
            first, second = mount.path(source), mount.path(target)
            if first is not None and second is not None:
                return ours(first, second)
            assert first is None and second is None, (source, target)
            return real(source, target, **options)

        return call

    real_open = io.open

    def open_file(file: Any, *args: Any, **options: Any) -> Any:
        return (real_open if mount.path(file) is None else _pyio.open)(file, *args, **options)

    replaced: dict[str, Callable[..., Any]] = {
        **{name: by_path(name, getattr(mount, name)) for name in ("open", "stat", "listdir", "scandir", "mkdir")},
        "statvfs": by_path("statvfs", mount.statvfs),
        "lstat": by_path("lstat", volume.stat),
        "chmod": by_path("chmod", mount.chmod),
        "rmdir": by_path("rmdir", volume.rmdir),
        "unlink": by_path("unlink", volume.unlink),
        "remove": by_path("remove", volume.unlink),
        "close": by_fd("close", volume.close),
        "read": by_fd("read", volume.read),
        "pread": by_fd("pread", volume.pread),
        "write": by_fd("write", lambda fd, data: volume.write(fd, bytes(data))),
        "pwrite": by_fd("pwrite", lambda fd, data, offset: volume.pwrite(fd, bytes(data), offset)),
        "fstat": by_fd("fstat", volume.fstat),
        "ftruncate": by_fd("ftruncate", volume.truncate),
        "fsync": by_fd("fsync", lambda fd: volume.sync("fsync", fd)),
        "fdatasync": by_fd("fdatasync", lambda fd: volume.sync("fdatasync", fd)),
        "isatty": by_fd("isatty", lambda _: False),
        "link": by_two_paths("link", volume.link),
        **{
            name: by_two_paths(name, lambda source, target, name=name: volume.rename(name, source, target))
            for name in ("rename", "replace")
        },
    }
    assert shutil.rmtree.avoids_symlink_attacks, "rmtree walks by descriptors, which the volume has"
    with patch.multiple(os, **replaced), patch.object(io, "open", open_file):
        yield
