"""Faults 12 and 13: a request to stop that comes in the middle of something long is heard, and spoils nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.checkpoint import verify
from areal_hpc.config.load import load
from areal_hpc.fs import publish_json
from areal_hpc.roles import evaluator
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.trainer import Member
from areal_hpc.roles.wiring.carried import carried_on
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
LIMIT_S = 20.0
"""Far below the time limits of what is interrupted here."""


@pytest.fixture
def process(tmp_path: Path) -> RoleProcess:
    run = RunDir.create(tmp_path / "run")
    recorder = Recorder(run.attempt(1).create().records("trainer", 0), role="trainer", index=0, epoch=1)
    config = load([QUICKSTART], ["limits.starve_s=3600"])
    return RoleProcess(role="trainer", index=0, run=run, epoch=1, config=config, token="t", recorder=recorder)


def in_time(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, in a thread, so that a call which does not hear fails the test and does not hang it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert results, "the request was not heard"
    return results[0]


def test_fault_12_the_trainer_hears_it_while_it_waits_for_the_first_evaluation(process: RoleProcess) -> None:
    first = WeightVersion(1, 0)
    claim_epoch(process.run, {})
    begun = StartRecord(
        parent=None, version=first, consumed=Watermark(), fingerprint="", carried=carried_on(process.run, None)
    )
    write_start(process.run, process.epoch, begun)
    polls = []

    def poll() -> None:
        polls.append(process.stopping())
        process.stop_flag.set()

    side = cast(Any, SimpleNamespace(reader=SimpleNamespace(poll=poll)))
    member = Member.__new__(Member)
    member.process, member.ranks, member.side = process, Ranks(), side
    in_time(lambda: member.wait_for_start_evaluation(0) or "heard")
    assert polls == [False]


def test_fault_12_the_evaluator_hears_it_in_the_middle_of_an_evaluation(
    process: RoleProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, cancelled = [], []

    @asynccontextmanager
    async def parts(_: RoleProcess) -> Any:
        yield None

    async def evaluate_all(*_: object) -> None:
        began.append(process.stopping())
        process.stop_flag.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    monkeypatch.setattr(evaluator, "make_evaluation", parts)
    monkeypatch.setattr(evaluator, "_evaluate_all", evaluate_all)
    assert in_time(lambda: asyncio.run(evaluator._watch(process))) is False
    assert (began, cancelled) == ([False], [True])


def test_fault_13_signals_in_the_middle_of_a_save_do_not_abort_the_commit(tmp_path: Path) -> None:
    """In a process that has become a trainer: both signals arrive while the checkpoint's files are being written."""
    run = RunDir.create(tmp_path / "run")
    attempt = run.attempt(1).create()
    run.config.write_text(QUICKSTART.read_text())
    run.token.write_text("t")
    publish_json(attempt.state, {"state": "running", "pid": os.getpid()})
    code = """
import os, signal, sys
from pathlib import Path
from areal_hpc import checkpoint
from areal_hpc.roles.process import enter
from areal_hpc.types import WeightVersion

process = enter("trainer", 0, Path(sys.argv[1]), 1, 0, parent=os.getppid(), host="127.0.0.1")
def save(directory):
    (directory / "first").write_bytes(b"1")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert process.stop_flag.wait(60)
    (directory / "second").write_bytes(b"2")
checkpoint.write(process.run, WeightVersion(1, 5), save, {"ring": 7})
sys.exit(75 if process.stopping() else 1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.root)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 75, done.stderr
    (path,) = run.checkpoints.iterdir()
    found = verify(path)
    assert (found.version.step, found.state["ring"]) == (5, 7)
    assert {file.name for file in path.iterdir()} >= {"first", "second"}
