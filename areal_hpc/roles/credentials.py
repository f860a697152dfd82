"""The secrets of a run: made once, and again when another member of the run's group goes on with it.

What protects them is that nobody but their owner reads them, the group included; so the next owner makes new ones, and
what the processes of the owner before still believe in is worth nothing any more.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from areal_hpc.fs import names_in, publish
from areal_hpc.privacy import is_own

NUM_BYTES = 32


def keep_secret(path: Path, prefix: str = "") -> None:
    """See to it that ``path`` holds a secret of the caller's own; called by who owns the run."""
    if path.name not in names_in(path.parent) or not is_own(path):
        publish(path, f"{prefix}{secrets.token_urlsafe(NUM_BYTES)}".encode(), secret=True)
