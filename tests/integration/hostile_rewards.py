"""Rewards that do what a reward must not, for the tests of the pool."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.types import Prompt


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class NotAnException(BaseException):
    """I9: like math_verify's TimeoutException."""


def _forever() -> None:
    while True:
        time.sleep(60)


def _ignore_sigterm() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


def _recurse() -> None:
    _recurse()


def _fork_and_hang() -> None:
    os.fork()
    _forever()


def _fork_and_exit() -> None:
    if os.fork():
        os._exit(3)
    _forever()


def _allocate() -> list[Any]:
    return [np.empty(1 << 30, dtype=np.uint8) for _ in range(16)]  # not written to: address space, no pages


def _raise(error: BaseException) -> None:
    raise error


def _scribble() -> None:
    """Write to every open descriptor that may be a channel."""
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2):
        with contextlib.suppress(OSError):
            os.write(fd, b"\xff" * 100)


ACTIONS = {
    "sleep": _forever,
    "ignore sigterm": _ignore_sigterm,
    "loop in c": lambda: re.match(r"(a+)+b", "a" * 60),
    "fork and hang": _fork_and_hang,
    "fork and exit": _fork_and_exit,
    "exit": lambda: os._exit(7),
    "sys.exit": lambda: sys.exit(0),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "raise": lambda: 1 / 0,
    "base exception": lambda: _raise(NotAnException("out of time")),
    "unprintable": lambda: _raise(Unprintable()),
    "scribble": _scribble,
    "recurse": _recurse,
    "allocate": _allocate,
    "close descriptors": lambda: os.closerange(3, 1 << 16),
    "nan": lambda: float("nan"),
    "inf": lambda: float("-inf"),
    "none": lambda: None,
    "string": lambda: "1.0",
    "dict": lambda: {"reward": 1.0},
    "complex": lambda: 1j,
    "array": lambda: np.ones(2),
    "huge": lambda: 10**400,
    "float": lambda: 0.25,
    "bool": lambda: True,
    "int": lambda: 3,
    "float32": lambda: np.float32(0.5),
    "bool_": lambda: np.bool_(True),
    "pid": os.getpid,
    "print": lambda: print('\x00\x00\x00\x10{"reward": 99.0}' * 3) or 0.5,
    "fork and return": lambda: 1.0 + os.fork() * 0,
    "torch": lambda: "torch" in sys.modules,
}


def act(text: str, answer: Any, prompt: Prompt) -> Any:
    """Do what the text says."""
    return ACTIONS[text]()


def note_pids(text: str, answer: Any, prompt: Prompt) -> float:
    """Write the pids of this process and of a child to the file named by the text, then hang, the child in C."""
    child = os.fork()
    if child == 0:
        re.match(r"(a+)+b", "a" * 60)
    Path(text).with_suffix(".tmp").write_text(f"{os.getpid()} {child}", encoding="utf-8")
    Path(text).with_suffix(".tmp").rename(text)
    re.match(r"(a+)+b", "a" * 60)
    return 0.0


def _scaled(text: str, answer: Any, prompt: Prompt, *, factor: float) -> float:
    return factor * len(text) + float(answer) + prompt.position


partial = functools.partial(_scaled, factor=2.0)


class _Prepared:
    def __init__(self) -> None:
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def __call__(self, text: str, answer: Any, prompt: Prompt) -> float:
        return self.prepared


prepared = _Prepared()
not_callable = 3


def slow(text: str, answer: Any, prompt: Prompt) -> float:
    time.sleep(0.25)
    return 1.0
