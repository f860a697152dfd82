"""Who may see and change what a run writes: its owner alone, or the members of one Unix group.

                        alone        run_group
run directory           0700         2770, of the group, which everything in it inherits
other directories       0700         2770
files                   0600         0660
secrets/*, signing.so   0600         0600: whoever goes on with another's run makes new ones

The run directory itself says which, so that whoever writes into it, at whatever time and as whichever member, does as
everybody else does, whatever the umask of his shell. Third-party libraries know the umask alone: processes that they
work in enter ``umask_of``.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_hpc.errors import RunDirError

PRIVATE_FILE, SHARED_FILE = 0o600, 0o660
PRIVATE_DIR, SHARED_DIR = 0o700, 0o2770
SHARED = stat.S_ISGID | stat.S_IWGRP
"""What a directory has whose files are the group's."""


def is_shared(directory: Path) -> bool:
    """Whether what is written into ``directory`` is for the group."""
    return directory.stat().st_mode & SHARED == SHARED


def umask_for(group: str) -> int:
    """What nobody may do with a run's files but their owner, or, where there is one, the run's group."""
    return 0o007 if group else 0o077


@contextmanager
def umask_of(group: str) -> Iterator[None]:
    """Within, libraries make files for the run's group, or where there is none for nobody but their owner."""
    before = os.umask(umask_for(group))
    try:
        yield
    finally:
        os.umask(before)


def open_private(path: Path, flags: int, *, secret: bool = False) -> int:
    """open(2) of a file that others may see as far as its directory is theirs; a ``secret`` is its owner's alone."""
    shared = not secret and bool(flags & os.O_CREAT) and is_shared(path.parent)
    fd = os.open(path, flags, SHARED_FILE if shared else PRIVATE_FILE)
    if shared and (found := os.fstat(fd)).st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != SHARED_FILE:
        os.fchmod(fd, SHARED_FILE)  # what the umask took
    return fd


def follow_directory(directory: Path) -> None:
    """Let others have the files in it as far as they have ``directory``: safetensors and we make private ones."""
    mode = stat.S_IMODE(directory.stat().st_mode) & 0o666
    for path in directory.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def make_inside(path: Path) -> None:
    """Make directory ``path``, as private as the one that it lies in.

    Raises:
        FileExistsError: it is there.
    """
    shared = is_shared(path.parent)
    path.mkdir(mode=SHARED_DIR if shared else PRIVATE_DIR)
    if shared and stat.S_IMODE(path.stat().st_mode) != SHARED_DIR:
        path.chmod(SHARED_DIR)


def make_root(path: Path, group: str) -> None:
    """Make directory ``path`` for ``group``, or for the caller alone, whatever it lies in.

    Raises:
        FileExistsError: it is there.
        RunDirError: there is no such group, or the caller is not in it.
    """
    number = _number_of(group) if group else -1
    path.mkdir(mode=PRIVATE_DIR)
    if not group:
        return
    try:
        os.chown(path, -1, number)
    except PermissionError:
        path.rmdir()
        raise RunDirError(f"run_group: {user_name()} is not in {group}; `id` lists your groups") from None
    path.chmod(SHARED_DIR)


def _number_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise RunDirError(f"run_group: there is no group {group} on this machine; `id` lists yours") from None


def check_mode(directory: Path, group: str) -> None:
    """See that an existing run directory is as private as it is meant to be.

    Raises:
        RunDirError: others may enter it, or it is another group's than ``group``; says what to do.
    """
    found = directory.stat()
    if not group:
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise RunDirError(f"{directory} is open to others; run `chmod go=,g-s {directory}`, or set run_group")
        return
    if found.st_mode & stat.S_IRWXO:
        raise RunDirError(f"{directory} is open to everybody; run `chmod o= {directory}`")
    if not is_shared(directory) or group_name(found.st_gid) != group:
        raise RunDirError(
            f"{directory} is not the group's; run `chgrp -R {group} {directory} && chmod -R g+rwXs {directory} && "
            f"chmod go= {directory}/secrets/*`"
        )


def owner_of(path: Path) -> str:
    """Name of the user whose file it is."""
    return user_name(path.stat().st_uid)


def is_own(path: Path) -> bool:
    """Whether a file is the caller's."""
    return path.stat().st_uid == os.geteuid()


def is_secret(path: Path) -> bool:
    """Whether a file is the caller's, and nobody else may read it."""
    return is_own(path) and not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def user_name(number: int | None = None) -> str:
    """Name of a user, by default of the caller; its number where it has no name, as in some containers."""
    number = os.geteuid() if number is None else number
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def group_name(number: int) -> str:
    """Name of a group, or its number."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
