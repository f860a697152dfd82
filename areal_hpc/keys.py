"""Keys that lie in files of their owner: made once for a run, and never empty."""

from __future__ import annotations

import secrets
from pathlib import Path

from areal_hpc.errors import RunDirError
from areal_hpc.fs import create_exclusive


def make_key(path: Path, prefix: str = "") -> str:
    """The key in the file, made now if there is none.

    Raises:
        RunDirError: as ``read_key``.
    """
    create_exclusive(path, f"{prefix}{secrets.token_urlsafe(32)}".encode())
    return read_key(path)


def read_key(path: Path) -> str:
    """The key in the file.

    Raises:
        RunDirError: the file is empty, as a crash can leave it where there are no hard links; whoever brings no key
            would be let in.
    """
    key = path.read_text(encoding="ascii").strip()
    if not key:
        raise RunDirError(f"{path} holds no key; remove it, and the run makes another when it is started again")
    return key
