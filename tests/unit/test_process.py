"""What every role has: an end when its launcher is gone, bounded waits with a name, an exit code for each way out."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from areal_hpc.config.load import load
from areal_hpc.errors import ConfigError, WaitTimeout
from areal_hpc.exits import EXIT_FAILED
from areal_hpc.fs import publish_json
from areal_hpc.roles import __main__ as entry
from areal_hpc.roles import process as module
from areal_hpc.roles.process import RoleProcess, StopRequested, _stop_when_due
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def process(tmp_path: Path) -> RoleProcess:
    run = RunDir.create(tmp_path / "run")
    attempt = run.attempt(1).create()
    recorder = Recorder(attempt.records("rollout", 2), role="rollout", index=2, epoch=1)
    config = load([QUICKSTART], ["limits.start_s=0.2"])
    return RoleProcess(role="rollout", index=2, run=run, epoch=1, config=config, token="t", recorder=recorder)


def test_the_flag_goes_up_when_the_launcher_is_not_our_parent_any_more() -> None:
    flag = threading.Event()
    _stop_when_due(1 << 30, SimpleQueue(), flag, grace_s=1e6, goes_first=lambda: False)
    assert flag.wait(timeout=20)


def test_the_flag_goes_up_on_request_while_the_launcher_lives() -> None:
    asked, flag = SimpleQueue[int](), threading.Event()
    _stop_when_due(os.getppid(), asked, flag, grace_s=1e6, goes_first=lambda: False)
    assert not flag.wait(timeout=0.05)
    asked.put(signal.SIGTERM)
    assert flag.wait(timeout=20)


def test_whoever_the_trainer_still_needs_goes_after_it(process: RoleProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    publish_json(process.attempt.endpoint("trainer", 0), {"host": process.host, "pid": trainer.pid})
    flag, asked, seen = threading.Event(), threading.Event(), []

    def goes_first() -> bool:
        seen.append((module._trainer_lives(process.attempt, process.host), flag.is_set()))
        asked.set()
        return seen[-1][0]

    _stop_when_due(1 << 30, SimpleQueue(), flag, grace_s=1e6, goes_first=goes_first)
    assert asked.wait(timeout=20)
    trainer.communicate(b"\n")
    assert flag.wait(timeout=20)
    assert seen[0] == (True, False)
    assert seen[-1] == (False, False)


def test_nobody_waits_for_a_trainer_that_never_came_up(process: RoleProcess) -> None:
    assert not module._trainer_lives(process.attempt, process.host)


def test_a_stop_comes_by_its_deadline_where_nobody_can_read_whether_the_trainer_lives(
    process: RoleProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    ended: list[int] = []
    over = threading.Event()
    monkeypatch.setattr(module, "read_if_listed", away)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module.os, "_exit", lambda code: (ended.append(code), over.set()))
    flag = threading.Event()
    lives = partial(module._trainer_lives, process.attempt, process.host)
    _stop_when_due(1 << 30, SimpleQueue(), flag, grace_s=0.05, goes_first=lives)
    assert flag.wait(timeout=20)
    assert over.wait(timeout=20)
    assert ended == [EXIT_FAILED]


def test_of_a_trainer_on_another_host_its_last_heartbeat_tells(process: RoleProcess) -> None:
    publish_json(process.attempt.endpoint("trainer", 0), {"host": "10.0.0.7", "pid": 1})
    beat = {"pid": 1, "incarnation": 0, "counter": 9, "waits": []}
    assert module._trainer_lives(process.attempt, process.host)  # it has not beaten yet
    for ended in (False, True):
        publish_json(process.attempt.heartbeat("trainer", 0), {**beat, "ended": ended})
        assert module._trainer_lives(process.attempt, process.host) is not ended


def test_a_role_that_cannot_stop_is_ended_when_its_launcher_is_gone() -> None:
    """As one whose main thread waits in a collective: it looks at no flag."""
    code = (
        "import queue, threading, time\nfrom areal_hpc.roles.process import _stop_when_due\n"
        "_stop_when_due(1 << 30, queue.SimpleQueue(), threading.Event(), 0.1, lambda: False)\ntime.sleep(3600)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "this process did not stop in 0.1 s: ended by force" in ended.stderr


def test_an_endpoint_is_found_by_its_file(process: RoleProcess) -> None:
    process.publish_endpoint({"url": "http://127.0.0.1:1"})
    found = process.endpoint_of("rollout", 2)
    assert (found["url"], found["epoch"]) == ("http://127.0.0.1:1", 1)


def test_a_process_that_does_not_come_up_is_named_with_its_log(process: RoleProcess) -> None:
    log_path = process.attempt.log("generator", 3)
    with pytest.raises(WaitTimeout, match=rf"waited 0\.2 s for generator-3 to come up.*; look into {log_path}"):
        process.endpoint_of("generator", 3)


def test_a_stop_request_ends_a_wait(process: RoleProcess) -> None:
    process.stop_flag.set()
    with pytest.raises(StopRequested):
        process.endpoint_of("generator", 3)


def run_role(process: RoleProcess, main: Callable[[RoleProcess], int], monkeypatch: pytest.MonkeyPatch) -> int:
    rollout = types.ModuleType("areal_hpc.roles.rollout")
    vars(rollout)["main"] = main
    monkeypatch.setattr(entry, "enter", lambda *_, **__: process)
    monkeypatch.setitem(sys.modules, "areal_hpc.roles.rollout", rollout)
    return entry.main(["rollout", "2", "/run", "1", "0", "77", "127.0.0.1"])


def raising(error: BaseException) -> Callable[[RoleProcess], int]:
    def main(_: RoleProcess) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code"),
    [(lambda _: 0, 0), (raising(StopRequested()), 75), (raising(ConfigError("rollout.reward: no; set it")), 2)],
    ids=["done", "stopped", "mistake"],
)
def test_each_way_out_has_its_code(
    main: Any, code: int, process: RoleProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_role(process, main, monkeypatch) == code
    assert [record.getMessage() for record in caplog.records] == (["rollout.reward: no; set it"] if code == 2 else [])
    assert all(record.exc_info is None for record in caplog.records)  # a person's mistake is no traceback


def test_a_mistake_of_ours_is_not_caught(process: RoleProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_role(process, raising(ZeroDivisionError()), monkeypatch)
