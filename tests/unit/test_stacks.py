"""Stacks on request: of all threads while the heart beats, of one that cannot run a line of Python by a signal."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_hpc.liveness.stacks import Stacks, ask_all, ask_silent
from areal_hpc.run_dir import AttemptDir, RunDir

HANGS = {
    "in a call that lets go of the interpreter": "time.sleep(3600)",
    "in C that keeps the interpreter": "lock(mutex); lock(mutex)",
}


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return RunDir.create(tmp_path / "run").attempt(1).create()


@contextmanager
def hanging(attempt: AttemptDir, call: str) -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "import ctypes, pathlib, sys, time\nfrom areal_hpc.run_dir import AttemptDir\n"
        "from areal_hpc.liveness.stacks import Stacks\n"
        "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        f"def hang():\n    {call}\n"
        "stacks = Stacks(AttemptDir(pathlib.Path(sys.argv[1])), 'trainer', 0)\nprint(flush=True)\nhang()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(attempt.root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until_shown(path: Path, process: subprocess.Popen[bytes], count: int, *, wake: bool = False) -> str:
    """Ask until it has shown so often that it hangs; at first it may be on its way there."""
    deadline = time.monotonic() + 60
    while (text := path.read_text()).count(" in hang") < count:
        assert time.monotonic() < deadline, text
        ask_silent(process, wake=wake)
        time.sleep(0.01)
    return text


@pytest.mark.parametrize("call", HANGS.values(), ids=HANGS)
def test_a_process_that_hangs_shows_where_as_often_as_it_is_asked(call: str, attempt: AttemptDir) -> None:
    path = attempt.stack("trainer", 0)
    with hanging(attempt, call) as process:
        for count in (1, 2):
            until_shown(path, process, count)
        assert process.poll() is None, "the request ended it"
    assert path.stat().st_mode & 0o077 == 0


def test_a_stopped_process_shows_where_when_it_is_woken(attempt: AttemptDir) -> None:
    path = attempt.stack("trainer", 0)
    with hanging(attempt, "time.sleep(3600)") as process:
        until_shown(path, process, 1)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        before = path.read_text()
        ask_silent(process)
        assert path.read_text() == before
        until_shown(path, process, before.count(" in hang") + 1, wake=True)
        assert process.poll() is None


def test_one_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ask_silent(process)


def test_each_request_is_answered_once_with_all_threads(attempt: AttemptDir) -> None:
    before = signal.getsignal(signal.SIGQUIT)
    stop, inside = threading.Event(), threading.Event()

    def wait_in_a_thread() -> None:
        inside.set()
        stop.wait()

    thread = threading.Thread(target=wait_in_a_thread)
    thread.start()
    inside.wait()
    ask_all(attempt)  # of an earlier life of this role: not for us
    stacks = Stacks(attempt, "rollout", 0)
    path = attempt.stack("rollout", 0)
    stacks.answer()
    assert path.read_text() == ""
    for count in (1, 2):
        ask_all(attempt)
        stacks.answer()
        stacks.answer()
        assert path.read_text().count("in wait_in_a_thread") == count
        assert path.read_text().count("in test_each_request_is_answered_once_with_all_threads") == count
    stop.set()
    thread.join()
    faulthandler.unregister(signal.SIGQUIT)
    assert signal.getsignal(signal.SIGQUIT) == before
