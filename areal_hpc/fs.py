"""Files that other processes read: published whole, found by listing, waited for with a limit.

What a shared file system really promises (close-to-open consistency, cached negative lookups, atomic rename) is worked
out here once: publish by temporary file, fsync, rename, fsync of the directory; create exclusively by link; wait by
listing the directory, never by asking for a name that may not exist yet (NFS caches the "no" for up to a minute).
A name is durable once its directory has been synced, so whoever makes a directory here syncs its parent, too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areal_hpc.errors import CorruptDocument, WaitTimeout
from areal_hpc.patience import naming, opened_status, rename, retried
from areal_hpc.privacy import make_inside, open_private
from areal_hpc.waits import FILE_SYSTEM, waiting

TEMPORARY_NAME = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{8}\.tmp")


def fsync_directory(path: Path) -> None:
    """Make names created in or removed from ``path`` survive a power cut."""
    with naming(path):
        fd = retried(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_durable(directory: Path) -> None:
    """Make everything in ``directory``, at any depth, survive a power cut; its own name is its parent's affair.

    Call it before the directory is renamed to what others look for: a rename may be durable sooner than the data.
    """
    for path in directory.rglob("*"):
        if path.is_dir():
            fsync_directory(path)
        else:
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_directory(directory)


@contextmanager
def _temporary(path: Path, data: bytes, *, secret: bool = False, durable: bool = True) -> Iterator[Path]:
    """A private file with ``data`` beside ``path``, for the block to rename or remove; gone if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    fd = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, secret=secret)
    try:
        _write(fd, path, data, durable=durable)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(fd: int, path: Path, data: bytes, *, durable: bool = True) -> None:
    with naming(path), os.fdopen(fd, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def publish(path: Path, data: bytes, *, secret: bool = False, durable: bool = True) -> None:
    """Replace ``path`` by ``data`` so that every reader sees the old or the new bytes, never a mixture.

    A ``secret`` is nobody's but the caller's, also in a group's run directory. What need not be ``durable`` costs no
    disk a sync: after a power cut it may be old, or empty.

    Raises:
        OSError: the file system refused; ``path`` is unchanged and nothing is left behind.
    """
    with waiting(f"writing {path}", FILE_SYSTEM, limit_s=None):
        with _temporary(path, data, secret=secret, durable=durable) as temporary:
            rename(temporary, path)
        if durable:
            fsync_directory(path.parent)


def publish_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """``publish`` of one JSON document."""
    publish(path, json.dumps(value, indent=1, sort_keys=True).encode(), durable=durable)


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create ``path`` with ``data`` if nobody has it: exactly one of many callers on any host gets True.

    link(2) makes the file appear complete; where hard links are refused, O_EXCL does (a reader may see it empty first,
    and a crash may leave it so). A server may answer "exists" to a repeated request of ours: a second link says so.
    """
    with waiting(f"writing {path}", FILE_SYSTEM, limit_s=None):
        with _temporary(path, data) as temporary:
            made = _link(temporary, path)
            temporary.unlink(missing_ok=True)
        if made is None:
            return _create_by_open(path, data)
        if made:
            fsync_directory(path.parent)
        return made


def _link(temporary: Path, path: Path) -> bool | None:
    """Whether ``path`` is now a second name of ``temporary``; None where there are no hard links."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return opened_status(temporary).st_nlink > 1
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        return None
    return True


def _create_by_open(path: Path, data: bytes) -> bool:
    try:
        fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    _write(fd, path, data)
    fsync_directory(path.parent)
    return True


def sweep_temporaries(directory: Path, *, before: str = "~") -> None:
    """Remove what killed processes left of files, of names that sort before ``before``, that they were publishing in
    ``directory``. Nobody who lives may be publishing one of these: his would go as well."""
    for name in names_in(directory):
        if (match := TEMPORARY_NAME.fullmatch(name)) and match[1] < before:
            (directory / name).unlink(missing_ok=True)


def names_in(directory: Path) -> list[str]:
    """What is in ``directory``, listed anew."""
    with waiting(f"listing {directory}", FILE_SYSTEM, limit_s=None):
        return retried(lambda: os.listdir(directory))


def read_json(path: Path) -> Any:
    """The JSON document at ``path``, opened anew: that is what revalidates on a network file system.

    Raises:
        CorruptDocument: it holds none.
    """
    return _document(path, _read(path))


def _document(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise CorruptDocument(
            f"{path} is no JSON document: {error}; restore it from a copy, or remove it if there is none"
        ) from error


def _read(path: Path) -> bytes:
    with waiting(f"reading {path}", FILE_SYSTEM, limit_s=None), naming(path):
        return retried(path.read_bytes)


def read_if_listed(path: Path) -> Any | None:
    """The JSON document at ``path``, or None while its directory does not list it or it is empty (no hard links here,
    and whoever made it has not written it yet).

    Raises:
        CorruptDocument: it holds none.
    """
    try:
        names = names_in(path.parent)
    except FileNotFoundError:
        return None
    if path.name not in names or not (data := _read(path)):
        return None
    return _document(path, data)


def wait_for(
    what: str, ready: Callable[[], Any], timeout_s: float, poll_s: float = 0.1, *, party: str, hint: str = ""
) -> Any:
    """The first truthy answer of ``ready``, asked every ``poll_s`` seconds; ``party`` is who brings it about.

    Raises:
        WaitTimeout: none came in ``timeout_s`` seconds; the message names ``what`` and carries ``hint``.
    """
    deadline = time.monotonic() + timeout_s
    with waiting(what, party, limit_s=timeout_s):
        while not (answer := ready()):
            if time.monotonic() >= deadline:
                raise WaitTimeout(f"waited {timeout_s:g} s for {what}, which did not come{'; ' + hint if hint else ''}")
            time.sleep(poll_s)
    return answer


def make_private_directory(path: Path, make: Callable[[Path], None] = make_inside) -> Path:
    """``path`` as a directory as private as the one it lies in; parents are made with the caller's umask.

    Its name is durable even if somebody made it who was killed before he could sync it; so are those of new parents.
    """
    for parent in reversed([parent for parent in path.parents if not parent.is_dir()]):
        parent.mkdir(exist_ok=True)
        fsync_directory(parent.parent)
    with suppress(FileExistsError):
        make(path)
    fsync_directory(path.parent)
    return path
