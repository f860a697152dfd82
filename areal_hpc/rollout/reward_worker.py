"""The process that computes rewards, one at a time: what ``reward_pool`` starts and kills.

It is a fresh interpreter (no fork of a process with threads, torch or device state) and speaks on a socket of its own,
so nothing that a reward prints can be taken for an answer:

    worker -> pool    {"ready": true}                             once; {"error": why} where the reward cannot load
    pool -> worker    pickle of (call, text, answer, prompt)
    worker -> pool    {"call": n, "reward": x}                    or {"call": n, "error": why}

A frame is a length (4 bytes, big-endian) and a body. Answers are JSON: the pool never unpickles what comes from here.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import operator
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = struct.Struct(">I")
MEMORY_LIMIT = 8 << 30
"""Bytes of data one worker may hold; a reward that asks for more gets MemoryError instead of the node's memory."""
LONGEST_REASON = 500


def resolve(path: str) -> Callable[..., Any]:
    """The object that ``module:name`` names: a function, a partial, any callable object; or the reward model that a
    directory holds, which is written with a ``/``.

    Raises:
        ValueError, ImportError, AttributeError, TypeError: the path names no callable.
    """
    if "/" in path:
        from areal_hpc.rollout.reward_model import ModelReward

        return ModelReward(path)
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{path!r} is not of the form module:function")
    found = operator.attrgetter(name)(importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"{path!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def outcome_of(value: object) -> dict[str, Any]:
    """What to answer for a returned ``value``: bool, int, float and numpy scalars are numbers, nothing else is."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float):
        return {"error": f"returned a {type(value).__name__}, not a number"}
    if not abs(value) <= sys.float_info.max:  # nor is NaN
        return {"error": f"returned {value if isinstance(value, float) else 'an int'}, which is no finite float"}
    return {"reward": float(value)}


SPENT = (MemoryError, RecursionError)
"""After these a process is replaced, as after what is no Exception: who knows what it lacks now."""


def reason_of(error: BaseException) -> str:
    """One line on what a reward raised and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    try:
        message = str(error)
    except Exception:  # a reward's exception is as strange as the reward
        message = "(its message cannot be printed)"
    return f"raised {type(error).__name__} at {where}: {message}"[:LONGEST_REASON]


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the other end of the pipe ``lifeline`` closes.

    A signal on readiness (fcntl(2), F_SETSIG) needs no thread and no cooperation: it works while a reward loops in C
    and reaches the processes it started. A parent-death signal would reach only us, and fire when a *thread* ends.
    """
    os.set_inheritable(lifeline, False)
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before the signal was armed
        os._exit(1)


def contain() -> None:
    """Stdout to the log, no core files, bounded memory, first in line when the kernel must free some."""
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if sys.platform == "linux":
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _send(channel: socket.socket, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def _receive(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = channel.recv(count - len(data))
        if not chunk:  # the pool is gone: end, and whatever a reward started with us
            os.killpg(0, signal.SIGKILL)
        data += chunk
    return data


def serve(reward: Callable[..., Any], channel: socket.socket) -> None:
    """Answer calls until the pool closes the channel."""
    home = os.getpid()
    while True:
        (length,) = LENGTH.unpack(_receive(channel, LENGTH.size))
        call, text, answer, prompt = pickle.loads(_receive(channel, length))  # noqa: S301 (from our own parent)
        try:
            outcome = outcome_of(reward(text, answer, prompt))
        except BaseException as error:  # whatever a reward raises, SystemExit too, is the answer to its call
            outcome = {"error": reason_of(error), "well": isinstance(error, Exception) and not isinstance(error, SPENT)}
        if os.getpid() != home:  # a child that the reward forked and let run out of its function
            os._exit(0)
        _send(channel, {"call": call, **outcome})


def main(path: str, channel_fd: int, lifeline_fd: int) -> None:
    """Load the reward at ``path``, let it prepare, say so, serve.

    An attribute ``prepare`` of the reward, if it has one, is called once before: slow imports belong there, where no
    time limit of a single reward counts.
    """
    die_with_parent(lifeline_fd)
    contain()
    channel = socket.socket(fileno=channel_fd)
    channel.set_inheritable(False)
    try:
        reward = resolve(path)
        getattr(reward, "prepare", lambda: None)()
    except BaseException as error:  # reported to the pool, which raises it for the person to mend
        _send(channel, {"error": reason_of(error)})
        return
    _send(channel, {"ready": True})
    serve(reward, channel)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
