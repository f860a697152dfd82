"""Engines that live and take no weights: the trainer gives their processes up, and these end, to be started anew.

attempts/N/given_up/generator-1.2     the third process that is generator-1; the file says why

trainer-0                             the engine's generator, each second
---------                             ---------------------------------
give_up      ------ the file ------>  why_given_up: it ends as one that has failed
"""

from __future__ import annotations

import json
from pathlib import Path

from areal_hpc.fs import create_exclusive, read_if_listed
from areal_hpc.run_dir import AttemptDir


def give_up(attempt: AttemptDir, name: str, incarnation: int, why: str) -> None:
    """Have the process end that is ``name`` in this incarnation; once is enough, more do no harm."""
    create_exclusive(_path(attempt, name, incarnation), json.dumps({"why": why}).encode())


def why_given_up(attempt: AttemptDir, name: str, incarnation: int) -> str:
    """Why that process is to end; empty while it is not."""
    told = read_if_listed(_path(attempt, name, incarnation))
    return "" if told is None else str(told["why"])


def _path(attempt: AttemptDir, name: str, incarnation: int) -> Path:
    return attempt.root / "given_up" / f"{name}.{incarnation}"
