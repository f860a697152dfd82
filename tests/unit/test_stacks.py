"""Stacks on request, from processes that cannot run a line of Python at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_hpc.roles import stacks

HANGS = {
    "in a call that lets go of the interpreter": "time.sleep(3600)",
    "in C that keeps the interpreter": "lock(mutex); lock(mutex)",
}


@contextmanager
def hanging(path: Path, call: str) -> Iterator[subprocess.Popen[bytes]]:
    code = (
        "import ctypes, pathlib, sys, time\nfrom areal_hpc.roles.stacks import dump_on_request\n"
        "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        f"def hang():\n    {call}\n"
        "dump_on_request(pathlib.Path(sys.argv[1]))\nprint(flush=True)\nhang()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until_shown(path: Path, pid: int, count: int, *, wake: bool = False) -> str:
    """Ask until it has shown so often that it hangs; at first it may be on its way there."""
    deadline = time.monotonic() + 60
    while (text := path.read_text()).count(" in hang") < count:
        assert time.monotonic() < deadline, text
        stacks.request(pid, wake=wake)
    return text


@pytest.mark.parametrize("call", HANGS.values(), ids=HANGS)
def test_a_process_that_hangs_shows_where_as_often_as_it_is_asked(call: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.txt"
    with hanging(path, call) as process:
        for count in (1, 2):
            assert "Current thread" in until_shown(path, process.pid, count)
        assert process.poll() is None, "the request ended it"
    assert path.stat().st_mode & 0o077 == 0


def test_a_stopped_process_shows_where_when_it_is_woken(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.txt"
    with hanging(path, "time.sleep(3600)") as process:
        until_shown(path, process.pid, 1)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        before = path.read_text()
        stacks.request(process.pid)
        assert path.read_text() == before
        until_shown(path, process.pid, before.count(" in hang") + 1, wake=True)
        assert process.poll() is None


def test_one_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    stacks.request(process.pid)
