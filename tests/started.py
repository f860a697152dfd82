"""Starts of a run in this process that end at once: no model, no data, no role processes."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.fs import publish_json, read_json
from areal_hpc.report import LiveConsole
from areal_hpc.roles import launcher
from areal_hpc.roles.attempts import Attempts
from areal_hpc.roles.launcher import run_local
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


def config_in(directory: Path) -> Config:
    """The quickstart's, with its run and an empty model directory in ``directory``."""
    (directory / "model").mkdir()
    words = [f"run_root={directory}", "name=run", f"model.path={directory / 'model'}", "cluster.shape=local"]
    return load([QUICKSTART], words)


def end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts finish at once, well, and without a look at data and reward."""
    monkeypatch.setattr(launcher, "prepare", lambda _: None)
    monkeypatch.setattr(Attempts, "supervise", lambda *_: "finished")
    monkeypatch.setattr(launcher, "report_run", lambda _: None)


def start(config: Config, *, resume: bool = False, takeover: bool = False, resume_from: int | None = None) -> int:
    console = LiveConsole(3, io.StringIO())
    return run_local(config, resume=resume, takeover=takeover, resume_from=resume_from, console=console)


def begin(run: RunDir, epoch: int = 1, step: int = 0) -> None:
    """What the trainer writes when an attempt really begins."""
    version = WeightVersion(epoch, step)
    write_start(run, epoch, StartRecord(parent=None, version=version, consumed=Watermark(), fingerprint="f"))


def state_of(run: RunDir, epoch: int = 1) -> Any:
    return read_json(run.attempt(epoch).state)["state"]


def leave(run: RunDir, state: str | None, **changes: Any) -> None:
    """An attempt as this process or, with ``changes``, another would have left it; None: it got no further yet."""
    owner = dataclasses.replace(Owner.this_process(), **changes).record()
    epoch = claim_epoch(RunDir.create(run.root), owner)
    if state is not None:
        publish_json(run.attempt(epoch).create().state, {"state": state, **owner})
