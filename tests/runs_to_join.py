"""Runs as ``areal-hpc join`` finds them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.fs import create_exclusive, publish, publish_json
from areal_hpc.liveness.stopping import RUNNING
from areal_hpc.run_dir import AttemptDir, RunDir

QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.yaml"
ELSEWHERE = {"host": "n7", "pid": 1, "boot": "b", "start_ticks": 1}
GONE = {**Owner.this_process().record(), "start_ticks": 1}


def config_of(*words: str) -> Config:
    return resolve(load([QUICKSTART], list(words)))


def run_to_join(tmp_path: Path) -> RunDir:
    """Not begun yet; engines may come to it at once."""
    made = RunDir.create(tmp_path / "run")
    (tmp_path / "model").mkdir()
    words = (f"model.path={tmp_path}/model", "generation.replicas=1", "limits.stop_s=3", "limits.rejoin_s=0.2")
    publish(made.config, dump(config_of(*words)).encode())
    create_exclusive(made.token, b"secret")
    return made


def begin(run: RunDir, state: str = RUNNING, owner: dict[str, Any] | None = None) -> AttemptDir:
    """The next attempt, with a trainer that is up."""
    holder = Owner.this_process().record() if owner is None else owner
    attempt = run.attempt(claim_epoch(run, holder)).create()
    publish_json(attempt.endpoint("trainer", 0), {"host": "127.0.0.1", "pid": os.getpid()})
    publish_json(attempt.state, {"state": state, **holder})
    return attempt


def end(attempt: AttemptDir, state: str) -> None:
    publish_json(attempt.state, {"state": state, **Owner.this_process().record()})
