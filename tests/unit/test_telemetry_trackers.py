"""Trackers: what they are given, and that nothing they do reaches the run."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from areal_hpc.config.schema import Sink, TelemetryConfig
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record, Trackers, TrackerSink, open_sinks
from areal_hpc.telemetry.trackers import QUEUE_LENGTH, TensorBoardSink, WandbSink


def record(kind: str, epoch: int = 1, **values: Any) -> Record:
    return Record(time=1e9, role="trainer", index=0, epoch=epoch, kind=kind, values=values)


class Kept:
    """A sink that keeps what it gets; ``broken`` is raised at the first write instead."""

    def __init__(self, broken: Exception | None = None) -> None:
        self.got: list[tuple[str, int, dict[str, float]]] = []
        self.closed = False
        self.calls = 0
        self.broken = broken

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        if self.broken is not None:
            raise self.broken
        self.got.append((kind, step, dict(values)))

    def close(self) -> None:
        self.closed = True


def follow_all(sinks: list[TrackerSink], records: list[Record]) -> None:
    trackers = Trackers(sinks)
    for each in records:
        trackers.follow(each)
    trackers.close()


def test_only_finite_numbers_with_a_step_are_shown() -> None:
    sink = Kept()
    follow_all(
        [sink],
        [
            record("step", step=1, reward_mean=0.5, loss=None, note="text"),
            record("generation", step=1, tokens=5),
            record("evaluation", step=0, reward_mean=-3),
            record("step", reward_mean=0.5),
        ],
    )
    assert sink.got == [
        ("step", 1, {"step": 1.0, "reward_mean": 0.5}),
        ("evaluation", 0, {"step": 0.0, "reward_mean": -3.0}),
    ]
    assert sink.closed


def test_C15_J9_a_tracker_that_raises_is_off_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, healthy = Kept(ConnectionError("wandb is not reachable")), Kept()
    with caplog.at_level(logging.WARNING):
        follow_all([broken, healthy], [record("step", step=step) for step in range(5)])
    assert (broken.calls, len(healthy.got)) == (1, 5)
    assert [entry.getMessage() for entry in caplog.records] == [
        "Kept is off from here on: ConnectionError: wandb is not reachable"
    ]


def test_a_tracker_that_hangs_costs_no_step_and_a_bounded_close(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Hanging(Kept):
        def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
            release.wait(60)

    trackers = Trackers([Hanging()])
    with caplog.at_level(logging.WARNING):
        for step in range(QUEUE_LENGTH + 10):
            trackers.follow(record("step", step=step))
        trackers.close(timeout_s=0.01)
    release.set()
    behind, not_done = (entry.getMessage() for entry in caplog.records)
    assert "1000 records behind" in behind
    assert "not done within 0.01 s" in not_done


def test_without_sinks_there_is_no_thread() -> None:
    before = threading.active_count()
    trackers = Trackers([])
    trackers.follow(record("step", step=1))
    assert threading.active_count() == before
    trackers.close()


def test_the_configuration_names_the_sinks(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    both = TelemetryConfig(sinks=(Sink.WANDB, Sink.TENSORBOARD))
    sinks = open_sinks(both, run, lambda: pytest.fail("no attempt has begun yet"))
    assert [type(sink) for sink in sinks] == [WandbSink, TensorBoardSink]
    assert open_sinks(TelemetryConfig(), run, str) == []
    assert not run.trackers.exists(), "nothing is opened before the first number"


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    records = [record("step", step=step, reward_mean=step / 4) for step in (1, 2, 3)]
    follow_all([TensorBoardSink(tmp_path / "tb")], [*records, record("evaluation", step=2, reward_mean=-1.5)])
    assert scalars(tmp_path / "tb", "step/reward_mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert scalars(tmp_path / "tb", "evaluation/reward_mean") == [(2, -1.5)]


def test_tensorboard_forgets_steps_that_a_rollback_took_back(tmp_path: Path) -> None:
    follow_all([TensorBoardSink(tmp_path)], [record("step", step=step, x=1.0) for step in (1, 2, 3, 4)])
    follow_all([TensorBoardSink(tmp_path)], [record("step", epoch=2, step=step, x=2.0) for step in (3, 4, 5)])
    assert scalars(tmp_path, "step/x") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_no_tracker_needs_torch() -> None:
    """The launcher feeds the trackers, and must not pay for torch."""
    code = (
        "import sys, tempfile, pathlib; from areal_hpc.telemetry.trackers import TensorBoardSink\n"
        "TensorBoardSink(pathlib.Path(tempfile.mkdtemp())).write('step', 1, {'x': 1.0})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class FakeWandb(ModuleType):
    """Stands for the package: keeps how it was opened, and refuses when told to."""

    def __init__(self, refusal: Exception | None = None) -> None:
        super().__init__("wandb")
        self.opened: list[dict[str, Any]] = []
        self.refusal = refusal
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, str]] = []

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(arguments)
        return SimpleNamespace(
            log=self.logged.append,
            define_metric=lambda name, step_metric: self.axes.append((name, step_metric)),
            finish=lambda: None,
        )


def wandb_sink(directory: Path) -> WandbSink:
    return WandbSink(directory / "trackers", name="my-run", run_id=lambda: "my-run-7", mode="offline")


def test_J9_wandb_that_cannot_be_opened_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(RuntimeError("CommError: 503")))
    with caplog.at_level(logging.WARNING):
        follow_all([wandb_sink(tmp_path)], [record("step", step=1), record("step", step=2)])
    assert [entry.getMessage() for entry in caplog.records] == [
        "WandbSink is off from here on: RuntimeError: CommError: 503"
    ]


def test_a_package_that_is_not_installed_turns_its_sink_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what makes an import raise ImportError
    with caplog.at_level(logging.WARNING):
        follow_all([wandb_sink(tmp_path)], [record("step", step=1)])
    assert "WandbSink is off" in caplog.text


def test_C15_every_attempt_goes_on_in_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        follow_all([wandb_sink(tmp_path)], [record("step", step=4, loss=2.0)])
    first, second = fake.opened
    assert first["id"] == second["id"] == "my-run-7"
    assert (first["mode"], first["resume"], first["dir"]) == ("offline", "allow", str(tmp_path / "trackers"))
    assert "config" not in first
    assert fake.logged[0] == {"step/step": 4, "step/loss": 2.0}
    assert fake.axes[:2] == [("evaluation/*", "evaluation/step"), ("step/*", "step/step")]


def test_the_real_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    follow_all([wandb_sink(tmp_path)], [record("step", step=step, loss=2.0) for step in (1, 2)])
    (written,) = (tmp_path / "trackers").glob("wandb/offline-run-*/*.wandb")
    assert written.stat().st_size > 0
