"""Processes of a run as forks of one that has imported everything: the same code, without the seconds of a start.

preload()                                     in a process that has started no thread and computed nothing
pid = fork("launcher", output, main)          and so for every role that a launcher among them starts
process = ForkedCommand(words, output, env)   the same from any process: a fork of this session's fork server
"""

from __future__ import annotations

import atexit
import functools
import inspect
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil

from areal_hpc.accelerator import REPRODUCIBLE
from areal_hpc.config.cluster import SignSockets
from areal_hpc.signing import provide

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ROLE = re.compile(r"(trainer|generator|rollout|evaluator)-\d+")


class ForkedRole(subprocess.Popen):  # type: ignore[type-arg]
    """A role as a fork of its launcher instead of a fresh interpreter."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        words: list[str] = given["args"][given["args"].index("areal_hpc.roles") + 1 :]

        name = "-".join(words[:2])

        def role() -> int:
            from areal_hpc.roles.__main__ import main

            os.environ.update(given["env"])
            if "HANG_ON_REQUEST" in os.environ:
                hang_on_request(Path(words[2]), name)
            return main(words)

        self.pid = fork(name, given["c2pwrite"], role)
        self._child_created = True


def hang_on_request(root: Path, name: str) -> None:
    """From now on this process's calls for files below ``root`` hang as long as there is a file ``<name>.hangs`` beside
    it, as if a server did not answer; those of the threads that it names go through."""
    switch, calls = root.parent / f"{name}.hangs", {"open", "os.listdir", "os.rename", "os.link", "os.remove"}

    def is_held() -> bool:
        try:
            return threading.current_thread().name not in switch.read_text().split()
        except FileNotFoundError:
            return False

    def hang(event: str, arguments: tuple[Any, ...]) -> None:
        if event in calls and str(arguments[0]).startswith(f"{root}/"):
            while is_held():
                time.sleep(0.05)

    sys.addaudithook(hang)


def fork(name: str, output: int, main: Callable[[], int]) -> int:
    """A child with a name, a session and an output of its own that runs ``main`` and ends with its code; its pid."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # a signal must not meet a child with its parent's handlers
    if (pid := os.fork()) == 0:
        _become(name, output)
        _leave(main)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    return pid


def _become(name: str, output: int) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    os.dup2(output, 1)
    os.dup2(output, 2)
    Path("/proc/self/comm").write_text(name, encoding="ascii")


def _leave(main: Callable[[], int]) -> None:
    """As an interpreter ends: with the code of ``main``, or 1 and a traceback."""
    code = 1
    try:
        code = main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@functools.cache
def fork_server() -> multiprocessing.context.ForkServerContext:
    """Whose processes are forks of one that has imported what is in ``preloaded.py``.

    As it starts it reads how its arithmetic is to be done, and loads what signs sockets: its forks can do neither.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["preloaded"])
    with mock.patch.dict(os.environ, {**REPRODUCIBLE, "LD_PRELOAD": signing_library()}):
        forkserver.ensure_running()
    return server


@functools.cache
def signing_library() -> str:
    """That of this session; empty where there can be none, and runs make none either."""
    directory = tempfile.mkdtemp(prefix="signing-")
    atexit.register(shutil.rmtree, directory)
    library = Path(directory) / "signing.so"
    return "" if provide(library, SignSockets.AUTO) else str(library)


class ForkedCommand:
    """``areal-hpc`` with ``words`` as a fork of the fork server; what the tests use of ``subprocess.Popen``."""

    def __init__(self, words: list[str], output: Path, env: dict[str, str]) -> None:
        self._process = fork_server().Process(target=_command, args=(words, output, env))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _command(words: list[str], output: Path, env: dict[str, str]) -> None:
    from areal_hpc.cli import main

    os.environ.update(env)
    preload()
    with output.open("ab") as file:
        _become("launcher", file.fileno())
    _leave(lambda: main(words))


def role_name(process: psutil.Process) -> str | None:
    """``trainer-0`` and the like for a role, however it was started; None for others, and the dead."""
    try:
        line = process.cmdline()
        name = "-".join(line[line.index("areal_hpc.roles") + 1 :][:2]) if "areal_hpc.roles" in line else process.name()
    except psutil.NoSuchProcess:  # a zombie is one, too
        return None
    return name if ROLE.fullmatch(name) else None


def preload() -> None:
    """Import what launcher and roles will import, so that their forks need not; from now on roles are forks."""
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import areal_hpc.cluster.local as local
    import areal_hpc.generation.embedded.server
    import areal_hpc.report
    import areal_hpc.roles.evaluator
    import areal_hpc.roles.generator
    import areal_hpc.roles.launcher
    import areal_hpc.roles.rollout
    import areal_hpc.roles.trainer
    import areal_hpc.training.reference  # noqa: F401

    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedRole})  # type: ignore[attr-defined]
