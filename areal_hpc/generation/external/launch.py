"""``PYTHON launch.py``: an engine's server in this interpreter, as standard input orders it.

Run by path, in the environment that the engine is installed in.

    {"parent": 4711, "module": "sglang.launch_server", "arguments": ["--model-path", ...]}
                                                        one JSON object, to the end of standard input

Arguments come that way because they hold the key of the server, and a command line can be read by every user of the
machine. The process dies with its parent, whichever way that ends. SIGTERM is blocked, here and in whatever the engine
starts: a scheduler sends it to all processes of a job at once, while the trainer still needs its engines to finish a
weight update. SIGINT ends it in order.

An engine spawns children, and a spawned child imports this file before anything else. vLLM's outlive a parent that is
killed, so those that are told to (``TIED``) die with theirs as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIED = "AREAL_HPC_TIED_CHILDREN"
UNFIT = "areal_hpc: "
"""Begins the line by which a server says what a person has to change; it ends with exit code 2."""


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if os.environ.get("SGLANG_PLATFORM") == "areal_cpu":
    from areal_hpc.generation.sglang.plugin import declare_vision_operators

    declare_vision_operators()

if __name__ == "__mp_main__" and TIED in os.environ:
    die_with_parent()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # its parent ignores it, which is handed down
    order = json.load(sys.stdin)
    die_with_parent()
    if os.getppid() != order["parent"]:
        sys.exit("the process that started this server is gone")
    sys.argv[1:] = order["arguments"]
    runpy.run_module(order["module"], run_name="__main__")


if __name__ == "__main__":
    main()
