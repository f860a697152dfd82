"""Where libraries keep code that they compile or download: on this node, and for each process of a run its own.

By default all of them use the home directory, which every node and every rank shares. Two that write one module there
at the same moment read each other's halves, and file locks do not hold between nodes. What only the launcher uses
(matplotlib, trackers), and what is read and never written (data sets), needs none.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from areal_hpc.errors import RunDirError
from areal_hpc.privacy import PRIVATE_DIR

VARIABLES = {
    "HF_MODULES_CACHE": "modules",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
}
"""Environment variable to directory. The libraries make what they use, and find it again in the next attempt."""


def use_own_caches(run: Path, role: str, index: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Point the libraries of this process, and of what it starts, to caches that no other role shares.

    Call it before they are imported. What the person has set stays.

    Raises:
        RunDirError: the directory is not the caller's alone, so that others could put code into it.
    """
    name = f"{hashlib.sha256(bytes(run)).hexdigest()[:16]}-{role}-{index}"
    place = _private(Path(tempfile.gettempdir()) / f"areal_hpc-{os.getuid()}") / name
    for variable, directory in VARIABLES.items():
        environment.setdefault(variable, str(place / directory))


def _private(directory: Path) -> Path:
    with suppress(FileExistsError):
        directory.mkdir(mode=PRIVATE_DIR)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RunDirError(f"{directory} is not a directory of yours alone; remove it, or set TMPDIR to one that is")
    return directory
