"""What the file system below a run offers, tried out before the first process starts.

    mount = examine(run_root / name, min_free_mb)     refuses, in a sentence, what cannot carry a run; leaves nothing
    is_served(directory)                              whether looking into its files costs a server that many share
    low_space(directory, min_free_mb)                 a sentence while there is too little room to begin new work

Object stores behind a file interface, FAT or an over-full quota show here in milliseconds instead of after a month.
What cannot be tried out by one host (caches of other clients, loss of power) is what ``fs`` and ``buffer`` are built
for. Locks (flock, fcntl) are not asked for: on network file systems they may be missing or local, and nothing uses
them.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_hpc.errors import RunDirError
from areal_hpc.fs import fsync_directory
from areal_hpc.waits import FILE_SYSTEM, waiting

MIB = 1 << 20
MIN_FREE_INODES = 1000
MOUNTS = Path("/proc/self/mountinfo")
SERVED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "panfs", "pvfs2", "wekafs", "afs", "9p")
"""Kinds whose every open is a request to a server that others ask, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """What was found."""

    path: str
    """The directory in which it was tried: where the run directory will be, or its nearest parent that exists."""
    kind: str
    """Type of the file system as the kernel calls it: ext4, nfs4, lustre, gpfs ...; empty where it does not say."""
    hard_links: bool
    """Whether link(2) works; without it claims are made by O_EXCL."""
    free_bytes: int
    free_inodes: int | None
    """Files that may still be made; None where the file system has no fixed number of inodes."""

    def record(self) -> Mapping[str, Any]:
        return asdict(self)


def examine(path: Path, min_free_mb: float) -> Mount:
    """Try out in a private directory, removed again, all that a run at ``path`` will rely on; well below a second.

    Raises:
        RunDirError: it cannot be written, lacks something that cannot be done without, or is nearly full.
    """
    directory = next(place for place in (path, *path.parents) if place.is_dir())
    kind = kind_of(directory)
    advice = "set run_root to a directory on a local disk or a file system such as NFS, Lustre or GPFS"
    try:
        with tempfile.TemporaryDirectory(prefix=".areal-hpc-mount-", dir=directory) as trial:
            _try_out(Path(trial), f"{directory} ({kind or 'unknown file system'})", advice)
            hard_links = _links(_room(Path(trial), "links"))
    except OSError as error:
        raise RunDirError(f"{directory} cannot be used for a run: {error}; {advice}") from error
    if problem := low_space(directory, min_free_mb):
        raise RunDirError(f"{problem}; free space there, or set run_root elsewhere, or lower buffer.min_free_mb")
    num_bytes, inodes = _free(directory)
    return Mount(path=str(directory), kind=kind, hard_links=hard_links, free_bytes=num_bytes, free_inodes=inodes)


def low_space(directory: Path, min_free_mb: float) -> str | None:
    """A sentence if ``directory`` has less than ``min_free_mb`` MiB or a thousand inodes left; 0 asks for no floor."""
    num_bytes, inodes = _free(directory)
    if num_bytes < min_free_mb * MIB:
        return (
            f"{directory} has {num_bytes / MIB:.0f} MiB left, less than the {min_free_mb:g} MiB of buffer.min_free_mb"
        )
    if min_free_mb and inodes is not None and inodes < MIN_FREE_INODES:
        return f"{directory} has {inodes} inodes left, less than {MIN_FREE_INODES}"
    return None


def has_room(directory: Path, num_bytes: int) -> bool:
    """Whether so many bytes can still be written below ``directory``."""
    return _free(directory)[0] > num_bytes


def _free(directory: Path) -> tuple[int, int | None]:
    """Bytes and inodes that this user may still take."""
    with waiting(f"asking for the space left in {directory}", FILE_SYSTEM, limit_s=None):
        found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def kind_of(directory: Path) -> str:
    """The type of the file system that ``directory`` is on; the last line wins where mounts cover each other."""
    if not MOUNTS.exists():
        return ""
    where, kind = "", ""
    target = str(directory.resolve())
    for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        place, rest = line.split(" ", 5)[4:]
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), place)
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(where):
            where, kind = point, rest.split(" - ", 1)[1].split(" ", 1)[0]
    return kind


def is_served(directory: Path) -> bool:
    """Whether a metadata server stands behind ``directory``, as far as the kernel says."""
    return kind_of(directory) in SERVED


def _room(trial: Path, name: str) -> Path:
    (trial / name).mkdir()
    return trial / name


def _try_out(trial: Path, place: str, advice: str) -> None:
    for number, (check, lack) in enumerate(CHECKS.items()):
        try:
            fine, why = check(_room(trial, str(number))), ""
        except OSError as error:
            fine, why = False, f" ({error.strerror})"
        if not fine:
            raise RunDirError(f"{place} {lack}{why}; {advice}")


def _put(path: Path, data: bytes, flags: int = os.O_CREAT | os.O_EXCL) -> None:
    fd = os.open(path, os.O_WRONLY | flags, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _excludes(room: Path) -> bool:
    _put(room / "claim", b"first")
    try:
        _put(room / "claim", b"second")
    except FileExistsError:
        return (room / "claim").read_bytes() == b"first"
    return False


def _replaces(room: Path) -> bool:
    _put(room / "old", b"old")
    _put(room / "new", b"new")
    os.replace(room / "new", room / "old")
    return (room / "old").read_bytes() == b"new" and os.listdir(room) == ["old"]


def _renames_directories(room: Path) -> bool:
    (room / "unfinished").mkdir()
    _put(room / "unfinished" / "file", b"data")
    (room / "unfinished").rename(room / "whole")
    return (room / "whole" / "file").read_bytes() == b"data" and os.listdir(room) == ["whole"]


def _writes_at_offsets(room: Path) -> bool:
    path = room / "log"
    _put(path, b"head")
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, b"tail", 8192)
        os.pwrite(fd, b"HEAD", 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return path.read_bytes() == b"HEAD" + bytes(8188) + b"tail"


def _syncs_directories(room: Path) -> bool:
    fsync_directory(room)
    return True


def _shows_what_is_there(room: Path) -> bool:
    before = os.listdir(room)
    _put(room / "name", b"")
    during = os.listdir(room)
    (room / "name").unlink()
    return (before, during, os.listdir(room)) == ([], ["name"], [])


def _keeps_modes(room: Path) -> bool:
    _put(room / "secret", b"")
    return stat.S_IMODE((room / "secret").stat().st_mode) == 0o600


def _links(room: Path) -> bool:
    _put(room / "one", b"")
    try:
        os.link(room / "one", room / "other")
    except OSError:
        return False  # whatever the reason, `fs.create_exclusive` then claims by O_EXCL
    return (room / "other").stat().st_nlink == 2


CHECKS: Mapping[Callable[[Path], bool], str] = {
    _excludes: "does not create files exclusively, so that two attempts could both own the run",
    _replaces: "does not replace a file by renaming another, so that readers would see half of one",
    _renames_directories: "does not rename a directory with files in it, so that no checkpoint could appear whole",
    _writes_at_offsets: "does not write at chosen offsets and read zeros between, as the logs of the ring need",
    _syncs_directories: "does not sync directories, so that files could vanish in a power cut",
    _shows_what_is_there: "does not list a file that was made, or lists one that was removed",
    _keeps_modes: "does not keep file modes, so that the run's secrets would lie open to other users",
}
"""What a run relies on, and what is wrong with a mount that lacks it."""
