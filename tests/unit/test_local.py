"""The order in which a launcher ends what it started; the processes themselves are in contract/test_launchers.py."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_hpc.cluster import local
from areal_hpc.cluster.local import KILL_RESERVE_S, Ended, Key, LocalLauncher, end_in_order
from areal_hpc.config.load import load
from areal_hpc.run_dir import RunDir

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


def test_trainers_end_first_and_leave_the_others_time() -> None:
    running: dict[Key, None] = dict.fromkeys([("generator", 0), ("trainer", 1), ("rollout", 0), ("trainer", 0)])
    calls: list[tuple[list[Key], float]] = []

    def end(keys: Sequence[Key], deadline: float) -> None:
        calls.append((list(keys), deadline))
        for key in keys:
            del running[key]

    before = time.monotonic()
    end_in_order(running, end, 30.0)
    (trainers, first), (others, last) = calls
    assert trainers == [("trainer", 1), ("trainer", 0)]
    assert others == [("generator", 0), ("rollout", 0)]
    assert last - first == KILL_RESERVE_S
    assert before + 30.0 <= last <= time.monotonic() + 30.0


@pytest.mark.parametrize(("deterministic", "threads"), [(False, "1"), (True, "64")])
def test_A14_pools_are_no_larger_than_the_part_of_the_machine_that_the_job_has(
    tmp_path: Path, deterministic: bool, threads: str
) -> None:
    """A real mask of one CPU, as a scheduler sets it, on a machine that has more."""
    words = ["trainer.threads=64", f"deterministic={str(deterministic).lower()}"]
    run = RunDir.create(tmp_path / "run")
    run.attempt(1).create()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        launcher = LocalLauncher.of(load([QUICKSTART], words), run, 1)
        shown = ["sh", "-c", "echo $OMP_NUM_THREADS $MKL_NUM_THREADS"]
        told = subprocess.run(shown, env=launcher._environment("trainer"), capture_output=True, text=True, check=True)
    finally:
        os.sched_setaffinity(0, before)
    assert told.stdout.split() == [threads, threads]


class Unkillable(subprocess.Popen[bytes]):
    """A process that is not seen to end, as one in a call to a file system that does not answer."""

    waited_s = 0.0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "for ever"
        type(self).waited_s += timeout
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_a_process_that_hangs_in_the_kernel_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = LocalLauncher(RunDir(tmp_path), 1, {})
    process = Unkillable(["sleep", "60"], start_new_session=True)
    launcher.running["generator", 0] = process
    with caplog.at_level(logging.CRITICAL):
        assert launcher.stop(0.0) == [Ended("generator", 0, -signal.SIGKILL)]
    assert f"process {process.pid} was killed and has not ended in {local.KILLED_S:g} s: it hangs in the kernel" in (
        caplog.text
    )
    assert launcher.running == {}
    assert subprocess.Popen.wait(process, 30) in (-signal.SIGTERM, -signal.SIGKILL)


def test_one_that_hangs_keeps_no_other_from_being_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by what is waited."""
    launcher = LocalLauncher(RunDir(tmp_path), 1, {})
    hanging = [Unkillable(["sleep", "60"], start_new_session=True) for _ in range(3)]
    launcher.running |= {("trainer", index): process for index, process in enumerate(hanging)}
    monkeypatch.setattr(Unkillable, "waited_s", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: Unkillable.waited_s)
    killed = list[tuple[int, float]]()
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append((pid, Unkillable.waited_s)))
    assert [one.code for one in launcher.stop(0.0)] == [-signal.SIGKILL] * 3
    assert killed == [(process.pid, 0.0) for process in hanging]
    assert Unkillable.waited_s == local.KILLED_S, "for all of them together"
    for process in hanging:
        assert subprocess.Popen.wait(process, 30) == -signal.SIGTERM
