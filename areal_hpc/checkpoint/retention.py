"""Which checkpoints stay and how the others go: by rename first, so that nobody takes a half-deleted one for whole."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.checkpoint.files import PENDING_NAME, PINNED, Lineage, counts, listed, pending, verify
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import names_in
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What stays besides pinned checkpoints: the ``newest`` ones, every one of a step that ``every`` divides (0: none),
    and the one whose score is the highest; of equal scores, the newest."""

    newest: int
    every: int = 0
    scores: Mapping[int, float] = field(default_factory=dict)
    """By step; a step without one is not in the running."""


def beside_the_newest(versions: Collection[WeightVersion], keep: Keep) -> set[WeightVersion]:
    """The ``versions`` that stay however old they are."""
    scored = [version for version in versions if version.step in keep.scores]
    best = max(scored, key=lambda version: (keep.scores[version.step], version), default=None)
    return {v for v in versions if v == best or (keep.every and v.step % keep.every == 0)}


def prune(run: RunDir, lineage: Lineage, keep: Keep, verified: Collection[Path] = ()) -> list[Path]:
    """Delete what ``keep`` does not name, once the newest ``keep.newest`` of the surviving history verify.

    While fewer verify, nothing is deleted, so the last good one never goes. Older ones that do not belong to the
    surviving history go like any other; a file ``PINNED`` in a checkpoint keeps it whatever the rest says. A deletion
    that the file system refuses (on NFS, a file that somebody still holds open) is logged and tried again by the next
    call; it never ends a run.

    Args:
        verified: checkpoints that need not be read once more.

    Returns:
        The newest ones that verify: what the next call need not read.
    """
    assert keep.newest >= 1, keep
    every = listed(run)
    stay = beside_the_newest([version for version, _ in every if counts(version, lineage)], keep)
    good: list[Path] = []
    for version, path in every:
        if len(good) < keep.newest:
            if counts(version, lineage) and (path in verified or _verifies(path)):
                good.append(path)
        elif version not in stay:
            _delete(path)
    _empty_trash(run)
    return good


def _verifies(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError as error:
        logger.warning("checkpoint not usable: %s", error)
        return False
    return True


def sweep(run: RunDir, epoch: int) -> None:
    """Remove what attempts before ``epoch`` left unfinished; called once by the attempt that owns ``epoch``."""
    for path, made_by, kind in _pending_entries(run):
        if kind == "tmp" and made_by < epoch:
            _delete(path)
    _empty_trash(run)


def _pending_entries(run: RunDir) -> list[tuple[Path, int, str]]:
    matches = [match for name in names_in(run.checkpoints) if (match := PENDING_NAME.fullmatch(name))]
    return [(run.checkpoints / match[0], int(match[1]), match[2]) for match in matches]


def _empty_trash(run: RunDir) -> None:
    for path, _, kind in _pending_entries(run):
        if kind == "trash":
            _delete(path)


def _delete(path: Path) -> None:
    """Rename ``path`` so that nobody takes it for whole, then remove what can be removed; nothing if it is pinned."""
    try:
        if PINNED in names_in(path):
            return
        if not PENDING_NAME.fullmatch(path.name):
            path = path.rename(pending(path, "trash"))
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("cannot delete %s yet, the next clean-up tries again: %s", path, error)
