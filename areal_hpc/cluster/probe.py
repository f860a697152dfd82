"""``python -m areal_hpc.cluster.probe DIRECTORY PORT``: what one node offers a run, as one line of JSON.

``areal-hpc doctor`` starts one on every node of a job: clock and network are only ever wrong between two of them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_hpc.accelerator import CUDA, NPU
from areal_hpc.cluster.owner import Machine

CONNECT_S = 5.0


def clock_ahead_s(directory: Path) -> float:
    """Seconds that this node's clock is ahead of the one which stamps files in ``directory``.

    Where that is a server's, a write takes the time of a round trip to it.
    """
    with tempfile.NamedTemporaryFile(prefix=".areal-hpc-clock-", dir=directory) as file:
        before = time.time()
        file.write(b"tick")
        file.flush()
        os.fsync(file.fileno())
        after = time.time()
        stamped = Path(file.name).stat().st_mtime
    if before <= stamped <= after:
        return 0.0
    return before - stamped if stamped < before else after - stamped


def unreachable(host: str, port: int) -> str:
    """Why ``host`` cannot be reached from here at ``port``; empty if it can."""
    try:
        with socket.create_connection((host, port), CONNECT_S):
            return ""
    except OSError as error:
        return str(error)


def probe(directory: Path, host: str, port: int) -> dict[str, Any]:
    return {
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "machine": Machine.here(),
        "clock_ahead_s": clock_ahead_s(directory),
        "host": host,
        "unreachable": unreachable(host, port),
        "cpus": len(os.sched_getaffinity(0)),
        "devices": next(
            (os.environ[row.visible_devices] for row in (CUDA, NPU) if row.visible_devices in os.environ), ""
        ),
    }


def main(arguments: Sequence[str]) -> None:
    directory, port = arguments
    print(json.dumps(probe(Path(directory), os.environ["SLURM_LAUNCH_NODE_IPADDR"], int(port))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
