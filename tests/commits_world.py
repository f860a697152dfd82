"""One trainer rank's checkpoints, with a disk that waits until it may write and a ring that notes what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from areal_hpc.buffer.account import Shortage
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.checkpoint import steps_of
from areal_hpc.config.load import load
from areal_hpc.config.schema import CheckpointConfig
from areal_hpc.roles.commits import Commits
from areal_hpc.roles.wiring.carried import carried_on
from areal_hpc.run_dir import RunDir
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
ONE = {1: None}


class Backend:
    """One number as a model. Writing waits for ``disk``, and fails with what is in ``problems``."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.weight, self.disk, self.problems = rank, 0, threading.Event(), list[Exception]()
        self.disk.set()

    def snapshot(self) -> Callable[[Path], None]:
        weight = self.weight

        def write(path: Path) -> None:
            assert self.disk.wait(10)
            if self.problems:
                raise self.problems.pop(0)
            (path / f"model-{self.rank}").write_text(str(weight))

        return write

    def complete(self, directory: str) -> None:
        """Note whose parts were there when they were made one."""
        parts = sorted(path.name for path in Path(directory).glob("model-*"))
        (Path(directory) / "completed").write_text(" ".join(parts))


class Reader:
    """A ring that notes what it is told to be durable."""

    def __init__(self) -> None:
        self.consumed = Watermark()
        self.told: list[int] = []
        self.problem: Shortage | None = None
        self.asked: list[Mapping[str, Any] | None] = []
        self.crowded = False

    def shortage(self) -> Shortage | None:
        return self.problem

    def is_crowded(self, begun: Mapping[str, Any] | None) -> bool:
        self.asked.append(begun)
        return self.crowded

    def stats(self) -> Mapping[str, float]:
        return {"bytes": 3 << 20}

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed.state_dict()}

    def covered(self, state: Mapping[str, Any]) -> None:
        self.told.append(state["consumed"]["low"])


class World:
    """One trainer rank, its disk and its ring."""

    def __init__(self, root: Path, ranks: Ranks | None = None, **checkpoint: Any) -> None:
        ranks = ranks or Ranks()
        self.run = RunDir.create(root)
        self.records: list[dict[str, Any]] = []
        self.backend, self.reader = Backend(ranks.rank), Reader()
        self.config = load([QUICKSTART], [f"run_root={root.parent}", "name=run"])
        self.config = replace(self.config, checkpoint=CheckpointConfig(**checkpoint))
        process: Any = SimpleNamespace(
            run=self.run,
            epoch=1,
            config=self.config,
            recorder=SimpleNamespace(record=lambda kind, values: self.records.append({"kind": kind, **values})),
        )
        side: Any = (
            SimpleNamespace(reader=self.reader, identity={"rows": 7}, archiver=None, ring=self.reader)
            if ranks.leads
            else None
        )
        self.side = side
        if ranks.leads:
            claim_epoch(self.run, {})
            start = WeightVersion(1, 0)
            record = StartRecord(
                parent=None, version=start, consumed=Watermark(), fingerprint="f", carried=carried_on(self.run, None)
            )
            write_start(self.run, 1, record)
        self.commits = Commits(process=process, ranks=ranks, backend=self.backend, side=side)  # type: ignore[arg-type]
        self.process = process

    def close(self) -> None:
        """Let the disk write what waits for it, and end."""
        self.backend.disk.set()
        self.commits.close()

    def train(self, step: int) -> None:
        """What the loop does up to the edge of ``step``: two prompts are consumed by it."""
        self.backend.weight = step
        for position in range(2 * step):
            self.reader.consumed.add(position)

    def steps(self) -> list[int]:
        return steps_of(self.run, ONE)

    def path(self, step: int) -> Path:
        return self.run.checkpoints / f"step-{step:08d}.e00000001"
