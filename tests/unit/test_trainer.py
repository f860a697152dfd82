"""The order of a trainer's start, and the proof that the engines got what was saved; whole runs are in test_run.py."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.config.load import load
from areal_hpc.errors import CheckpointError
from areal_hpc.journal import Journal
from areal_hpc.roles import trainer
from areal_hpc.roles.trainer import Member
from areal_hpc.run_dir import RunDir
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.rng import restore_rng, rng_state
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def begin(run: RunDir, parent: WeightVersion | None) -> None:
    epoch = claim_epoch(run, {})
    version = WeightVersion(epoch, 0 if parent is None else parent.step)
    write_start(run, epoch, StartRecord(parent=parent, version=version, consumed=Watermark(), fingerprint="f"))


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_C17_C33_random_streams_are_restored_after_everything_that_may_draw_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the data set, making the model and reading the ring may all draw; so loading comes after them, and then
    the engines get what was loaded, before any step."""
    run = RunDir.create(tmp_path / "run")
    begin(run, None)
    saved = rng_state(torch.device("cpu"))
    expected = draw()
    state: dict[str, Any] = {"config": "", "weights": 5, "prompts": {}, "ring": {}}
    state |= {"trackers": {"wandb": "the run"}, "evaluations": {"through": 20, "owed": [20]}}
    checkpoint.write(run, WeightVersion(1, 20), lambda _: None, state)
    claim_epoch(run, {})
    order, drawn = [], []

    class Backend:
        def load(self, directory: str) -> None:
            order.append("load")
            restore_rng(saved, torch.device("cpu"))

        def weights(self) -> Any:
            yield from ()

    class Reader:
        def may_publish(self, version: WeightVersion) -> bool:
            return True

        def release(self, version: WeightVersion) -> None:
            order.append("release")

    class Fleet:
        def publish(self, version: int, weights: Any) -> dict[str, float]:
            order.append(f"publish {version}")
            return {"fingerprint": 5.0}

        def close(self) -> None: ...

    def make(name: str, what: Any) -> Any:
        def made(*_: Any) -> Any:
            order.append(name)
            draw()
            return what

        return made

    def run_loop(_: Any) -> bool:
        drawn.extend(draw())
        return True

    def start(version: WeightVersion, carried: dict[str, Any]) -> None:
        order.append(f"start {version.step}")
        assert carried == {"trackers": {"wandb": "the run"}, "evaluations": {"through": 20, "owed": [20]}}

    side = SimpleNamespace(
        reader=Reader(),
        fleet=Fleet(),
        identity={},
        journal=Journal(run, 2),
        begin=start,
        archiver=None,
    )
    monkeypatch.setattr(trainer, "join_ranks", lambda _: Ranks())
    monkeypatch.setattr(trainer, "make_backend", make("model", Backend()))
    monkeypatch.setattr(trainer, "make_trainer_side", make("side", side))
    monkeypatch.setattr(trainer.TrainingLoop, "run", run_loop)
    process: Any = SimpleNamespace(
        run=run,
        epoch=2,
        config=load([QUICKSTART], [f"run_root={tmp_path}"]),
        stopping=lambda: False,
        starting=ExitStack(),
        recorder=SimpleNamespace(record=None),
    )
    assert trainer.main(process) == 0
    assert order == ["model", "side", "load", "start 20", "publish 20", "release"]
    assert drawn == expected


@pytest.mark.parametrize(
    ("version", "fingerprint", "same", "words"),
    [
        (20, 5, True, []),
        (20, 6, False, []),
        (21, 6, True, []),
        (20, None, True, []),  # engines that prove nothing, such as SGLang's own on a GPU
        (20, 6, False, ["model.lora.rank=2"]),
        (20, 6, False, ["model.lora.rank=2", "generation.backend=sglang"]),
        (20, 6, True, ["model.lora.rank=2", "generation.backend=sglang", "generation.pipeline_parallel=2"]),  # merged
    ],
)
def test_C32_weights_that_are_not_those_that_were_saved_are_refused_before_a_token(
    version: int, fingerprint: int | None, same: bool, words: list[str], tmp_path: Path
) -> None:
    class Fleet:
        def publish(self, version: int, weights: Any) -> dict[str, float]:
            proof = {} if fingerprint is None else {"fingerprint": float(fingerprint)}
            return {**proof, "seconds_paused": 0.0}

    run, state = RunDir.create(tmp_path / "run"), {"weights": 5, "merged": False, "ring": {}}
    parent = checkpoint.verify(checkpoint.write(run, WeightVersion(1, 20), lambda _: None, state))
    process: Any = SimpleNamespace(config=load([QUICKSTART], words), run=None)
    member = Member(
        process=process,
        ranks=Ranks(),
        backend=process,
        side=SimpleNamespace(fleet=Fleet(), archiver=None),  # type: ignore[arg-type]
        parent=parent,
    )
    if same:
        assert member.publish(version, lambda: iter(()))["seconds_paused"] == 0.0
        assert member.fingerprint == fingerprint
    else:
        with pytest.raises(CheckpointError, match=r"loaded from .*/step-00000020\.e00000001 are not"):
            member.publish(version, lambda: iter(()))
