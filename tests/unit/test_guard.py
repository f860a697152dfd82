"""The guard of a launcher that hangs: when it acts, what it does, and that nothing keeps it from leaving."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_hpc.liveness import guard as guard_module
from areal_hpc.liveness.guard import Guard
from areal_hpc.waits import FILE_SYSTEM, waiting

CALL = "reading /runs/r/attempts/00000001/heartbeats/rollout-0.json"


def guard_of(end_all: Callable[[], object], leave: Callable[[int], object], **options: object) -> Guard:
    return Guard(Path("/runs/r"), 0.05, end_all, exit_code=70, leave=leave, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "LOOK_S", 0.001)


def test_fault_24_a_launcher_that_hangs_names_the_call_ends_all_and_leaves(caplog: pytest.LogCaptureFixture) -> None:
    acts: list[object] = []
    left = threading.Event()

    def leave(code: int) -> None:
        acts.append(code)
        left.set()

    with waiting(CALL, FILE_SYSTEM, limit_s=None), guard_of(lambda: acts.append("end all"), leave):
        assert left.wait(30)
    assert acts == ["end all", 70]
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert f"(limits.stall_s) at {CALL}: the file system of /runs/r does not answer" in record.getMessage()
    assert record.getMessage().endswith("with --resume")


def test_processes_that_cannot_be_ended_do_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hang in the kernel, and so does whoever waits for them."""
    monkeypatch.setattr(guard_module, "LAST_ACTS_S", 0.01)
    never, left = threading.Event(), threading.Event()
    with guard_of(lambda: never.wait(60), lambda _: left.set()):
        assert left.wait(30)
    never.set()


def test_a_loop_that_comes_round_is_left_alone_and_one_that_was_stopped_for_an_hour_is_too() -> None:
    now, acts = 0.0, list[object]()
    guard = Guard(Path("/r"), 10.0, lambda: None, exit_code=70, leave=acts.append, clock=lambda: now)
    for _ in range(100):
        now += 9.0
        guard.beat()
        assert not guard._has_hung()
    now += 3600.0
    assert not guard._has_hung(), "the guard itself was stopped for as long"
    looks = 0
    while not guard._has_hung():
        now += 0.25
        looks += 1
    assert looks == 37  # 1 s for the hour, then more than 9 s
    guard.beat()
    assert not guard._has_hung()
    with guard:
        pass
    assert acts == []
