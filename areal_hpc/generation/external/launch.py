"""``PYTHON launch.py``: SGLang's server in this interpreter, with the arguments that standard input holds.

Run by path, in the environment that SGLang is installed in; on a GPU nothing of this project needs to be there.

    {"parent": 4711, "arguments": ["--model-path", ...]}        one JSON object, to the end of standard input

Arguments come that way because they hold the key of the server, and a command line can be read by every user of the
machine. The process dies with its parent, whichever way that ends. SIGTERM is blocked, here and in whatever SGLang
starts: a scheduler sends it to all processes of a job at once, while the trainer still needs its engines to finish a
weight update. SIGINT ends it in order.

SGLang spawns its scheduler and detokenizer, and a spawned child imports this file before anything else.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if os.environ.get("SGLANG_PLATFORM") == "areal_cpu":
    from areal_hpc.generation.sglang.plugin import declare_vision_operators

    declare_vision_operators()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # its parent ignores it, which is handed down
    order = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != order["parent"]:
        sys.exit("the process that started this server is gone")
    sys.argv[1:] = order["arguments"]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
