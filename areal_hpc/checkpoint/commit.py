"""Making a checkpoint: every rank's files under a temporary name, each rank's word for them, then one rename.

    rank 0                                              every other rank
    directory = begin(run, version)
    write(run, version, save, state, ...)               add_part(directory, rank, save)
        save(directory)
        await_parts(directory, ...)     <-- files --    part-00001.json
        manifest, fence, rename

The vote travels as files and not by a collective: it is cast in the background, while the ranks' own threads are in the
middle of the next steps' collectives.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.checkpoint.files import STATE, path_of, pending, write_manifest
from areal_hpc.errors import RoleDied
from areal_hpc.fs import fsync_directory, names_in, publish, publish_json, read_json, wait_for
from areal_hpc.patience import rename
from areal_hpc.privacy import follow_directory, make_inside
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion


def _no_successor() -> None:
    """The fence of a run that cannot have a second trainer."""


def begin(run: RunDir, version: WeightVersion) -> Path:
    """An empty directory that no reader takes for a checkpoint; ``write`` makes it the one of ``version``."""
    directory = pending(path_of(run, version), "tmp")
    make_inside(directory)
    return directory


def write(
    run: RunDir,
    version: WeightVersion,
    save: Callable[[Path], None],
    state: Mapping[str, Any],
    *,
    directory: Path | None = None,
    layout: Mapping[str, Any] | None = None,
    still_leader: Callable[[], None] = _no_successor,
) -> Path:
    """Make the checkpoint of ``version``, replacing one that exists; when this returns it survives a power cut.

    Args:
        save: fills the directory it is given; when it returns, all files of all ranks are there.
        state: plain JSON data.
        directory: what ``begin`` made, where other ranks had to know it before; by default one is made here.
        layout: how the files are split over ranks, for people and for a check at load.
        still_leader: called once all data is durable, just before the checkpoint becomes visible: a process that slept
            through its own replacement must find out after the slow part, not before it.

    Raises:
        Fenced: by ``still_leader``. As with every other failure, nothing is left behind and older checkpoints stand.
        OSError: the disk refused.
    """
    document = json.dumps(state, indent=1, sort_keys=True).encode()
    path, temporary = path_of(run, version), directory or begin(run, version)
    try:
        save(temporary)
        follow_directory(temporary)
        publish(temporary / STATE, document)
        write_manifest(temporary, version, layout or {})
        still_leader()
        if path.exists():
            os.rename(path, pending(path, "trash"))  # noqa: PTH104
        rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # what cannot be removed now, `sweep` removes
        raise
    fsync_directory(run.checkpoints)
    return path


def add_part(directory: Path, rank: int, save: Callable[[Path], None]) -> None:
    """Write one rank's files into a directory that rank 0 began, then its vote on them.

    Raises:
        OSError, CorruptRecord: by ``save``. Rank 0 is told, if the disk still takes that.
    """
    vote = directory / f"part-{rank:05d}.json"
    try:
        save(directory)
    except Exception as error:
        with suppress(OSError):  # the disk has just refused the part itself, which is what is raised
            publish_json(vote, {"problem": f"{type(error).__name__}: {error}"})
        raise
    publish_json(vote, {"problem": None})


def await_parts(directory: Path, ranks: Sequence[int], timeout_s: float) -> None:
    """Wait until each of ``ranks`` has cast its vote in ``directory``.

    Raises:
        RoleDied: a rank says that its part failed, which ends it as well; names it.
        WaitTimeout: a rank said nothing; names it.
    """
    deadline = time.monotonic() + timeout_s
    for rank in ranks:
        part = directory / f"part-{rank:05d}.json"
        wait_for(
            f"the part of trainer rank {rank} in {directory}",
            partial(_is_listed, part),
            max(0.0, deadline - time.monotonic()),
            party=f"trainer-{rank}",
            hint="look into its log",
        )
        problem = read_json(part)["problem"]
        if problem is not None:
            raise RoleDied(f"trainer rank {rank} could not write its part of {directory} ({problem}); see its log")


def _is_listed(path: Path) -> bool:
    return path.name in names_in(path.parent)
