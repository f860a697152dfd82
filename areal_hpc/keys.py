"""Keys that lie in files of their owner: made once, and again when another member of the run's group goes on with it.

What protects them is that nobody but their owner reads them, the group included; so the next owner makes new ones, and
what the processes of the owner before still believe in is worth nothing any more.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from areal_hpc.errors import RunDirError
from areal_hpc.fs import names_in, publish
from areal_hpc.privacy import is_secret, owner_of

NUM_BYTES = 32


def make_key(path: Path, prefix: str = "") -> str:
    """The caller's own key in the file, made now if there is none; called by who owns the run.

    Raises:
        RunDirError: as ``read_key``.
    """
    if path.name not in names_in(path.parent) or not is_secret(path):
        publish(path, f"{prefix}{secrets.token_urlsafe(NUM_BYTES)}".encode(), secret=True)
    return read_key(path)


def read_key(path: Path) -> str:
    """The key in the file.

    Raises:
        RunDirError: it is another user's; or the file is empty, and whoever brings no key would be let in.
    """
    if not os.access(path, os.R_OK):
        raise RunDirError(f"{path} is the secret of {owner_of(path)}, whom to ask: nobody else may read it")
    key = path.read_text(encoding="ascii").strip()
    if not key:
        raise RunDirError(f"{path} holds no key; remove it, and the run makes another when it is started again")
    return key


def engine_token(run_token: str, epoch: int, index: int, incarnation: int) -> str:
    """What the server of one generator process asks for: no other process of the run takes it."""
    identity = f"{epoch}/generator-{index}/{incarnation}"
    return hmac.new(run_token.encode(), identity.encode(), hashlib.sha256).hexdigest()
